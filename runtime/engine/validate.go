package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/project"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/store"
)

// Validators judge the result of an apply before it reaches a directory. Each runs in a fork of the
// sandbox of its own, whose workspaces show the directories as the apply would leave them. Their
// rules are the owner's: those of the policy that the sandbox was created under, and of the file
// .agentbox.yaml as the directory itself has it, not as the sandbox shows it.

// maxSaid bounds the output of a validator that is kept: its end.
const maxSaid = 8 << 10

// drainWait bounds the wait for the last output of a validator that has ended.
const drainWait = 10 * time.Second

// validator is one validator of an apply.
type validator struct {
	policy.Validator
	from string // where its rule stands
	dir  string // where it runs: a workspace, by its path in the sandbox
}

// applyRules are the rules of an apply.
type applyRules struct {
	policy.Apply
	validators []validator
	canaries   []canary
}

// canary is a canary of an apply.
type canary struct {
	validator
	rule policy.Canary
	of   string // the workspace with the rule; empty: the policy has it
}

// takes reports whether the canary takes a path.
func (c canary) takes(workspace, rel string) bool {
	// The patterns of a directory's rules are relative to that directory.
	return (c.of == "" || c.rule.Workspace != "" || c.of == workspace) && c.rule.Takes(workspace, rel)
}

// readRules reads the rules of an apply: those of the sandbox's policy first.
func (w *workspaces) readRules(s runtime.Spec) (rules applyRules, err error) {
	add := func(from, dir, of string, a policy.Apply) {
		rules.Apply = rules.With(a)
		for _, v := range a.Validators {
			rules.validators = append(rules.validators, validator{v, from, dir})
		}
		for _, c := range a.Canaries {
			rules.canaries = append(rules.canaries, canary{validator{c.Validator, from, dir}, c, of})
		}
	}
	p, err := recorded(s)
	if err != nil {
		return rules, err
	}
	if p != nil {
		add("policy "+p.Name, w.chosen[0].Target, "", p.Rules.Apply)
	}
	for _, v := range w.chosen {
		file, err := readProject(v.Lower)
		if err != nil {
			return rules, rulesUnknown(v.Lower, err)
		}
		add(filepath.Join(v.Lower, project.Name), v.Target, v.Target, file.Apply)
	}
	return rules, nil
}

// rulesUnknown is the error of an apply to a directory whose own rules cannot be read.
func rulesUnknown(dir string, err error) error {
	return hint(fmt.Errorf("%s: %w", filepath.Join(dir, project.Name), err),
		"Its rules cannot be read. Correct the file, or remove it from the directory.")
}

func readProject(dir string) (project.File, error) {
	root, err := apply.OpenRoot(dir) // no link may have taken its place
	if err != nil {
		return project.File{}, err
	}
	defer root.Close()
	data, err := project.Read(root.Proc())
	if err != nil {
		return project.File{}, err
	}
	file, err := project.Parse(data)
	if err != nil || !file.Apply.Asks() {
		return file, err
	}
	// A change of what a link leads to would not be seen as one of the rules.
	if _, err := os.Readlink(filepath.Join(root.Proc(), project.Name)); err == nil {
		return file, fmt.Errorf("%w: a file with rules for apply must not be a symlink", runtime.ErrInvalid)
	}
	return file, nil
}

// review computes the risk of a planned apply and enforces the rules: first the approval, then the
// validators.
func (w *workspaces) review(
	ctx context.Context, s *apply.Staged, opts runtime.ApplyOptions, out *runtime.Applied,
) error {
	removed, err := s.Removed(ctx)
	if err != nil {
		return err
	}
	places := w.home().Places
	risk := apply.RiskOf(places, out.Changes, removed)
	out.Risk = &risk
	why := w.rules.approvalOf(risk, places, out.Changes, removed)
	if len(why) > 0 {
		if out.Approval, err = w.ask(ctx, s, *out, why); err != nil {
			return err
		}
		if !opts.DryRun && out.Approval.Approved.IsZero() {
			return notApproved(*out.Approval, strings.Join(why, "; "))
		}
	}
	if opts.DryRun {
		return nil
	}
	return w.validate(ctx, s, out)
}

