// Package group runs the same work in many sandboxes at once, and leaves none of
// them behind.
//
// It works over a runtime.Service, so that it does the same with the embedded
// engine and with a service. All members belong to one lease of the caller: what
// this package does not come to clean up, because it is killed or the service
// does not answer, goes when the caller's process does.
package group

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// MaxMembers bounds one group.
const MaxMembers = 1000

// usualParallel is how many members are at work at a time, unless told.
const usualParallel = 8

// cleanupTimeout bounds the cleaning up after one member.
const cleanupTimeout = 2 * time.Minute

// Phases of a member.
const (
	PhaseMake    = "make"
	PhaseWork    = "run"
	PhaseScore   = "score"
	PhaseCleanup = "cleanup"
	PhaseDone    = "done"
)

// Outcomes of a member.
const (
	Passed    = "passed"
	Failed    = "failed"
	Cancelled = "cancelled" // another one's failure, or the caller, came first
)

// Member is one sandbox of a group.
type Member struct {
	Number int    // from 1
	Name   string // of the sandbox
	ID     string // of the sandbox
	Env    []string
}

// A Step is done in each member.
type Step func(ctx context.Context, m Member) error

// Options say what a group is and does.
type Options struct {
	Name     string // of the group and of its lease; members are NAME-1, NAME-2; empty: made up
	Count    int
	Parallel int  // members at work at a time; 0: 8
	NoStop   bool // a failure does not cancel the others

	// Where members come from: forks of a checkpoint of Sandbox, of one that is
	// taken now when none is named; or, when it is not nil, what Create asks for.
	Sandbox string
	Fork    runtime.ForkOptions
	Create  *runtime.CreateRequest

	Work  Step                                                // nil: none
	Score func(ctx context.Context, m Member) (string, error) // of members whose work passed; nil: none
	// Gather is called once all are through, if none has failed or NoStop is set,
	// before any is handed over. Its error is the group's.
	Gather func(ctx context.Context, members []Result) error
	// Cleanup is called before a member is removed, whatever its outcome.
	Cleanup Step
	// KeepFor is how long the members that passed are handed over for; only their lease's
	// deadline removes them then.
	KeepFor time.Duration

	Log *slog.Logger // nil: slog.Default
}

// Result is the outcome of a member.
type Result struct {
	Member  int           `json:"member"` // from 1
	Name    string        `json:"name"`
	ID      string        `json:"id,omitempty"` // empty: it was never made
	Phase   string        `json:"phase"`        // done, or the one that it came to
	Outcome string        `json:"outcome"`
	Exit    *int          `json:"exit,omitempty"` // of its command, if that ended
	Score   string        `json:"score,omitempty"`
	Kept    bool          `json:"kept"` // it was handed over
	Took    time.Duration `json:"took_ns"`
	Error   string        `json:"error,omitempty"`
}

// Report is the outcome of a group.
type Report struct {
	Group   string    `json:"group"`
	Lease   string    `json:"lease"`            // its id
	Expires time.Time `json:"expires,omitzero"` // when those that are kept go
	Members []Result  `json:"members"`
	Errors  []string  `json:"errors"` // all there were; those of the work come before those of cleaning up
}

// Count counts the members with an outcome.
func (r Report) Count(outcome string) (n int) {
	for _, m := range r.Members {
		if m.Outcome == outcome {
			n++
		}
	}
	return n
}

// Error is a failure in a member.
type Error struct {
	Member, Phase string
	Err           error
}

func (e *Error) Error() string { return fmt.Sprintf("member %s: %s: %v", e.Member, e.Phase, e.Err) }
func (e *Error) Unwrap() error { return e.Err }

// ExitError is a command that did not end with 0. Its cause is no error of ours, so it is not
// unwrapped.
type ExitError struct {
	Code int
	Err  error // why, if that is known: it cannot be executed
}

func (e *ExitError) Error() string {
	if e.Err != nil {
		return e.Err.Error()
	}
	return fmt.Sprintf("its command ended with code %d", e.Code)
}

