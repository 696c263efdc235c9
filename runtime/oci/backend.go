// Package oci is agentbox's default backend: conmon + agentbox-runtime + runc,
// and no daemon.
//
// Package box has the life of a container; this one has what conmon does in it. What lasts is in
// ROOT/sandboxes/<id>, what a reboot may take is in RUN; besides the files of package box these are:
//
//	ROOT/sandboxes/<id>/upper work merged  the overlay; mounted only while the container runs
//	                    etc/ init        sources of bind mounts; CRIU wants them under the same path at restore.
//	                                     etc/.generated tells what in etc is ours and what the sandbox wrote
//	                    log              all that the container printed, kept over restarts and restores
//	                    runs/<n>/        exit and oom, by conmon
//	RUN/<id>/           bundle.<n>/      config.json, pid files, attach socket, fifos of run n
//	                    exec/<e>/        the same of one exec session
//	                    netns            owned by package network
//	                    criu.conf        named by the bundle's org.criu.config annotation; the Engine fills it
//
// Nothing is remembered: every method reads these files and asks the kernel.
// A run's first process is the one in its pid file, if that process is in the
// cgroup /agentbox/<id>; frozen or not is read from the cgroup; an exit code
// is in the file that conmon wrote when it had drained the output.
//
// Data flows caller <-> conmon's attach socket <-> conmon <-> the container's
// pipes or pseudo-terminal, and from conmon into the log. Conmon outlives
// agentbox; when the container has ended it runs `agentbox reap <id>`, which
// comes back as Stop and frees what the container held. Conmon is small and
// proven, and treats our wrapper as any runtime.
package oci

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

// Options place a Backend. The zero value of every field but Root and Run works.
type Options struct {
	Root string // lasting state, e.g. /var/lib/agentbox
	Run  string // transient state, e.g. /run/agentbox

	// Existing: nothing of a root that is being removed is made again.
	Existing bool

	// Self is the agentbox binary that conmon runs as `Self --root Root reap ID`
	// when a container has exited. Empty: what an exited container still holds
	// is freed by the next Stop, Start or Remove.
	Self string
	// Wrapper is agentbox-runtime. Empty: the one beside Self, or, without
	// Self, none: then there is no way to restore processes.
	Wrapper    string
	OCIRuntime string // default: runc
	Conmon     string // default: conmon
	Log        *slog.Logger
}

// Backend implements runtime.Backend. It holds no state of containers, so any
// number of processes may have one over the same directories.
type Backend struct {
	box    *box.Lifecycle
	self   string
	conmon string
	log    *slog.Logger
	cache  statusCache

	execution time.Duration // what a start gives its command to be executed
}

var _ runtime.Backend = (*Backend)(nil)

// hooks are what box.Lifecycle has the Backend do.
type hooks struct{ *Backend }

// executionTime bounds the wait for a command to be executed. It may lie on a network,
// and the host may be busy.
const executionTime = time.Minute

// Open checks that the programs are there and makes the directories.
func Open(opts Options) (*Backend, error) {
	b := &Backend{log: opts.Log, execution: executionTime}
	if b.log == nil {
		b.log = slog.Default()
	}
	var err error
	if opts.Self != "" {
		if b.self, err = box.Program(opts.Self); err != nil {
			return nil, err
		}
	}
	if b.conmon, err = box.Program(cmp.Or(opts.Conmon, "conmon")); err != nil {
		return nil, err
	}
	b.box, err = box.Open(box.Options{
		Root: opts.Root, Run: opts.Run, OCIRuntime: opts.OCIRuntime, Wrapper: opts.Wrapper, Self: b.self, Log: b.log,
		Drain: box.Grace, Existing: opts.Existing, Hit: func(point string) error { return failpoint.Hit("oci." + point) },
	}, hooks{b})
	if err != nil {
		return nil, err
	}
	if err = os.MkdirAll(filepath.Join(b.box.Run, "tmp"), 0o700); err != nil {
		return nil, err
	}
	if b.self != "" {
		b.box.Net.UseProxy(b.egress, b.startEgress)
	}
	// It must not keep the user from other sandboxes; those it is for have no way out.
	if dead, err := b.box.Net.Revive(context.Background()); err != nil {
		b.log.Error("egress proxy not running; filtered sandboxes have no network", "error", err)
	} else if dead {
		b.log.Warn("egress proxy was dead; restarting")
	}
	return b, nil
}

// Properties are this backend's differences.
func (b *Backend) Properties() runtime.Properties {
	return runtime.Properties{Name: "oci", Filters: true, Restarts: true}
}

// Start starts a created or exited container; see box.Lifecycle for this and the following verbs.
func (b *Backend) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	return b.box.Start(ctx, id, opts)
}

// Stop ends a container's processes and frees all that it holds while it runs.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	return b.box.Stop(ctx, id, opts)
}

// Reap frees what a container that ended by itself still holds.
func (b *Backend) Reap(ctx context.Context, id string) error { return b.box.Reap(ctx, id) }

// Wait blocks until the container has exited.
func (b *Backend) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	return b.box.Wait(ctx, id)
}

// List returns every id of which a file, a link or an address of ours exists.
func (b *Backend) List(ctx context.Context) ([]string, error) { return b.box.List(ctx) }

// Attach connects streams to a running container's first process. Without a terminal, a caller's
// end of input, or its leaving, ends the container's input: conmon cannot tell the one from the
// other.
func (b *Backend) Attach(ctx context.Context, id string, ends runtime.Streams) error {
	return b.box.Attach(ctx, id, ends)
}

// Exec runs one more process in a running container.
func (b *Backend) Exec(ctx context.Context, id string, p runtime.Process, ends runtime.Streams) (exit int, err error) {
	return b.box.Exec(ctx, id, p, ends)
}

// Logs writes the log.
func (b *Backend) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	return b.box.Logs(ctx, id, opts, stdout, stderr)
}

// Mount makes a container's root filesystem reachable while fn runs.
func (b *Backend) Mount(ctx context.Context, id string, fn func(root string) error) error {
	return b.box.Mount(ctx, id, fn)
}
