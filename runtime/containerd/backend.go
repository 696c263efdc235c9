// Package containerd runs sandboxes as containers of containerd, in a namespace
// of their own, and adopts containers of other programs in any namespace.
//
// What containerd knows of a sandbox is what `ctr -n agentbox` shows: a
// container of the sandbox's id, with the labels agentbox.root and
// agentbox.name, an active snapshot of that id over the image's committed
// chain, and, while it runs, a task. The snapshot's directories are the upperdir
// and the lower directories. Package box has the life of a container, and its files in
// ROOT/containerd and RUN/containerd; besides these there are:
//
//	ROOT/containerd/agentbox-runtime        the program containerd's shims are told to call; see wrap
//	    sandboxes/<id>/container.json       with the snapshot's directories; of an adopted container its name too
//	                   merged               the root filesystem, mounted only while the sandbox runs
//	                   etc/ init log        as in the oci backend
//	                   streams.json exit.json   of an adopted container's task that a Stop has deleted
//	RUN/containerd/<id>/bundle.<n>/         fifos 0, 1 and 2, the attach socket, the monitor's lock and orders
//	                    exec/<e>/           the fifos of one exec session
//	                    netns, criu.conf
//	RUN/containerd/runc/<namespace>         runc's own state
//
// Each run has a monitor, a process of ours (Monitor) that holds the other end
// of the fifos which containerd's shim copies the container's output to and its
// input from. Data flows caller <-> the monitor's socket <-> monitor <-> fifos
// <-> shim <-> the container's pipes or terminal, and from the monitor into the
// log. The monitor asks the shim, not the daemon, for the exit code, so it learns
// of it while the daemon is down; it records it when the output has been
// drained, and then runs `agentbox reap <id>`. The shim holds both ends of every
// fifo, so a monitor that was killed loses nothing: the next look at the
// container starts another, and until then the container can print as much as a
// pipe holds.
//
// Nothing is cached in memory: every method asks containerd whether the
// container is there, and reads the rest from these files and from the kernel, as
// the oci backend does. So what needs no daemon works without one: Inspect, Wait,
// Logs, Attach, Unpause.
package containerd

import (
	"cmp"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

// Defaults of Options.
const (
	DefaultAddress     = "/run/containerd/containerd.sock"
	DefaultNamespace   = "agentbox"
	DefaultSnapshotter = "overlayfs"
)

// Options place a Backend. The zero value of every field but Root and Run works.
type Options struct {
	Root string // lasting state, e.g. /var/lib/agentbox
	Run  string // transient state, e.g. /run/agentbox

	Address     string // of containerd's socket; default: CONTAINERD_ADDRESS, else DefaultAddress
	Namespace   string // of new sandboxes; default DefaultNamespace
	Snapshotter string // of new sandboxes; default DefaultSnapshotter

	// Existing: nothing of a root that is being removed is made again.
	Existing bool

	// Self is the agentbox binary. It is run as `Self --root Root reap ID` when
	// a sandbox has exited. Empty: what an exited one still holds is freed by
	// the next Stop, Start or Remove.
	Self string
	// Monitor is the command that becomes a run's monitor, with what to do as
	// its last arguments, which it hands to Monitor. Default: Self monitor.
	Monitor []string
	// Wrapper is agentbox-runtime. Empty: the one beside Self, or, without
	// Self, none: then there is no way to restore processes.
	Wrapper    string
	OCIRuntime string // default: runc
	Log        *slog.Logger
}

// Backend implements runtime.Backend. It holds no state of containers, so any
// number of processes may have one over the same directories.
type Backend struct {
	box         *box.Lifecycle // its base names us in labels and to the reaper
	address     string
	namespace   string
	snapshotter string
	self        string
	monitor     []string
	client      *client
	log         *slog.Logger
}

var _ runtime.Backend = (*Backend)(nil)

// hooks are what box.Lifecycle has the Backend do.
type hooks struct{ *Backend }

// Open checks that the programs are there and makes the directories. It does
// not talk to containerd.
func Open(opts Options) (*Backend, error) {
	b := &Backend{
		address:   cmp.Or(opts.Address, os.Getenv("CONTAINERD_ADDRESS"), DefaultAddress),
		namespace: cmp.Or(opts.Namespace, DefaultNamespace), snapshotter: cmp.Or(opts.Snapshotter, DefaultSnapshotter),
		self: opts.Self, monitor: opts.Monitor, log: opts.Log,
	}
	b.address = strings.TrimPrefix(b.address, "unix://")
	if b.log == nil {
		b.log = slog.Default()
	}
	if b.monitor == nil && b.self != "" {
		b.monitor = []string{b.self, "monitor"}
	}
	var err error
	b.box, err = box.Open(box.Options{
		Root: opts.Root, Run: opts.Run, Part: "containerd", OCIRuntime: opts.OCIRuntime,
		Wrapper: opts.Wrapper, Self: b.self,
		Log: b.log, Drain: drain, Existing: opts.Existing, Hit: func(point string) error { return failpoint.Hit("containerd." + point) },
	}, hooks{b})
	if err != nil {
		return nil, err
	}
	// The shim appends the namespace to this directory.
	b.box.State = filepath.Join(b.box.State, b.namespace)
	b.client, err = newClient(b.address)
	return b, err
}

// drain is how long a monitor may take to record an end. One that was killed is replaced meanwhile.
const drain = 2 * box.Grace

// Close ends the connection to containerd.
func (b *Backend) Close() error { return b.client.Close() }

// Properties are this backend's differences.
func (b *Backend) Properties() runtime.Properties { return runtime.Properties{Name: "containerd"} }

// monitors is the cgroup of all monitors.
const monitors = box.CgroupRoot + "/monitor"
