package containerd

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// orders are the instructions of a monitor, in a file of its bundle.
type orders struct {
	Namespace string   `json:"namespace"`
	Container string   `json:"container"` // what containerd calls it
	Address   string   `json:"address"`   // containerd's
	Run       string   `json:"run"`       // the run's directory: run.json, started, exit.json
	Log       string   `json:"log"`
	Terminal  bool     `json:"terminal,omitempty"`
	Input     bool     `json:"input,omitempty"`
	Reap      []string `json:"reap,omitempty"` // run after the end
	Exec      string   `json:"exec,omitempty"` // only drop what this exec session prints, then delete it
}

const ordersFile = "orders.json"

// The descriptors of a monitor that runs from the beginning of a run: from the first it learns of
// the start, over the second it says that it is ready.
const (
	startFd = 3
	readyFd = 4
)

// Monitor is the life of a monitor: the process that Options.Monitor begins
// with these arguments. It returns when the output has ended and its end is on
// record.
func Monitor(ctx context.Context, args []string) error {
	if len(args) < 1 || len(args) > 2 {
		return fmt.Errorf("%w: a monitor is told a bundle", fault.ErrInvalid)
	}
	// Its end is the container's, not a terminal's or a login's.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE, syscall.SIGQUIT)
	signal.Reset(syscall.SIGTERM) // nothing is lost with it
	ctx = context.WithoutCancel(ctx)
	// Socket addresses are too short for a bundle's path.
	if err := os.Chdir(args[0]); err != nil {
		return err
	}
	m := &monitor{log: slog.Default()}
	if err := record.ReadJSON(ordersFile, &m.orders); err != nil {
		return err
	}
	if m.Exec != "" {
		return m.drainExec(ctx)
	}
	lock, err := takeMonitor(".")
	if err != nil || lock == nil {
		return err
	}
	defer lock.Unlock()
	return m.run(ctx, len(args) == 2)
}

type monitor struct {
	orders
	hub *hub
	log *slog.Logger
}

func (m *monitor) run(ctx context.Context, fresh bool) (err error) {
	if m.hub, err = openHub(".", m.Terminal, m.Input, fresh); err != nil {
		return err
	}
	defer m.hub.close()
	m.hub.endInput = func() { m.closeInput(ctx) }
	if m.hub.log, err = streams.OpenWriter(m.Log); err != nil {
		return err
	}
	l, err := m.listen()
	if err != nil {
		return err
	}
	defer l.Close()
	m.hub.pump()
	guard.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			m.hub.add(c)
		}
	})
	ready()
	if fresh {
		goes, err := m.await(ctx)
		if err != nil || !goes {
			return err
		}
	}
	m.hub.started()
	exit, err := m.awaitExit(ctx)
	if err != nil {
		return err // the next look at the container starts another monitor
	}
	m.hub.ended()
	if err := record.WriteJSON(filepath.Join(m.Run, "exit.json"), exit, true); err != nil &&
		!errors.Is(err, os.ErrNotExist) {
		return err
	}
	_ = l.Close()
	if len(m.Reap) > 0 {
		reap := exec.Command(m.Reap[0], m.Reap[1:]...)
		reap.Dir, reap.Stderr = "/", os.Stderr
		if err := reap.Start(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, reap.Wait()) }()
	}
	m.hub.flush(patience)
	return nil
}

// patience is how long a caller has to read the rest of the output after the end.
const patience = time.Hour

// ready tells the process that started us that we hold the streams. Errors do not matter:
// that process may have stopped waiting.
func ready() {
	f := os.NewFile(readyFd, "ready")
	_, _ = f.WriteString("\n")
	_ = f.Close()
}

func (m *monitor) listen() (*net.UnixListener, error) {
	if err := os.Remove("attach"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "attach", Net: "unixpacket"})
	if err == nil {
		l.SetUnlinkOnClose(false) // it goes with the bundle
	}
	return l, err
}

// await returns whether the container was started. When agentbox is killed
// before it can say so, the shim knows.
func (m *monitor) await(ctx context.Context) (bool, error) {
	start := os.NewFile(startFd, "start")
	_, err := bufio.NewReader(start).ReadByte()
	_ = start.Close()
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, io.EOF) {
		return false, err
	}
	run, err := readRun(m.Run)
	if err != nil || run.Pid == 0 {
		return false, nil
	}
	s, err := run.Shim.dial(ctx, m.Container)
	if err != nil {
		return false, nil
	}
	defer s.close()
	state, err := s.state(ctx)
	return err == nil && state != task.Status_CREATED && state != task.Status_UNKNOWN, nil
}

// closeInput has the shim let go of the input, whose last writer it then is.
func (m *monitor) closeInput(ctx context.Context) {
	run, err := readRun(m.Run)
	if err == nil {
		var s *shimConn
		if s, err = run.Shim.dial(ctx, m.Container); err == nil {
			defer s.close()
			err = s.closeInput(ctx, "")
		}
	}
	if err != nil {
		m.log.Warn("input not closed", "err", err)
	}
}

