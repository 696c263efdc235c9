// Package box is the life of a sandbox's container, for the backends that run their sandboxes
// themselves: create, start, look, stop, remove, and the frames of exec, attach and logs. A
// Lifecycle orders the steps of each verb and records how far it got; a backend's Hooks take the
// steps that differ: how a container gets its monitor, and what creates it.
//
// A container is started with a monitor, a process that outlives its caller, holds the
// container's streams and records its exit code. These files are a sandbox's:
//
//	ROOT/sandboxes/<id>/container.json   a Container; without it the sandbox does not exist
//	                    runs/<n>/        one directory per start: run.json, started, exit.json, and the backend's own
//	RUN/<id>/bundle.<n>/                 what start n needs while it lasts
//	         exec/<e>/                   what an exec session needs while it lasts
//	RUN/runc                             the OCI runtime's own state
//	RUN/exits/<id>                       exit codes of removed sandboxes, for callers still in Wait
//
// ROOT and RUN are the backend's part of the two directories that it was given,
// except that exits is in RUN itself.
//
// The end of a container is on record before anything that it held is freed: how often its limits
// came into force is known to its cgroups alone until then.
package box

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/streams"
	"github.com/agentbox/agentbox/runtime/network"
)

// Hooks are a backend's own steps. None of them may take a sandbox's lock.
type Hooks interface {
	// Look finds out a container's state: Lifecycle.Look, after what the backend has to ask first.
	Look(ctx context.Context, id string) (View, error)

	// Make makes a container whose directory is there and empty.
	Make(ctx context.Context, spec runtime.Spec, lower []string) error

	// Launch starts the monitor of a start. The time that it takes to come up is spent on the
	// root filesystem and the network.
	Launch(s *Start) (Launched, error)

	// Connect connects streams to a run's first process. Once it returns, nothing that the
	// process prints is missed.
	Connect(ctx context.Context, v View, s runtime.Streams, size *runtime.Size) (*streams.Attachment, error)

	// Exec runs a session's process and returns its exit code.
	Exec(ctx context.Context, s *Session) (exit int, err error)

	// Monitored reports whether a monitor works in a bundle or a session's directory.
	Monitored(dir string) (bool, error)

	// Attend is called for each run that a look finds alive. It replaces a monitor that was killed.
	Attend(ctx context.Context, id string, run Run) error

	// MonitorExit returns how start n ended, if its monitor left word of that elsewhere than in
	// exit.json.
	MonitorExit(id string, n int) (Exit, bool, error)

	// AwaitMonitor returns when a run whose first process has ended has no monitor any more that
	// could record that.
	AwaitMonitor(ctx context.Context, id string, run Run) error

	// KillStrays ends the monitors and runtime calls that work for a container.
	KillStrays(ctx context.Context, id string) error

	// Free frees what the backend holds for a container whose processes have ended.
	Free(ctx context.Context, id string) error

	// Unmake is the reverse of Make, for a container of which nothing is mounted.
	Unmake(ctx context.Context, id string) error
}

// Launched is a backend's part in a start whose monitor runs.
type Launched interface {
	// Create has the container created, or restored: its first process then waits.
	Create(ctx context.Context) error
	// Go lets the command run, or the restored processes go on.
	Go(ctx context.Context) error
	// Started tells the monitor that the start is on record.
	Started() error
	// Close lets go of the monitor, which goes on if the container was created.
	Close()
	// Abort ends, after Close, what release does not.
	Abort()
}

// Container is container.json.
type Container struct {
	Spec  runtime.Spec `json:"spec"`
	Lower []string     `json:"lower"` // top first
	// Upper and Work are the directories of an engine's snapshot; empty: those in the sandbox's own.
	Upper string `json:"upper,omitempty"`
	Work  string `json:"work,omitempty"`
}

// Run is runs/<n>/run.json: what the later verbs need to know of a
// start. It is not synced, since it describes processes, and no process
// outlives what could lose it.
type Run struct {
	Number  int      `json:"number"`
	Bundle  string   `json:"bundle"`
	Env     []string `json:"env,omitempty"`
	Address string   `json:"address,omitempty"`
	Pid     int      `json:"pid,omitempty"` // of the first process; else the bundle has a pid file
}

// Options place a Lifecycle.
type Options struct {
	Root, Run, Part           string // see openHome
	Existing                  bool   // see openHome
	OCIRuntime, Wrapper, Self string // see runtimes
	Log                       *slog.Logger

	// Drain is how long a monitor may take to record the end of a container that was stopped.
	Drain time.Duration
	// Hit is a failpoint of the backend.
	Hit func(point string) error
}

// Lifecycle has the verbs. It holds no state of containers, so any number of processes may have
// one over the same directories.
type Lifecycle struct {
	home
	OCI     string // the OCI runtime
	Wrapper string // agentbox-runtime, or the OCI runtime where there is none
	Net     *network.Manager
	Cgroups kernel.Cgroups

	log   *slog.Logger
	drain time.Duration
	hit   func(point string) error
	hooks Hooks
}

// Grace bounds every wait for something that happens by itself in
// milliseconds once its cause is there, such as a monitor's record of an exit.
const Grace = 10 * time.Second

// Open checks that the programs are there and makes the directories.
func Open(opts Options, hooks Hooks) (*Lifecycle, error) {
	l := &Lifecycle{log: opts.Log, drain: opts.Drain, hit: opts.Hit, hooks: hooks}
	var err error
	if l.OCI, l.Wrapper, err = runtimes(opts.OCIRuntime, opts.Wrapper, opts.Self); err != nil {
		return nil, err
	}
	if l.home, err = openHome(opts.Root, opts.Run, opts.Part, opts.Existing); err != nil {
		return nil, err
	}
	if l.Cgroups, err = kernel.Hierarchies(); err != nil {
		return nil, err
	}
	l.Net, err = network.Open(l.Root, l.Run)
	return l, err
}

// OpenNetwork opens the network of a root alone.
func OpenNetwork(root, run string) (*network.Manager, error) {
	h, err := openHome(root, run, "", false)
	if err != nil {
		return nil, err
	}
	return network.Open(h.Root, h.Run)
}

// place returns the parts of a container's bundle.
func (l *Lifecycle) place(c Container) bundle.Place {
	id := c.Spec.ID
	return bundle.Place{
		Dir: l.Dir(id), Rootfs: l.Dir(id, "merged"), Upper: cmp.Or(c.Upper, l.Dir(id, "upper")),
		Config: l.RunDir(id, "criu.conf"), Cgroup: l.Cgroup(id), Init: l.Wrapper, Cgroups: l.Cgroups,
		Secrets: l.RunDir(id, "secrets"),
	}
}

// Workspaces lists the workspaces of a container.
func (l *Lifecycle) Workspaces(c Container) []bundle.Workspace { return l.place(c).Workspaces(c.Spec) }

// rootfs returns the mount of a container's root filesystem. An engine would mount a snapshot
// itself, with the kernel's defaults; the options that keep an upperdir free of references to the
// layers below are ours.
func (l *Lifecycle) rootfs(c Container) overlay.Mount {
	id := c.Spec.ID
	return overlay.Mount{
		Lower: c.Lower, Upper: cmp.Or(c.Upper, l.Dir(id, "upper")), Work: cmp.Or(c.Work, l.Dir(id, "work")),
		Target: l.Dir(id, "merged"), IDs: c.Spec.IDs,
	}
}
