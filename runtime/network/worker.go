package network

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/runtime/network/egress"
)

// workerEnv is set for the process that does what Serve's own has others do.
const workerEnv = "AGENTBOX_EGRESS_WORKER"

const (
	workerWait   = 5 * time.Second  // for it to take an order, and to answer
	workerPause  = 10 * time.Second // at most, between one that died and the next
	workerStable = 30 * time.Second // after which it did not die of its start
	workerLine   = 64 << 10         // bytes of an answer
)

// order is an instruction for the worker: a line of JSON.
type order struct {
	Gates  map[netip.Addr]egress.Ports `json:"gates,omitempty"`
	Boxes  []egress.Box                `json:"boxes,omitempty"`
	Denied *denied                     `json:"denied,omitempty"` // it is that alone, and has no answer
}

// denied is a packet that the kernel's rules have dropped.
type denied struct {
	From     netip.Addr     `json:"from"`
	Protocol string         `json:"protocol"`
	To       netip.AddrPort `json:"to"`
}

// served is the worker's answer: where it listens.
type served struct {
	Gates map[netip.Addr]egress.Ports `json:"gates,omitempty"`
	Error string                      `json:"error,omitempty"`
}

// worker is the process that speaks with sandboxes, the proxy and the resolver. Its input is
// hostile, so it is a process of its own, which knows the rules and has no other rights. If
// it dies, a new one takes over the same ports; until then nothing listens there, and nothing
// passes.
type worker struct {
	moved func(map[netip.Addr]egress.Ports) // another one could not have the same ports

	mu     sync.Mutex
	cmd    *exec.Cmd
	ended  chan struct{} // closed when it has
	orders *os.File
	lines  *bufio.Reader
	out    *os.File // that lines reads
	last   order    // that is in force
	failed int      // deaths in a row
	closed bool
}

// start starts a process, and has it serve what the last one served.
func (w *worker) start() error {
	theirs, orders, err := os.Pipe()
	if err != nil {
		return err
	}
	out, answers, err := os.Pipe()
	if err != nil {
		return errors.Join(err, theirs.Close(), orders.Close())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0], cmd.Dir = os.Args[0], "/"
	cmd.Env = append(os.Environ(), workerEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, answers, os.Stderr
	err = errors.Join(cmd.Start(), theirs.Close(), answers.Close())
	if err != nil {
		return errors.Join(err, orders.Close(), out.Close())
	}
	w.cmd, w.orders, w.out, w.lines = cmd, orders, out, bufio.NewReaderSize(out, workerLine)
	w.ended = make(chan struct{})
	go w.await(cmd, w.ended)
	if w.last.Gates == nil {
		return nil
	}
	gates, err := w.ask(w.last)
	if err != nil {
		_ = cmd.Process.Kill() // await tries again
		return err
	}
	for a, p := range gates {
		if w.last.Gates[a] != p {
			w.last.Gates = gates
			go w.moved(gates)
			break
		}
	}
	return nil
}

// await starts the next one when this one has died.
func (w *worker) await(cmd *exec.Cmd, ended chan struct{}) {
	began := time.Now()
	err := cmd.Wait()
	close(ended)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd != cmd {
		return
	}
	w.drop()
	if w.closed {
		return
	}
	if w.failed++; time.Since(began) > workerStable {
		w.failed = 1
	}
	slog.Warn("proxy died; restarting", "error", err, "times", w.failed)
	for {
		if w.failed > 1 { // no pause after the first failure
			pause := min(100*time.Millisecond<<min(w.failed, 10), workerPause)
			w.mu.Unlock()
			time.Sleep(pause)
			w.mu.Lock()
		}
		if w.closed || w.cmd != nil {
			return
		}
		err := w.start()
		if err == nil || w.cmd != nil { // whose own await sees to it
			return
		}
		w.failed++
		slog.Warn("proxy not restarted", "error", err, "times", w.failed)
	}
}

// drop forgets a process that is gone.
func (w *worker) drop() {
	_ = w.orders.Close()
	_ = w.out.Close()
	w.cmd = nil
}

// errDumb is a worker that does not answer as it should.
var errDumb = errors.New("it does not answer")

// ask sends the worker what to serve and returns its ports.
func (w *worker) ask(o order) (map[netip.Addr]egress.Ports, error) {
	if err := w.tell(o); err != nil {
		return nil, fmt.Errorf("%w: %w", errDumb, err)
	}
	var a served
	err := w.out.SetReadDeadline(time.Now().Add(workerWait))
	if err == nil {
		var line []byte
		if line, err = w.lines.ReadSlice('\n'); err == nil {
			err = json.Unmarshal(line, &a)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDumb, err)
	}
	if a.Error != "" {
		return nil, errors.New(a.Error)
	}
	return a.Gates, nil
}

func (w *worker) tell(o order) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := w.orders.SetWriteDeadline(time.Now().Add(workerWait)); err != nil {
		return err
	}
	_, err = w.orders.Write(append(text, '\n'))
	return err
}

// Update is that of an egress.Server.
func (w *worker) Update(gates map[netip.Addr]egress.Ports, boxes []egress.Box) (map[netip.Addr]egress.Ports, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := order{Gates: gates, Boxes: boxes}
	at, err := w.serve(o)
	if errors.Is(err, errDumb) && w.cmd != nil {
		// It has just died, or might as well have.
		_ = w.cmd.Process.Kill()
		w.drop()
		at, err = w.serve(o)
	}
	if err != nil {
		return nil, err
	}
	o.Gates = at
	w.last = o
	return at, nil
}

// serve asks the worker, started if need be.
func (w *worker) serve(o order) (map[netip.Addr]egress.Ports, error) {
	if w.cmd == nil {
		if err := w.start(); err != nil {
			return nil, fmt.Errorf("start the proxy: %w", err)
		}
	}
	return w.ask(o)
}

// Denied has the worker note what was dropped, if it is there.
func (w *worker) Denied(from netip.Addr, protocol string, to netip.AddrPort) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cmd == nil {
		return
	}
	if err := w.tell(order{Denied: &denied{from, protocol, to}}); err != nil {
		slog.Debug("event lost", "error", err)
	}
}

// Close ends the worker.
func (w *worker) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed = true; w.cmd != nil {
		_ = w.cmd.Process.Kill()
		<-w.ended // then it writes no more events
	}
}

// work is the life of the worker. It ends with the process that has started it.
func (m *Manager) work() error {
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE, syscall.SIGQUIT)
	debug.SetMemoryLimit(memoryLimit)
	if err := m.confine(); err != nil {
		return fmt.Errorf("confine the proxy: %w", err)
	}
	s := egress.New(egress.Options{Events: m.EventsDir(), Local: hostAddresses})
	defer s.Close()
	orders, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var o order
		if err := orders.Decode(&o); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if d := o.Denied; d != nil {
			s.Denied(d.From, d.Protocol, d.To)
			continue
		}
		var a served
		var err error
		if a.Gates, err = s.Update(o.Gates, o.Boxes); err != nil {
			a.Error = err.Error()
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}
