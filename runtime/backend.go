package runtime

import (
	"context"
	"io"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/idmap"
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
	// write. lower lists the image's read-only directories, top first; it is
	// empty when the image is the engine's own, which spec.ImageDigest names.
	// On error nothing of it is left. An id that exists is ErrExists.
	Create(ctx context.Context, spec Spec, lower []string) error

	// Start is the engine's ordinary start; with a restore staged for the
	// container (criu/stage, Container.Stage) the runtime wrapper restores
	// instead. A running
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

	// Pause freezes every process of a running container, as the engine does
	// it, so that the engine knows. A paused one is nil, a stopped one ErrState.
	Pause(ctx context.Context, id string) error

	// Unpause thaws a paused container. A running one is nil, a stopped one
	// ErrState. It works when the engine's daemon does not: nothing stays
	// frozen because a daemon died.
	Unpause(ctx context.Context, id string) error

	// Kill sends a signal, by name or number, to the first process of a
	// running or paused container; a stopped one is ErrState.
	Kill(ctx context.Context, id, signal string) error

	// Exec runs one more process in a running container and returns its
	// exit code, or ErrDetached (the process goes on). An error is Unstarted
	// only if no process has begun.
	Exec(ctx context.Context, id string, p Process, streams Streams) (exit int, err error)

	// Wait blocks until the container has exited and returns how it ended;
	// at once if it has already.
	Wait(ctx context.Context, id string) (Exit, error)

	// Inspect returns the present state as the engine and the kernel report it,
	// not a cached one.
	Inspect(ctx context.Context, id string) (Container, error)

	// Logs writes what the container's processes printed, in order, until
	// the end of the log or, when following, the container's exit.
	Logs(ctx context.Context, id string, opts LogOptions, stdout, stderr io.Writer) error

	// Remove stops the container and frees all it has: mounts, namespaces,
	// cgroups, files. It is idempotent: nil means that nothing of the container is
	// left, even after an interrupted Create.
	Remove(ctx context.Context, id string) error

	// Mount makes the container's root filesystem reachable on the host
	// while fn runs, whether it runs or is stopped.
	Mount(ctx context.Context, id string, fn func(root string) error) error

	// List returns the ids of all containers that Create made under this root and of
	// which this backend still holds anything, partially created ones included.
	List(ctx context.Context) ([]string, error)

	// Adopt describes, as a sandbox, a container that was made through its engine;
	// ref is the engine's name or id of it. Spec.ID is derived from the engine's id,
	// is always the same, and all other methods accept it from then on; Spec.Name is
	// the engine's name. For a container that Create made, Adopt returns the original
	// spec. It does not change the container. A backend that only has containers of
	// its own returns ErrUnsupported.
	Adopt(ctx context.Context, ref string) (Spec, error)

	// Properties are this backend's differences, as data.
	Properties() Properties
}

// Images is where a backend's images come from: agentbox's own store, or the
// engine. Its methods are those of *images.Store.
type Images interface {
	// Resolve finds the image that a reference means. Image.Lower is empty
	// when the engine keeps its layers to itself.
	Resolve(ctx context.Context, ref string) (image.Image, error)
	// ResolveDigest finds the image that a sandbox or a checkpoint refers to.
	ResolveDigest(ctx context.Context, digest string) (image.Image, error)
	List(ctx context.Context) ([]image.Image, error)
	// Pull fetches the image that a reference means, unless the pull policy accepts
	// the local one. An image that cannot be fetched is ErrNotFound.
	Pull(ctx context.Context, ref string, opts image.PullOptions) (image.Image, error)
	Import(ctx context.Context, name, source string) (image.Image, error)
	ImportFrom(ctx context.Context, name string, r io.Reader) (image.Image, error)
	Remove(ctx context.Context, ref string, inUse func(digest string) bool) error
	ImageKeeper
}

// ImageKeeper is the part of Images that running a sandbox does not need.
type ImageKeeper interface {
	// Tag gives an image one more name; an image that had the name loses it.
	Tag(ctx context.Context, ref, name string) error
	Inspect(ctx context.Context, ref string) (image.Details, error)
	// Prune removes the images without a name, or all, but not those in use.
	Prune(ctx context.Context, all bool, inUse func(digest string) bool) (removed []image.Image, freed int64, err error)
	// Verify reads all of an image again; damage is ErrCorrupt.
	Verify(ctx context.Context, digest string) error
	// V1 returns an image in the form that copies and builds use.
	V1(ctx context.Context, digest string) (v1.Image, error)
	// Add adds an image, under a name unless that is empty. Layers that are already
	// present are not read.
	Add(ctx context.Context, name string, img v1.Image) (image.Image, error)
}

// Original is a Backend that can copy a sandbox's changes into the directory that the
// sandbox is layered over.
type Original interface {
	// Apply copies all changes or none; see Service.Apply. The container is
	// stopped. On error the directory and the upperdir are as they were, except
	// for what Settle has yet to undo.
	Apply(ctx context.Context, id string, opts ApplyOptions) (Applied, error)
	// Settle finishes or rolls back an Apply that was killed, and says which in a
	// sentence; empty: there was none. It is idempotent.
	Settle(ctx context.Context, id string) (did string, err error)
}

// StartOptions modify Start.
type StartOptions struct {
	Streams *Streams
	Env     []string     // added to the first process's environment and to every Exec's until the next Start
	Secrets []SecretFile // one for each of Spec.Secrets; a start without them fails
}

// StopOptions modify Stop. The zero value kills at once.
type StopOptions struct {
	Timeout time.Duration // between the stop signal and SIGKILL; 0: SIGKILL at once
	Signal  string        // default: the spec's stop signal
	// Silent disconnects the container from its network first, so that the peers of
	// its connections do not notice and a restore can resume the connections.
	Silent bool
}

