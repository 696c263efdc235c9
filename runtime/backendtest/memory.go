package backendtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/moby/sys/signal"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/runtime"
)

// Memory is a backend whose containers are goroutines and whose upperdirs are
// real directories. Its processes are the few commands of shell.go; there is
// no OCI runtime behind it, so that it cannot pause and its checkpoints are
// those of stopped containers, files only. It needs no privilege.
type Memory struct {
	root  string
	mu    sync.Mutex // guards all below, the boxes' fields too
	boxes map[string]*box
}

// NewMemory returns an empty backend with its files under root.
func NewMemory(root string) *Memory {
	return &Memory{root: root, boxes: map[string]*box{}}
}

// MemoryCannot are the cases that no backend without a kernel behind it passes.
func MemoryCannot() map[string]string {
	const (
		processes = "its processes are goroutines, not the host's"
		terminal  = "it has no terminals"
		overlay   = "it mounts no overlay: it has an upperdir and reads the lower ones"
		freezer   = "it has no freezer"
		spec      = "it obeys only the spec's command, environment and stop signal"
	)
	return map[string]string{
		"workspace/is the sandbox's to change": overlay, "workspace/read-only": overlay,
		"workspace/without its directory": overlay, "workspace/of what it is kept in": overlay,
		"start/an unknown user": spec, "start/seen by a second process": "its containers live in one process",
		"terminal/size and resize": terminal, "terminal/one stream": terminal, "terminal/ctrl-c": terminal,
		"terminal/detach keys": terminal, "terminal/exec": terminal, "terminal/exec detach keys": terminal,
		"logs/of a terminal":                   terminal,
		"exec/environment, directory and user": spec, "exec/a paused one": freezer,
		"stop/a paused one runs no further instruction": freezer, "stop/silent": spec,
		"stop/ends every process and unmounts": processes, "inspect/a running one": processes,
		"inspect/a paused one": freezer, "inspect/one killed from the host": processes,
		"pause/twice is once": freezer, "pause/every process stands still": freezer,
		"pause/one that does not run": freezer, "pause/is over with the next start": freezer,
		"kill/signals by name and number": processes, "kill/a paused one has it when it goes on": freezer,
		"kill/one that does not run": processes, "logs/in order": processes,
		"daemon/restarted between any two calls": freezer, "daemon/restarted in the course of a restore": processes,
		"daemon/restarted while somebody waits": processes, "daemon/an end while it is down": processes,
		"daemon/a paused one is thawed without it":                    freezer,
		"daemon/a paused one is thawed without it by another process": freezer,
		"remove/a running one":                                        processes, "remove/a paused one": freezer,
		"files/the upperdir is visible from the host": overlay, "files/deletions are whiteouts": overlay,
		"mount/a running one": overlay, "mount/a stopped one": overlay,
		"spec/user, directory, hostname, environment": spec, "spec/mounts": spec, "spec/a read-only root": spec,
		"spec/limits": spec, "wait/knows what the memory limit ended": spec, "spec/what processes may do": spec, "spec/an init reaps and passes signals on": spec,
		"spec/network none has lo": spec,
		"spec/network host":        spec, "spec/network bridge": spec,
		"restore/a staged one goes on": processes, "restore/a failure leaves it stopped": processes,
	}
}

// box is one container.
type box struct {
	spec     runtime.Spec
	lower    []string
	upper    string
	status   runtime.Status
	exit     int
	started  time.Time
	finished time.Time
	env      []string
	log      []chunk
	changed  chan struct{} // closed and made anew whenever log or status changes
	runs     int
	first    *process
	kill     context.CancelFunc // ends every process of this run
	dead     context.Context
	stdin    *io.PipeWriter
}

// chunk is the output of one write.
type chunk struct {
	at     time.Time
	stderr bool
	text   string
}

func (b *box) change() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// find returns a container with the lock held.
func (m *Memory) find(ctx context.Context, id string) (*box, func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	m.mu.Lock()
	if b := m.boxes[id]; b != nil {
		return b, m.mu.Unlock, nil
	}
	m.mu.Unlock()
	return nil, nil, fmt.Errorf("container %s: %w", id, runtime.ErrNotFound)
}

