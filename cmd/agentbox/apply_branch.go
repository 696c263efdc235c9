package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// A commit on another branch touches neither the directory nor its index. It is what the sandbox has
// changed, carried over to the branch as `git cherry-pick` would: of the branch's own tree two more
// are made, one with what the directory has at the paths that come and one with what is to come, and
// the step from one to the other is merged into the branch. So the owner's edits that are in no commit
// do not get into it. The repository gets objects; only the last step, of the branch alone, shows.

// A branchCommit is a commit that no branch points to yet.
type branchCommit struct {
	*repository
	name     string
	tip      string // of the branch, or of HEAD for a new one
	old      string // of the branch; zeros: it is new
	index    string // a file of its own
	commitID string
}

// onBranch makes the commits of a plan on a branch, of all repositories or of none.
func (a *app) onBranch(
	ctx context.Context, opts applyOptions, what string, list []*repository, svc runtime.Service, shown bool,
) error {
	look := opts.ApplyOptions
	look.DryRun, look.Patch = true, true
	plan, err := svc.Apply(ctx, what, look)
	if err != nil {
		return err
	}
	if err := errors.Join(heldBack(opts, plan, a.stderr), unjudged(plan)); err != nil {
		return err
	}
	parts := map[string]bool{}
	for _, p := range opts.Picks {
		parts[pathOf(p.Path, p.PathB64)] = p.Hunks != nil
	}
	temp, err := os.MkdirTemp("", "agentbox-branch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp) //nolint:errcheck // only temporary
	var commits []*branchCommit
	for i, r := range list {
		if slices.ContainsFunc(commits, func(b *branchCommit) bool { return b.top == r.top }) {
			return &runtime.Error{Err: fmt.Errorf("%w: two workspaces are in the repository %s", runtime.ErrUnsupported,
				r.top), Hint: "Commit one workspace after the other: --workspace PATH."}
		}
		if r.as != nil {
			if err := os.Chown(temp, int(r.as.Uid), int(r.as.Gid)); err != nil {
				return err
			}
		}
		r.parts = parts
		b := &branchCommit{repository: r, name: opts.Branch, index: filepath.Join(temp, fmt.Sprint("index", i))}
		if err := b.find(ctx); err != nil {
			return err
		}
		if err := b.build(ctx, what, plan, opts.commitMessage(plan), svc); err != nil {
			return fmt.Errorf("no commit was made on %s: %w", opts.Branch, err)
		}
		if b.commitID != "" {
			commits = append(commits, b)
		}
	}
	again, err := svc.Apply(ctx, what, look)
	if err != nil {
		return err
	}
	if !slices.EqualFunc(plan.Changes, again.Changes, func(a, b runtime.Change) bool {
		return a.Seen == b.Seen && a.Path == b.Path && a.Patch == b.Patch
	}) {
		return &runtime.Error{Err: fmt.Errorf("%w: %s was changed meanwhile; no commit was made", runtime.ErrState,
			originals(plan)), Hint: "Try again when nothing writes to it."}
	}
	for i, b := range commits {
		if err := b.publish(ctx); err != nil {
			for _, done := range commits[:i] {
				err = errors.Join(err, done.takeBack(context.WithoutCancel(ctx)))
			}
			return err
		}
	}
	if err := showCommitted(opts, plan, a.stdout, shown); err != nil {
		return err
	}
	for _, b := range commits {
		text, err := b.git(ctx, nil, "log", "-1", "--format=%h %s", b.commitID)
		if err != nil {
			return err
		}
		fmt.Fprintln(a.stderr, printable(fmt.Sprintf("committed %s to branch %s of %s; the directory is as it was",
			strings.TrimSpace(text), b.name, b.top)))
	}
	if len(commits) == 0 {
		fmt.Fprintln(a.stderr, printable("nothing to commit on "+opts.Branch))
	}
	return nil
}

// unjudged refuses a commit on a branch if a rule has to judge the apply first: rules judge what reaches
// the directory, and a merge of the branch would get around them.
func unjudged(plan runtime.Applied) error {
	if len(plan.Validators) == 0 && len(plan.Canaries) == 0 && plan.Approval == nil {
		return nil
	}
	return &runtime.Error{
		Err: fmt.Errorf("%w: a commit on a branch is not judged by the rules that %s has for an apply", runtime.ErrDenied,
			originals(plan)), Hint: "Leave --branch out: apply judges what comes, and --git-commit commits it.",
	}
}

// showCommitted lists what was committed.
func showCommitted(opts applyOptions, plan runtime.Applied, stdout io.Writer, shown bool) error {
	for i := range plan.Changes {
		plan.Changes[i].Patch, plan.Changes[i].Seen, plan.Changes[i].Hunks = "", "", 0
	}
	switch {
	case opts.Format == formatJSON:
		return printJSON(stdout, plan)
	case shown:
		return nil
	}
	return printApplied(plan, stdout, false)
}

// find looks for the branch, which must be checked out nowhere.
func (b *branchCommit) find(ctx context.Context) error {
	// Git would take "@{-1}" as the name of another branch.
	if name, err := b.git(ctx, nil, "check-ref-format", "--branch", b.name); err != nil ||
		strings.TrimSuffix(name, "\n") != b.name {
		return fmt.Errorf("%w: git does not accept %q as the name of a branch", runtime.ErrInvalid, b.name)
	}
	trees, err := b.git(ctx, nil, "worktree", "list", "--porcelain")
	if err != nil {
		return err
	}
	if slices.Contains(strings.Split(trees, "\n"), "branch refs/heads/"+b.name) {
		return &runtime.Error{Err: fmt.Errorf("%w: branch %s of %s is checked out", runtime.ErrState, b.name, b.top),
			Hint: "Leave --branch out to commit on the current branch, or name another one."}
	}
	if to, err := b.git(ctx, nil, "symbolic-ref", "-q", "refs/heads/"+b.name); err == nil {
		return &runtime.Error{Err: fmt.Errorf("%w: branch %s of %s is another name of %s", runtime.ErrState, b.name, b.top,
			strings.TrimSpace(to)), Hint: "Name a branch that is none: a commit would move the other one."}
	}
	text, err := b.git(ctx, nil, "rev-parse", "-q", "--verify", "HEAD^{commit}")
	if err != nil {
		return &runtime.Error{Err: fmt.Errorf("%w: %s has no commit yet", runtime.ErrState, b.top),
			Hint: "Make a first commit, or leave --branch out."}
	}
	b.tip, b.old = strings.TrimSpace(text), strings.Repeat("0", len(strings.TrimSpace(text)))
	if text, err = b.git(ctx, nil, "rev-parse", "-q", "--verify", "refs/heads/"+b.name+"^{commit}"); err == nil {
		b.tip = strings.TrimSpace(text)
		b.old = b.tip
	}
	return nil
}

// build makes the commit, unless the branch has all of it already.
func (b *branchCommit) build(
	ctx context.Context, what string, plan runtime.Applied, message string, svc runtime.Service,
) error {
	paths, err := b.known(ctx, b.paths(plan))
	if err != nil || len(paths) == 0 {
		return err
	}
	if _, err := b.indexed(ctx, nil, "read-tree", b.tip); err != nil {
		return err
	}
	update := []string{"update-index", "--add", "--remove", "--replace", "-z", "--stdin"}
	wanted := map[string]bool{}
	for _, p := range paths {
		wanted[p] = true
	}
	var there []string // without directories that a file replaces
	for _, c := range plan.Changes {
		if name, ok := b.pathOf(plan, c); ok && wanted[name] && (c.Old == nil || c.Old.Type != "dir") {
			there = append(there, name)
		}
	}
	if _, err := b.indexed(ctx, nulled(there), update...); err != nil {
		return err
	}
	before, err := b.indexed(ctx, nil, "write-tree")
	if err != nil {
		return err
	}
	var removed, added strings.Builder
	for _, c := range plan.Changes {
		name, ok := b.pathOf(plan, c)
		if !ok || !wanted[name] && c.Change != "T" {
			continue
		}
		mode, id := "", ""
		if c.New != nil {
			if mode, id, err = b.blob(ctx, what, plan, c, name, svc); err != nil {
				return fmt.Errorf("%s: %w", quotePath(name), err)
			}
		}
		if fmt.Fprintf(&removed, "0 %s\t%s\x00", strings.Repeat("0", len(b.tip)), name); mode != "" {
			fmt.Fprintf(&added, "%s %s\t%s\x00", mode, id, name)
		}
	}
	in := strings.NewReader(removed.String() + added.String())
	if _, err := b.indexed(ctx, in, "update-index", "--add", "--replace", "-z", "--index-info"); err != nil {
		return err
	}
	after, err := b.indexed(ctx, nil, "write-tree")
	if err != nil {
		return err
	}
	return b.merge(ctx, strings.TrimSpace(before), strings.TrimSpace(after), message)
}

// merge commits the difference of two trees on the branch.
func (b *branchCommit) merge(ctx context.Context, before, after, message string) error {
	commit := func(tree string, more ...string) (string, error) {
		text, err := b.git(ctx, nil, append([]string{"commit-tree", tree}, more...)...)
		return strings.TrimSpace(text), err
	}
	base, err := commit(before, "-m", "base")
	if err != nil {
		return err
	}
	ours, err := commit(b.tip+"^{tree}", "-p", base, "-m", "ours")
	if err != nil {
		return err
	}
	theirs, err := commit(after, "-p", base, "-m", "theirs")
	if err != nil {
		return err
	}
	text, err := b.git(ctx, nil, "merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", ours, theirs)
	list := nulls(text)
	switch {
	case err != nil && len(list) > 1:
		return &runtime.Error{Err: fmt.Errorf("%w: branch %s has changed the same lines or files: %s", runtime.ErrState,
			b.name, clipNames(list[1:])), Hint: "Name a new branch, or apply to the directory and merge there."}
	case err != nil:
		return &runtime.Error{Err: err, Hint: "A commit on another branch needs git 2.38 or newer."}
	case len(list) == 0:
		return errors.New("git merge-tree printed no tree")
	}
	tree, err := b.git(ctx, nil, "rev-parse", b.tip+"^{tree}")
	if err != nil || strings.TrimSpace(tree) == list[0] {
		return err
	}
	args := []string{"-p", b.tip, "-m", message}
	if sign, _ := b.git(ctx, nil, "config", "--type=bool", "commit.gpgSign"); strings.TrimSpace(sign) == "true" {
		args = append(args, "-S")
	}
	b.commitID, err = commit(list[0], args...)
	return err
}

// publish moves the branch, if it is still where it was.
func (b *branchCommit) publish(ctx context.Context) error {
	_, err := b.git(ctx, nil, "update-ref", "--no-deref", "--create-reflog", "-m", "agentbox apply", "refs/heads/"+b.name,
		b.commitID, b.old)
	if err != nil {
		err = fmt.Errorf("%w: no commit was made on %s: %w", runtime.ErrState, b.name, err)
	}
	return err
}

func (b *branchCommit) takeBack(ctx context.Context) error {
	args := []string{"update-ref", "refs/heads/" + b.name, b.old, b.commitID}
	if strings.Trim(b.old, "0") == "" {
		args = []string{"update-ref", "-d", "refs/heads/" + b.name, b.commitID}
	}
	_, err := b.git(ctx, nil, args...)
	return err
}

// indexed runs git with the index of its own.
func (b *branchCommit) indexed(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	own := *b.repository
	own.env = append(slices.Clip(own.env), "GIT_INDEX_FILE="+b.index)
	return own.gitOn(ctx, stdin, args...)
}

// blob writes the content of a file to the repository. mode is empty for what git cannot store.
func (b *branchCommit) blob(
	ctx context.Context, what string, plan runtime.Applied, c runtime.Change, name string, svc runtime.Service,
) (mode, id string, err error) {
	hash := []string{"hash-object", "-w", "--stdin", "--path=" + name}
	switch c.New.Type {
	case "symlink":
		id, err = b.gitOn(ctx, strings.NewReader(c.New.Target), "hash-object", "-w", "--stdin", "--no-filters")
		return "120000", strings.TrimSpace(id), err
	case "file":
	default:
		return "", "", nil
	}
	if mode = "100644"; strings.Trim(c.New.Mode, "0246") != "" && c.New.Mode[len(c.New.Mode)-3]&1 == 1 {
		mode = "100755"
	}
	file := pathOf(c.Path, c.PathB64)
	if c.Change == "M" && (slices.Contains(plan.Merged, c.Path) || b.parts[file]) {
		old, err := readOwn(filepath.Join(b.top, name))
		if err != nil {
			return "", "", err
		}
		text, err := applyHunks(old, c.Patch)
		if err != nil || c.Patch == "" && slices.Contains(c.What, "content") {
			return "", "", errors.Join(err, fmt.Errorf("%w: of a merge, or a part of a file, only text up to 1 MiB can be "+
				"committed to another branch", runtime.ErrUnsupported))
		}
		id, err = b.gitOn(ctx, strings.NewReader(text), hash...)
		return mode, strings.TrimSpace(id), err
	}
	err = pipe(ctx, func(ctx context.Context, w io.Writer) error { return svc.CopyFrom(ctx, what, file, w) },
		func(ctx context.Context, r io.Reader) error {
			t := tar.NewReader(r)
			head, err := t.Next()
			if err == nil && head.Typeflag != tar.TypeReg {
				err = fmt.Errorf("%w: no regular file", runtime.ErrState)
			}
			if err == nil {
				id, err = b.gitOn(ctx, t, hash...)
			}
			if err == nil {
				_, err = io.Copy(io.Discard, r)
			}
			return err
		})
	return mode, strings.TrimSpace(id), err
}

// readOwn reads a text file of the directory.
func readOwn(name string) (string, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	const most = 1 << 20
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && len(data) > most {
		err = fmt.Errorf("%w: it is larger than 1 MiB", runtime.ErrUnsupported)
	}
	return string(data), err
}

// pathOf is the path of a change in the repository; false: git cannot store it.
func (r *repository) pathOf(out runtime.Applied, c runtime.Change) (string, bool) {
	name := pathOf(c.Path, c.PathB64)
	rel, ok := strings.CutPrefix(name, strings.TrimSuffix(r.workspace.Path, "/")+"/")
	if !ok || slices.ContainsFunc(out.Workspaces, func(w runtime.AppliedWorkspace) bool {
		return len(w.Path) > len(r.workspace.Path) && strings.HasPrefix(name, w.Path+"/") // that of another one
	}) || slices.Contains(strings.Split(rel, "/"), ".git") {
		return "", false
	}
	return path.Join(filepath.ToSlash(r.prefix), rel), true
}
