package mcp

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// The bounds of commands; docs/mcp.md documents them.
const (
	defaultTimeout = 120  // seconds
	maxTimeout     = 3600 // seconds
	maxCommand     = 128 << 10
	maxOutput      = 30_000  // bytes that one call returns
	keptOutput     = 1 << 20 // bytes of a job that can be paged in
	maxRunning     = 16      // jobs
	maxFinished    = 32      // jobs whose output can still be read
	grace          = 2 * time.Second
	killTimeout    = 10 * time.Second
)

// job is a command that runs or ran in a sandbox.
type job struct {
	id, mark, command string
	box               *box
	begun             time.Time
	out               output
	cancel            context.CancelFunc
	done              chan struct{}

	ended atomic.Pointer[string] // why it is being ended; nil: it ends by itself

	// set before done is closed
	exit int
	err  error
	took time.Duration
}

// jobs are those of a session, the oldest first.
type jobs struct {
	mu    sync.Mutex
	ctx   context.Context
	end   context.CancelFunc
	last  int
	list  []*job
	shut  bool
	alive guard.WaitGroup
}

func (j *jobs) init() { j.ctx, j.end = context.WithCancel(context.Background()) }

// output keeps the end of what a command printed, stdout and stderr in order.
type output struct {
	mu    sync.Mutex
	data  []byte
	start int64         // offset of data[0] in all that was printed
	more  chan struct{} // closed by the next Write; nil: no reader waits
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.more != nil {
		close(o.more)
		o.more = nil
	}
	o.data = append(o.data, p...)
	// Twice as much is let grow, so that moving it stays cheap.
	if over := len(o.data) - keptOutput; over > keptOutput {
		o.start += int64(over)
		o.data = append(o.data[:0], o.data[over:]...)
	}
	return len(p), nil
}

// beyond is closed once more than so many bytes were printed, or soon before; nil:
// they are.
func (o *output) beyond(offset int64) <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.start+int64(len(o.data)) > offset {
		return nil
	}
	if o.more == nil {
		o.more = make(chan struct{})
	}
	return o.more
}

// page returns up to most bytes from offset on, where they begin, and where all
// that was printed ends.
func (o *output) page(offset int64, most int) (text string, from, end int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	end = o.start + int64(len(o.data))
	from = min(max(offset, o.start), end)
	data := o.data[from-o.start:]
	return string(data[:min(len(data), most)]), from, end
}

// ends is the output, or its beginning and its end with a note between.
func (o *output) ends(id string) (text string, whole bool) {
	const head = maxOutput / 3
	text, from, end := o.page(0, maxOutput)
	if from == 0 && int64(len(text)) == end {
		return text, true
	}
	tail, at, _ := o.page(end-(maxOutput-head), maxOutput-head)
	begin := ""
	if from == 0 {
		begin = text[:head]
	}
	return fmt.Sprintf("%s\n[... %d of %d bytes are left out here; job_output with job %q and offset %d shows them ...]\n%s",
		begin, at-int64(len(begin)), end, id, max(int64(len(begin)), from), tail), false
}

type runArgs struct {
	Target
	Command    string `json:"command" jsonschema:"what to run with /bin/sh -c"`
	Cwd        string `json:"cwd,omitempty" jsonschema:"directory to run it in; omit it for the working directory"`
	Timeout    int    `json:"timeout,omitempty" jsonschema:"seconds after which it is ended, with all that it has started; default 120, at most 3600; a background job has none unless one is given"`
	Background bool   `json:"background,omitempty" jsonschema:"return at once with a job id, for job_output and job_stop; the job ends with the session"`
}