// run is one group under way.
type run struct {
	Options
	svc    runtime.Service
	lease  runtime.Lease
	cancel context.CancelCauseFunc

	mu      sync.Mutex
	results []Result
	work    []error // in the order in which they came
	cleanup []error
}

// errSibling is the cause for cancelling members that have done nothing wrong.
var errSibling = errors.New("another member has failed")

// Run makes the members, has each do its work, and cleans up. The error is the first
// that came up in the work, or else in the cleaning up; the report has all. Members
// are cleaned up after as soon as they are through, those that are to be kept once
// all are, if that cannot be.
func Run(ctx context.Context, svc runtime.Service, opts Options) (Report, error) {
	switch {
	case opts.Count < 1 || opts.Count > MaxMembers:
		return Report{}, fmt.Errorf("%w: %d members: from 1 to %d", runtime.ErrInvalid, opts.Count, MaxMembers)
	case (opts.Create == nil) == (opts.Sandbox == ""):
		return Report{}, fmt.Errorf("%w: members are forks of a sandbox, or made of an image: one of these",
			runtime.ErrInvalid)
	case opts.Parallel < 0 || opts.KeepFor < 0:
		return Report{}, fmt.Errorf("%w: a negative number", runtime.ErrInvalid)
	}
	opts.Name = cmp.Or(opts.Name, "g-"+strings.ToLower(rand.Text()[:6]))
	opts.Parallel = cmp.Or(opts.Parallel, usualParallel)
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	g := &run{Options: opts, svc: svc, results: make([]Result, opts.Count)}
	terms := runtime.LeaseTerms{Owner: runtime.OwnerPid}
	if r, ok := svc.(interface{ Remote() bool }); ok && r.Remote() { // it cannot see our process
		terms = runtime.LeaseTerms{Owner: runtime.OwnerHeartbeat, Interval: beatInterval}
	}
	var err error
	g.lease, err = svc.CreateLease(ctx, runtime.LeaseRequest{Name: opts.Name, LeaseTerms: terms})
	if err != nil {
		return Report{}, err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if terms.Owner == runtime.OwnerHeartbeat {
		id := g.lease.ID // the lease is another's once it is handed over
		guard.Go(func() { g.renew(ctx, id, stop) })
	}
	for i := range g.results {
		g.results[i] = Result{
			Member: i + 1, Name: fmt.Sprintf("%s-%d", g.Name, i+1), Phase: PhaseMake, Outcome: Cancelled,
		}
	}
	kept := g.perform(ctx)
	if !kept {
		// Releasing the lease removes what a member's own clean-up left.
		done, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if _, err := svc.ReleaseLease(done, g.lease.ID); err != nil && !errors.Is(err, runtime.ErrState) {
			g.failed(nil, PhaseCleanup, err)
		}
	}
	return g.report(ctx, kept)
}

// beatInterval is how long a lease stays whose owner, on another host, is silent.
const beatInterval = time.Minute

// renew renews the lease until ctx or the lease ends.
func (g *run) renew(ctx context.Context, id string, stop context.CancelCauseFunc) {
	tick := time.NewTicker(beatInterval / 6)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		_, err := g.svc.RenewLease(ctx, id, 0)
		if errors.Is(err, runtime.ErrState) || errors.Is(err, runtime.ErrNotFound) {
			stop(err)
			return
		}
		if err != nil && ctx.Err() == nil {
			g.Log.Warn("group lease not renewed", "group", g.Name, "err", err)
		}
	}
}