// begin uses up the approval of an apply that is about to change its directories.
func (w *workspaces) begin(ctx context.Context, out runtime.Applied) error {
	if out.Approval == nil {
		return nil
	}
	return w.approvals().use(ctx, *out.Approval)
}

// approvalOf returns the reasons why an apply needs an approval; none: it needs none.
func (r applyRules) approvalOf(
	risk runtime.Risk, places []apply.Place, list []runtime.Change, removed []string,
) (why []string) {
	if r.Approve.At > 0 && int64(risk.Score) >= r.Approve.At {
		why = append(why, fmt.Sprintf("its risk is %d, and from %d on a person has to approve it", risk.Score,
			r.Approve.At))
	}
	covered := func(p, rule string) []string {
		return append(why, fmt.Sprintf("it changes %s, which apply.approve.paths has (%s)", p, rule))
	}
	for _, p := range removed {
		if rule := r.Approve.Covers(apply.RelativeTo(places, p)); rule != "" {
			return covered(p, rule)
		}
	}
	link := func(s *runtime.FileState) bool { return s != nil && s.Type == string(overlay.TypeSymlink) }
	for _, c := range list {
		covers := r.Approve.Covers
		if link(c.Old) || link(c.New) {
			covers = r.Approve.CoversBelow
		}
		p := apply.PathOf(c)
		if rule := covers(apply.RelativeTo(places, p)); rule != "" {
			return covered(p, rule)
		}
	}
	return why
}

// ask asks for the approval of an apply, or finds it.
func (w *workspaces) ask(
	ctx context.Context, s *apply.Staged, out runtime.Applied, why []string,
) (*runtime.Approval, error) {
	plan, err := s.Sum(ctx)
	if err != nil {
		return nil, err
	}
	a := runtime.Approval{
		Plan: plan, Sandbox: w.sb.ID, SandboxName: w.sb.Name, Checkpoint: w.row.ID, Changes: len(out.Changes),
		Risk: *out.Risk, Why: why, Lasts: w.rules.Approve.Expires, Some: []string{},
	}
	if a.Lasts == 0 {
		a.Lasts = policy.DefaultApproval
	}
	for _, at := range out.Workspaces {
		a.Originals = append(a.Originals, at.Original)
	}
	for _, c := range out.Changes[:min(len(out.Changes), maxSome)] {
		a.Some = append(a.Some, c.Change+" "+c.Path)
	}
	a, err = w.approvals().ask(ctx, a)
	return &a, err
}

// planned lists the validators and canaries that are yet to run.
func (r applyRules) planned(out *runtime.Applied) {
	for _, v := range r.validators {
		out.Validators = append(out.Validators, runtime.Validated{Name: v.Name, From: v.from})
	}
	for _, c := range r.canaries {
		out.Canaries = append(out.Canaries, runtime.Validated{Name: c.Name, From: c.from})
	}
}

// parts are the canaries as an apply makes them. Their checks see the directories as they are then.
func (w *workspaces) parts(out *runtime.Applied) (list []apply.Canary) {
	for _, c := range w.rules.canaries {
		list = append(list, apply.Canary{Takes: c.takes, Check: func(ctx context.Context) error {
			got, err := w.restores.validate(ctx, w.row, c.validator, w.eachWorkspace(func(v runtime.Volume) error {
				return errors.Join(emptyUpper(v), apply.HideScratch(v.Path, v.Lower))
			}))
			if err != nil {
				return fmt.Errorf("canary %q of %s: %w", c.Name, c.from, err)
			}
			out.Canaries = append(out.Canaries, got)
			w.log.Info("canary checked", "sandbox", w.sb.ID, "canary", c.Name, "exit", *got.Exit, "took", got.Took)
			if !got.OK() {
				return refusedBy("canary", c.validator, got, "all is taken back")
			}
			return nil
		}})
	}
	return list
}

