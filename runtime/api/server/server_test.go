package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// service answers what a test has it answer; the engine itself is behind the API
// in the tests of package test.
type service struct {
	runtime.Service
	sandboxes  func(context.Context) ([]runtime.Sandbox, error)
	checkpoint func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error)
	copyFrom   func(context.Context, io.Writer) error
	copyTo     func(context.Context, io.Reader) error
	list       func(string, string, runtime.ListOptions, func(runtime.FileEntry) error) error
	exec       func(context.Context, runtime.Process, runtime.Streams) (int, error)
	logs       func(context.Context, io.Writer, io.Writer) error
	recover    func() (runtime.ReconcileReport, error)

	checkpoints func(runtime.CheckpointFilter) ([]runtime.Checkpoint, error)
	create      func(runtime.CreateRequest) (runtime.Sandbox, error)
	fork        func(runtime.ForkOptions) ([]runtime.Forked, error)
	info        func(string) (runtime.Checkpoint, error)
	pause       func() error
	restore     func(context.Context, runtime.RestoreOptions) (runtime.Restored, error)
	sandbox     func() (runtime.Sandbox, error)
}

func (s *service) Sandboxes(ctx context.Context) ([]runtime.Sandbox, error) { return s.sandboxes(ctx) }
func (s *service) Checkpoint(ctx context.Context, ref string, o runtime.CheckpointOptions) (runtime.Checkpoint, error) {
	return s.checkpoint(ctx, ref, o)
}
func (s *service) CopyFrom(ctx context.Context, _, _ string, w io.Writer) error {
	return s.copyFrom(ctx, w)
}
func (s *service) List(
	_ context.Context, ref, path string, o runtime.ListOptions, fn func(runtime.FileEntry) error,
) error {
	return s.list(ref, path, o, fn)
}
func (s *service) CopyTo(ctx context.Context, _, _ string, r io.Reader) error {
	return s.copyTo(ctx, r)
}
func (s *service) Exec(ctx context.Context, _ string, p runtime.Process, streams runtime.Streams) (int, error) {
	return s.exec(ctx, p, streams)
}
func (s *service) Logs(ctx context.Context, _ string, _ runtime.LogOptions, out, err io.Writer) error {
	return s.logs(ctx, out, err)
}
func (s *service) Reconcile(context.Context) (runtime.ReconcileReport, error) { return s.recover() }
func (s *service) Checkpoints(_ context.Context, f runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
	return s.checkpoints(f)
}
func (s *service) Create(_ context.Context, r runtime.CreateRequest) (runtime.Sandbox, error) {
	return s.create(r)
}
func (s *service) CheckpointInfo(_ context.Context, ref string) (runtime.Checkpoint, error) {
	return s.info(ref)
}
func (s *service) Fork(_ context.Context, _ string, o runtime.ForkOptions) ([]runtime.Forked, error) {
	return s.fork(o)
}
func (s *service) Restore(ctx context.Context, _ string, o runtime.RestoreOptions) (runtime.Restored, error) {
	return s.restore(ctx, o)
}
func (s *service) Pause(context.Context, string) error                      { return s.pause() }
func (s *service) Sandbox(context.Context, string) (runtime.Sandbox, error) { return s.sandbox() }

// serving runs a service on a socket and returns that; the end of the test drains it.
func serving(t *testing.T, svc runtime.Service, opts Options) (socket string) {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	dir, err := os.MkdirTemp("", "api")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket = filepath.Join(dir, api.SocketName)
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	opts.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	if opts.Requests == "" {
		opts.Requests = filepath.Join(dir, "requests")
	}
	h, err := New(svc, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, h) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return socket
}

// caller is a client of a service, and sends requests of a test's own there.
type caller struct {
	*api.Client
	http *http.Client
}

func client(t *testing.T, socket string) *caller {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}, DisableCompression: true}
	c := &caller{api.Dial(socket), &http.Client{Transport: tr}}
	t.Cleanup(func() {
		c.Close()
		tr.CloseIdleConnections()
	})
	return c
}

