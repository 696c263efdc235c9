package freezer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	// limit is how long Freeze tries; a process that waits for a disk or a
	// network filesystem cannot be frozen before it has got its answer.
	limit = 10 * time.Second
	// stuck is after which time a cgroup of v1 that does not freeze is thawed
	// and frozen anew: one that is frozen already may be what another waits for.
	stuck = 250 * time.Millisecond
	// breath is how long it is thawed then.
	breath = 10 * time.Millisecond
)

// Freeze stops all processes of the container and returns when they stand. One
// that is frozen is nil, one that is stopped ErrState. On error it is thawed.
func (c Container) Freeze(ctx context.Context) error {
	if !c.Alive() {
		return c.stopped()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errLimit)
	defer cancel()
	is, err := c.Frozen()
	switch {
	case err == nil && is:
		return nil
	case err == nil && c.v2:
		err = c.freezeV2(ctx)
	case err == nil:
		err = c.freezeV1(ctx)
	}
	alive := c.Alive()
	if err == nil && alive {
		return nil
	}
	if !alive { // what is left of it is to end
		_ = c.set(false)
		return c.stopped()
	}
	why := ""
	if ctx.Err() != nil {
		why = c.laggards()
	}
	err = fmt.Errorf("freeze container %s: %w%s", c.ID, err, why)
	if e := c.set(false); e != nil {
		err = errors.Join(err, fmt.Errorf("thaw container %s: %w", c.ID, e))
	}
	return err
}

var errLimit = fmt.Errorf("%w: not all of its processes stand still after %v", fault.ErrBusy, limit)

// Thaw lets the container's processes go on. One that runs is nil, one that is
// stopped ErrState.
func (c Container) Thaw() error {
	err := c.set(false)
	if !c.Alive() {
		return c.stopped()
	}
	if err != nil {
		return fmt.Errorf("thaw container %s: %w", c.ID, err)
	}
	return nil
}

// Frozen reports whether all processes of the container stand still.
func (c Container) Frozen() (bool, error) {
	file, want := "freezer.state", "FROZEN"
	if c.v2 {
		file, want = "cgroup.events", "frozen 1"
	}
	data, err := os.ReadFile(filepath.Join(c.dir, file))
	if err != nil {
		return false, fmt.Errorf("container %s: %w", c.ID, err)
	}
	return hasLine(data, want), nil
}

// Freezing reports whether no process of the container runs on in its program, though
// some may be on their way into the freezer.
func (c Container) Freezing() (bool, error) {
	file := "freezer.self_freezing"
	if c.v2 {
		file = "cgroup.freeze"
	}
	data, err := os.ReadFile(filepath.Join(c.dir, file))
	if err != nil {
		return false, fmt.Errorf("container %s: %w", c.ID, err)
	}
	return hasLine(data, "1"), nil
}

func (c Container) set(frozen bool) error {
	file, value := "freezer.state", "THAWED"
	switch {
	case c.v2 && frozen:
		file, value = "cgroup.freeze", "1"
	case c.v2:
		file, value = "cgroup.freeze", "0"
	case frozen:
		value = "FROZEN"
	}
	f, err := os.OpenFile(filepath.Join(c.dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

func hasLine(data []byte, want string) bool {
	for line := range strings.Lines(string(data)) {
		if strings.TrimSpace(line) == want {
			return true
		}
	}
	return false
}

// freezeV1 asks again and again: the kernel looks at the processes only when it
// is asked, and wakes those that do not stand yet each time it is told.
func (c Container) freezeV1(ctx context.Context) error {
	begun := time.Now()
	for wait := 20 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		if err := c.set(true); err != nil {
			return err
		}
		if is, err := c.Frozen(); err != nil || is {
			return err
		}
		if time.Since(begun) > stuck {
			if err := c.set(false); err != nil {
				return err
			}
			if err := sleep(ctx, breath); err != nil {
				return err
			}
			begun = time.Now()
			continue
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// freezeV2 waits for the kernel's word that all stand.
func (c Container) freezeV2(ctx context.Context) error {
	f, err := os.Open(filepath.Join(c.dir, "cgroup.events"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := c.set(true); err != nil {
		return err
	}
	buf := make([]byte, 256)
	for {
		n, err := f.ReadAt(buf, 0)
		if n == 0 && err != nil {
			return err
		}
		if hasLine(buf[:n], "frozen 1") {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// It wakes on any change since the read above; the bound is for ctx.
		poll := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(poll, 20); err != nil && err != unix.EINTR {
			return err
		}
	}
}

// laggards names processes of the cgroup that do not stand in the freezer.
func (c Container) laggards() string {
	var found []string
	data, err := os.ReadFile(filepath.Join(c.dir, "cgroup.procs"))
	if err != nil {
		return ""
	}
	for _, pid := range strings.Fields(string(data)) {
		where, err := os.ReadFile("/proc/" + pid + "/wchan")
		if err != nil || Halts(string(where)) {
			continue
		}
		name, _ := os.ReadFile("/proc/" + pid + "/comm")
		number, _ := strconv.Atoi(pid)
		state, _, _ := process(number)
		found = append(found, fmt.Sprintf("process %s (%q, state %s, in %q)", pid,
			strings.TrimSpace(string(name)), state, where))
		if len(found) == 3 {
			break
		}
	}
	if len(found) == 0 {
		return ""
	}
	return ": " + strings.Join(found, ", ")
}
