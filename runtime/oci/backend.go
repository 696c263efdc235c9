// Package oci is agentbox's default backend: conmon + agentbox-runtime + runc,
// and no daemon.
//
// What lasts is in ROOT/sandboxes/<id>, what a reboot may take is in RUN:
//
//	ROOT/sandboxes/<id>/container.json   the spec and the lower directories; its presence makes the container
//	                    upper work merged  the overlay; mounted only while the container runs
//	                    etc/ init        sources of bind mounts; CRIU wants them under the same path at restore.
//	                                     etc/.generated tells what in etc is ours and what the sandbox wrote
//	                    log              all that the container printed, kept over restarts and restores
//	                    runs/<n>/        one directory per start: run.json, started, exit (by conmon), exit.json
//	RUN/<id>/           bundle.<n>/      config.json, pid files, attach socket, fifos of run n
//	                    exec/<e>/        the same of one exec session
//	                    netns            owned by package network
//	                    criu.conf        named by the bundle's org.criu.config annotation; the Engine fills it
//	RUN/runc            runc's own state
//	RUN/exits/<id>      exit codes of removed containers, for callers still in Wait
//
// Nothing is remembered: every method reads these files and asks the kernel.
// A run's first process is the one in its pid file, if that process is in the
// cgroup /agentbox/<id>; frozen or not is read from the cgroup; an exit code
// is in the file that conmon wrote when it had drained the output.
//
// Data flows caller <-> conmon's attach socket <-> conmon <-> the container's
// pipes or pseudo-terminal, and from conmon into the log. Conmon outlives
// agentbox; when the container has ended it runs `agentbox reap <id>`, which
// comes back as Stop and frees what the container held.
package oci

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/network"
)

// Options place a Backend. The zero value of every field but Root and Run works.
type Options struct {
	Root string // lasting state, e.g. /var/lib/agentbox
	Run  string // transient state, e.g. /run/agentbox

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
	home    home.Home
	self    string
	wrapper string // what conmon is given for create and start
	oci     string // the real runtime
	conmon  string
	net     *network.Manager
	cgroups kernel.Cgroups
	log     *slog.Logger
	glances glances

	execution time.Duration // what a start gives its command to be executed
}

var _ runtime.Backend = (*Backend)(nil)

// grace bounds every wait for something that happens by itself in
// milliseconds once its cause is there, such as conmon's exit file.
const grace = 10 * time.Second

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
		if b.self, err = home.Program(opts.Self); err != nil {
			return nil, err
		}
	}
	if b.oci, b.wrapper, err = home.Runtimes(opts.OCIRuntime, opts.Wrapper, b.self); err != nil {
		return nil, err
	}
	if b.conmon, err = home.Program(cmp.Or(opts.Conmon, "conmon")); err != nil {
		return nil, err
	}
	if b.home, err = home.Open(opts.Root, opts.Run, ""); err != nil {
		return nil, err
	}
	if err = os.MkdirAll(filepath.Join(b.home.Run, "tmp"), 0o700); err != nil {
		return nil, err
	}
	if b.cgroups, err = kernel.Hierarchies(); err != nil {
		return nil, err
	}
	if b.net, err = network.Open(b.home.Root, b.home.Run); err != nil {
		return nil, err
	}
	if b.self != "" {
		b.net.UseProxy(b.egress, b.startEgress)
	}
	// It must not keep the user from other sandboxes; those it is for have no way out.
	if dead, err := b.net.Revive(context.Background()); err != nil {
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

// place returns the parts of a container's bundle.
func (b *Backend) place(id string) bundle.Place {
	return bundle.Place{
		Dir: b.home.Dir(id), Rootfs: b.home.Dir(id, "merged"), Upper: b.home.Dir(id, "upper"), Config: b.home.RunDir(id, "criu.conf"), Cgroup: b.home.Cgroup(id), Init: b.wrapper, Cgroups: b.cgroups,
		Secrets: b.home.RunDir(id, "secrets"),
	}
}
