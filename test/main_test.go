// Package test holds the end-to-end tests: the real binaries, built with
// failpoints, on the real kernel, runc, conmon and CRIU, as root.
//
// Each test drives the command line in a root of its own (newBox), and at its
// end everything it made is removed through the command line and the host is
// searched for what stayed behind (leaks_test.go). Tests that need a real
// distribution share one root, whose image is imported once (debianBox).
package test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/thorough"
)

// bin is where the binaries under test are.
var bin string

// race has agentbox built with Go's race detector, which ends with 66 what has a race.
var race = os.Getenv("AGENTBOX_RACE") != ""

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Geteuid() != 0 {
			fmt.Fprintln(os.Stderr, "the end-to-end tests need root: they run containers")
			return 1
		}
		// The sweeps wait more than they compute, but for where computing is slow.
		flag.Parse()
		err := flag.Set("test.parallel", fmt.Sprint(max(2, 6/patience.Nanoseconds())))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		if bin, err = os.MkdirTemp("", "abbin"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(bin)
		for program, race := range map[string]bool{"agentbox": race, "agentbox-runtime": false} { // the latter is in sandboxes, too: static
			build := exec.Command("go", "build", "-tags", "failpoint", "-ldflags", "-s -w", "-o",
				bin, "../cmd/"+program)
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			if race {
				build.Args = slices.Insert(build.Args, 2, "-race")
				build.Env = append(build.Env, "CGO_ENABLED=1")
			}
			if out, err := build.CombinedOutput(); err != nil {
				fmt.Fprintf(os.Stderr, "build %s: %v\n%s", program, err, out)
				return 1
			}
		}
		before := hostState()
		code := m.Run()
		removePodmanGroups()
		if err := debian.close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		// A test that kills a CRIU may be followed by no command that finds none at work, and the
		// tests of other packages run CRIU at the same time: a sweep may have to be made again.
		left := newlyThere(before, hostState())
		for deadline := time.Now().Add(3 * time.Minute); len(left) > 0 &&
			time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
			if err := criu.Sweep(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
				break
			}
			left = newlyThere(before, hostState())
		}
		for _, left := range left {
			fmt.Fprintln(os.Stderr, "left behind by the tests:", left)
			code = 1
		}
		return code
	}())
}

// box drives the command line on one root.
type box struct {
	*testing.T
	root   string
	shared bool
	env    []string // added to every command's environment
	dir    string   // where its commands run; empty: here
	bin    string   // where its binaries are; empty: those of all tests

	serveArgs []string             // flags of its service
	serveAttr *syscall.SysProcAttr // how it is started

	mu     sync.Mutex
	names  []string          // sandboxes to remove at the end, on a shared root
	uppers map[string]string // upperdirs that inspect told, by sandbox
}

// newBox returns an empty root that the test's end checks and deletes.
func newBox(t *testing.T) *box {
	t.Helper()
	// Not t.TempDir: with the test's name in it the path outgrows what a
	// unix socket's address may have.
	root, err := os.MkdirTemp("", "ab")
	if err != nil {
		t.Fatal(err)
	}
	return boxAt(t, root)
}

// memoryBox is newBox in memory, for tests that a disk's time to sync would only
// make slow.
func memoryBox(t *testing.T) *box {
	t.Helper()
	root, err := os.MkdirTemp("/dev/shm", "ab")
	if err != nil {
		t.Fatal(err)
	}
	return boxAt(t, root)
}

// boxAt is newBox for a directory that exists.
func boxAt(t *testing.T, root string) *box {
	b := &box{T: t, root: root}
	t.Cleanup(func() {
		b.empty()
		b.leaks()
		if !t.Failed() {
			if err := os.RemoveAll(root); err != nil {
				t.Error(err)
			}
		} else if err := os.RemoveAll(root); err != nil {
			t.Log(err)
		}
	})
	return b
}

// empty removes every sandbox and every checkpoint of the root.
func (b *box) empty() {
	b.Helper()
	for _, name := range strings.Fields(b.ok("ps", "-a", "-q", "--no-trunc")) {
		b.ok("rm", "-f", "--checkpoints", name)
	}
	for _, id := range strings.Fields(b.ok("checkpoint", "ls", "-a", "-q", "--no-trunc")) {
		b.ok("checkpoint", "rm", id)
	}
	b.ok("recover")
}

// debian is the root that the tests with a distribution share.
var debian shared

