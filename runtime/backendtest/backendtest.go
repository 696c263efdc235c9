// Package backendtest is the conformance suite that every runtime.Backend
// passes, with what goes beside it: a backend in memory for fast tests of the
// engine, and a wrapper that makes a backend fail where a test wants it to.
//
// A backend's own test is a Factory and a call of Run. The cases are listed in
// cases.go by name; each gets a fresh backend over an empty directory, and
// after each the host is searched for what it left behind: mounts, processes,
// cgroups, files. A case that a backend cannot pass stands with its reason in
// the Factory's Cannot, and the run shows it; no case disappears silently.
package backendtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/runtime"
)

// Factory makes what a run tests.
type Factory struct {
	// New returns a backend that keeps all its state under root, laid out as
	// `agentbox --root` does: transient state is in root/run. A second call
	// with the same root is a second process on the same host.
	New func(t *testing.T, root string) runtime.Backend
	// Lower is the image: read-only directories, top first. They hold what
	// BusyboxLower makes, or a superset.
	Lower func(t *testing.T) []string
	// Image names the image, with what Lower holds, in an engine that has its
	// own: Spec.Image and Spec.ImageDigest. Create is then given no lower
	// directories. Nil: Lower is all there is.
	Image func(t *testing.T) (name, digest string)
	// Restart kills the engine's daemon and starts it again; it returns when
	// that answers. Nil: there is no daemon, and the cases about it are
	// ordinary ones.
	Restart func(t *testing.T)
	// Down kills the engine's daemon, runs fn, and starts the daemon again. Nil:
	// there is none.
	Down func(t *testing.T, fn func())
	// Leaks names what of the engine's carries an id of a removed container
	// and should not, such as mounts and files under its own root. May be nil.
	Leaks func(t *testing.T, ids []string) []string
	// IDs are of the sandboxes' user namespace; nil: they have none.
	IDs *idmap.Map
	// Cannot names the cases that this backend cannot pass, and why. A name
	// that is no case fails the run.
	Cannot map[string]string
	// Needless names the cases that prove nothing about this backend, and why, as far as
	// its tests would be too slow with them. A name that ends in a slash is that of a
	// group.
	Needless map[string]string
}

// caseTimeout bounds one case, so that a call that hangs fails by its name. A
// loaded host is no hang.
const caseTimeout = 5 * time.Minute

// patience bounds one wait of a case.
const patience = caseTimeout / 3

// Run tests a backend with every case.
func Run(t *testing.T, f Factory) {
	known, groups := map[string]bool{}, map[string]bool{}
	for _, c := range cases {
		if known[c.name] {
			t.Fatalf("two cases are named %s", c.name)
		}
		known[c.name] = true
		group, _, _ := strings.Cut(c.name, "/")
		groups[group] = true
	}
	for name, why := range f.Cannot {
		if !known[name] {
			t.Errorf("Cannot names %q, which is no case", name)
		}
		if why == "" {
			t.Errorf("Cannot names %s without a reason", name)
		}
	}
	for name, why := range f.Needless {
		if group, is := strings.CutSuffix(name, "/"); !known[name] && !(is && groups[group]) {
			t.Errorf("Needless names %q, which is no case", name)
		}
		if why == "" {
			t.Errorf("Needless names %s without a reason", name)
		}
	}
	lower := f.Lower(t)
	name, digest := "busybox", "sha256:00"
	if f.Image != nil {
		name, digest = f.Image(t)
		lower = nil
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if why := f.Cannot[c.name]; why != "" {
				t.Skipf("not for this backend: %s", why)
			}
			group, _, _ := strings.Cut(c.name, "/")
			for _, name := range []string{c.name, group + "/"} {
				if why := f.Needless[name]; why != "" {
					t.Skipf("not needed for this backend: %s", why)
				}
			}
			e := newBench(t, f, lower)
			e.image, e.digest = name, digest
			c.run(e)
		})
	}
}

// bench is the workplace of a case: one backend, a few shorthands, and the clean-up that ends with
// the search for leftovers.
type bench struct {
	*testing.T
	f      Factory
	b      runtime.Backend
	ctx    context.Context
	root   string
	lower  []string
	image  string // and its digest
	digest string
	mark   string // in the environment of every process of the case

	mu     sync.Mutex
	ids    []string
	uppers map[string]string // upperdirs that Inspect told
}