func TestErrors(t *testing.T) {
	var fails error
	svc := &service{checkpoint: func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
		return runtime.Checkpoint{}, fails
	}}
	c := client(t, serving(t, svc, Options{}))
	inner := &fault.Error{Hint: "Do that.", Err: fmt.Errorf("deep: %w", errors.Join(fault.ErrBusy, fault.ErrState))}
	for _, err := range []error{
		fault.ErrNotFound, fault.ErrExists, fault.ErrState, fault.ErrDenied, fault.ErrUnsupported, fault.ErrCorrupt,
		fault.ErrBusy, fault.ErrInvalid,
		errors.New("of no kind"),
		&fault.Error{Op: "checkpoint", ID: "c", Hint: "Do this.", Err: inner},
		fmt.Errorf("around: %w", inner),
		&fault.Error{Op: "checkpoint", ID: "c", Hint: "Do this.", Log: "/x/dump.log", Err: inner},
		&fault.Error{Op: "exec", ID: "c", Err: &runtime.ExecError{Command: "x", Code: 127, Err: errors.New("no x")}},
	} {
		fails = err
		_, got := c.Checkpoint(t.Context(), "c", runtime.CheckpointOptions{})
		if got == nil || got.Error() != err.Error() || fmt.Sprint(fault.Hint(got)) != fmt.Sprint(fault.Hint(err)) ||
			fmt.Sprint(fault.Logs(got)) != fmt.Sprint(fault.Logs(err)) {
			t.Errorf("%v %q, want %v %q", got, fault.Hint(got), err, fault.Hint(err))
		}
		for _, s := range wire.Codes {
			if errors.Is(got, s.Err) != errors.Is(err, s.Err) {
				t.Errorf("%v: errors.Is(%v) is %v", err, s.Err, errors.Is(got, s.Err))
			}
		}
		if fmt.Sprint(codesOf(got)) != fmt.Sprint(codesOf(err)) {
			t.Errorf("%v: %v in another order: %v", err, codesOf(err), codesOf(got))
		}
		var own, exec = new(runtime.Error), new(runtime.ExecError)
		if want, ok := err.(*runtime.Error); ok && (!errors.As(got, &own) || own.Op != want.Op || own.ID != want.ID ||
			own.Hint != want.Hint) {
			t.Errorf("%#v, want %#v", got, err)
		}
		if errors.As(err, &exec) && (!errors.As(got, &exec) || exec.Code != 127 || exec.Command != "x") {
			t.Errorf("%#v", got)
		}
	}
}

// A checkpoint arrives by the name that the client was given, whatever is in it.
func TestCheckpointRefs(t *testing.T) {
	var asked string
	svc := &service{info: func(ref string) (runtime.Checkpoint, error) {
		asked = ref
		return runtime.Checkpoint{ID: "x"}, nil
	}}
	socket := serving(t, svc, Options{})
	c := client(t, socket)
	for _, ref := range []string{
		"c@HEAD~2", "c@{5m}", "c@@{5m}~1", "c@{2026-01-02T17:04:05+02:00}", "docker://web@HEAD~", "c@a/b", "c@%7E", "c@a b?#",
	} {
		got, err := c.CheckpointInfo(t.Context(), ref)
		if err != nil || got.ID != "x" || asked != ref {
			t.Errorf("%q arrived as %q: %+v, %v", ref, asked, got, err)
		}
	}
	// Other clients escape more than they have to, or less.
	for path, want := range map[string]string{
		"c%40HEAD%7E2": "c@HEAD~2", "c@HEAD~2": "c@HEAD~2", "c%40%7B5m%7D": "c@{5m}", "c@{5m}": "c@{5m}",
	} {
		r, err := c.http.Get("http://agentbox/v1/checkpoints/" + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusOK || asked != want {
			t.Errorf("%s arrived as %q, %s", path, asked, r.Status)
		}
	}
}

func TestPartial(t *testing.T) {
	svc := &service{recover: func() (runtime.ReconcileReport, error) {
		return runtime.ReconcileReport{Actions: []string{"did this"}}, fault.ErrBusy
	}}
	c := client(t, serving(t, svc, Options{}))
	if got, err := c.Reconcile(t.Context()); !errors.Is(err, fault.ErrBusy) || len(got.Actions) != 1 {
		t.Error(got, err)
	}
}

// A verb is cancelled by its caller's context, and waited for.
func TestCancel(t *testing.T) {
	begun, undone := make(chan struct{}), false
	svc := &service{checkpoint: func(ctx context.Context, _ string, _ runtime.CheckpointOptions) (runtime.Checkpoint,
		error) {
		close(begun)
		<-ctx.Done()
		time.Sleep(20 * time.Millisecond) // it undoes something
		undone = true
		return runtime.Checkpoint{}, ctx.Err()
	}}
	c := client(t, serving(t, svc, Options{}))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	if _, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{}); !errors.Is(err, context.Canceled) || !undone {
		t.Error(err, undone)
	}
}