func (s *Server) runCommand(ctx context.Context, b *box, in runArgs) (reply, error) {
	if in.Command == "" || len(in.Command) > maxCommand {
		return reply{}, fmt.Errorf("%w: a command has 1 to %d bytes; put longer scripts into a file",
			runtime.ErrInvalid, maxCommand)
	}
	timeout, err := orDefault("timeout", in.Timeout, defaultTimeout, maxTimeout)
	if err != nil {
		return reply{}, err
	}
	if !b.every.Exec {
		if err := s.before(ctx, b, "run_command"); err != nil {
			return reply{}, err
		}
	}
	cwd := in.Cwd
	if cwd != "" && !path.IsAbs(cwd) {
		cwd = path.Join(b.workdir, cwd)
	}
	j, err := s.start(b, in.Command, cwd)
	if err != nil {
		return reply{}, err
	}
	limit := time.Duration(timeout) * time.Second
	if in.Background {
		if in.Timeout > 0 {
			time.AfterFunc(limit, func() {
				_ = guard.Do(func() error { // failures are logged
					s.end(context.WithoutCancel(ctx), j, fmt.Sprintf("its timeout of %d s", timeout))
					return nil
				})
			})
		}
		return reply{text: fmt.Sprintf("job %s runs in the background; read what it prints with job_output", j.id)}, nil
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-j.done:
	case <-timer.C:
		s.end(ctx, j, fmt.Sprintf("its timeout of %d s", timeout))
	case <-ctx.Done():
		s.end(context.WithoutCancel(ctx), j, "the call was cancelled")
		s.forget(j)
		return reply{}, ctx.Err()
	}
	text, whole := j.out.ends(j.id)
	if whole {
		s.forget(j)
	}
	ended := j.ended.Load() != nil
	if j.err != nil && !ended {
		if errors.Is(j.err, runtime.ErrState) {
			return reply{}, &runtime.Error{
				Err: j.err, Hint: "File tools work all the same. Your user can bring it back.",
			}
		}
		return reply{}, j.err
	}
	r := reply{text: text, note: "[" + j.status() + "]", failed: ended}
	if ended {
		r.note += "[a longer timeout, or background, lets it run on]"
	}
	return r, nil
}

// start runs a command as a job.
func (s *Server) start(b *box, command, cwd string) (*job, error) {
	js := &s.jobs
	js.mu.Lock()
	defer js.mu.Unlock()
	running := 0
	for _, j := range js.list {
		if j.running() {
			running++
		}
	}
	if js.shut || running >= maxRunning {
		return nil, &runtime.Error{
			Err:  fmt.Errorf("%w: %d commands are running", runtime.ErrBusy, running),
			Hint: "Wait for one, or end it with job_stop.",
		}
	}
	js.last++
	ctx, cancel := context.WithCancel(js.ctx)
	j := &job{
		id: fmt.Sprint(js.last), mark: randomName() + randomName(), command: command, box: b, begun: time.Now(),
		cancel: cancel, done: make(chan struct{}),
	}
	js.list = append(js.list, j)
	finished := len(js.list) - running - 1
	js.list = slices.DeleteFunc(js.list, func(old *job) bool {
		drop := finished > maxFinished && old != j && !old.running()
		if drop {
			finished--
		}
		return drop
	})
	js.alive.Go(func() {
		defer close(j.done)
		defer cancel()
		j.err = guard.Do(func() (err error) {
			j.exit, err = s.svc.Exec(ctx, b.id, runtime.Process{
				Args: []string{"/bin/sh", "-c", command}, Workdir: cwd, Env: []string{markName + "=" + j.mark},
			}, runtime.Streams{Stdout: &j.out, Stderr: &j.out})
			return err
		})
		j.took = time.Since(j.begun)
	})
	return j, nil
}

func (j *job) running() bool {
	select {
	case <-j.done:
		return false
	default:
		return true
	}
}

// status says in a sentence how a job is.
func (j *job) status() string {
	if j.running() {
		return fmt.Sprintf("running for %s", time.Since(j.begun).Round(time.Second))
	}
	took := j.took.Round(10 * time.Millisecond)
	switch {
	case j.ended.Load() != nil:
		return fmt.Sprintf("ended after %s: %s", took, *j.ended.Load())
	case j.err != nil:
		return fmt.Sprintf("it broke off after %s: %v", took, j.err)
	}
	return fmt.Sprintf("exit code %d, after %s", j.exit, took)
}

// markName is the variable that a job's processes have, also those that left
// its session; killScript ends all that have it.
const (
	markName   = "AGENTBOX_JOB"
	killScript = `for p in /proc/[0-9]*; do grep -qs "` + markName +
		`=$1" "$p/environ" && kill -s "$2" "${p#/proc/}" 2>/dev/null; done; :`
)

