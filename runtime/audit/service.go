package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	goruntime "runtime"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
)

// Engine is what stands behind the log: the Service of this host, and what only
// its own processes call.
type Engine interface {
	runtime.Local
	Subject(ctx context.Context, ref string, checkpoint bool) runtime.Subject
	RecoverInterrupted(ctx context.Context) (runtime.Recovery, error)
	ReviveWatches(ctx context.Context) error
	EndLeases(ctx context.Context) (did []string, err error)
	KeepLeases(ctx context.Context) error
	Reap(ctx context.Context, id string) error
	Watch(ctx context.Context, id string) error
	Upkeep(ctx context.Context, u engine.Upkeep)
	Release(id string)
}

// reads are the methods that are passed on without a record: they change
// nothing, or see to it that what is on record already comes to its end. A new
// method of the Engine is either here or in verbs.go, or this does not compile.
type reads interface {
	Wait(ctx context.Context, sandbox string) (exit int, err error)
	Logs(ctx context.Context, sandbox string, opts runtime.LogOptions, stdout, stderr io.Writer) error
	Sandbox(ctx context.Context, sandbox string) (runtime.Sandbox, error)
	Sandboxes(ctx context.Context) ([]runtime.Sandbox, error)
	CopyFrom(ctx context.Context, sandbox, path string, w io.Writer) error
	Stat(ctx context.Context, sandbox, path string) (runtime.PathStat, error)
	Checkpoints(ctx context.Context, filter runtime.CheckpointFilter) ([]runtime.Checkpoint, error)
	CheckpointInfo(ctx context.Context, checkpoint string) (runtime.Checkpoint, error)
	Diff(ctx context.Context, req runtime.DiffRequest) (runtime.Diff, error)
	History(ctx context.Context, sandbox string, opts runtime.HistoryOptions) ([]runtime.HistoryEntry, error)
	PlanRestore(ctx context.Context, sandbox string, opts runtime.RestoreOptions) (runtime.RestorePlan, error)
	Usage(ctx context.Context) (runtime.Usage, error)
	Stats(ctx context.Context, opts runtime.StatsOptions) ([]runtime.Stats, error)
	Images(ctx context.Context) ([]runtime.Image, error)
	InspectImage(ctx context.Context, ref string) (runtime.ImageDetails, error)
	Events(ctx context.Context, sandbox string, opts runtime.EventOptions, each func(runtime.Event) error) error

	Effects(ctx context.Context, sandbox string, all bool) ([]runtime.Effect, error)
	Lease(ctx context.Context, lease string) (runtime.Lease, error)
	Leases(ctx context.Context, all bool) ([]runtime.Lease, error)
	Policies(ctx context.Context) ([]runtime.PolicyEntry, error)
	Policy(ctx context.Context, name string) (*policy.Policy, error)

	Subject(ctx context.Context, ref string, checkpoint bool) runtime.Subject
	// What these do by themselves is on record by way of Deeds.
	RecoverInterrupted(ctx context.Context) (runtime.Recovery, error)
	Upkeep(ctx context.Context, u engine.Upkeep)
	ReviveWatches(ctx context.Context) error
	EndLeases(ctx context.Context) (did []string, err error)
	KeepLeases(ctx context.Context) error
	Reap(ctx context.Context, id string) error
	Watch(ctx context.Context, id string) error
	Release(id string)
	Close() error
}

// Service is an Engine whose verbs are on record.
type Service struct {
	reads
	next Engine
	log  *Log
	by   string
}

var _ Engine = (*Service)(nil)

// New returns the Service before next. by says which process this is, for verbs
// that nobody else has asked for: "command", "mcp", "auto".
func New(next Engine, log *Log, by string) *Service {
	return &Service{reads: next, next: next, log: log, by: by}
}

// frees are the verbs that go on without the log: on a full disk they are the
// way out, and what runs amok must be stoppable.
var frees = map[string]bool{"checkpoint rm": true, "image logout": true, "image prune": true, "image rm": true, "kill": true, "pause": true, "prune": true,
	"lease end": true, "lease release": true, "lease renew": true, "lease transfer": true, "recover": true, "rm": true, "stop": true, "volume rm": true}

// on is a record about a sandbox, of a checkpoint with at.
func (s *Service) on(ctx context.Context, verb, ref string, at bool) Record {
	r := Record{Verb: verb, Ref: Clip(ref)}
	r.about(s.next.Subject(ctx, ref, at))
	return r
}

func (r *Record) about(sub runtime.Subject) {
	r.Sandbox, r.Name, r.Checkpoint = sub.Sandbox, Clip(sub.Name), sub.Checkpoint
}

// box notes which sandbox it turned out to be.
func (r *Record) box(sb runtime.Sandbox) {
	if sb.ID != "" {
		r.Sandbox, r.Name = sb.ID, Clip(sb.Name)
	}
}

