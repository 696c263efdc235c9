package backendtest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// Op names a method of runtime.Backend for Faulty.
type Op string

// The operations that can be made to fail.
const (
	Create  Op = "Create"
	Start   Op = "Start"
	Attach  Op = "Attach"
	Stop    Op = "Stop"
	Pause   Op = "Pause"
	Unpause Op = "Unpause"
	Exec    Op = "Exec"
	Wait    Op = "Wait"
	Inspect Op = "Inspect"
	Logs    Op = "Logs"
	Remove  Op = "Remove"
	Mount   Op = "Mount"
	List    Op = "List"

	VolumeUsers Op = "VolumeUsers"
)

// Fault says how an operation fails. The zero value does nothing, but still
// has to be reached.
type Fault struct {
	Err   error           // what the operation returns
	After bool            // it is done first, and its success reported as Err
	Skip  int             // so many calls go well before the first that fails
	Times int             // so many calls fail, then all go well; 0: every one
	Do    func(id string) // called at the instant of the failure; may be nil
}

// Faulty makes chosen operations of b fail. A fault that never fired fails the
// test: it would prove nothing.
func Faulty(t testing.TB, b runtime.Backend, faults map[Op]Fault) runtime.Backend {
	t.Helper()
	f := &faulty{Backend: b, faults: faults, calls: map[Op]int{}, fired: map[Op]int{}}
	t.Cleanup(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, op := range slices.Sorted(maps.Keys(faults)) {
			if f.fired[op] == 0 {
				t.Errorf("the fault of %s never fired (%d calls)", op, f.calls[op])
			}
		}
	})
	return f
}

type faulty struct {
	runtime.Backend
	faults map[Op]Fault

	mu    sync.Mutex
	calls map[Op]int
	fired map[Op]int
}

// do runs an operation, or what stands for it.
func (f *faulty) do(op Op, id string, work func() error) error {
	fault, ok := f.faults[op]
	f.mu.Lock()
	n := f.calls[op]
	f.calls[op]++
	ok = ok && n >= fault.Skip && (fault.Times == 0 || n < fault.Skip+fault.Times)
	if ok {
		f.fired[op]++
	}
	f.mu.Unlock()
	if !ok {
		return work()
	}
	if fault.After {
		if err := work(); err != nil {
			return err
		}
	}
	if fault.Do != nil {
		fault.Do(id)
	}
	if fault.Err == nil && !fault.After {
		return work()
	}
	return fault.Err
}

func (f *faulty) Create(ctx context.Context, spec runtime.Spec, lower []string) error {
	return f.do(Create, spec.ID, func() error { return f.Backend.Create(ctx, spec, lower) })
}

func (f *faulty) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	err = f.do(Start, id, func() (err error) { wait, err = f.Backend.Start(ctx, id, opts); return err })
	if err != nil {
		return nil, err
	}
	return wait, nil
}

func (f *faulty) Attach(ctx context.Context, id string, streams runtime.Streams) error {
	return f.do(Attach, id, func() error { return f.Backend.Attach(ctx, id, streams) })
}

func (f *faulty) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	return f.do(Stop, id, func() error { return f.Backend.Stop(ctx, id, opts) })
}

func (f *faulty) Pause(ctx context.Context, id string) error {
	return f.do(Pause, id, func() error { return f.Backend.Pause(ctx, id) })
}

func (f *faulty) Unpause(ctx context.Context, id string) error {
	return f.do(Unpause, id, func() error { return f.Backend.Unpause(ctx, id) })
}

func (f *faulty) Exec(
	ctx context.Context, id string, p runtime.Process, streams runtime.Streams,
) (exit int, err error) {
	err = f.do(Exec, id, func() (err error) { exit, err = f.Backend.Exec(ctx, id, p, streams); return err })
	return exit, err
}

func (f *faulty) Wait(ctx context.Context, id string) (exit runtime.Exit, err error) {
	err = f.do(Wait, id, func() (err error) { exit, err = f.Backend.Wait(ctx, id); return err })
	return exit, err
}

func (f *faulty) Inspect(ctx context.Context, id string) (c runtime.Container, err error) {
	err = f.do(Inspect, id, func() (err error) { c, err = f.Backend.Inspect(ctx, id); return err })
	if err != nil {
		return runtime.Container{}, err
	}
	return c, nil
}

func (f *faulty) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	return f.do(Logs, id, func() error { return f.Backend.Logs(ctx, id, opts, stdout, stderr) })
}

func (f *faulty) Remove(ctx context.Context, id string) error {
	return f.do(Remove, id, func() error { return f.Backend.Remove(ctx, id) })
}

func (f *faulty) Mount(ctx context.Context, id string, fn func(root string) error) error {
	return f.do(Mount, id, func() error { return f.Backend.Mount(ctx, id, fn) })
}

// VolumeUsers implements runtime.VolumeSharer, as far as b does.
func (f *faulty) VolumeUsers(
	ctx context.Context, id string, of []runtime.Volume,
) (users map[string][]string, err error) {
	sharer, ok := f.Backend.(runtime.VolumeSharer)
	if !ok {
		return nil, fmt.Errorf("who has volumes: %w", runtime.ErrUnsupported)
	}
	err = f.do(VolumeUsers, id, func() (err error) { users, err = sharer.VolumeUsers(ctx, id, of); return err })
	if err != nil {
		return nil, err
	}
	return users, nil
}

func (f *faulty) List(ctx context.Context) (ids []string, err error) {
	err = f.do(List, "", func() (err error) { ids, err = f.Backend.List(ctx); return err })
	if err != nil {
		return nil, err
	}
	return ids, nil
}