// perform does the work, and cleans up after members that are not kept. It reports whether the
// lease was handed over.
func (g *run) perform(parent context.Context) (kept bool) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	g.cancel = cancel
	if g.Create == nil && g.Fork.Checkpoint == "" {
		c, err := g.svc.Checkpoint(ctx, g.Sandbox, runtime.CheckpointOptions{
			Trigger: "fork", FilesOnly: g.Fork.FilesOnly, Lease: g.lease.ID,
		})
		if err != nil {
			g.failed(nil, PhaseMake, err)
			return false
		}
		g.Fork.Checkpoint = c.ID
	}
	members := new(guard.Group)
	members.SetLimit(g.Parallel)
	for i := range g.results {
		members.Go(func() error {
			if ctx.Err() == nil {
				g.member(ctx, &g.results[i])
			}
			return nil
		})
	}
	if err := members.Wait(); err != nil { // other errors are in g.work
		g.failed(nil, PhaseCleanup, err)
	}
	if g.Gather != nil && ctx.Err() == nil && (g.NoStop || len(g.work) == 0) {
		if err := g.Gather(ctx, slices.Clone(g.results)); err != nil {
			g.failed(nil, "gather", err)
			cancel(errSibling)
		}
	}
	if g.KeepFor > 0 && ctx.Err() == nil && slices.ContainsFunc(g.results, func(r Result) bool {
		return r.Outcome == Passed
	}) {
		l, err := g.svc.TransferLease(ctx, g.lease.ID, runtime.LeaseTerms{For: g.KeepFor})
		if err == nil {
			g.lease = l
			return true
		}
		g.failed(nil, "hand-over", err)
	}
	g.each(func(r *Result) { g.clean(parent, r) })
	return false
}

// each calls fn for all members that are still there.
func (g *run) each(fn func(*Result)) {
	group := new(guard.Group)
	group.SetLimit(g.Parallel)
	for i := range g.results {
		if r := &g.results[i]; r.Kept {
			group.Go(func() error { fn(r); return nil })
		}
	}
	if err := group.Wait(); err != nil { // other errors are in g.cleanup
		g.failed(nil, PhaseCleanup, err)
	}
}

// member brings one through all of its phases.
func (g *run) member(ctx context.Context, r *Result) {
	begun := time.Now()
	err := guard.Do(func() error { return g.phases(ctx, r) })
	r.Took = time.Since(begun)
	switch {
	case err == nil:
		r.Phase, r.Outcome = PhaseDone, Passed
	case ctx.Err() != nil:
		r.Outcome = Cancelled // whatever it says, it is no longer its own
		r.Error = context.Cause(ctx).Error()
	default:
		r.Outcome, r.Error = Failed, err.Error()
		g.failed(r, r.Phase, err)
		if !g.NoStop {
			g.cancel(errSibling)
		}
	}
	if r.ID == "" {
		return
	}
	if r.Kept = true; g.KeepFor == 0 || r.Outcome != Passed {
		g.clean(ctx, r)
	}
}

// phases are those of a member, until one fails.
func (g *run) phases(ctx context.Context, r *Result) error {
	err := g.make(ctx, r)
	m := Member{Number: r.Member, Name: r.Name, ID: r.ID, Env: []string{
		"AGENTBOX_GROUP=" + g.Name, fmt.Sprintf("AGENTBOX_MEMBER=%d", r.Member),
		fmt.Sprintf("AGENTBOX_MEMBERS=%d", g.Count),
	}}
	if err == nil && g.Work != nil {
		r.Phase = PhaseWork
		err = g.Work(ctx, m)
		var exit *ExitError
		switch {
		case errors.As(err, &exit):
			r.Exit = &exit.Code
		case err == nil:
			r.Exit = new(int)
		}
	}
	if err == nil && g.Score != nil {
		r.Phase = PhaseScore
		r.Score, err = g.Score(ctx, m)
	}
	return err
}

// make makes a member. After an error there is none.
func (g *run) make(ctx context.Context, r *Result) error {
	if g.Create == nil {
		opts := g.Fork
		opts.Count, opts.Names, opts.Lease, opts.Group = 1, []string{r.Name}, g.lease.ID, g.Name
		forks, err := g.svc.Fork(ctx, g.Sandbox, opts)
		if len(forks) > 0 {
			r.ID = forks[0].Sandbox.ID
		}
		return err
	}
	req := *g.Create
	req.Spec.Name, req.Lease, req.Group = r.Name, g.lease.ID, g.Name
	sb, err := g.svc.Create(ctx, req)
	if err != nil {
		return err
	}
	r.ID = sb.ID
	_, err = g.svc.Start(ctx, sb.ID, nil)
	return err
}