// Pause implements runtime.Backend.
func (m *Memory) Pause(ctx context.Context, id string) error { return m.cannot(ctx, id) }

// Unpause implements runtime.Backend.
func (m *Memory) Unpause(ctx context.Context, id string) error { return m.cannot(ctx, id) }

// cannot is what a goroutine has no way to do.
func (m *Memory) cannot(ctx context.Context, id string) error {
	_, unlock, err := m.find(ctx, id)
	if err != nil {
		return err
	}
	unlock()
	return fmt.Errorf("container %s: %w", id, runtime.ErrUnsupported)
}

// Kill implements runtime.Backend.
func (m *Memory) Kill(ctx context.Context, id, _ string) error { return m.cannot(ctx, id) }

// Adopt implements runtime.Backend.
func (m *Memory) Adopt(_ context.Context, ref string) (runtime.Spec, error) {
	return runtime.Spec{}, fmt.Errorf("container %s: %w", ref, runtime.ErrUnsupported)
}

// Create implements runtime.Backend.
func (m *Memory) Create(ctx context.Context, spec runtime.Spec, lower []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, dir := range lower {
		if _, err := os.Stat(dir); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.boxes[spec.ID] != nil {
		return fmt.Errorf("container %s: %w", spec.ID, runtime.ErrExists)
	}
	upper := filepath.Join(m.root, "sandboxes", spec.ID, "upper")
	if err := os.MkdirAll(upper, 0o700); err != nil {
		return err
	}
	for _, v := range m.volumes(spec) {
		if err := os.MkdirAll(v.Path, 0o700); err != nil {
			return err
		}
	}
	m.boxes[spec.ID] = &box{
		spec: spec, lower: lower, upper: upper, status: runtime.Created, changed: make(chan struct{}),
	}
	return nil
}

// volumes are those of a spec, which outlive their containers, and its workspaces, which do not;
// no process sees either of them.
func (m *Memory) volumes(spec runtime.Spec) (list []runtime.Volume) {
	for i, mount := range spec.Mounts {
		switch mount.Type {
		case "volume":
			list = append(list, runtime.Volume{
				Name: mount.Source, Path: filepath.Join(m.root, "volumes", mount.Source, "data"),
			})
		case runtime.MountWorkspace:
			list = append(list, runtime.Volume{
				Name: mount.Target, Target: mount.Target, Lower: mount.Source,
				Path: filepath.Join(m.root, "sandboxes", spec.ID, fmt.Sprintf("work-%d", i)),
			})
		}
	}
	return list
}

// VolumeUsers implements runtime.VolumeSharer.
func (m *Memory) VolumeUsers(ctx context.Context, id string, of []runtime.Volume) (map[string][]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	users := map[string][]string{}
	for _, other := range slices.Sorted(maps.Keys(m.boxes)) {
		b := m.boxes[other]
		for _, v := range m.volumes(b.spec) {
			if other != id && b.status == runtime.Running &&
				slices.ContainsFunc(of, func(have runtime.Volume) bool { return have.Name == v.Name }) {
				users[v.Name] = append(users[v.Name], b.spec.Name)
			}
		}
	}
	return users, ctx.Err()
}

// Start implements runtime.Backend.
func (m *Memory) Start(ctx context.Context, id string, opts runtime.StartOptions) (func() error, error) {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if b.status == runtime.Running {
		return nil, fmt.Errorf("%w: it is running", runtime.ErrState)
	}
	var stdin io.Reader = eof{}
	if b.spec.OpenStdin {
		stdin, b.stdin = io.Pipe()
	} else {
		b.stdin = nil
	}
	b.env = opts.Env
	dead, kill := context.WithCancel(context.Background())
	p := newProcess(b, dead, nil, stdin, &logWriter{m, b, false}, &logWriter{m, b, true})
	if err := p.look(b.spec.Args[0]); err != nil {
		kill()
		return nil, err
	}
	b.dead, b.kill, b.first = dead, kill, p
	b.status, b.started, b.exit = runtime.Running, time.Now(), 0
	b.runs++
	b.change()
	from := len(b.log)
	go func() {
		code := p.run(b.spec.Args)
		m.mu.Lock()
		defer m.mu.Unlock()
		kill()
		if b.stdin != nil {
			b.stdin.Close()
		}
		b.status, b.exit, b.finished, b.first = runtime.Exited, code, time.Now(), nil
		b.change()
	}()
	if opts.Streams == nil {
		return nil, nil
	}
	streams := *opts.Streams
	run := b.runs
	return func() error { return m.serve(ctx, b, run, from, streams) }, nil
}

// serve connects streams to a run of a container until it has ended.
func (m *Memory) serve(ctx context.Context, b *box, run, from int, s runtime.Streams) error {
	m.mu.Lock()
	stdin := b.stdin
	m.mu.Unlock()
	if s.Stdin != nil && stdin != nil {
		go func() {
			_, _ = io.Copy(stdin, s.Stdin)
			stdin.Close()
		}()
	}
	return m.follow(ctx, b, run, from, func(c chunk) error { return write(c.text, c.stderr, s.Stdout, s.Stderr) })
}

// follow passes a run's output on as it comes.
func (m *Memory) follow(ctx context.Context, b *box, run, from int, fn func(chunk) error) error {
	for {
		m.mu.Lock()
		fresh, changed := slices.Clone(b.log[from:]), b.changed
		over := b.status != runtime.Running || b.runs != run
		m.mu.Unlock()
		from += len(fresh)
		for _, c := range fresh {
			if err := fn(c); err != nil {
				return err
			}
		}
		if over && len(fresh) == 0 {
			return nil
		}
		if over {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func write(text string, stderr bool, out, errw io.Writer) (err error) {
	if stderr {
		out = errw
	}
	if out != nil {
		_, err = io.WriteString(out, text)
	}
	return err
}

// Attach implements runtime.Backend.
func (m *Memory) Attach(ctx context.Context, id string, s runtime.Streams) error {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return err
	}
	status, run, from := b.status, b.runs, len(b.log)
	unlock()
	if status != runtime.Running {
		return fmt.Errorf("%w: it is %s", runtime.ErrState, status)
	}
	return m.serve(ctx, b, run, from, s)
}

// Stop implements runtime.Backend.
func (m *Memory) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return err
	}
	first, dead, kill := b.first, b.dead, b.kill
	name := cmp.Or(opts.Signal, b.spec.StopSignal, "SIGTERM")
	unlock()
	if first == nil {
		return nil
	}
	if opts.Timeout > 0 {
		sig, err := signal.ParseSignal(name)
		if err != nil {
			return fmt.Errorf("%w: %w", runtime.ErrInvalid, err)
		}
		first.signal(sig)
		select {
		case <-dead.Done():
		case <-time.After(opts.Timeout):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	kill()
	_, err = m.Wait(ctx, id)
	return err
}

// Exec implements runtime.Backend.
func (m *Memory) Exec(ctx context.Context, id string, p runtime.Process, s runtime.Streams) (int, error) {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return 0, err
	}
	defer unlock()
	if b.status != runtime.Running {
		return 0, runtime.Unstarted(fmt.Errorf("%w: it is %s", runtime.ErrState, b.status))
	}
	if s.Stdin == nil || p.Detach {
		s.Stdin = eof{}
	}
	dead, kill := context.WithCancel(b.dead)
	proc := newProcess(b, dead, p.Env, s.Stdin, writer(s.Stdout), writer(s.Stderr))
	if err := proc.look(p.Args[0]); err != nil {
		kill()
		return 0, err
	}
	exits := make(chan int, 1)
	go func() { exits <- proc.run(p.Args); kill() }()
	if p.Detach {
		return 0, nil
	}
	m.mu.Unlock()
	defer m.mu.Lock() // for unlock above
	select {
	case code := <-exits:
		return code, nil
	case <-ctx.Done():
		kill()
		<-exits
		return 0, ctx.Err()
	}
}

func writer(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}

// Wait implements runtime.Backend.
func (m *Memory) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return runtime.Exit{}, err
	}
	for b.status != runtime.Exited {
		changed := b.changed
		unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return runtime.Exit{}, ctx.Err()
		}
		m.mu.Lock()
	}
	defer unlock()
	return runtime.Exit{Code: b.exit}, nil
}