func newBench(t *testing.T, f Factory, lower []string) *bench {
	t.Helper()
	// Not t.TempDir: with the case's name in it the path outgrows what a
	// unix socket's address may have.
	root, err := os.MkdirTemp("", "bt")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), caseTimeout)
	e := &bench{
		T: t, f: f, ctx: ctx, root: root, lower: lower, mark: "BACKENDTEST=" + newID(), uppers: map[string]string{},
	}
	before := snapshot()
	e.b = f.New(t, root)
	// Last in, first out: this is over when the case's own clean-ups are.
	t.Cleanup(func() {
		defer cancel()
		e.cleanUp(before)
	})
	return e
}

// cleanUp removes the case's containers and searches for leftovers.
func (e *bench) cleanUp(before map[string]bool) {
	ctx, cancel := context.WithTimeout(context.Background(), caseTimeout)
	defer cancel()
	for _, id := range e.ids {
		if err := e.b.Remove(ctx, id); err != nil {
			e.Errorf("clean-up: Remove(%s): %v", id, err)
		}
	}
	if left, err := e.b.List(ctx); err != nil || len(left) > 0 {
		e.Errorf("clean-up: List = %v, %v after everything was removed", left, err)
	}
	e.leaks(before)
	if err := os.RemoveAll(e.root); err != nil {
		e.Errorf("clean-up: %v", err)
	}
}

// newID returns a sandbox id.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// sh is a command for the sandbox's shell.
func sh(script string) []string { return []string{"sh", "-c", script} }

// spec returns an ordinary spec for a command.
func (e *bench) spec(args ...string) runtime.Spec {
	id := newID()
	return runtime.Spec{
		ID: id, Name: "bt-" + id[:8], Image: e.image, ImageDigest: e.digest, Args: args,
		Env:     []string{"PATH=/bin:/sbin:/usr/bin:/usr/sbin", "HOME=/root", e.mark},
		Workdir: "/", Hostname: id[:12], Network: runtime.Network{Mode: runtime.NetworkNone}, IDs: e.f.IDs,
	}
}

// own has the case's end remove a container.
func (e *bench) own(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ids = append(e.ids, id)
}

// create makes a container that the case's end removes.
func (e *bench) create(s runtime.Spec) string {
	e.Helper()
	e.own(s.ID)
	if err := e.b.Create(e.ctx, s, e.lower); err != nil {
		e.Fatalf("Create: %v", err)
	}
	return s.ID
}

// start creates and starts a container without streams.
func (e *bench) start(args ...string) string {
	e.Helper()
	return e.startSpec(e.spec(args...))
}

func (e *bench) startSpec(s runtime.Spec) string {
	e.Helper()
	id := e.create(s)
	e.restart(id)
	return id
}

// restart starts a stopped container without streams.
func (e *bench) restart(id string) {
	e.Helper()
	wait, err := e.b.Start(e.ctx, id, runtime.StartOptions{})
	if err != nil {
		e.Fatalf("Start: %v", err)
	}
	if wait != nil {
		e.Errorf("Start without streams returned a wait")
	}
}

// run starts a new container with streams, waits until its output and it have
// ended, and returns what it printed.
func (e *bench) run(s runtime.Spec, stdin string) (stdout, stderr string, exit int) {
	e.Helper()
	var out, errw bytes.Buffer
	streams := runtime.Streams{Stdout: &out, Stderr: &errw}
	if stdin != "" {
		s.OpenStdin = true
		streams.Stdin = strings.NewReader(stdin)
	}
	id := e.create(s)
	wait, err := e.b.Start(e.ctx, id, runtime.StartOptions{Streams: &streams})
	if err != nil {
		e.Fatalf("Start: %v", err)
	}
	if err := e.within("wait of Start", wait); err != nil {
		e.Fatalf("wait of Start: %v", err)
	}
	exit = e.wait(id)
	return out.String(), errw.String(), exit
}

