package containerd

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// hub is our end of a process's streams: the fifos that its shim copies its
// output to and its input from, on one side, and callers' connections on the
// other.
type hub struct {
	terminal bool
	out      [2]*os.File // stdout and stderr; with a terminal stdout only
	keep     [2]*os.File // write ends, so that there is no end of output before the shim has opened its own
	in       *os.File    // nil: the process has no input
	log      *streams.Writer
	endInput func() // has the shim let go of its end of the input
	trouble  sync.Once

	mu      sync.Mutex
	callers map[*caller]bool
	over    bool // the process is gone; callers must not hold up its end

	read     atomic.Int64 // bytes of output
	senders  sync.WaitGroup
	finished chan struct{} // closed when no more output comes
	drained  chan struct{} // closed at the end of all output
}

// caller is a connection with what it has yet to be sent. The hub waits for a
// caller that does not read, as a pipe would, but not when the process is gone:
// what is left then is no more than pipes hold.
type caller struct {
	c *net.UnixConn

	mu     sync.Mutex
	change sync.Cond
	queue  [][]byte
	bytes  int
	over   bool // put no longer waits for it
	closed bool
}

// outputBuffer is as much as is printed in one packet and one record.
const outputBuffer = 8 << 10

// callerBuffer is how far a caller may lag behind.
const callerBuffer = 256 << 10

// idleWait bounds the wait for the end of the output when a process has ended and nothing comes: a
// child that it has left behind, or a shim that died, may keep it open.
const idleWait = 2 * time.Second

// fifos returns the paths of a process's streams in a directory, in the form a shim takes; empty
// for a stream that it does not have.
func fifos(dir string, terminal, input bool) (stdin, stdout, stderr string) {
	stdout = filepath.Join(dir, "1")
	if input {
		stdin = filepath.Join(dir, "0")
	}
	if !terminal {
		stderr = filepath.Join(dir, "2")
	}
	return stdin, stdout, stderr
}

// makeFifos makes them.
func makeFifos(dir string, terminal, input bool) error {
	stdin, stdout, stderr := fifos(dir, terminal, input)
	for _, path := range []string{stdin, stdout, stderr} {
		if path == "" {
			continue
		}
		if err := unix.Mkfifo(path, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
			return &os.PathError{Op: "mkfifo", Path: path, Err: err}
		}
	}
	return nil
}

// openHub opens the fifos in dir. fresh: the shim has not opened them yet.
func openHub(dir string, terminal, input, fresh bool) (h *hub, err error) {
	h = &hub{
		terminal: terminal, callers: map[*caller]bool{}, drained: make(chan struct{}), finished: make(chan struct{}),
	}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	stdin, stdout, stderr := fifos(dir, terminal, input)
	for i, path := range []string{stdout, stderr} {
		if path == "" {
			continue
		}
		if h.out[i], err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
			return h, err
		}
		if fresh {
			if h.keep[i], err = os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0); err != nil {
				return h, err
			}
		}
	}
	if stdin != "" {
		// For reading too, so that it can be opened before the shim does.
		if h.in, err = os.OpenFile(stdin, os.O_RDWR|unix.O_NONBLOCK, 0); err != nil {
			return h, err
		}
	}
	return h, nil
}

// pump begins to copy the output.
func (h *hub) pump() {
	var group guard.WaitGroup
	for i, f := range h.out {
		if f == nil {
			continue
		}
		group.Go(func() { h.copy(i, f) })
	}
	guard.Go(func() {
		defer close(h.drained)
		group.Wait()
	})
}

func (h *hub) copy(i int, f *os.File) {
	buf := make([]byte, 1+outputBuffer)
	buf[0] = streams.FromStdout
	if i == 1 {
		buf[0] = streams.FromStderr
	}
	for {
		n, err := f.Read(buf[1:])
		if n > 0 {
			h.read.Add(int64(n))
			if h.log != nil {
				if err := h.log.Write(i == 1, buf[1:1+n]); err != nil {
					// The process goes on, as far as it can do without a log.
					h.trouble.Do(func() { slog.Error("log not written", "err", err) })
				}
			}
			h.tell(buf[:1+n])
		}
		if err != nil {
			return
		}
	}
}

// tell sends output to all callers.
func (h *hub) tell(packet []byte) {
	h.mu.Lock()
	list := make([]*caller, 0, len(h.callers))
	for c := range h.callers {
		list = append(list, c)
	}
	h.mu.Unlock()
	for _, c := range list {
		c.put(packet)
	}
}

func (c *caller) put(packet []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.bytes > callerBuffer && !c.over && !c.closed {
		c.change.Wait()
	}
	if !c.closed {
		c.queue = append(c.queue, slices.Clone(packet))
		c.bytes += len(packet)
		c.change.Broadcast()
	}
}

