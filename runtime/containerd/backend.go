// Package containerd runs sandboxes as containers of containerd, in a namespace
// of their own, and adopts containers of other programs in any namespace.
//
// What containerd knows of a sandbox is what `ctr -n agentbox` shows: a
// container of the sandbox's id, with the labels agentbox.root and
// agentbox.name, an active snapshot of that id over the image's committed
// chain, and, while it runs, a task. The snapshot's directories are the upperdir
// and the lower directories. What containerd does not keep is in ROOT/containerd,
// what a reboot may take is in RUN/containerd:
//
//	ROOT/containerd/agentbox-runtime        the program containerd's shims are told to call; see wrap
//	    sandboxes/<id>/container.json       the spec, the snapshot's directories; of an adopted container its name too
//	                   merged               the root filesystem, mounted only while the sandbox runs
//	                   etc/ init log        as in the oci backend
//	                   runs/<n>/            one directory per start: run.json, started, exit.json
//	                   streams.json exit.json   of an adopted container's task that a Stop has deleted
//	RUN/containerd/<id>/bundle.<n>/         fifos 0, 1 and 2, the attach socket, the monitor's lock and orders
//	                    exec/<e>/           the fifos of one exec session
//	                    netns, criu.conf
//	RUN/containerd/runc/<namespace>         runc's own state
//	RUN/exits/<id>                          exit codes of removed containers, for callers still in Wait
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
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/network"
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
	home        home.Home // its base names us in labels and to the reaper
	address     string
	namespace   string
	snapshotter string
	self        string
	monitor     []string
	wrapper     string // agentbox-runtime, or the real runtime where there is none
	oci         string // the real runtime
	client      *client
	net         *network.Manager
	cgroups     kernel.Cgroups
	log         *slog.Logger
}

var _ runtime.Backend = (*Backend)(nil)

// grace bounds every wait for something that happens by itself in
// milliseconds once its cause is there, such as a monitor's record of an exit.
const grace = 10 * time.Second

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
	if b.oci, b.wrapper, err = home.Runtimes(opts.OCIRuntime, opts.Wrapper, b.self); err != nil {
		return nil, err
	}
	if b.home, err = home.Open(opts.Root, opts.Run, "containerd"); err != nil {
		return nil, err
	}
	// The shim appends the namespace to this directory.
	b.home.State = filepath.Join(b.home.State, b.namespace)
	if b.cgroups, err = kernel.Hierarchies(); err != nil {
		return nil, err
	}
	if b.net, err = network.Open(b.home.Root, b.home.Run); err != nil {
		return nil, err
	}
	b.client, err = newClient(b.address)
	return b, err
}

// Close ends the connection to containerd.
func (b *Backend) Close() error { return b.client.Close() }

// Properties are this backend's differences.
func (b *Backend) Properties() runtime.Properties { return runtime.Properties{Name: "containerd"} }

// monitors is the cgroup of all monitors.
const monitors = home.Cgroups + "/monitor"

// place returns the parts of a container's bundle.
func (b *Backend) place(id string) bundle.Place {
	return bundle.Place{
		Dir: b.home.Dir(id), Rootfs: b.home.Dir(id, "merged"), Config: b.home.RunDir(id, "criu.conf"), Cgroup: b.home.Cgroup(id), Init: b.wrapper, Cgroups: b.cgroups,
		Secrets: b.home.RunDir(id, "secrets"),
	}
}