// Inspect implements runtime.Backend.
func (m *Memory) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return runtime.Container{}, err
	}
	defer unlock()
	return runtime.Container{Status: b.status, ExitCode: b.exit, Started: b.started,
		Finished: b.finished, Upper: b.upper,
		Lower: b.lower, Volumes: m.volumes(b.spec), Stage: stage.Slot{Run: filepath.Join(m.root, "run"), ID: id}}, nil
}

// Logs implements runtime.Backend.
func (m *Memory) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return err
	}
	text, from, run := logLines(b.log), len(b.log), b.runs
	unlock()
	if opts.Tail >= 0 {
		text = text[max(0, len(text)-opts.Tail):]
	}
	print := func(c chunk) error {
		if c.at.Before(opts.Since) {
			return nil
		}
		if opts.Timestamps {
			c.text = c.at.Format(time.RFC3339Nano) + " " + c.text
		}
		return write(c.text, c.stderr, stdout, stderr)
	}
	for _, c := range text {
		if err := print(c); err != nil {
			return err
		}
	}
	if !opts.Follow {
		return nil
	}
	return m.follow(ctx, b, run, from, print)
}

// logLines joins chunks and cuts them into lines.
func logLines(log []chunk) (text []chunk) {
	var open [2]int // the unfinished line of each stream, plus one
	for _, c := range log {
		for c.text != "" {
			part := chunk{c.at, c.stderr, c.text}
			if i := slices.Index([]byte(c.text), '\n'); i >= 0 {
				part.text = c.text[:i+1]
			}
			c.text = c.text[len(part.text):]
			which := 0
			if c.stderr {
				which = 1
			}
			if open[which] > 0 {
				text[open[which]-1].text += part.text
			} else {
				text = append(text, part)
				open[which] = len(text)
			}
			if part.text[len(part.text)-1] == '\n' {
				open[which] = 0
			}
		}
	}
	return text
}