// awaitExit returns how the container ended, once it has.
func (m *monitor) awaitExit(ctx context.Context) (box.Exit, error) {
	unknown := func() box.Exit { return box.Exit{Code: box.UnknownExit, Finished: time.Now()} }
	run, err := readRun(m.Run)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fault.ErrCorrupt) {
		return unknown(), nil
	}
	if err != nil {
		return box.Exit{}, err
	}
	p, err := kernel.OpenProcess(run.Pid)
	if err != nil && !kernel.Gone(err) {
		return box.Exit{}, err
	}
	if p != nil {
		defer p.Close()
	}
	var hits func() kernel.Hits
	if groups, err := kernel.Hierarchies(); err == nil {
		hits, _ = groups.HitsOf(run.Pid) // none of one that has ended
	}
	for {
		exit, err := m.askShim(ctx, run)
		if err == nil {
			// The cgroups go when the task is deleted, which happens only after this is on record.
			if hits != nil {
				exit.Hits = hits()
			}
			exit.OOM = exit.Hits.OOMKills > 0
			return exit, nil
		}
		if p != nil && p.Alive() {
			// The shim is gone, or its socket is; containerd ends the
			// processes of a shim that died.
			_ = p.WaitFor(ctx, time.Second)
			continue
		}
		if exit, ok := m.askDaemon(ctx); ok {
			return exit, nil
		}
		return unknown(), nil
	}
}

func (m *monitor) askShim(ctx context.Context, run runRecord) (box.Exit, error) {
	s, err := run.Shim.dial(ctx, m.Container)
	if err != nil {
		return box.Exit{}, err
	}
	defer s.close()
	return s.wait(ctx)
}

// askDaemon asks the daemon for an exit that the shim no longer knows.
func (m *monitor) askDaemon(ctx context.Context) (box.Exit, bool) {
	c, err := newClient(m.Address)
	if err != nil {
		return box.Exit{}, false
	}
	defer c.Close()
	resp, err := c.TaskService().Get(in(ctx, m.Namespace), &tasks.GetRequest{ContainerID: m.Container})
	if err != nil || resp.Process.Status != task.Status_STOPPED {
		return box.Exit{}, false
	}
	return box.Exit{Code: int(resp.Process.ExitStatus), Finished: resp.Process.ExitedAt.AsTime()}, true
}