// at notes which checkpoint it turned out to be.
func (r *Record) at(c runtime.Checkpoint) {
	if c.ID != "" {
		r.Checkpoint, r.Sandbox, r.Name = c.ID, c.Sandbox, Clip(c.SandboxName)
	}
}

// do is Do for who has called the verb.
func (s *Service) do(ctx context.Context, r Record, do func(r *Record) error) error {
	err := s.log.Do(s.who(ctx), r, do)
	if p := (*guard.Panic)(nil); errors.As(err, &p) {
		// The process goes on, so that nobody else would do it: what the verb has
		// frozen must not stand still until the next command.
		goruntime.GC() // with which locks go that nobody can let go any more
		if _, e := s.next.RecoverInterrupted(context.WithoutCancel(ctx)); e != nil {
			slog.Error("what a panic left is not brought to its end", "verb", r.Verb, "ref", r.Ref, "err", e)
		}
	}
	return err
}

// Do has a verb done between its two records. do may add to the second one what
// came of it.
func (l *Log) Do(who Who, r Record, do func(r *Record) error) error {
	r.Phase, r.Who = Begin, who
	seq, err := l.Append(r, false)
	if err == nil {
		err = failpoint.Hit("audit.after-begin")
	}
	if err != nil && !frees[r.Verb] {
		return &fault.Error{Op: r.Verb, ID: r.Ref, Err: fmt.Errorf("nothing was done, as it cannot be put on record: %w", err),
			Hint: "Everything that may change something is noted in " + l.Dir() + " first."}
	}
	if err != nil {
		slog.Error("this is not on record", "verb", r.Verb, "ref", r.Ref, "err", err)
	}
	done := r
	done.Of = seq
	err = guard.Do(func() error { return do(&done) })
	done.Phase, done.Outcome = End, Outcome(err)
	e := failpoint.Hit("audit.before-end")
	if e == nil {
		_, e = l.Append(done, true)
	}
	if e != nil && !frees[r.Verb] {
		e = fmt.Errorf("its end is not on record: %w", e)
		if err == nil {
			e = &fault.Error{Op: r.Verb, ID: r.Ref, Err: fmt.Errorf("it is done, but %w", e)}
		}
		return errors.Join(err, e)
	}
	if e != nil {
		slog.Error("its end is not on record", "verb", r.Verb, "ref", r.Ref, "err", e)
	}
	return err
}

// made is do for a verb that returns something.
func made[T any](ctx context.Context, s *Service, r Record, do func(r *Record) (T, error)) (out T, err error) {
	err = s.do(ctx, r, func(r *Record) (err error) {
		out, err = do(r)
		return err
	})
	return out, err
}

// outcomes are the codes of errors, as the API has them.
var outcomes = []struct {
	err  error
	code string
}{
	{fault.ErrNotFound, "not_found"}, {fault.ErrExists, "exists"}, {fault.ErrState, "state"}, {fault.ErrDenied, "denied"}, {fault.ErrUnsupported, "unsupported"},
	{fault.ErrCorrupt, "corrupt"}, {fault.ErrBusy, "busy"}, {fault.ErrInvalid, "invalid"}, {runtime.ErrDetached, "detached"},
	{context.Canceled, "canceled"}, {context.DeadlineExceeded, "deadline"},
}

// Outcome is the code of an error: its text may have in it what is secret.
func Outcome(err error) string {
	if err == nil {
		return "ok"
	}
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			return o.code
		}
	}
	return "internal"
}

// who asks for a verb.
func (s *Service) who(ctx context.Context) Who { return whoAsks(ctx, s.by) }

// whoAsks is whom this process does something for, or it itself.
func whoAsks(ctx context.Context, by string) Who {
	if c, ok := runtime.CallerOf(ctx); ok {
		if c.Address != "" {
			return Who{Client: Clip(c.Client), Address: c.Address, By: "service"}
		}
		return Who{UID: &c.UID, Pid: c.Pid, Login: loginOf(c.Pid), By: "service"}
	}
	return Self(by)
}

// Self is this process.
func Self(by string) Who {
	uid := uint32(os.Getuid())
	return Who{UID: &uid, Pid: os.Getpid(), Login: loginOf(os.Getpid()), By: by}
}

// loginOf is the user who had logged in to what a process is part of; nil: nobody,
// or the kernel does not say.
func loginOf(pid int) *uint32 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/loginuid", pid))
	if err != nil {
		return nil
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
	uid := uint32(n)
	if err != nil || uid == ^uint32(0) {
		return nil
	}
	return &uid
}

// maxText bounds what of a caller's is on record.
const maxText = 256

// userinfo is that of a URL typed where a name belongs, which may be a password.
var userinfo = lazy.Regexp(`://[^/@\s]*@`)

// Clip bounds what of a caller's text goes on record, and takes the password of a URL out of it.
func Clip(s string) string {
	if strings.Contains(s, "://") {
		s = userinfo().ReplaceAllString(s, "://…@")
	}
	if len(s) <= maxText {
		return s
	}
	n := maxText
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