// Exit is how a sandbox's first process ended.
type Exit struct {
	Code int `json:"exit"`
	// OOMKilled: the kernel killed one of its processes for lack of memory, as far as its backend knows
	OOMKilled bool `json:"oom_killed,omitempty"`
}

// Container is the state of one container as its backend reports it.
type Container struct {
	Status   Status
	Pid      int // of the first process on the host; 0 unless running or paused
	ExitCode int // of an exited one; 128+n after signal n
	// OOMKilled: the container has exited, and the kernel killed one of its processes
	// for lack of memory. Not every backend reports this, or Hits.
	OOMKilled bool
	Hits      LimitHits // of an exited one, in its last start
	OOMAt     time.Time // when the first process was killed for memory since it was last started, if that was noted
	Started   time.Time
	Finished  time.Time
	Upper     string     // the upperdir on the host
	Lower     []string   // the read-only directories below it, top first
	Runtime   OCIRuntime // the OCI runtime's view of it, valid while it runs
	Address   string     // bridge mode: the sandbox's IPv4 address

	// Volumes are the engine's named volumes in it whose data lies in a
	// directory of this host and nowhere else, and its workspaces.
	Volumes []Volume

	// Applies is the directory that keeps the applies of its workspaces; empty: it has none.
	Applies string

	// Stage is where Start looks for a staged restore.
	Stage stage.Slot
	// NoRestore says, in a sentence, why Start cannot restore processes, and
	// Remedy what to do about it; empty: it can.
	NoRestore, Remedy string
	// AutoRemove: the engine removes the container, files and all, as soon as
	// it ends. It cannot be stopped and started again.
	AutoRemove bool
	// Busy says, in a sentence, what keeps Stop from stopping it, and Remedy
	// what to do about it; empty: Stop can.
	Busy string
	// Fresh are directories in the container that the engine mounts empty, from
	// outside, at every start: their contents are in neither the upperdir nor the
	// CRIU images.
	Fresh []string
	// EmptyNetwork: the OCI runtime creates the network namespace and the engine
	// fills it at every start, so CRIU must not dump its contents.
	EmptyNetwork bool

	// Managed are the files that the backend writes and binds over the root
	// filesystem, such as /etc/hosts: by their path in the sandbox, the file on
	// the host. Start writes a file that is missing or unchanged since Start last
	// wrote it; it leaves a file that the sandbox or a restore has changed.
	Managed map[string]string
}

// OCIRuntime identifies one container of an OCI runtime (runc or crun). It has the
// fields of criu.Runtime, to which it converts.
type OCIRuntime struct {
	Binary string // e.g. /usr/sbin/runc
	Root   string // its --root
	ID     string
}

// Volume is a named volume of an engine, or a workspace.
type Volume struct {
	Name   string // of a workspace: Target
	Path   string // its data on the host; of a workspace: the upperdir
	Target string // where it is in the container

	// Lower is the directory that a workspace lies over; empty: it is no workspace. Its data is
	// the sandbox's alone, and part of each checkpoint.
	Lower string
}

// Workspace reports whether it is a workspace.
func (v Volume) Workspace() bool { return v.Lower != "" }

// Properties describe how backends differ.
type Properties struct {
	Name string // "oci", "docker", "containerd", "podman"
	// FilesOnly: its sandboxes have no processes of their own. Their checkpoints
	// contain only files; Pause freezes the processes that use the files.
	FilesOnly bool
	// Filters: it supports the network mode filtered, and is an EgressFilter.
	Filters bool
	// Restarts: agentbox restarts its sandboxes according to Spec.Restart. Otherwise
	// the container engine has restart rules of its own.
	Restarts bool
}

// VolumeSharer is a Backend whose containers can have Container.Volumes.
type VolumeSharer interface {
	// VolumeUsers lists, by the names of a container's volumes, the other running or
	// paused containers that use them: a restore replaces the directory under them.
	// It has to inspect every container, and any of them can block it or make it
	// fail. Inspect must not depend on that, so it does not call VolumeUsers.
	VolumeUsers(ctx context.Context, id string, of []Volume) (map[string][]string, error)
}

// IDMapper is a Backend whose sandboxes can have user namespaces.
type IDMapper interface {
	// MayMap says why a sandbox over these layers cannot have a user namespace with
	// ids; empty: it can.
	MayMap(ctx context.Context, s Spec, lower []string, ids idmap.Map) (why string, err error)
	// IDsElsewhere returns the first id of each range that running sandboxes of other
	// roots on this machine use.
	IDsElsewhere() ([]uint32, error)
}

// EgressFilter is a Backend that confines sandboxes to egress rules.
type EgressFilter interface {
	// SetEgress replaces the rules of a container, whether it runs or not, and ends
	// connections that the new rules do not allow.
	SetEgress(ctx context.Context, id string, rules []string) error
	// EgressLog is the directory of the eventlogs, named by container id, of denied
	// connections. Each entry is an egress.Event.
	EgressLog() string
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

// ReachedBy reports whether a container that mounts source, a path of the host, reaches
// the volume's data through it: source is the data, a part of it or, if the mount is
// writable, a directory above it.
func (v Volume) ReachedBy(source string, writable bool) bool {
	if source == "" { // a tmpfs, say
		return false
	}
	// A source that is gone is only a name.
	data, source := filepath.Clean(fsx.Resolved(v.Path)), filepath.Clean(fsx.Resolved(source))
	return fsx.Within(data, source) || writable && fsx.Within(source, data)
}
