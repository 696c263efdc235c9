package volume

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// usage describes the users of a volume. The kernel's view, the mounts of the overlay in
// all mount namespaces, decides; the engine's gives them names.
type usage struct {
	mounted bool       // on its mount point, here
	refs    []ref      // of callers that may still come to use it
	seen    []sighting // mounts in namespaces of containers
	users   []User     // containers that run or are paused
	unknown error      // why the engine did not answer
}

// used reports whether the volume is in use.
func (u usage) used() bool { return len(u.refs) > 0 || len(u.seen) > 0 || len(u.users) > 0 }

// coming reports whether the daemon has the volume mounted for more containers than
// run: one is starting, or stopping.
func (u usage) coming() bool {
	n := 0
	for _, r := range u.refs {
		if r.Pid == 0 && time.Since(r.Since) < young {
			n++
		}
	}
	for _, c := range u.users {
		n -= c.Mounts
	}
	return n > 0 && u.unknown == nil
}

// busy describes the users of the volume, or returns "" if it is not in use.
func (u usage) busy() string {
	if !u.used() {
		return ""
	}
	names := map[string]bool{}
	for _, c := range u.users {
		names[c.Name] = true
	}
	if len(names) > 0 {
		return "it is mounted by " + count(len(names), "container") + " (" + strings.Join(sorted(names), ", ") + ")"
	}
	for _, s := range u.seen {
		return fmt.Sprintf("it is mounted where process %d (%s) is, at %s", s.Pid, s.Command, s.Mountpoint)
	}
	for _, r := range u.refs {
		if r.Pid != 0 {
			return fmt.Sprintf("agentbox (pid %d) is copying files to or from it", r.Pid)
		}
	}
	return "a container that uses it is starting or stopping"
}

func (u usage) remedy() string {
	names := map[string]bool{}
	for _, c := range u.users {
		names[c.Name] = true
	}
	switch {
	case len(names) > 0:
		return "Stop first what uses it: docker stop " + strings.Join(sorted(names), " ")
	case u.unknown != nil:
		return "Stop first what uses it. The Docker daemon could not be asked for names: " + u.unknown.Error()
	}
	return "Stop first what uses it."
}

func count(n int, one string) string {
	if n == 1 {
		return one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// usage finds the users of a volume.
func (v *Volumes) usage(ctx context.Context, rec stored) (u usage, err error) {
	if u.mounted, err = overlay.Mounted(v.path(rec.Name, "merged")); err != nil {
		return u, err
	}
	all, err := sightings(v.path(rec.Name, "upper"))
	if err != nil {
		return u, err
	}
	own := v.path(rec.Name, "merged")
	for _, s := range all {
		// The mount point itself, as other namespaces see it too.
		if !strings.HasSuffix(s.Mountpoint, own) {
			u.seen = append(u.seen, s)
		}
	}
	have, err := v.refs(rec.Name)
	if err != nil {
		return u, err
	}
	if len(have.List) == 0 && len(u.seen) == 0 {
		return u, nil
	}
	u.users, u.unknown = v.engine.Using(ctx, rec.Name, v.path(rec.Name, "upper"))
	for _, r := range have.List {
		// A reference that no container came to use was left by a daemon that was killed, or
		// by a call that a killed plugin has answered twice.
		if r.Pid != 0 || len(u.seen) > 0 || len(u.users) > 0 || time.Since(r.Since) < young {
			u.refs = append(u.refs, r)
		}
	}
	return u, nil
}

// sighting is one mount of a volume's overlay in one mount namespace.
type sighting struct {
	Pid        int // a process that sees it
	Command    string
	Namespace  uint64
	Mountpoint string // as that process sees it
}

// maxMountinfo bounds what is read of one namespace's mounts.
const maxMountinfo = 64 << 20

// sightings finds the mounts of the overlay with this upperdir in all mount
// namespaces that a process lives in.
func sightings(upper string) ([]sighting, error) {
	pids, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var list []sighting
	done := map[uint64]bool{}
	for _, e := range pids {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		ns, err := mountNamespace(pid)
		if err != nil || done[ns] {
			continue // it has ended, or was examined already
		}
		points, err := mountpoints(pid, upper)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
			continue // it ends; another process of the namespace may not
		}
		if err != nil {
			return nil, err
		}
		done[ns] = true
		comm, _, _ := record.Read(fmt.Sprintf("/proc/%d/comm", pid))
		for _, p := range points {
			list = append(list, sighting{pid, strings.TrimSpace(string(comm)), ns, p})
		}
	}
	return list, nil
}

func mountNamespace(pid int) (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat(fmt.Sprintf("/proc/%d/ns/mnt", pid), &st)
	return st.Ino, err
}

// mountpoints lists where a process sees the overlay with this upperdir.
func mountpoints(pid int, upper string) ([]string, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var list []string
	sc := bufio.NewScanner(f)
	sc.Buffer(make([]byte, 64<<10), 1<<20)
	for read := 0; sc.Scan(); {
		if read += len(sc.Bytes()); read > maxMountinfo {
			return nil, fmt.Errorf("%w: process %d has too many mounts", fault.ErrUnsupported, pid)
		}
		fields, super, ok := strings.Cut(sc.Text(), " - ")
		if !ok || !strings.HasPrefix(super, "overlay ") {
			continue
		}
		at := strings.Fields(fields)
		_, options, _ := strings.Cut(strings.TrimPrefix(super, "overlay "), " ")
		for o := range strings.SplitSeq(options, ",") {
			if dir, ok := strings.CutPrefix(o, "upperdir="); ok && len(at) > 4 && unescape(dir) == upper {
				list = append(list, unescape(at[4]))
			}
		}
	}
	return list, sc.Err()
}

// unescape undoes the kernel's octal escapes, such as \040 for a space.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
