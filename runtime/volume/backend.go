package volume

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Backend shows volumes to the Engine as sandboxes without processes. Adopt
// is how they become such; Create makes none.
type Backend struct{ *Volumes }

var (
	_ runtime.Backend  = Backend{}
	_ runtime.Original = Backend{}
)

// Properties implements runtime.Backend.
func (b Backend) Properties() runtime.Properties {
	return runtime.Properties{Name: "volume", FilesOnly: true}
}

// Adopt describes a volume.
func (b Backend) Adopt(_ context.Context, ref string) (runtime.Spec, error) {
	rec, err := b.find(ref)
	if err != nil {
		return runtime.Spec{}, err
	}
	return runtime.Spec{
		ID: rec.ID, Name: rec.Name, Image: "dir:" + rec.From, ImageDigest: "dir:" + rec.From, Args: []string{},
		Workdir: "/", ReadOnly: rec.ReadOnly, Network: runtime.Network{Mode: runtime.NetworkNone}, Adopted: true,
	}, nil
}

// Inspect describes a volume. It counts as running while it is in use.
func (b Backend) Inspect(ctx context.Context, id string) (c runtime.Container, err error) {
	rec, err := b.find(id)
	if err != nil {
		return c, err
	}
	u, err := b.usage(ctx, rec)
	if err != nil {
		return c, err
	}
	m := mountOf(b.path(rec.Name), rec)
	c = runtime.Container{
		Status: runtime.Exited, Upper: m.Upper, Lower: m.Lower, Started: rec.Created,
		Stage: stage.Slot{Run: b.run, ID: rec.ID},
		Busy:  u.busy(),
	}
	switch {
	case b.isPaused(rec.Name):
		c.Status = runtime.Paused
	case u.used():
		c.Status = runtime.Running
	}
	if c.Busy != "" {
		c.Remedy = u.remedy()
	}
	return c, nil
}

// Start does nothing: a volume is mounted when a caller comes to use it.
func (b Backend) Start(_ context.Context, id string, _ runtime.StartOptions) (func() error, error) {
	_, err := b.find(id)
	return nil, err
}

// Stop unmounts an unused volume; for one in use it returns ErrState, since agentbox must
// not stop the containers that use it.
func (b Backend) Stop(ctx context.Context, id string, _ runtime.StopOptions) error {
	rec, unlock, err := b.locked(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return b.idle(ctx, rec)
}

func (b Backend) locked(ctx context.Context, id string) (stored, func(), error) {
	rec, err := b.find(id)
	if err != nil {
		return rec, nil, err
	}
	unlock, err := b.lock(ctx, rec.Name)
	return rec, unlock, err
}

// paused is the content of paused.json: the containers that a checkpoint has frozen, each noted
// before it was.
type paused struct {
	Boot string        `json:"boot"`
	List []pausedEntry `json:"list"`
}

type pausedEntry struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Cgroup string `json:"cgroup"` // to thaw it by when its engine does not answer
}

const filePaused = "paused.json"

func (v *Volumes) isPaused(name string) bool {
	p, err := v.pausedNow(name)
	return err == nil && p != nil
}

// pausedNow returns the containers that a checkpoint holds frozen, or nil if there is no record.
func (v *Volumes) pausedNow(name string) (*paused, error) {
	var p paused
	err := record.ReadJSON(v.path(name, filePaused), &p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil || p.Boot != boot {
		return nil, err
	}
	return &p, nil
}

// settling bounds how long Pause waits for containers that are starting or
// stopping to do so.
const settling = 5 * time.Second

// settlingPoll is the polling interval: the daemon does not announce that it is about to start
// a container.
const settlingPoll = 50 * time.Millisecond

// Pause freezes every running container that uses the volume. It keeps others from being
// started with it, and fails if a process that it cannot freeze uses the volume.
func (b Backend) Pause(ctx context.Context, id string) (err error) {
	rec, unlock, err := b.locked(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if b.isPaused(rec.Name) {
		return nil
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	p := paused{Boot: boot}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.thaw(context.WithoutCancel(ctx), rec.Name, &p))
		}
	}()
	note := func() error { return record.WriteJSON(b.path(rec.Name, filePaused), p, false) }
	if err := note(); err != nil {
		return err
	}
	for began := time.Now(); time.Since(began) < settling; {
		u, err := b.usage(ctx, rec)
		if err != nil {
			return err
		}
		if !u.used() {
			return fmt.Errorf("volume %s: %w: no container uses it", rec.Name, fault.ErrState)
		}
		fresh := false
		for _, c := range u.users {
			if c.Paused {
				continue
			}
			fresh = true
			p.List = append(p.List, pausedEntry{c.ID, c.Name, freezerOf(c.Pid)})
			if err := note(); err != nil {
				return err
			}
			if err := failpoint.Hit("volume.pause.before-container"); err != nil {
				return err
			}
			err := b.engine.Pause(ctx, c.ID)
			if errors.Is(err, fault.ErrNotFound) || errors.Is(err, fault.ErrState) {
				// It exited, or was paused by another program and stays paused.
				p.List = p.List[:len(p.List)-1]
				err = note()
			}
			if err != nil {
				return err
			}
		}
		switch {
		case !fresh && !u.coming():
			return b.allFrozen(rec, u)
		case !fresh:
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(settlingPoll):
			}
		}
	}
	return fmt.Errorf("volume %s: %w: a container that uses it is starting or stopping, for more than %v", rec.Name,
		fault.ErrBusy, settling)
}

