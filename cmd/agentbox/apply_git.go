package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentbox/agentbox/runtime"
)

// A repository is where apply commits what it has brought, as the caller would: root through sudo is
// the user that called sudo.
type repository struct {
	workspace runtime.AppliedWorkspace
	top       string // its top directory
	prefix    string // the workspace's directory in it
	as        *syscall.Credential
	env       []string
	parts     map[string]bool // files of which only some hunks come, by their paths in the sandbox
}

// openRepositories finds the repositories of an apply, and refuses those that cannot take a commit of
// just what comes. elsewhere: the commit leaves the directory and its index alone.
func openRepositories(ctx context.Context, plan runtime.Applied, elsewhere bool) (list []*repository, err error) {
	if len(plan.Workspaces) == 0 {
		return nil, fmt.Errorf("%w: --git-commit is for workspaces", runtime.ErrUnsupported)
	}
	as, env, err := caller()
	if err != nil {
		return nil, err
	}
	for _, w := range plan.Workspaces {
		r := &repository{workspace: w, top: w.Original, as: as, env: env}
		if len(r.paths(plan)) == 0 {
			continue
		}
		if err := r.open(ctx, plan, elsewhere); err != nil {
			return nil, err
		}
		list = append(list, r)
	}
	return list, nil
}

// caller returns as whom git runs, and in which environment.
func caller() (*syscall.Credential, []string, error) {
	env := slices.DeleteFunc(os.Environ(), func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return slices.Contains([]string{"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY",
			"GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_ICASE_PATHSPECS"}, name)
	})
	uid, gid := os.Getenv("SUDO_UID"), os.Getenv("SUDO_GID")
	if os.Geteuid() != 0 || uid == "" {
		return nil, env, nil
	}
	u, err := strconv.ParseUint(uid, 10, 32)
	g, e2 := strconv.ParseUint(gid, 10, 32)
	if err := errors.Join(err, e2); err != nil {
		return nil, nil, fmt.Errorf("%w: SUDO_UID and SUDO_GID: %w", runtime.ErrInvalid, err)
	}
	if who, err := user.LookupId(uid); err == nil {
		env = append(env, "HOME="+who.HomeDir, "USER="+who.Username, "LOGNAME="+who.Username)
	}
	return &syscall.Credential{Uid: uint32(u), Gid: uint32(g)}, env, nil
}

// git runs git in the repository, and returns what it printed.
func (r *repository) git(ctx context.Context, stdin []string, args ...string) (string, error) {
	return r.gitOn(ctx, nulled(stdin), args...)
}

// nulled ends each of some texts by a NUL.
func nulled(list []string) io.Reader {
	var in strings.Builder
	for _, s := range list {
		in.WriteString(s + "\x00")
	}
	return strings.NewReader(in.String())
}

// gitOn is git with a stream for its stdin.
func (r *repository) gitOn(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	// Programs that the repository names may have come with the apply.
	args = append([]string{"-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false",
		"-c", "safe.bareRepository=explicit"}, args...)
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir, cmd.Env = r.top, r.env
	if r.as != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: r.as}
	}
	var out, said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &said
	err := cmd.Run()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("git %s in %s: %w: %s", strings.Join(args[6:min(8, len(args))], " "), r.top, err,
			strings.TrimSpace(said.String()))
	}
	return out.String(), err
}

func (r *repository) open(ctx context.Context, plan runtime.Applied, elsewhere bool) error {
	text, err := r.git(ctx, nil, "rev-parse", "--show-toplevel")
	if err != nil {
		return &runtime.Error{Err: fmt.Errorf("%w: no commit can be made: %w", runtime.ErrState, err),
			Hint: "Apply without --git-commit, and commit yourself."}
	}
	r.top = strings.TrimSuffix(text, "\n")
	if r.prefix, err = filepath.Rel(r.top, r.workspace.Original); err != nil {
		return err
	}
	if elsewhere {
		return nil
	}
	if _, err = r.git(ctx, nil, "rev-parse", "-q", "--verify", "MERGE_HEAD"); err == nil {
		return &runtime.Error{Err: fmt.Errorf("%w: a merge is under way in %s", runtime.ErrState, r.top),
			Hint: "End it first: git commit, or git merge --abort"}
	}
	staged, err := r.staged(ctx, r.paths(plan))
	if err == nil && len(staged) > 0 {
		err = &runtime.Error{Err: fmt.Errorf("%w: %s has staged changes of what comes: %s", runtime.ErrState, r.top,
			clipNames(staged)), Hint: "Commit them first, or take them out of the index: git restore --staged PATH"}
	}
	return err
}

// paths lists the files of an apply that git can have, as paths in the repository.
func (r *repository) paths(out runtime.Applied) (list []string) {
	for _, c := range out.Changes {
		if name, ok := r.pathOf(out, c); ok && c.Type != "dir" {
			list = append(list, name)
		}
	}
	return list
}

// staged lists which of some paths differ in the index from the last commit.
func (r *repository) staged(ctx context.Context, paths []string) ([]string, error) {
	text, err := r.git(ctx, nil, "diff", "--cached", "--name-only", "--no-renames", "-z")
	if err != nil {
		return nil, err
	}
	of := map[string]bool{}
	for _, p := range paths {
		of[p] = true
	}
	return slices.DeleteFunc(nulls(text), func(p string) bool { return !of[p] }), nil
}

func nulls(text string) []string {
	return slices.DeleteFunc(strings.Split(text, "\x00"), func(s string) bool { return s == "" })
}

// known leaves out which of some paths git ignores.
func (r *repository) known(ctx context.Context, paths []string) ([]string, error) {
	var asked []string
	for _, p := range paths {
		asked = append(asked, "./"+p) // a path with a colon before it would be magic
	}
	text, err := r.git(ctx, asked, "check-ignore", "-z", "--stdin")
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) { // 1: none is
		return nil, err
	}
	ignored := map[string]bool{}
	for _, p := range nulls(text) {
		ignored[strings.TrimPrefix(p, "./")] = true
	}
	return slices.DeleteFunc(paths, func(p string) bool { return ignored[p] }), nil
}

// commit commits what an apply has brought, and nothing else. What git ignores is left out.
func (r *repository) commit(ctx context.Context, out runtime.Applied, message string, stderr io.Writer) error {
	paths, err := r.known(ctx, r.paths(out))
	if err != nil || len(paths) == 0 {
		return err
	}
	if _, err := r.git(ctx, paths, "update-index", "--add", "--remove", "--replace", "-z", "--stdin"); err != nil {
		return err
	}
	staged, err := r.staged(ctx, paths)
	if err != nil || len(staged) == 0 {
		return err
	}
	exactly := []string{"--pathspec-from-file=-", "--pathspec-file-nul"}
	commit := append([]string{"--literal-pathspecs", "commit", "-q", "--only", "-m", message}, exactly...)
	if _, err = r.git(ctx, staged, commit...); err != nil {
		reset := append([]string{"--literal-pathspecs", "reset", "-q"}, exactly...)
		_, e2 := r.git(context.WithoutCancel(ctx), staged, reset...)
		return errors.Join(err, e2)
	}
	text, err := r.git(ctx, nil, "log", "-1", "--format=%h %s")
	if err == nil {
		fmt.Fprintln(stderr, printable(fmt.Sprintf("committed %s to %s", strings.TrimSpace(text), r.top)))
	}
	return err
}
