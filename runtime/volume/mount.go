package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// refs is the content of refs.json. It is of one boot: a later one has no mounts.
type refs struct {
	Boot string `json:"boot"`
	List []ref  `json:"list"`
}

// ref is one caller of Mount. Docker mounts a volume twice under one id, and
// unmounts it as often, when files are copied to a container that runs.
type ref struct {
	ID    string    `json:"id"`
	Count int       `json:"count"`
	Since time.Time `json:"since"`           // of the last one
	Pid   int       `json:"pid,omitempty"`   // a process of ours, which its end frees; 0: Docker
	Start uint64    `json:"start,omitempty"` // of that process, in ticks since boot
}

// young is how long a mount may have no user that the kernel knows: the daemon
// asks for it before it makes the container.
const young = 30 * time.Second

// held bounds how long Mount waits for a checkpoint or a restore to end.
const held = time.Minute

// heldPoll is the polling interval: neither announces its end.
const heldPoll = 20 * time.Millisecond

// maxRefs bounds what callers can make refs.json hold.
const maxRefs = 4096

func bootID() (string, error) {
	data, _, err := record.Read("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data)), err
}

// refs returns the callers that mounted a volume, except those that are surely gone.
func (v *Volumes) refs(name string) (refs, error) {
	boot, err := bootID()
	if err != nil {
		return refs{}, err
	}
	var have refs
	err = record.ReadJSON(v.path(name, "refs.json"), &have)
	if errors.Is(err, fault.ErrCorrupt) {
		// It says nothing that the kernel's mounts do not say better.
		v.log.Warn("mounts forgotten", "volume", name, "err", err)
		return refs{Boot: boot}, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return refs{}, err
	}
	out := refs{Boot: boot}
	for _, r := range have.List {
		if have.Boot == boot && (r.Pid == 0 || startOf(r.Pid) == r.Start) {
			out.List = append(out.List, r)
		}
	}
	return out, nil
}

func (v *Volumes) putRefs(name string, r refs) error {
	return record.WriteJSON(v.path(name, "refs.json"), r, true)
}

// startOf returns the start time of a process, in ticks since boot; 0: there is none.
func startOf(pid int) uint64 {
	p, err := proc.Read(pid)
	if err != nil || p.Ended() {
		return 0
	}
	return p.Start
}

// Mount mounts the volume for the caller id and returns the path. The mount lasts until
// Unmount was called as often for that id. While a checkpoint or a restore holds the
// volume, Mount waits.
func (v *Volumes) Mount(ctx context.Context, name, id string) (string, error) {
	if id == "" || len(id) > 256 {
		return "", fmt.Errorf("%w: mount id of %d bytes", fault.ErrInvalid, len(id))
	}
	return v.mountFor(ctx, name, ref{ID: id})
}

func (v *Volumes) mountFor(ctx context.Context, name string, by ref) (string, error) {
	deadline := time.Now().Add(held)
	recovered := false
	for {
		path, err := v.mountOnce(ctx, name, by)
		if !errors.Is(err, errHeld) {
			return path, err
		}
		if !recovered && v.recover != nil {
			recovered = true // it leaves alone what a living process holds
			if err := v.recover(ctx); err != nil {
				v.log.Error("recovery failed", "volume", name, "err", err)
			}
			continue
		}
		if time.Now().After(deadline) {
			return "", err
		}
		select {
		case <-ctx.Done():
			return "", errors.Join(err, ctx.Err())
		case <-time.After(heldPoll):
		}
	}
}

// errHeld says that a verb of agentbox holds the volume.
var errHeld = fmt.Errorf("%w: it is being checkpointed or restored", fault.ErrBusy)

func (v *Volumes) mountOnce(ctx context.Context, name string, by ref) (_ string, err error) {
	unlock, err := v.lock(ctx, name)
	if err != nil {
		return "", err
	}
	defer unlock()
	rec, err := v.load(name)
	if err != nil {
		return "", err
	}
	if stage.At(v.run, rec.ID).Held() || v.isPaused(name) {
		return "", fmt.Errorf("volume %s: %w", name, errHeld)
	}
	have, err := v.refs(name)
	if err != nil {
		return "", err
	}
	if len(have.List) >= maxRefs {
		return "", fmt.Errorf("volume %s: %w: %d mounts", name, fault.ErrState, maxRefs)
	}
	merged := v.path(name, "merged")
	on, err := overlay.Mounted(merged)
	if err != nil {
		return "", err
	}
	if !on {
		if err := v.mount(rec, have); err != nil {
			return "", err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, overlay.Unmount(merged, overlay.UnmountOptions{}))
			}
		}()
	}
	if err := failpoint.Hit("volume.mount.after-mount"); err != nil {
		return "", err
	}
	have.add(by)
	if err := v.putRefs(name, have); err != nil {
		return "", err
	}
	return merged, failpoint.Hit("volume.mount.after-refs")
}