// end ends a job and all that it has started: politely, then by force.
func (s *Server) end(ctx context.Context, j *job, why string) {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	signal := func(name string) {
		_, err := s.svc.Exec(ctx, j.box.id, runtime.Process{Args: []string{
			"/bin/sh", "-c", killScript, "sh", j.mark, name,
		}, Workdir: "/"}, runtime.Streams{})
		if err != nil && !errors.Is(err, runtime.ErrState) && !errors.Is(err, runtime.ErrNotFound) {
			s.log.Warn("command not ended", "sandbox", j.box.id, "signal", name, "err", err)
		}
	}
	if !j.running() {
		return
	}
	j.ended.Store(&why)
	signal("TERM")
	select {
	case <-j.done:
	case <-time.After(grace):
	case <-ctx.Done():
	}
	signal("KILL")
	j.cancel()
	<-j.done
}

func (s *Server) forget(j *job) {
	s.jobs.mu.Lock()
	defer s.jobs.mu.Unlock()
	s.jobs.list = slices.DeleteFunc(s.jobs.list, func(other *job) bool { return other == j })
}

// stopJobs ends the commands in a sandbox, or all and for good.
func (s *Server) stopJobs(ctx context.Context, b *box) {
	s.jobs.mu.Lock()
	s.jobs.shut = s.jobs.shut || b == nil
	list := slices.Clone(s.jobs.list)
	s.jobs.mu.Unlock()
	var wg guard.WaitGroup
	for _, j := range list {
		if b == nil || j.box == b {
			wg.Go(func() { s.end(ctx, j, "its sandbox was given up") })
		}
	}
	wg.Wait()
	if b == nil {
		s.jobs.end()
		s.jobs.alive.Wait()
	}
}

// cutOff ends the commands in a sandbox whose processes a restore is about to end. A command
// that is only about to start must not do so after it.
func (s *Server) cutOff(b *box) {
	s.jobs.mu.Lock()
	list := slices.Clone(s.jobs.list)
	s.jobs.mu.Unlock()
	why := "a restore"
	for _, j := range list {
		if j.box == b && j.running() {
			j.ended.Store(&why)
			j.cancel()
			<-j.done
		}
	}
}

func (s *Server) job(id string) (*job, error) {
	s.jobs.mu.Lock()
	defer s.jobs.mu.Unlock()
	var ids []string
	for _, j := range s.jobs.list {
		if j.id == id {
			return j, nil
		}
		ids = append(ids, j.id)
	}
	return nil, &runtime.Error{
		Op: "job", ID: id, Err: runtime.ErrNotFound,
		Hint: fmt.Sprintf("There are the jobs %v; of finished ones only the last %d.", ids, maxFinished),
	}
}

type jobOutputArgs struct {
	Job    string `json:"job" jsonschema:"id that run_command has told"`
	Offset int64  `json:"offset,omitempty" jsonschema:"byte to begin at; the last answer told the next one"`
	Wait   int    `json:"wait,omitempty" jsonschema:"seconds to wait until there is more to read, or the job has ended, up to 60"`
}

func (s *Server) jobOutput(ctx context.Context, in jobOutputArgs) (reply, error) {
	j, err := s.job(in.Job)
	if err != nil {
		return reply{}, err
	}
	if in.Offset < 0 || in.Wait < 0 || in.Wait > 60 {
		return reply{}, fmt.Errorf("%w: give an offset from 0 on, and a wait from 0 to 60", runtime.ErrInvalid)
	}
	if more := j.out.beyond(in.Offset); more != nil && in.Wait > 0 {
		timer := time.NewTimer(time.Duration(in.Wait) * time.Second)
		defer timer.Stop()
		select {
		case <-more:
		case <-j.done:
		case <-timer.C:
		case <-ctx.Done():
			return reply{}, ctx.Err()
		}
	}
	status := j.status() // before the output, which is then all of it
	text, from, end := j.out.page(in.Offset, maxOutput)
	next := from + int64(len(text))
	r := reply{text: text, note: fmt.Sprintf("[job %s: %s; next offset %d of %d]", j.id, status, next, end)}
	if from > in.Offset {
		r.note += fmt.Sprintf("[what was before byte %d is no longer kept]", from)
	}
	return r, nil
}

type jobStopArgs struct {
	Job string `json:"job" jsonschema:"id that run_command has told"`
}

func (s *Server) jobStop(ctx context.Context, in jobStopArgs) (reply, error) {
	j, err := s.job(in.Job)
	if err != nil {
		return reply{}, err
	}
	s.end(context.WithoutCancel(ctx), j, "job_stop")
	return reply{text: fmt.Sprintf("job %s: %s", j.id, j.status())}, nil
}
