package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
)

// enterLimit is how long LetIn waits for processes that come in.
const enterLimit = 10 * time.Second

// LetIn lets processes that an exec is bringing into a frozen container (a health check, for
// example) finish entering, and freezes it again. A process that the freeze caught half-way would
// block its engine: a shim thaws nothing while it waits for the OCI runtime, which waits for that
// process. initPid is the container's first process, a child of the shim. LetIn returns nil if
// that process has ended; on error the container may be thawed.
func (r Runtime) LetIn(ctx context.Context, initPid int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, enterLimit, errEntering)
	defer cancel()
	for {
		caught := entering(initPid, r.ID)
		if len(caught) == 0 {
			return nil
		}
		err := r.Resume(ctx)
		for err == nil && slices.ContainsFunc(entering(initPid, r.ID), func(pid int) bool {
			return slices.Contains(caught, pid)
		}) {
			select {
			case <-time.After(2 * time.Millisecond):
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		}
		if err == nil {
			err = r.Pause(ctx)
		}
		switch {
		case errors.Is(err, fault.ErrState), errors.Is(err, fault.ErrNotFound):
			return nil
		case err != nil:
			return fmt.Errorf("freeze container %s with a process on its way in: %w", r.ID, err)
		}
	}
}

var errEntering = fmt.Errorf("%w: there is always one for %v", fault.ErrBusy, enterLimit)

// entering lists the execs by which the shim of a container has its OCI runtime
// start processes in it; each ends when its process has begun.
func entering(initPid int, id string) []int {
	first, err := proc.Read(initPid)
	if err != nil {
		return nil // it has ended
	}
	all, err := hostPids()
	if err != nil {
		return nil
	}
	group := cgroupOf(initPid)
	return slices.DeleteFunc(all, func(pid int) bool {
		st, err := proc.Read(pid)
		if err != nil || st.Parent != first.Parent || within(cgroupOf(pid), group) {
			return true // or one that has come in: its command line may be any
		}
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		args := strings.Split(string(line), "\x00")
		return err != nil || !slices.Contains(args, "exec") || !slices.Contains(args, id)
	})
}
