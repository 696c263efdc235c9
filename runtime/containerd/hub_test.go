package containerd

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// shimEnd stands for a shim: both ends of each fifo, as that has.
type shimEnd struct{ in, out *os.File }

func newHub(t *testing.T) (*hub, shimEnd) {
	t.Helper()
	dir := t.TempDir()
	if err := makeFifos(dir, false, true); err != nil {
		t.Fatal(err)
	}
	h, err := openHub(dir, false, true, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.close)
	h.pump()
	var s shimEnd
	for path, f := range map[string]**os.File{"0": &s.in, "1": &s.out} {
		if *f, err = os.OpenFile(filepath.Join(dir, path), os.O_RDWR|unix.O_NONBLOCK, 0); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*f).Close() })
	}
	h.started()
	return h, s
}

// read takes packets until there are n bytes of output.
func read(t *testing.T, c *net.UnixConn, n int) string {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	var got strings.Builder
	buf := make([]byte, 64<<10)
	for got.Len() < n {
		k, err := c.Read(buf)
		if err != nil {
			t.Fatalf("%v after %d bytes of %d", err, got.Len(), n)
		}
		if buf[0] == streams.FromStdout {
			got.Write(buf[1:k])
		}
	}
	return got.String()
}

func TestHubSlowCaller(t *testing.T) {
	h, s := newHub(t)
	slow, err := h.pair()
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	// More than every buffer on the way holds: the process waits.
	text := strings.Repeat("0123456789abcde\n", 1<<16)
	written := make(chan error, 1)
	go func() {
		_, err := io.WriteString(s.out, text)
		written <- err
	}()
	select {
	case <-written:
		t.Error("nothing held up a process whose caller does not read")
	case <-time.After(200 * time.Millisecond):
	}
	// Its end is not held up, and the caller still gets all of it.
	go func() {
		if err := <-written; err != nil {
			t.Error(err)
		}
		s.out.Close()
	}()
	began := time.Now()
	h.ended()
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("a caller who does not read held the end up for %v", d)
	}
	go h.flush(time.Minute)
	if got := read(t, slow, len(text)); got != text {
		t.Error("it came out otherwise than it went in")
	}
	if _, err := slow.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
}

func TestHubCallerGone(t *testing.T) {
	h, s := newHub(t)
	gone, err := h.pair()
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	stays, err := h.pair()
	if err != nil {
		t.Fatal(err)
	}
	defer stays.Close()
	if _, err := io.WriteString(s.out, "hello\n"); err != nil {
		t.Fatal(err)
	}
	if got := read(t, stays, 6); got != "hello\n" {
		t.Errorf("%q", got)
	}
}

func TestHubInput(t *testing.T) {
	h, s := newHub(t)
	ended := make(chan struct{})
	h.endInput = func() { close(ended) }
	watcher, err := h.pair()
	if err != nil {
		t.Fatal(err)
	}
	read(t, watcher, 0)
	watcher.Close() // a client that only watched ends nothing
	typist, err := h.pair()
	if err != nil {
		t.Fatal(err)
	}
	defer typist.Close()
	if _, err := typist.Write([]byte("typed\n")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	_ = s.in.SetReadDeadline(time.Now().Add(time.Minute))
	if n, err := s.in.Read(buf); err != nil || string(buf[:n]) != "typed\n" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	select {
	case <-ended:
		t.Error("the input ended with a caller who had not typed")
	default:
	}
	if err := typist.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the end of what was typed did not end the input")
	}
}
