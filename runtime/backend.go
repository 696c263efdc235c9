package runtime

import (
	"context"
	"io"
	"time"

	"github.com/agentbox/agentbox/criu"
)

// Backend drives one container engine. Every backend passes backendtest.Run.
//
// A Backend knows containers, not checkpoints: the Engine checkpoints and
// restores through the OCI runtime that Inspect names and the upperdir it
// reports. Ids are Spec.ID. All methods are safe for concurrent use on
// different ids; the Engine serialises the mutating ones on the same id.
// Errors wrap the sentinels: an unknown id is ErrNotFound unless said otherwise.
type Backend interface {
	// Create makes a stopped container: its upperdir exists and is ours to
	// write. lower lists the image's read-only directories, top first. On
	// error nothing of it is left. An id that exists is ErrExists.
	Create(ctx context.Context, spec Spec, lower []string) error

	// Start is the engine's ordinary start; with a restore staged for the
	// container (criu/stage) the runtime wrapper restores instead. A running
	// container is ErrState. With streams, they are connected before the
	// first instruction runs, and the returned wait serves them until the
	// output ends (nil) or the user detaches (ErrDetached); without, wait is
	// nil. On error the container is stopped, as before. A command that is
	// not there or not executable is an *ExecError.
	Start(ctx context.Context, id string, opts StartOptions) (wait func() error, err error)

	// Attach connects streams to a running container's first process and
	// blocks until its output ends (nil) or the user detaches (ErrDetached).
	Attach(ctx context.Context, id string, streams Streams) error

	// Stop ends a container's processes and unmounts it; the upperdir is
	// then quiescent. Idempotent: nil on a stopped one. A paused container
	// is stopped without running another instruction.
	Stop(ctx context.Context, id string, opts StopOptions) error

	// Exec runs one more process in a running container and returns its
	// exit code, or ErrDetached (the process goes on).
	Exec(ctx context.Context, id string, p Process, streams Streams) (exit int, err error)

	// Wait blocks until the container has exited and returns its exit code;
	// at once if it has already.
	Wait(ctx context.Context, id string) (exit int, err error)

	// Inspect tells what is so now, from the engine and the kernel, not
	// from memory.
	Inspect(ctx context.Context, id string) (Container, error)

	// Logs writes what the container's processes printed, in order, until
	// the end of the log or, when following, the container's exit.
	Logs(ctx context.Context, id string, opts LogOptions, stdout, stderr io.Writer) error

	// Remove stops the container and frees all it has: mounts, namespaces,
	// cgroups, files. Idempotent: nil means "not present any more", after an
	// interrupted Create too.
	Remove(ctx context.Context, id string) error

	// Mount makes the container's root filesystem reachable on the host
	// while fn runs, whether it runs or is stopped.
	Mount(ctx context.Context, id string, fn func(root string) error) error

	// List returns the ids of all containers this backend holds anything
	// of, half-made ones included.
	List(ctx context.Context) ([]string, error)

	// Properties are this backend's differences, as data.
	Properties() Properties
}

// StartOptions modify Start.
type StartOptions struct {
	Streams *Streams
	Env     []string // added to the first process's environment and to every Exec's until the next Start
}

// StopOptions modify Stop. The zero value kills at once.
type StopOptions struct {
	Timeout time.Duration // between the stop signal and SIGKILL; 0: SIGKILL at once
	Signal  string        // default: the spec's stop signal
	// Silent cuts the container off its network before the end, so that the
	// peers of its connections do not learn of it and a restore can go on
	// with them.
	Silent bool
}

// Container is what a backend knows of one container.
type Container struct {
	Status   Status
	Pid      int // of the first process on the host; 0 unless running or paused
	ExitCode int // of an exited one; 128+n after signal n
	Started  time.Time
	Finished time.Time
	Upper    string       // the upperdir on the host
	Runtime  criu.Runtime // the OCI runtime's view of it, valid while it runs
	Address  string       // bridge mode: the sandbox's IPv4 address

	// Managed are the files that the backend writes and binds over the root
	// filesystem, such as /etc/hosts: by their path in the sandbox, the file
	// on the host. Start writes one that is missing or as Start last wrote
	// it; what was changed since, in the sandbox or by a restore, it leaves.
	Managed map[string]string
}

// Properties tell what a backend does differently.
type Properties struct {
	Name string // "oci", "docker", "containerd"
}

// ExecError is a command that could not be started: 127 when it was not
// found, 126 when it is there but cannot be executed.
type ExecError struct {
	Command string
	Code    int
	Err     error
}

func (e *ExecError) Error() string { return e.Err.Error() }
func (e *ExecError) Unwrap() error { return e.Err }