// allFrozen fails if the volume is mounted in a mount namespace that belongs to none of
// the containers the engine knows.
func (b Backend) allFrozen(rec stored, u usage) error {
	known := map[uint64]bool{}
	for _, c := range u.users {
		if ns, err := mountNamespace(c.Pid); err == nil {
			known[ns] = true
		}
	}
	for _, s := range u.seen {
		if known[s.Namespace] {
			continue
		}
		if _, err := mountNamespace(s.Pid); err != nil {
			continue // it has ended
		}
		if u.unknown != nil {
			return &fault.Error{Err: fmt.Errorf("volume %s: what uses it cannot be frozen: %w", rec.Name, u.unknown),
				Hint: "Start the Docker daemon, or name its socket in DOCKER_HOST; or stop what uses the volume."}
		}
		return &fault.Error{Err: fmt.Errorf("volume %s: %w: process %d (%s) uses it and is in no container that this Docker daemon knows", rec.Name, fault.ErrState, s.Pid, s.Command),
			Hint: "Stop it, or name the daemon that runs it in DOCKER_HOST."}
	}
	if u.unknown != nil && len(u.seen) > 0 {
		return u.unknown
	}
	for _, r := range u.refs {
		if r.Pid != 0 {
			return fmt.Errorf("volume %s: %w: %s", rec.Name, fault.ErrBusy, usage{refs: []ref{r}}.busy())
		}
	}
	return nil
}

// Unpause thaws what Pause has frozen.
func (b Backend) Unpause(ctx context.Context, id string) error {
	rec, err := b.find(id)
	if err != nil {
		return err
	}
	p, err := b.pausedNow(rec.Name)
	if err != nil {
		return err
	}
	if p == nil {
		u, err := b.usage(ctx, rec)
		if err == nil && !u.used() {
			err = fmt.Errorf("volume %s: %w: no container uses it", rec.Name, fault.ErrState)
		}
		return err
	}
	return b.thaw(ctx, rec.Name, p)
}

// thaw thaws containers and forgets them. It thaws a container whose engine does not answer by
// its cgroup.
func (v *Volumes) thaw(ctx context.Context, name string, p *paused) error {
	var errs []error
	for _, c := range p.List {
		err := v.engine.Unpause(ctx, c.ID)
		if err != nil && c.Cgroup != "" {
			v.log.Warn("container thawed without its engine", "container", c.Name, "err", err)
			groups, e := kernel.Hierarchies()
			if e == nil {
				e = groups.Thaw(c.Cgroup)
			}
			err = e
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("container %s stays frozen: %w", c.Name, err))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...) // the record stays, for the next try
	}
	err := os.Remove(v.path(name, filePaused))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return err
}

// freezerOf is the cgroup by which a process is frozen, as the hierarchies see
// it; empty: not known.
func freezerOf(pid int) string {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	unified := ""
	for line := range strings.SplitSeq(string(data), "\n") {
		f := strings.SplitN(line, ":", 3)
		if len(f) != 3 {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			if c == "freezer" {
				return f[2]
			}
		}
		if f[0] == "0" {
			unified = f[2]
		}
	}
	return unified
}

// Wait returns at once for an unused volume, and fails for one in use: the exit codes of
// its users are not its own.
func (b Backend) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	c, err := b.Inspect(ctx, id)
	if err == nil && c.Status != runtime.Exited {
		err = errNoProcess
	}
	return runtime.Exit{}, err
}

// Remove deletes an unused volume.
func (b Backend) Remove(ctx context.Context, id string) error {
	rec, err := b.find(id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return b.Volumes.Remove(ctx, rec.Name)
}

// Mount calls fn with the files, even while the volume is in use.
func (b Backend) Mount(ctx context.Context, id string, fn func(root string) error) error {
	rec, err := b.find(id)
	if err != nil {
		return err
	}
	return b.With(ctx, rec.Name, fn)
}

// List has none: Create makes no volumes.
func (b Backend) List(context.Context) ([]string, error) { return nil, nil }

var errNoProcess = &fault.Error{Err: fmt.Errorf("%w: a volume has no processes", fault.ErrUnsupported),
	Hint: "Use the containers that mount it."}

// Create implements runtime.Backend.
func (b Backend) Create(context.Context, runtime.Spec, []string) error { return errNoProcess }

// Attach implements runtime.Backend.
func (b Backend) Attach(context.Context, string, runtime.Streams) error { return errNoProcess }

// Exec implements runtime.Backend.
func (b Backend) Exec(context.Context, string, runtime.Process, runtime.Streams) (int, error) {
	return 0, errNoProcess
}

// Kill implements runtime.Backend.
func (b Backend) Kill(context.Context, string, string) error { return errNoProcess }

// Logs implements runtime.Backend.
func (b Backend) Logs(context.Context, string, runtime.LogOptions, io.Writer, io.Writer) error {
	return errNoProcess
}