// A request that is too slow, too large or makes no sense is refused, and ends.
func TestBadRequests(t *testing.T) {
	svc := &service{checkpoint: func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
		return runtime.Checkpoint{}, nil
	}}
	socket := serving(t, svc, Options{Body: 100 * time.Millisecond})
	say := func(text string) string {
		t.Helper()
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, text); err != nil && !errors.Is(err, syscall.EPIPE) {
			t.Fatal(err)
		}
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil {
			t.Fatalf("%.50q: %v", text, err)
		}
		return line
	}
	const post = "POST /v1/sandboxes/c/checkpoints HTTP/1.1\r\nHost: agentbox\r\n"
	for text, want := range map[string]string{
		post + "Content-Length: 2\r\n\r\n{}": " 200 ",
		// never sends the rest
		post + "Content-Length: 100\r\n\r\n{":                                                " 400 ",
		post + "Content-Length: 8\r\n\r\n{\"x\":1}\n":                                        " 400 ",
		post + "Content-Length: 4\r\n\r\n{} {":                                               " 400 ",
		post + "Content-Length: 5000000\r\n\r\n" + strings.Repeat(" ", 4<<20+1):              " 400 ",
		"GET /v1/sandboxes HTTP/1.1\r\nHost: agentbox\r\nX: " + strings.Repeat("x", 100<<10): " 431 ",
		"nonsense\r\n\r\n":                                                           " 400 ",
		"GET /v2 HTTP/1.1\r\nHost: agentbox\r\n\r\n":                                 " 404 ",
		"PUT /v1/sandboxes HTTP/1.1\r\nHost: agentbox\r\n\r\n":                       " 405 ",
		"GET /openapi.json HTTP/1.1\r\nHost: agentbox\r\n\r\n":                       " 200 ",
		"DELETE /v1/requests/x HTTP/1.1\r\nHost: agentbox\r\n\r\n":                   " 404 ",
		post + "Content-Length: 23\r\n\r\n{\"name\":\"b\",\"name\":\"a\"}":           " 400 ",
		post + "Content-Length: 12\r\n\r\n{\"Name\":\"b\"}":                          " 400 ",
		post + "Content-Length: 31\r\n\r\n{\"labels\":{\"a\":\"1\",\"A\":\"2\"}}   ": " 200 ", // these are names
		post + "Content-Length: 31\r\n\r\n{\"labels\":{\"a\":\"1\",\"a\":\"2\"}}   ": " 400 ",
		// A page at a name that leads here.
		"GET /v1/info HTTP/1.1\r\nHost: evil.example\r\n\r\n":          " 403 ",
		"GET /v1/info HTTP/1.1\r\nHost: agentbox.evil.example\r\n\r\n": " 403 ",
		"GET /v1/info HTTP/1.1\r\nHost: 8.8.8.8\r\n\r\n":               " 403 ",
		"GET /v1/sandboxes/c/exec HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n": " 403 ",
		"GET /v1/info HTTP/1.1\r\nHost: localhost:80\r\n\r\n": " 200 ",
		"GET /v1/info HTTP/1.1\r\nHost: [::1]:80\r\n\r\n":     " 200 ",
		"GET /v1/info HTTP/1.0\r\n\r\n":                       " 200 ",
	} {
		if got := say(text); !strings.Contains(got, want) {
			t.Errorf("%.80q: %q, want %s", text, got, want)
		}
	}
}

// A list arrives in parts, in order; what was found before an error, too.
func TestFiles(t *testing.T) {
	svc := &service{}
	c := client(t, serving(t, svc, Options{}))
	opts := runtime.ListOptions{Recursive: true, Name: "*.go", Type: "file"}
	for _, n := range []int{0, 1, maxFiles, 2*maxFiles + 7} {
		for _, fails := range []error{nil, fault.ErrCorrupt} {
			svc.list = func(ref, path string, o runtime.ListOptions, fn func(runtime.FileEntry) error) error {
				if ref != "c@before" || path != "/a b" || o != opts {
					t.Errorf("%s %s %+v", ref, path, o)
				}
				for i := range n {
					f := runtime.FileEntry{Path: fmt.Sprint(i), FileState: runtime.FileState{UID: 7}}
					if err := fn(f); err != nil {
						return err
					}
				}
				return fails
			}
			i := 0
			err := c.List(t.Context(), "c@before", "/a b", opts, func(f runtime.FileEntry) error {
				if f.Path != fmt.Sprint(i) || f.UID != 7 {
					t.Errorf("%d: %+v", i, f)
				}
				i++
				return nil
			})
			if !errors.Is(err, fails) || i != n {
				t.Errorf("%d of %d: %v", i, n, err)
			}
		}
	}
	own := errors.New("own")
	if err := c.List(t.Context(), "c@before", "/a b", opts, func(runtime.FileEntry) error { return own }); err != own {
		t.Error(err)
	}
}

