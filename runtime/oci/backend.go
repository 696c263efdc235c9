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
//	RUN/exits/<id>      exit codes of removed containers, for those who still wait
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
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
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
	root, run string
	self      string
	wrapper   string // what conmon is given for create and start
	oci       string // the real runtime
	conmon    string
	net       *network.Manager
	cgroups   kernel.Cgroups
	log       *slog.Logger
}

var _ runtime.Backend = (*Backend)(nil)

// idPattern is what a container id looks like; anything else in our
// directories is not a container.
var idPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)

// grace bounds every wait for something that happens by itself in
// milliseconds once its cause is there, such as conmon's exit file.
const grace = 10 * time.Second

// Open checks that the programs are there and makes the directories.
func Open(opts Options) (*Backend, error) {
	if opts.Root == "" || opts.Run == "" {
		return nil, fmt.Errorf("%w: oci backend without root or run directory", fault.ErrInvalid)
	}
	b := &Backend{log: opts.Log}
	if b.log == nil {
		b.log = slog.Default()
	}
	var err error
	if b.oci, err = program(opts.OCIRuntime, "runc"); err != nil {
		return nil, err
	}
	if b.conmon, err = program(opts.Conmon, "conmon"); err != nil {
		return nil, err
	}
	b.wrapper = b.oci
	wrapper := opts.Wrapper
	if opts.Self != "" {
		if b.self, err = program(opts.Self, ""); err != nil {
			return nil, err
		}
		if wrapper == "" {
			// Through symlinks: /usr/local/bin/agentbox may point into a build tree.
			real, err := filepath.EvalSymlinks(b.self)
			if err != nil {
				return nil, err
			}
			wrapper = filepath.Join(filepath.Dir(real), "agentbox-runtime")
		}
	}
	if wrapper != "" {
		if b.wrapper, err = program(wrapper, ""); err != nil {
			return nil, err
		}
	}
	if strings.Contains(opts.Run, ",") {
		// runc takes it for the end of a namespace's path.
		return nil, fmt.Errorf("%w: run directory %s: its path must not have a comma", fault.ErrInvalid, opts.Run)
	}
	if b.root, err = directory(opts.Root, "sandboxes"); err != nil {
		return nil, err
	}
	if b.run, err = directory(opts.Run, "runc", "exits", "tmp"); err != nil {
		return nil, err
	}
	if b.cgroups, err = kernel.Hierarchies(); err != nil {
		return nil, err
	}
	if b.net, err = network.Open(b.root, b.run); err != nil {
		return nil, err
	}
	return b, nil
}

// program finds an executable and returns its absolute path.
func program(name, fallback string) (string, error) {
	if name == "" {
		name = fallback
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w: %w", fault.ErrUnsupported, err)
	}
	return filepath.Abs(path)
}

// directory makes dir with children and returns its real path, which is how
// the mount table names it.
func directory(dir string, children ...string) (string, error) {
	for _, child := range children {
		if err := os.MkdirAll(filepath.Join(dir, child), 0o700); err != nil {
			return "", err
		}
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", err
	}
	return filepath.Abs(real)
}

// Properties are this backend's differences.
func (b *Backend) Properties() runtime.Properties { return runtime.Properties{Name: "oci"} }

// paths of one container.
func (b *Backend) dir(id string, elem ...string) string {
	return filepath.Join(append([]string{b.root, "sandboxes", id}, elem...)...)
}

func (b *Backend) runDir(id string, elem ...string) string {
	return filepath.Join(append([]string{b.run, id}, elem...)...)
}

// place is what a container's bundle is made of.
func (b *Backend) place(id string) bundle.Place {
	return bundle.Place{
		Dir: b.dir(id), Rootfs: b.dir(id, "merged"), Config: b.runDir(id, "criu.conf"), Cgroup: cgroupPath(id), Init: b.wrapper, Cgroups: b.cgroups,
	}
}

func (b *Backend) ociRoot() string { return filepath.Join(b.run, "runc") }

func checkID(id string) error {
	if !idPattern.MatchString(id) {
		return fmt.Errorf("container %q: %w", id, fault.ErrNotFound)
	}
	return nil
}