// Remove implements runtime.Backend.
func (m *Memory) Remove(ctx context.Context, id string) error {
	if err := m.Stop(ctx, id, runtime.StopOptions{}); errors.Is(err, runtime.ErrNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := os.RemoveAll(filepath.Join(m.root, "sandboxes", id)); err != nil {
		return err
	}
	delete(m.boxes, id)
	return nil
}

// Mount implements runtime.Backend; fn sees the upperdir alone.
func (m *Memory) Mount(ctx context.Context, id string, fn func(root string) error) error {
	b, unlock, err := m.find(ctx, id)
	if err != nil {
		return err
	}
	unlock()
	return fn(b.upper)
}

// List implements runtime.Backend.
func (m *Memory) List(ctx context.Context) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.boxes)), ctx.Err()
}

// Properties implements runtime.Backend.
func (m *Memory) Properties() runtime.Properties {
	return runtime.Properties{Name: "memory", Restarts: true}
}

// logWriter is a first process's stdout or stderr.
type logWriter struct {
	m      *Memory
	b      *box
	stderr bool
}

func (w *logWriter) Write(p []byte) (int, error) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.b.log = append(w.b.log, chunk{time.Now(), w.stderr, string(p)})
	w.b.change()
	return len(p), nil
}

// eof is no input.
type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

// read finds a file in the upperdir, then in the lower ones.
func (b *box) read(path string) (*os.File, error) {
	for _, dir := range append([]string{b.upper}, b.lower...) {
		f, err := os.Open(filepath.Join(dir, path))
		if !errors.Is(err, fs.ErrNotExist) {
			return f, err
		}
	}
	return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
}