// eachWorkspace calls fn for each workspace of a fork, which has those that are applied.
func (w *workspaces) eachWorkspace(fn func(runtime.Volume) error) func(context.Context, runtime.Container) error {
	return func(_ context.Context, c runtime.Container) error {
		for _, v := range w.chosen {
			if !slices.ContainsFunc(c.Volumes, func(have runtime.Volume) bool {
				return have.Target == v.Target && have.Lower == v.Lower
			}) {
				return fmt.Errorf("%w: checkpoint %s gives its forks no workspace %s", runtime.ErrUnsupported,
					short(w.row.ID), v.Target)
			}
		}
		for _, v := range c.Volumes {
			if !v.Workspace() {
				continue
			}
			if err := fn(v); err != nil {
				return fmt.Errorf("lay out %s: %w", v.Target, err)
			}
		}
		return nil
	}
}

// validate runs all validators over the staged result of an apply, up to the first that fails.
func (w *workspaces) validate(ctx context.Context, s *apply.Staged, out *runtime.Applied) error {
	for _, v := range w.rules.validators {
		got, err := w.restores.validate(ctx, w.row, v, w.eachWorkspace(func(v runtime.Volume) error {
			if err := emptyUpper(v); err != nil {
				return err
			}
			return s.Lay(ctx, v.Target, v.Path)
		}))
		if err != nil {
			return fmt.Errorf("validator %q of %s: %w", v.Name, v.from, err)
		}
		out.Validators = append(out.Validators, got)
		w.log.Info("apply validated", "sandbox", w.sb.ID, "validator", v.Name, "exit", *got.Exit, "took", got.Took)
		if !got.OK() {
			return refusedBy("validator", v, got, "nothing was applied")
		}
	}
	return nil
}

// refusedBy is the error of an apply that a validator or a canary refuses. It has the output.
func refusedBy(what string, v validator, got runtime.Validated, result string) error {
	how := fmt.Sprintf("ended with exit code %d", *got.Exit)
	if got.TimedOut {
		how = fmt.Sprintf("did not end within %s", v.Timeout)
	}
	text := fmt.Sprintf("%s %q of %s %s; %s", what, v.Name, v.from, how, result)
	if got.Output != "" {
		text += ":\n  | " + strings.ReplaceAll(strings.TrimRight(got.Output, "\n"), "\n", "\n  | ")
	}
	return fmt.Errorf("%w: %s", runtime.ErrDenied, text)
}

// emptyUpper empties the upperdir of a workspace, so that it shows the directory below as it is.
func emptyUpper(v runtime.Volume) error {
	list, err := os.ReadDir(v.Path)
	if err != nil {
		return err
	}
	for _, e := range list {
		if err := os.RemoveAll(filepath.Join(v.Path, e.Name())); err != nil {
			return err
		}
	}
	return apply.TakeAfter(v.Path, v.Lower)
}

// errTried makes the fork of a validator roll back.
var errTried = errors.New("the validator has ended")

// validate runs a validator in a fork of a checkpoint, once lay has laid out the workspaces of the
// fork. The fork has the files of the checkpoint and none of its processes, and stays under way all
// the time: if this process is killed, the next command removes it.
func (rs *restores) validate(
	ctx context.Context, row store.Checkpoint, v validator, lay func(context.Context, runtime.Container) error,
) (out runtime.Validated, err error) {
	out = runtime.Validated{Name: v.Name, From: v.from}
	var id string
	try := trial{
		files: true, offline: v.Network == policy.ValidatorNone,
		change: func(s *runtime.Spec) { validates(s, row, v) },
		look: func(_ context.Context, r *restoration) error {
			id = r.sb.ID
			if err := errors.Join(lay(ctx, r.c), failpoint.Hit("validate.before-run")); err != nil {
				return err
			}
			if err := rs.runValidator(ctx, r, v, &out); err != nil {
				return err
			}
			return errors.Join(errTried, failpoint.Hit("validate.after-run"))
		},
	}
	_, err = rs.forkOne(ctx, row, "", runtime.ForkOptions{Count: 1, FilesOnly: true}, nil, &try)
	if id != "" { // the rollback may have failed
		if _, gone := rs.store.Sandbox(context.WithoutCancel(ctx), id); !errors.Is(gone, runtime.ErrNotFound) {
			return out, hint(fmt.Errorf("its sandbox %s is not removed: %w", short(id), err), "agentbox rm -f "+short(id))
		}
	}
	if out.Exit == nil || !errors.Is(err, errTried) {
		return out, err
	}
	return out, nil
}