func (r *refs) add(by ref) {
	for i := range r.List {
		if r.List[i].ID == by.ID {
			r.List[i].Count++
			r.List[i].Since = time.Now()
			return
		}
	}
	by.Count, by.Since = 1, time.Now()
	r.List = append(r.List, by)
}

// mount mounts a volume that is not mounted here. The kernel lets two overlays have one upperdir,
// but using both is undefined.
func (v *Volumes) mount(rec stored, have refs) error {
	seen, err := sightings(v.path(rec.Name, "upper"))
	if err != nil {
		return err
	}
	for _, s := range seen {
		// A mount namespace that was cloned while the volume was mounted has a copy at the
		// same place for as long as it lasts, or until its container begins. Unless a
		// caller has mounted the volume, such a copy is not in use.
		if len(have.List) == 0 && strings.HasSuffix(s.Mountpoint, v.path(rec.Name, "merged")) {
			v.log.Debug("copy of the mount still busy", "volume", rec.Name, "pid", s.Pid)
			continue
		}
		return fmt.Errorf("volume %s: %w: it is mounted in another mount namespace, that of process %d (%s), at %s",
			rec.Name, fault.ErrState, s.Pid, s.Command, s.Mountpoint)
	}
	err = mountAt(v.path(rec.Name), rec)
	if errors.Is(err, fault.ErrNotFound) && rec.From != "" {
		return &fault.Error{
			Err:  fmt.Errorf("volume %s lies over %s: %w", rec.Name, rec.From, err),
			Hint: "Put the directory back first.",
		}
	}
	return err
}

// mountAt mounts the volume in dir. The kernel gets its directory as a handle: the owner
// of the one above could put a symlink in its place.
func mountAt(dir string, rec stored) error {
	m := mountOf(dir, rec)
	from, err := apply.OpenRoot(m.Lower[0])
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("%s, or a directory above it, has become a symlink: %w", rec.From, fault.ErrState)
	}
	if err != nil {
		return err
	}
	defer from.Close()
	m.Lower = []string{from.Proc()}
	return m.Mount()
}

func mountOf(dir string, rec stored) overlay.Mount {
	m := overlay.Mount{
		Lower: []string{rec.From}, Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work"),
		Target: filepath.Join(dir, "merged"), ReadOnly: rec.ReadOnly,
	}
	if rec.From == "" {
		m.Lower = []string{filepath.Join(dir, "lower")}
	}
	return m
}

// Unmount takes back one Mount of the caller id; the volume is unmounted with the last of
// all callers. It returns nil if the caller has not mounted the volume.
func (v *Volumes) Unmount(ctx context.Context, name, id string) error {
	unlock, err := v.lock(ctx, name)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	have, err := v.refs(name)
	if err != nil {
		return err
	}
	for i := range have.List {
		if have.List[i].ID == id {
			have.List[i].Count--
			if have.List[i].Count <= 0 {
				have.List = append(have.List[:i], have.List[i+1:]...)
			}
			break
		}
	}
	if len(have.List) == 0 {
		// Unmount before updating the record: an unrecorded mount is taken down by the next
		// verb that needs it down, while a record without a mount belongs to a caller.
		if err := overlay.Unmount(v.path(name, "merged"), overlay.UnmountOptions{}); errors.Is(err, fault.ErrBusy) {
			// Not the daemon's concern: it has let go.
			v.log.Warn("volume stays mounted", "volume", name, "err", err)
		} else if err != nil {
			return err
		}
	}
	if err := failpoint.Hit("volume.unmount.before-refs"); err != nil {
		return err
	}
	return v.putRefs(name, have)
}

// With mounts the volume while fn runs, and gives it the path.
func (v *Volumes) With(ctx context.Context, name string, fn func(path string) error) error {
	pid := os.Getpid()
	by := ref{ID: "agentbox-" + newID(), Pid: pid, Start: startOf(pid)}
	path, err := v.mountFor(ctx, name, by)
	if err != nil {
		return err
	}
	err = fn(path)
	return errors.Join(err, v.Unmount(context.WithoutCancel(ctx), name, by.ID))
}

// idle unmounts the volume if it is not in use. Otherwise it returns ErrState with the
// users in the text. The caller holds the lock.
func (v *Volumes) idle(ctx context.Context, rec stored) error {
	u, err := v.usage(ctx, rec)
	if err != nil {
		return err
	}
	if busy := u.busy(); busy != "" {
		return &fault.Error{Err: fmt.Errorf("volume %s: %w: %s", rec.Name, fault.ErrState, busy), Hint: u.remedy()}
	}
	if err := overlay.Unmount(v.path(rec.Name, "merged"), overlay.UnmountOptions{}); err != nil {
		return err
	}
	have, err := v.refs(rec.Name)
	if err != nil || len(have.List) == 0 {
		return err
	}
	v.log.Warn("unused mounts dropped", "volume", rec.Name, "mounts", len(have.List))
	return v.putRefs(rec.Name, refs{Boot: have.Boot})
}