type shared struct {
	once sync.Once
	root string
	err  error
}

// debianBox returns the shared root, with the image "debian".
func debianBox(t *testing.T) *box {
	t.Helper()
	debian.once.Do(func() { debian.err = debian.open() })
	if debian.err != nil {
		t.Fatal(debian.err)
	}
	b := &box{T: t, root: debian.root, shared: true}
	t.Cleanup(func() {
		for _, name := range b.names {
			b.ok("rm", "-f", "--checkpoints", name)
		}
		b.leaks()
	})
	return b
}

func (s *shared) open() error {
	var stderr bytes.Buffer
	cmd := exec.Command("../scripts/debian-image.sh")
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("debian-image.sh: %w: %s", err, stderr.String())
	}
	if s.root, err = os.MkdirTemp("", "ab"); err != nil {
		return err
	}
	// The image gets a few files of the tests' own, in a copy of the tarball.
	tarball, parts := filepath.Join(bin, "debian.tar"), filepath.Join(bin, "parts")
	defer os.Remove(tarball)
	for _, args := range [][]string{
		{"cp", strings.TrimSpace(string(out)), tarball},
		{"mkdir", parts},
		{"sh", "-c", "cd " + parts + " && " + imageParts},
		{"tar", "-rf", tarball, "--owner=0", "--group=0", "-C", parts, "./etc/hostname.image", "./usr/share/agentbox"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%q: %w: %s", args, err, out)
		}
	}
	imp := exec.Command(filepath.Join(bin, "agentbox"), "--root", s.root, "image", "import", "debian", tarball)
	if out, err := imp.CombinedOutput(); err != nil {
		return fmt.Errorf("image import: %w: %s", err, out)
	}
	return nil
}

func (s *shared) close() error {
	if s.root == "" {
		return nil
	}
	return os.RemoveAll(s.root)
}

// start runs a sandbox in the background and returns its name.
func (b *box) start(name string, args ...string) string {
	b.Helper()
	b.own(name)
	b.ok(append([]string{"run", "-d", "--name", name}, args...)...)
	return name
}

// own has the end of a test on a shared root remove a sandbox.
func (b *box) own(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.names = append(b.names, name)
}

// result is how a command ended.
type result struct {
	args     []string
	out, err string
	code     int
	killed   bool // by SIGKILL
}

func (r result) String() string {
	return fmt.Sprintf("agentbox %s\nexit %d, killed %v\nstdout: %s\nstderr: %s", strings.Join(r.args, " "), r.code,
		r.killed, r.out, r.err)
}

// commandTimeout bounds one command, so that one that hangs fails by its name.
var commandTimeout = 5 * time.Minute * patience

var patience = thorough.Patience()

func (b *box) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(cmp.Or(b.bin, bin), "agentbox"),
		append([]string{"--root", b.root}, args...)...)
	cmd.Env = append(os.Environ(), b.env...)
	cmd.Dir = b.dir
	return cmd
}

// try runs a command with more environment and returns how it ended.
func (b *box) try(env []string, args ...string) result {
	b.Helper()
	return b.input(nil, env, args...)
}

func (b *box) input(stdin []byte, env []string, args ...string) result {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	cmd := b.command(ctx, args...)
	cmd.Env = append(cmd.Env, env...)
	// A monitor that outlives the command must not keep us waiting for the
	// end of its output: output goes to files.
	var files [2]*os.File
	for i := range files {
		f, err := os.CreateTemp(bin, "out")
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		defer os.Remove(f.Name())
		files[i] = f
	}
	cmd.Stdout, cmd.Stderr = files[0], files[1]
	if stdin != nil {
		cmd.Stdin = bytes.NewReader(stdin)
	}
	err := cmd.Run()
	r := result{args: args, code: cmd.ProcessState.ExitCode()}
	for i, to := range []*string{&r.out, &r.err} {
		text, err := os.ReadFile(files[i].Name())
		if err != nil {
			b.Fatal(err)
		}
		*to = string(text)
	}
	if ctx.Err() != nil {
		b.Fatalf("hangs: %s", r)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.Fatal(err)
	}
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() && st.Signal() == syscall.SIGKILL {
		r.killed = true
	}
	return r
}

// ok runs a command that has to succeed and returns its output, trimmed.
func (b *box) ok(args ...string) string {
	b.Helper()
	r := b.try(nil, args...)
	if r.code != 0 {
		b.Fatalf("%s", r)
	}
	return strings.TrimSpace(r.out)
}