// exec runs a command in a container and returns its output.
func (e *bench) exec(id string, args ...string) (stdout string, exit int) {
	e.Helper()
	var out, errw bytes.Buffer
	exit, err := e.b.Exec(e.ctx, id, runtime.Process{Args: args}, runtime.Streams{Stdout: &out, Stderr: &errw})
	if err != nil {
		e.Fatalf("Exec %q: %v (stderr %q)", args, err, errw.String())
	}
	return out.String(), exit
}

// wait returns the exit code of a container that will exit.
func (e *bench) wait(id string) int {
	e.Helper()
	exit, err := e.b.Wait(e.ctx, id)
	if err != nil {
		e.Fatalf("Wait: %v", err)
	}
	return exit.Code
}

func (e *bench) stop(id string) {
	e.Helper()
	if err := e.b.Stop(e.ctx, id, runtime.StopOptions{}); err != nil {
		e.Fatalf("Stop: %v", err)
	}
}

func (e *bench) inspect(id string) runtime.Container {
	e.Helper()
	c, err := e.b.Inspect(e.ctx, id)
	if err != nil {
		e.Fatalf("Inspect: %v", err)
	}
	return c
}

// is checks a container's state.
func (e *bench) is(id string, want runtime.Status) runtime.Container {
	e.Helper()
	c := e.inspect(id)
	if c.Status != want {
		e.Fatalf("Inspect: status %s, want %s", c.Status, want)
	}
	return c
}

// upper is a path in the upperdir, seen from the host. Inspect is asked for it
// only if it is not known: many cases poll for what is in it, and some backends
// take a tenth of a second to answer.
func (e *bench) upper(id, path string) string {
	e.Helper()
	e.mu.Lock()
	dir := e.uppers[id]
	e.mu.Unlock()
	if _, err := os.Stat(dir); dir == "" || err != nil {
		dir = e.inspect(id).Upper
		e.mu.Lock()
		e.uppers[id] = dir
		e.mu.Unlock()
	}
	return filepath.Join(dir, path)
}

// file reads a file of the upperdir; one that is not there is empty.
func (e *bench) file(id, path string) string {
	e.Helper()
	b, err := os.ReadFile(e.upper(id, path))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		e.Fatal(err)
	}
	return string(b)
}

// logs returns all that Logs writes.
func (e *bench) logs(id string, opts runtime.LogOptions) (stdout, stderr string) {
	e.Helper()
	var out, errw bytes.Buffer
	if err := e.b.Logs(e.ctx, id, opts, &out, &errw); err != nil {
		e.Fatalf("Logs: %v", err)
	}
	return out.String(), errw.String()
}

// eventually polls for what nothing announces.
func (e *bench) eventually(what string, ok func() bool) {
	e.Helper()
	for deadline := time.Now().Add(patience); !ok(); {
		if time.Now().After(deadline) {
			e.Fatalf("still not so after %v: %s", patience, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// within fails the case when fn hangs, and returns fn's error.
func (e *bench) within(what string, fn func() error) error {
	e.Helper()
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		e.Fatalf("%s hangs", what)
		return nil
	}
}

// wantErr checks that err wraps a sentinel.
func (e *bench) wantErr(what string, err, want error) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf("%s: error %v, want one that wraps %q", what, err, want)
	}
}

// equal compares two values.
func equal[T comparable](e *bench, what string, got, want T) {
	e.Helper()
	if got != want {
		e.Errorf("%s: %#v, want %#v", what, got, want)
	}
}

func (e *bench) pause(id string) {
	e.Helper()
	if err := e.b.Pause(e.ctx, id); err != nil {
		e.Fatalf("Pause: %v", err)
	}
}

func (e *bench) resume(id string) {
	e.Helper()
	if err := e.b.Unpause(e.ctx, id); err != nil {
		e.Fatalf("Unpause: %v", err)
	}
}

// buffer is a bytes.Buffer that may be read while it is written.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *buffer) has(s string) func() bool {
	return func() bool { return strings.Contains(b.String(), s) }
}

// lines is "1\n2\n...n\n".
func lines(from, to int) string {
	var b strings.Builder
	for i := from; i <= to; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.String()
}