// send writes what is put until it is over or the caller gone.
func (c *caller) send(last func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for len(c.queue) == 0 && !c.closed && !last() {
			c.change.Wait()
		}
		if len(c.queue) == 0 || c.closed {
			return
		}
		packet := c.queue[0]
		c.queue = c.queue[1:]
		c.mu.Unlock()
		_, err := c.c.Write(packet)
		c.mu.Lock()
		c.bytes -= len(packet)
		if err != nil {
			c.closed = true
		}
		c.change.Broadcast()
	}
}

// set changes a caller's state.
func (c *caller) set(closed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	c.closed = c.closed || closed
	c.change.Broadcast()
}

// started notes that the shim has opened the fifos: an end of output is now one.
func (h *hub) started() {
	for i, f := range h.keep {
		if f != nil {
			_ = f.Close()
			h.keep[i] = nil
		}
	}
}

// ended notes that the process is gone, and returns when all of its output is in the log and
// with the callers' senders.
func (h *hub) ended() {
	h.mu.Lock()
	h.over = true
	for c := range h.callers {
		c.set(false)
	}
	h.mu.Unlock()
	for {
		n := h.read.Load()
		select {
		case <-h.drained:
			return
		case <-time.After(idleWait):
			if h.read.Load() == n {
				return
			}
		}
	}
}

// add serves a caller: it gets all that is printed from now on.
func (h *hub) add(conn *net.UnixConn) {
	c := &caller{c: conn}
	c.change.L = &c.mu
	c.queue = append(c.queue, []byte{streams.Greeting})
	h.mu.Lock()
	c.over = h.over
	h.callers[c] = true
	h.mu.Unlock()
	h.senders.Add(1)
	guard.Go(func() {
		defer h.senders.Done()
		defer h.drop(c)
		c.send(func() bool {
			select {
			case <-h.finished:
				return true
			default:
				return false
			}
		})
	})
	guard.Go(func() { h.input(c) })
}

func (h *hub) drop(c *caller) {
	h.mu.Lock()
	delete(h.callers, c)
	h.mu.Unlock()
	c.set(true)
	_ = c.c.Close()
}

// flush sends callers what they have yet to get, and hangs up. It is bounded
// only by their patience: a pager may stand for an hour.
func (h *hub) flush(limit time.Duration) {
	close(h.finished)
	h.mu.Lock()
	for c := range h.callers {
		c.set(false)
	}
	h.mu.Unlock()
	done := make(chan struct{})
	guard.Go(func() { h.senders.Wait(); close(done) })
	select {
	case <-done:
	case <-time.After(limit):
	}
}

// input copies what a caller types. Without a terminal the end of it is the end
// of the input, unless the caller only watched and left.
func (h *hub) input(c *caller) {
	buf := make([]byte, 32<<10)
	typed := false
	for {
		n, err := c.c.Read(buf)
		if n > 0 {
			typed = true
			h.mu.Lock()
			in := h.in
			h.mu.Unlock()
			if in != nil {
				_, _ = in.Write(buf[:n]) // its reader may be gone; the output need not be
			}
		}
		if errors.Is(err, io.EOF) {
			if !h.terminal && (typed || !left(c.c)) {
				h.closeInput()
			}
			if left(c.c) {
				h.drop(c)
			}
			return
		}
		if err != nil {
			h.drop(c)
			return
		}
	}
}

// left reports whether a caller has gone, and not only ended what it sends.
func left(c *net.UnixConn) bool {
	conn, err := c.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	_ = conn.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		_, err := unix.Poll(fds, 0)
		gone = err == nil && fds[0].Revents&unix.POLLHUP != 0
	})
	return gone
}

// closeInput ends the process's input once.
func (h *hub) closeInput() {
	h.mu.Lock()
	in := h.in
	h.in = nil
	h.mu.Unlock()
	if in == nil {
		return
	}
	_ = in.Close()
	if h.endInput != nil {
		h.endInput()
	}
}

// close lets everything go; callers see the end of the output.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for c := range h.callers {
		c.set(true)
		_ = c.c.Close()
	}
	for _, f := range []*os.File{h.out[0], h.out[1], h.keep[0], h.keep[1], h.in} {
		if f != nil {
			_ = f.Close()
		}
	}
	if h.log != nil {
		_ = h.log.Close()
	}
}

// pair connects a caller of this process to the hub.
func (h *hub) pair() (*net.UnixConn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair"+strconv.Itoa(i))
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			return nil, err
		}
		conns[i] = c.(*net.UnixConn)
	}
	h.add(conns[0])
	return conns[1], nil
}
