package test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// leaks searches the host for what belongs to a root whose sandboxes are gone;
// on a shared root the other tests' sandboxes are gone too, since they run one
// after the other.
func (b *box) leaks() {
	b.Helper()
	var found []string
	// A monitor ends a moment after its sandbox; nothing announces it.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		found = slices.Concat(mountsUnder(b.root), processesOf(b.root), b.cgroups(), b.leftFiles(), b.netLeft())
		if len(found) == 0 {
			return
		}
		if time.Now().After(deadline) {
			break
		}
	}
	for _, f := range found {
		b.Errorf("left behind: %s", f)
	}
}

// mountsUnder lists the mounts below dir.
func mountsUnder(dir string) (found []string) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			found = append(found, "mount "+f[4])
		}
	}
	return found
}

// processesOf lists the processes with a root in their command line: conmon,
// runc, criu and agentbox itself.
func processesOf(root string) (found []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		line, _ := os.ReadFile(dir + "/cmdline")
		if bytes.Contains(line, []byte(root+"/")) || bytes.Contains(line, []byte(root+"\x00")) {
			found = append(found, "process "+filepath.Base(dir)+": "+
				string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return found
}

// insiders lists the processes of a sandbox, by what they are told of it.
func insiders(id string) []string { return withEnv("AGENTBOX_SANDBOX=" + id) }

// withEnv lists the processes that were started with a variable of the environment.
func withEnv(variable string) (pids []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		env, _ := os.ReadFile(dir + "/environ")
		if slices.Contains(strings.Split(string(env), "\x00"), variable) {
			pids = append(pids, filepath.Base(dir))
		}
	}
	return pids
}

// ids are all that the root ever gave out, as its lock files tell.
func (b *box) ids() (ids []string) {
	for _, dir := range []string{"locks", "sandboxes", "run"} {
		entries, _ := os.ReadDir(filepath.Join(b.root, dir))
		for _, e := range entries {
			if len(e.Name()) == 32 && !slices.Contains(ids, e.Name()) {
				ids = append(ids, e.Name())
			}
		}
	}
	return ids
}

func (b *box) cgroups() (found []string) {
	ids := b.ids()
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // it may have gone while we walked
		}
		for _, id := range ids {
			if strings.Contains(d.Name(), id) {
				found = append(found, "cgroup "+path)
				return fs.SkipDir
			}
		}
		return nil
	})
	for _, id := range ids {
		for _, pid := range insiders(id) {
			found = append(found, "process "+pid+" inside sandbox "+id)
		}
	}
	return found
}

// leftFiles lists files that no sandbox, checkpoint or image accounts for. An
// empty root keeps its database, its lock files, its images and its log.
func (b *box) leftFiles() (found []string) {
	for _, dir := range []string{
		"sandboxes", "checkpoints", "checkpoints/failed", "run/restore", "run/runc", "run/tmp",
	} {
		entries, _ := os.ReadDir(filepath.Join(b.root, dir))
		for _, e := range entries {
			if dir == "checkpoints" && e.Name() == "failed" {
				continue // where the logs of failed ones are, while they are listed
			}
			found = append(found, "file "+filepath.Join(b.root, dir, e.Name()))
		}
	}
	entries, _ := os.ReadDir(filepath.Join(b.root, "run"))
	for _, e := range entries {
		if len(e.Name()) == 32 {
			found = append(found, "file "+filepath.Join(b.root, "run", e.Name()))
		}
	}
	_ = filepath.WalkDir(b.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == filepath.Join(b.root, "images") && b.shared {
			return fs.SkipDir
		}
		if name := d.Name(); strings.HasSuffix(name, ".tmp") || strings.HasPrefix(name, "tmp.") ||
			strings.HasPrefix(name, ".tmp") || name == "upper.new" {
			found = append(found, "temporary file "+path)
		}
		return nil
	})
	return found
}

// netLeft lists the devices and tables of the root. Their names follow from
// the root's path and the sandbox's id, so that other roots' are left alone.
func (b *box) netLeft() (found []string) {
	sum := sha256.Sum256([]byte(b.root))
	tag := hex.EncodeToString(sum[:6])
	ours := []string{"abx" + tag[:6]}
	for _, id := range b.ids() {
		sum := sha256.Sum256([]byte(tag + "/" + id))
		ours = append(ours, "abv"+hex.EncodeToString(sum[:6]))
	}
	links, _ := net.Interfaces()
	for _, l := range links {
		for _, prefix := range ours {
			if strings.HasPrefix(l.Name, prefix) {
				found = append(found, "network device "+l.Name)
			}
		}
	}
	out, _ := exec.Command("nft", "list", "tables").Output()
	if strings.Contains(string(out), tag) {
		found = append(found, "nftables table of tag "+tag)
	}
	return found
}

// hostState is what the whole run of the tests must leave as it was, besides
// what each test looks for in its own root. The default root is there when a
// command has gone without --root.
func hostState() map[string]bool {
	set := map[string]bool{}
	for _, pattern := range []string{
		"/var/lib/agentbox", "/var/lib/agentbox/*", "/run/agentbox", "/tmp/.criu*", "/tmp/runc-process*",
		"/tmp/ab[0-9]*", "/dev/shm/ab[0-9]*", "/tmp/abfs*",
	} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			set["file "+f] = true
		}
	}
	return set
}

func newlyThere(before, after map[string]bool) (found []string) {
	for what := range after {
		if !before[what] {
			found = append(found, what)
		}
	}
	slices.Sort(found)
	return found
}

// noProcess fails when a process lives that should not.
func (b *box) noProcess(pid int) {
	b.Helper()
	b.eventually(fmt.Sprintf("process %d is gone", pid), func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
		return err != nil
	})
}
