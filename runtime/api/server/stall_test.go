package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// ending serves svc until the test calls end, which returns when the service has.
func ending(t *testing.T, svc runtime.Service, opts Options) (socket string, end func()) {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	opts.Log = silent
	h, err := New(svc, opts)
	if err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(t.TempDir(), "s")
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, h) }()
	return socket, func() {
		t.Helper()
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(4 * wire.LastTime):
			t.Error("the service does not end")
		}
	}
}

// A caller that sends its headers byte by byte, or half of them, is cut off, however
// busy it looks.
func TestSlowHeaders(t *testing.T) {
	socket, end := ending(t, &service{}, Options{Body: 200 * time.Millisecond})
	defer end()
	for _, goesOn := range []bool{false, true} {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET /v1/info HTTP/1.1\r\nHost: agentbox\r\nX: "); err != nil {
			t.Fatal(err)
		}
		dripped := make(chan struct{})
		go func() {
			defer close(dripped)
			for goesOn {
				if _, err := io.WriteString(conn, "x"); err != nil {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		}()
		if err := conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(conn); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("it is not cut off: %v", err)
		}
		<-dripped
	}
}

// Callers that send for ever, or never read, do not keep a service alive, and one
// whose upload failed is not listened to for ever.
func TestEndOfStalled(t *testing.T) {
	reading, writing := make(chan struct{}, 1), make(chan struct{}, 1)
	svc := &service{
		copyTo: func(_ context.Context, r io.Reader) error {
			reading <- struct{}{}
			_, err := io.Copy(io.Discard, r)
			return err
		},
		copyFrom: func(_ context.Context, w io.Writer) error {
			writing <- struct{}{}
			_, err := io.Copy(w, zeros{})
			return err
		},
	}
	socket, end := ending(t, svc, Options{Drain: 10 * time.Millisecond})
	dial := func(request string) net.Conn {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if _, err := fmt.Fprintf(conn, "%s\r\nHost: agentbox\r\n%s\r\n", request,
			"Transfer-Encoding: chunked\r\n"); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	drip := func(conn net.Conn) (stop func()) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				if _, err := io.WriteString(conn, "1\r\nx\r\n"); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}()
		return func() { conn.Close(); <-done }
	}
	upload := dial("PUT /v1/sandboxes/c/archive?path=/ HTTP/1.1")
	defer drip(upload)()
	download := dial("GET /v1/sandboxes/c/archive?path=/ HTTP/1.1")
	defer drip(download)()
	<-reading
	<-writing
	svc.copyTo = func(context.Context, io.Reader) error { return fault.ErrDenied }
	failed := dial("PUT /v1/sandboxes/c/archive?path=/ HTTP/1.1")
	defer drip(failed)()
	answer := bufio.NewReader(failed)
	resp, err := http.ReadResponse(answer, nil)
	if err != nil || resp.StatusCode != http.StatusForbidden || !resp.Close {
		t.Fatal(resp, err)
	}
	end()
}

// A session that the end of a service cancels is told so.
func TestEndOfSession(t *testing.T) {
	begun := make(chan struct{}, 1)
	svc := &service{exec: func(ctx context.Context, _ runtime.Process, s runtime.Streams) (int, error) {
		fmt.Fprint(s.Stdout, "here")
		begun <- struct{}{}
		<-ctx.Done()
		return 0, ctx.Err()
	}}
	socket, end := ending(t, svc, Options{Drain: 10 * time.Millisecond})
	c := client(t, socket)
	failed := make(chan error, 1)
	var out strings.Builder
	go func() {
		_, err := c.Exec(context.Background(), "c", runtime.Process{Args: []string{"x"}}, runtime.Streams{Stdout: &out})
		failed <- err
	}()
	<-begun
	end()
	if err := <-failed; !errors.Is(err, context.Canceled) || out.String() != "here" {
		t.Error(err, out.String())
	}
}

// A caller of a session that takes nothing is cut off.
func TestStalledSession(t *testing.T) {
	ended := make(chan error, 1)
	svc := &service{exec: func(_ context.Context, _ runtime.Process, s runtime.Streams) (int, error) {
		_, err := io.Copy(s.Stdout, zeros{})
		ended <- err
		return 0, err
	}}
	c := client(t, serving(t, svc, Options{Stall: 100 * time.Millisecond, Body: 100 * time.Millisecond}))
	stuck := make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		_, err := c.Exec(context.Background(), "c", runtime.Process{Args: []string{"x"}},
			runtime.Streams{Stdout: blocked{stuck}})
		failed <- err
	}()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("no error")
		}
	case <-time.After(time.Minute):
		t.Error("it is not cut off")
	}
	close(stuck)
	if err := <-failed; err == nil {
		t.Error("a session that was cut looks like a whole one")
	}
}

type blocked struct{ until chan struct{} }

func (b blocked) Write(p []byte) (int, error) { <-b.until; return len(p), nil }

// While a service ends, what is under way can still be cancelled; a request's
// name is that of one request.
func TestRequestNames(t *testing.T) {
	begun := make(chan struct{}, 1)
	svc := &service{checkpoint: func(ctx context.Context, _ string, _ runtime.CheckpointOptions) (runtime.Checkpoint,
		error) {
		begun <- struct{}{}
		<-ctx.Done()
		return runtime.Checkpoint{}, ctx.Err()
	}}
	h, err := New(svc, Options{Log: silent})
	if err != nil {
		t.Fatal(err)
	}
	call := func(method, path, name string) int {
		r := mustRequest(method, "http://agentbox"+path)
		r.Body = http.NoBody
		r.Header.Set(wire.HeaderRequest, name)
		rec := &recorder{header: http.Header{}}
		h.ServeHTTP(rec, r)
		return rec.status
	}
	const path = "/v1/sandboxes/c/checkpoints"
	first := make(chan int, 1)
	go func() { first <- call("POST", path, "a") }()
	<-begun
	if got := call("POST", path, "a"); got != http.StatusConflict {
		t.Error(got)
	}
	drained := make(chan struct{})
	go func() { h.Drain(t.Context()); close(drained) }()
	<-h.draining
	if got := call("POST", path, "b"); got != http.StatusLocked {
		t.Error(got)
	}
	if got := call("DELETE", "/v1/requests/a", ""); got != http.StatusNoContent {
		t.Error(got)
	}
	if got := <-first; got != http.StatusServiceUnavailable {
		t.Error(got)
	}
	<-drained
}
