package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// A caller that is neither root nor in the socket's group is refused, though it reaches
// the socket.
func TestPeer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	const group = 12345
	svc := &service{sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return nil, nil }}
	h, err := New(svc, Options{Log: silent})
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "api")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	sockets := map[int]string{}
	for _, gid := range []int{0, group} {
		sockets[gid] = filepath.Join(dir, fmt.Sprint(gid))
		l, err := Listen(sockets[gid])
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(sockets[gid]); err != nil || info.Mode().Perm() != 0o660 {
			t.Fatal(info, err)
		}
		if err := errors.Join(os.Lchown(sockets[gid], 0, gid), os.Chmod(sockets[gid], 0o666),
			os.Chmod(dir, 0o755)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- Serve(ctx, l, h) }()
		defer func() { cancel(); <-ended }()
	}
	for _, tc := range []struct {
		uid, gid int
		groups   []uint32
		socket   int
		want     string
	}{
		{0, 0, nil, group, "200"},
		{65534, 65534, nil, group, "403"},
		{65534, 65534, []uint32{1, group}, group, "200"},
		{65534, group, nil, group, "200"},
		{0, 0, nil, 0, "200"},
		{65534, 0, []uint32{1, 0}, 0, "403"}, // root's group is no group for it
	} {
		socket := sockets[tc.socket]
		conn, err := dialAs(socket, tc.uid, tc.gid, tc.groups)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET /v1/sandboxes HTTP/1.1\r\nHost: agentbox\r\n\r\n")
		line, err := bufio.NewReader(conn).ReadString('\n')
		if conn.Close(); err != nil || !strings.Contains(line, tc.want) {
			t.Errorf("%+v: %s %v", tc, line, err)
		}
	}
}

// dialAs connects as another user, in a thread of its own, which then ends.
func dialAs(socket string, uid, gid int, groups []uint32) (conn net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		goruntime.LockOSThread()
		groups = append(groups, 0)
		for _, call := range [][3]uintptr{
			{unix.SYS_SETGROUPS, uintptr(len(groups) - 1), uintptr(unsafe.Pointer(&groups[0]))},
			{unix.SYS_SETRESGID, uintptr(gid), uintptr(gid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid)},
		} {
			if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[2]); errno != 0 {
				err = errno
				return
			}
		}
		conn, err = net.Dial("unix", socket)
	}()
	<-done
	return conn, err
}

// Connections that stand idle keep others waiting, not for ever out.
func TestSocket(t *testing.T) {
	svc := &service{sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return nil, nil }}
	socket := serving(t, svc, Options{})
	if l, err := Listen(socket); !errors.Is(err, fault.ErrExists) {
		t.Error(l, err)
	}
	stale := filepath.Join(filepath.Dir(socket), "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	again, err := Listen(stale)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(stale); !errors.Is(err, fault.ErrExists) {
		t.Error(err)
	}
	// One place: the second connection is accepted when the first has gone.
	inner, err := Listen(filepath.Join(filepath.Dir(socket), "few"))
	if err != nil {
		t.Fatal(err)
	}
	few := newLimited(inner, 1, nil)
	defer few.Close()
	for range 2 {
		c, err := net.Dial("unix", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	first, err := few.Accept()
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan net.Conn, 1)
	go func() { c, _ := few.Accept(); second <- c }()
	select {
	case <-second:
		t.Error("more connections than there may be")
	case <-time.After(20 * time.Millisecond):
	}
	first.Close()
	(<-second).Close()
}

// The end of a service lets verbs end, and what follows something at once.
func TestDrain(t *testing.T) {
	following := make(chan struct{})
	working, finish := make(chan struct{}), make(chan struct{})
	svc := &service{
		logs: func(ctx context.Context, _, _ io.Writer) error { close(following); <-ctx.Done(); return ctx.Err() },
		checkpoint: func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			close(working)
			<-finish
			return runtime.Checkpoint{ID: "done"}, nil
		},
	}
	h, err := New(svc, Options{Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, h) }()
	c := client(t, socket)
	var all sync.WaitGroup
	all.Go(func() {
		if err := c.Logs(t.Context(), "c", runtime.LogOptions{Follow: true}, nil,
			nil); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	all.Go(func() {
		if got, err := c.Checkpoint(t.Context(), "c", runtime.CheckpointOptions{}); err != nil || got.ID != "done" {
			t.Error(got, err)
		}
	})
	<-following
	<-working
	cancel()
	<-h.draining
	rec := &recorder{header: http.Header{}}
	h.ServeHTTP(rec, mustRequest("GET", "http://agentbox/v1/sandboxes"))
	if rec.status != http.StatusLocked {
		t.Error(rec.status)
	}
	close(finish)
	all.Wait()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

type recorder struct {
	header http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(status int)      { r.status = status }
func (r *recorder) Write(p []byte) (int, error) { return len(p), nil }

func mustRequest(method, url string) *http.Request {
	r, err := http.NewRequest(method, url, nil)
	if err != nil {
		panic(err)
	}
	return r
}