// drainExec reads and drops what an exec session prints whose caller has
// detached, so that it can go on, and deletes it when it has ended.
func (m *monitor) drainExec(ctx context.Context) error {
	h, err := openHub(".", m.Terminal, m.Input, false)
	if err != nil {
		return err
	}
	defer h.close()
	// Its caller holds the lock until we are ready, and then leaves.
	h.pump()
	ready()
	lock, err := flock.Lock(context.Background(), monitorLock, flock.Existing)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	<-h.drained
	c, err := newClient(m.Address)
	if err != nil {
		return err
	}
	defer c.Close()
	ctx = in(ctx, m.Namespace)
	if _, err := c.TaskService().Wait(ctx, &tasks.WaitRequest{ContainerID: m.Container, ExecID: m.Exec}); err == nil {
		_, _ = c.TaskService().DeleteProcess(ctx, &tasks.DeleteProcessRequest{ContainerID: m.Container, ExecID: m.Exec})
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// watcher is a monitor that this process has started.
type watcher struct {
	cmd   *exec.Cmd
	start *os.File // we write, or close, when the container was started, or not
	ready *os.File
	done  chan error
}

// watch starts a monitor on the orders in a bundle. fresh: for a container that
// is yet to be started, which the monitor is to hear of.
func (b *Backend) watch(bundle string, o orders, fresh bool) (w *watcher, err error) {
	if len(b.monitor) == 0 {
		return nil, fmt.Errorf("%w: there is no program to watch over containers of containerd", fault.ErrUnsupported)
	}
	if err := record.WriteJSON(filepath.Join(bundle, ordersFile), o, false); err != nil {
		return nil, err
	}
	args := append(append([]string{}, b.monitor[1:]...), bundle)
	if fresh {
		args = append(args, "start")
	}
	cmd := exec.Command(b.monitor[0], args...)
	cmd.Dir = "/"
	cmd.Env = b.environ()
	// A session of its own: an interrupt typed at our terminal is not for it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stderr, err := os.OpenFile(filepath.Join(bundle, "monitor.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer stderr.Close()
	cmd.Stderr = stderr
	w = &watcher{cmd: cmd, done: make(chan error, 1)}
	theirStart, ourStart, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer theirStart.Close()
	w.start = ourStart
	ourReady, theirReady, err := os.Pipe()
	if err != nil {
		w.close()
		return nil, err
	}
	defer theirReady.Close()
	w.ready = ourReady
	cmd.ExtraFiles = []*os.File{theirStart, theirReady}
	born, err := b.box.Cgroups.StartIn(cmd, monitors)
	if err != nil {
		w.close()
		return nil, fmt.Errorf("start the monitor: %w", err)
	}
	guard.Go(func() {
		if err := b.box.Cgroups.MoveTo(cmd.Process.Pid, monitors, born); err != nil {
			b.log.Debug("monitor left in the caller's cgroup", "error", err)
		}
	})
	guard.Go(func() { w.done <- cmd.Wait() })
	return w, nil
}

// environ is all that a monitor, and the reaper after it, gets to see.
func (b *Backend) environ() []string {
	path := cmp.Or(os.Getenv("PATH"), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	env := []string{"PATH=" + path, "CONTAINERD_ADDRESS=" + b.address}
	return env
}

// await waits until the monitor holds the streams.
func (w *watcher) await(ctx context.Context, bundle string) error {
	stop := context.AfterFunc(ctx, func() { _ = w.ready.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := bufio.NewReader(w.ready).ReadByte(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		said, _, _ := record.Read(filepath.Join(bundle, "monitor.log"))
		return fmt.Errorf("the monitor failed: %w: %s", err, said)
	}
	return nil
}

// started tells the monitor.
func (w *watcher) started() error {
	_, err := w.start.Write([]byte{0})
	return errors.Join(err, w.start.Close())
}

// kill ends a monitor whose container was not started.
func (w *watcher) kill() {
	if w == nil || w.cmd.Process == nil {
		return
	}
	_ = w.cmd.Process.Kill()
	<-w.done
}

func (w *watcher) close() {
	if w == nil {
		return
	}
	for _, f := range []*os.File{w.start, w.ready} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// ordersOf are the orders for the monitor of run n.
func (b *Backend) ordersOf(spec runtime.Spec, t *theirs, n int) orders {
	id := spec.ID
	o := orders{
		Namespace: b.namespace, Container: id, Address: b.address, Run: b.box.StartDir(id, n),
		Log:      b.box.Dir(id, "log"),
		Terminal: spec.Terminal, Input: spec.OpenStdin || spec.Terminal,
	}
	if t != nil {
		o.Namespace, o.Container = t.Namespace, t.ID
	} else if b.self != "" {
		o.Reap = []string{b.self, "--root", b.box.Base, "reap", id}
	}
	return o
}

// rewatch starts another monitor for a run whose own was killed.
func (b *Backend) rewatch(ctx context.Context, id string, n int) error {
	dir := b.box.Bundle(id, n)
	var o orders
	if err := record.ReadJSON(filepath.Join(dir, ordersFile), &o); err != nil {
		return err
	}
	w, err := b.watch(dir, o, false)
	if err != nil {
		return err
	}
	defer w.close()
	if err := w.await(ctx, dir); err != nil {
		if other, merr := monitored(dir); other || merr != nil {
			return merr // another one was faster
		}
		if _, done, rerr := b.box.RecordedExit(id, n); done || rerr != nil {
			return rerr
		}
		return err
	}
	b.log.Warn("monitor restarted", "sandbox", id)
	return nil
}

// Connect implements box.Hooks.
func (h hooks) Connect(
	ctx context.Context, v box.View, s runtime.Streams, size *runtime.Size,
) (*streams.Attachment, error) {
	if v.Foreign && v.Run.Bundle == "" {
		err := fmt.Errorf("%w: the streams of %s are with the program that started it",
			fault.ErrUnsupported, v.Spec.Name)
		return nil, &fault.Error{Err: err, Hint: "Attach with the tool that did."}
	}
	conn, err := streams.Dial(filepath.Join(v.Run.Bundle, "attach"))
	if err != nil {
		return nil, err
	}
	if err := conn.Greeted(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return streams.New(ctx, conn, s, v.Spec.Terminal, size, func(size runtime.Size) {
		h.resize(v.Spec.ID, "", size)
	}), nil
}

// resize sets the size of a process's terminal; it does nothing for one that has ended.
func (b *Backend) resize(sandbox, exec string, size runtime.Size) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	ns, id := b.nameOf(sandbox)
	_, err := b.client.TaskService().ResizePty(in(ctx, ns),
		&tasks.ResizePtyRequest{ContainerID: id, ExecID: exec, Width: uint32(size.Width), Height: uint32(size.Height)})
	if err != nil {
		b.log.Debug("terminal not resized", "sandbox", sandbox, "err", plain(err))
	}
}

// nameOf returns containerd's name of a container.
func (b *Backend) nameOf(id string) (namespace, name string) {
	if a, _ := b.adopted(id); a != nil {
		return a.Theirs.Namespace, a.Theirs.ID
	}
	return b.namespace, id
}