// A stream that was cut is never taken for a whole one.
func TestStreams(t *testing.T) {
	piece := bytes.Repeat([]byte("x"), 100<<10)
	svc := &service{}
	c := client(t, serving(t, svc, Options{}))
	type result struct {
		data []byte
		err  error
	}
	var next atomic.Value
	svc.copyFrom = func(_ context.Context, w io.Writer) error {
		r := next.Load().(result)
		_, err := w.Write(r.data)
		return errors.Join(err, r.err)
	}
	for _, fails := range []error{nil, fault.ErrCorrupt} {
		for _, data := range [][]byte{nil, piece} {
			next.Store(result{data, fails})
			var got bytes.Buffer
			if err := c.CopyFrom(t.Context(), "c", "/", &got); !errors.Is(err, fails) ||
				!bytes.Equal(got.Bytes(), data) {
				t.Errorf("%d bytes: %v, want %v", got.Len(), err, fails)
			}
			// A client that takes no trailers sees the connection cut.
			resp, err := c.http.Get("http://agentbox/v1/sandboxes/c/archive?path=/")
			if err == nil && len(data) > 0 {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if (err != nil) != (fails != nil) {
					t.Errorf("without trailers: %v, want %v", err, fails)
				}
			} else if err == nil {
				resp.Body.Close()
			}
		}
	}
	// The error of an upload arrives though the caller has more to send.
	svc.copyTo = func(_ context.Context, r io.Reader) error {
		_, _ = r.Read(make([]byte, 10))
		return fault.ErrDenied
	}
	if err := c.CopyTo(t.Context(), "c", "/", io.LimitReader(zeros{}, 8<<20)); !errors.Is(err, fault.ErrDenied) {
		t.Error(err)
	}
	// And the caller's own is the one that is told; the service sees no end.
	ended := make(chan error, 1)
	svc.copyTo = func(_ context.Context, r io.Reader) error {
		_, err := io.Copy(io.Discard, r)
		ended <- err
		return err
	}
	own := errors.New("my disk")
	if err := c.CopyTo(t.Context(), "c", "/", io.MultiReader(bytes.NewReader(piece),
		failing{own})); !errors.Is(err, own) {
		t.Error(err)
	}
	if err := <-ended; err == nil {
		t.Error("a stream that was cut was taken for a whole one")
	}
	var out, errs bytes.Buffer
	svc.logs = func(_ context.Context, stdout, stderr io.Writer) error {
		fmt.Fprint(stdout, "a\xff\nb")
		fmt.Fprint(stderr, "c\n")
		return fault.ErrBusy
	}
	if err := c.Logs(t.Context(), "c", runtime.LogOptions{}, &out, &errs); !errors.Is(err, fault.ErrBusy) ||
		out.String() != "a\xff\nb" || errs.String() != "c\n" {
		t.Errorf("%q %q %v", &out, &errs, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestSession(t *testing.T) {
	svc := &service{}
	c := client(t, serving(t, svc, Options{}))
	// More than the window, both ways at once.
	svc.exec = func(_ context.Context, p runtime.Process, s runtime.Streams) (int, error) {
		n, err := io.Copy(s.Stdout, s.Stdin)
		fmt.Fprint(s.Stderr, n, p.Args)
		return 7, err
	}
	in := bytes.Repeat([]byte("0123456789"), wire.Window/5)
	var out, errs bytes.Buffer
	exit, err := c.Exec(t.Context(), "c", runtime.Process{Args: []string{"x"}},
		runtime.Streams{Stdin: bytes.NewReader(in), Stdout: &out, Stderr: &errs})
	if err != nil || exit != 7 || !bytes.Equal(out.Bytes(), in) || errs.String() != fmt.Sprint(len(in), []string{"x"}) {
		t.Error(exit, err, out.Len(), errs.String())
	}
	// Sizes, and detaching.
	svc.exec = func(_ context.Context, _ runtime.Process, s runtime.Streams) (int, error) {
		if size := <-s.Resize; size != (runtime.Size{Width: 80, Height: 24}) || string(s.DetachKeys) != "\x10" {
			return 0, fmt.Errorf("%v %q", size, s.DetachKeys)
		}
		return 0, runtime.ErrDetached
	}
	sizes := make(chan runtime.Size, 1)
	sizes <- runtime.Size{Width: 80, Height: 24}
	if _, err := c.Exec(t.Context(), "c", runtime.Process{Args: []string{"x"}},
		runtime.Streams{Resize: sizes, DetachKeys: []byte{16}}); err != runtime.ErrDetached {
		t.Error(err)
	}
	// A caller that goes away ends it.
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	svc.exec = func(inner context.Context, _ runtime.Process, s runtime.Streams) (int, error) {
		defer close(ended)
		cancel()
		<-inner.Done()
		return 0, inner.Err()
	}
	if _, err := c.Exec(ctx, "c", runtime.Process{Args: []string{"x"}},
		runtime.Streams{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	<-ended
}