// fails runs a command that has to end with a certain code and returns what it
// said.
func (b *box) fails(code int, args ...string) string {
	b.Helper()
	r := b.try(nil, args...)
	if r.code != code {
		b.Fatalf("want exit %d: %s", code, r)
	}
	if code != 0 && r.err == "" {
		b.Errorf("failed without a word: %s", r)
	}
	return r.err
}

// sh runs a script in a sandbox.
func (b *box) sh(name, script string) string {
	b.Helper()
	return b.ok("exec", name, "sh", "-c", script)
}

// sandbox is what `agentbox inspect` documents.
type sandbox struct {
	Address     string
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Status      string            `json:"status"`
	Pid         int               `json:"pid"`
	ExitCode    int               `json:"exit_code"`
	Upperdir    string            `json:"upperdir"`
	Image       string            `json:"image"`
	ImageDigest string            `json:"image_digest"`
	Backend     string            `json:"backend"`
	Head        string            `json:"head"`
	Held        string            `json:"held"`
	Labels      map[string]string `json:"labels"`
	Finished    time.Time         `json:"finished"`
}

// checkpoint is what `agentbox checkpoint inspect` documents.
type checkpoint struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Sandbox   string `json:"sandbox"`
	Kind      string `json:"kind"`
	Status    string `json:"status"`
	Error     string `json:"error"`
	Parent    string `json:"parent"`
	Trigger   string `json:"trigger"`
	Message   string `json:"message"`
	Files     int64  `json:"files"`
	Processes int    `json:"processes"`
	Bytes     int64  `json:"bytes"`
	Digest    string `json:"digest"`
}

func decode[T any](b *box, text string) T {
	b.Helper()
	var v T
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		b.Fatalf("not JSON: %v: %s", err, text)
	}
	return v
}

func (b *box) inspect(name string) sandbox {
	b.Helper()
	list := decode[[]sandbox](b, b.ok("inspect", name))
	if len(list) != 1 {
		b.Fatalf("inspect %s: %d objects", name, len(list))
	}
	return list[0]
}

// find returns a sandbox, or false when there is none of that name.
func (b *box) find(name string) (sandbox, bool) {
	b.Helper()
	for _, s := range decode[[]sandbox](b, b.ok("ps", "-a", "--format", "json")) {
		if s.Name == name {
			return s, true
		}
	}
	return sandbox{}, false
}

// checkpoints lists all checkpoints of a sandbox, or of all, in every state.
func (b *box) checkpoints(args ...string) []checkpoint {
	b.Helper()
	return decode[[]checkpoint](b, b.ok(append([]string{"checkpoint", "ls", "-a", "--format", "json"}, args...)...))
}

// checkpoint takes one and returns its id.
func (b *box) checkpoint(args ...string) string {
	b.Helper()
	return b.ok(append([]string{"checkpoint"}, args...)...)
}

// file reads a file of a sandbox's upperdir; one that is not there is empty.
func (b *box) file(name, path string) string {
	b.Helper()
	return b.read(filepath.Join(b.upperdir(name), path))
}

// upperdir is a sandbox's; inspect is asked for it only if it is not known, as
// many tests poll for what is in it. One of a new sandbox of that name is another.
func (b *box) upperdir(name string) string {
	b.Helper()
	b.mu.Lock()
	upper := b.uppers[name]
	b.mu.Unlock()
	if _, err := os.Stat(upper); upper != "" && err == nil {
		return upper
	}
	upper = b.inspect(name).Upperdir
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.uppers == nil {
		b.uppers = map[string]string{}
	}
	b.uppers[name] = upper
	return upper
}

func (b *box) read(path string) string {
	b.Helper()
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		b.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// eventually polls for what nothing announces.
func (b *box) eventually(what string, ok func() bool) {
	b.Helper()
	for deadline := time.Now().Add(2 * time.Minute * patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("still not so after %v: %s", 2*time.Minute*patience, what)
		}
	}
}

func equal[T comparable](b *box, what string, got, want T) {
	b.Helper()
	if got != want {
		b.Errorf("%s: %#v, want %#v", what, got, want)
	}
}

// failpoint is the environment that breaks a command at a named instant.
func failpoint(name, action string) []string {
	return []string{"AGENTBOX_FAILPOINT=" + name + "=" + action}
}