// validates makes the spec of a fork that of a validator: it runs nothing else, has no secrets, and
// what is shared with other sandboxes is read-only.
func validates(s *runtime.Spec, row store.Checkpoint, v validator) {
	s.Name = row.SandboxName[:min(len(row.SandboxName), 40)] + "-validate-" + s.ID[:6]
	s.Args, s.Workdir, s.Terminal, s.OpenStdin = v.Run, v.dir, false, false
	s.AutoRemove, s.Restart, s.Lifetime, s.CheckpointEvery = false, runtime.Restart{}, runtime.Lifetime{}, ""
	s.Steps, s.Secrets = runtime.StepsOff, nil
	s.Labels = maps.Clone(s.Labels) // which the policy may ask for
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	s.Labels[runtime.LabelValidates] = row.SandboxID
	s.Mounts = slices.Clone(s.Mounts)
	for i := range s.Mounts {
		if t := s.Mounts[i].Type; t == "bind" || t == "volume" {
			s.Mounts[i].ReadOnly = true
		}
	}
}

// runValidator starts the sandbox of a validator, and waits until it has ended or its time is over.
func (rs *restores) runValidator(ctx context.Context, r *restoration, v validator, out *runtime.Validated) error {
	if err := r.c.Stage.AllowCreate(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, v.Timeout)
	defer cancel()
	began, said := time.Now(), new(tail)
	ended := func(exit int) {
		out.Exit, out.Took, out.Output = &exit, time.Since(began), said.String()
	}
	serve, err := r.sb.host.Start(ctx, r.sb.ID, runtime.StartOptions{
		Env: identity(r.spec, 1), Streams: &runtime.Streams{Stdout: said, Stderr: said},
	})
	var exec *runtime.ExecError
	if errors.As(err, &exec) {
		_, _ = said.Write([]byte(err.Error())) // never fails
		ended(exec.Code)
		return nil
	}
	if err != nil {
		return err
	}
	served := guard.Start(serve)
	back := runtime.Aside(ctx) // it may take long
	exit, err := r.sb.host.Wait(ctx, r.sb.ID)
	back()
	if out.TimedOut = errors.Is(ctx.Err(), context.DeadlineExceeded); out.TimedOut {
		exit.Code = 128 + int(unix.SIGKILL)
	} else if err != nil {
		return err
	}
	if err := r.sb.host.Stop(context.WithoutCancel(ctx), r.sb.ID, runtime.StopOptions{}); err != nil {
		return err
	}
	select {
	case err = <-served:
		if err != nil && !out.TimedOut {
			return fmt.Errorf("read its output: %w", err)
		}
	case <-time.After(drainWait): // what it printed last is missing
	}
	if exit.OOMKilled {
		_, _ = said.Write([]byte("\nkilled for lack of memory\n")) // never fails
	}
	ended(exit.Code)
	return nil
}

// tail is a writer that keeps the end of its input.
type tail struct {
	mu   sync.Mutex
	kept []byte
	lost bool
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p[max(0, len(p)-maxSaid):]...)
	if over := len(t.kept) - maxSaid; over > 0 {
		t.kept, t.lost = append(t.kept[:0], t.kept[over:]...), true
	}
	t.lost = t.lost || len(p) > maxSaid
	return len(p), nil
}

// String returns what is kept, from the beginning of a line if the beginning is lost.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	kept := t.kept
	if t.lost {
		if i := bytes.IndexByte(kept, '\n'); i >= 0 {
			kept = kept[i+1:]
		}
		kept = append([]byte("...\n"), kept...)
	}
	return fault.Printable(strings.ToValidUTF8(string(kept), "\ufffd"))
}