// clean removes a member, whatever the caller has come to.
func (g *run) clean(ctx context.Context, r *Result) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if g.Cleanup != nil {
		if err := g.Cleanup(ctx, Member{Number: r.Member, Name: r.Name, ID: r.ID}); err != nil {
			g.failed(r, PhaseCleanup, err)
		}
	}
	err := g.svc.Remove(ctx, r.ID, runtime.RemoveOptions{Force: true})
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		g.failed(r, PhaseCleanup, err) // its lease goes on trying
	}
	r.Kept = false
}

// failed notes an error, of a member or of the group.
func (g *run) failed(r *Result, phase string, err error) {
	name := ""
	if r != nil {
		name = r.Name
		err = &Error{Member: r.Name, Phase: phase, Err: err}
	} else {
		err = fmt.Errorf("group %s: %s: %w", g.Name, phase, err)
	}
	level := slog.LevelInfo // it is in the report, by its member
	if phase == PhaseCleanup {
		level = slog.LevelError
	}
	g.Log.Log(context.Background(), level, "group", "group", g.Name, "member", name, "phase", phase, "err", err)
	g.mu.Lock()
	defer g.mu.Unlock()
	if phase == PhaseCleanup {
		g.cleanup = append(g.cleanup, err)
	} else {
		g.work = append(g.work, err)
	}
}

// report returns the results, and the first error.
func (g *run) report(ctx context.Context, kept bool) (Report, error) {
	rep := Report{Group: g.Name, Lease: g.lease.ID, Members: g.results, Errors: []string{}}
	if kept {
		rep.Expires = g.lease.Expires
	}
	errs := g.work
	if err := context.Cause(ctx); err != nil {
		errs = append(errs, fmt.Errorf("group %s: %w", g.Name, err))
	}
	errs = append(errs, g.cleanup...)
	for _, err := range errs {
		rep.Errors = append(rep.Errors, err.Error())
	}
	if len(errs) == 0 {
		return rep, nil
	}
	return rep, errs[0]
}

// Group is some sandboxes with the same name of a group.
type Group struct {
	Name    string    `json:"name"`
	Members []string  `json:"members"` // names, newest first
	Running int       `json:"running"`
	Lease   string    `json:"lease,omitempty"` // of its newest member
	Created time.Time `json:"created"`         // its oldest member
}

// List finds the groups that have members, by name.
func List(ctx context.Context, svc runtime.Service) ([]Group, error) {
	all, err := svc.Sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	by := map[string]*Group{}
	list := []Group{}
	for _, sb := range all {
		if sb.Group == "" {
			continue
		}
		g := by[sb.Group]
		if g == nil {
			g = &Group{Name: sb.Group, Lease: sb.Lease}
			by[sb.Group] = g
		}
		g.Members, g.Created = append(g.Members, sb.Name), sb.Created
		if sb.Status == runtime.Running || sb.Status == runtime.Paused {
			g.Running++
		}
	}
	for _, g := range by {
		list = append(list, *g)
	}
	slices.SortFunc(list, func(a, b Group) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Remove removes all members of a group, and ends the lease that Run made for it:
// then it gets no more. An error with one does not keep it from the others.
func Remove(ctx context.Context, svc runtime.Service, name string) error {
	all, err := svc.Sandboxes(ctx)
	if err != nil {
		return err
	}
	var members []runtime.Sandbox
	ours := map[string]bool{}   // leases that hold members
	others := map[string]bool{} // and those that hold something else, too
	for _, sb := range all {
		if sb.Group == name {
			members = append(members, sb)
			ours[sb.Lease] = true
		} else if sb.Lease != "" {
			others[sb.Lease] = true
		}
	}
	if len(members) == 0 {
		return fmt.Errorf("group %q: %w", name, runtime.ErrNotFound)
	}
	var errs []error
	// A lease of another owner may have the group's name.
	if l, err := svc.Lease(ctx, name); err == nil && l.Name == name && l.State != "ended" &&
		ours[l.ID] && !others[l.ID] {
		if _, err := svc.ReleaseLease(ctx, l.ID); err != nil && !errors.Is(err, runtime.ErrState) {
			errs = append(errs, err)
		}
	}
	for _, sb := range members {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		if err := svc.Remove(ctx, sb.ID, runtime.RemoveOptions{Force: true}); err != nil &&
			!errors.Is(err, runtime.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
