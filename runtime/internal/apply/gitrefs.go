package apply

import (
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
)

// What git keeps in a repository is no text to merge: a ref with conflict markers is none. Of what both
// sides have changed, notes such as reflogs stay as the directory has them. HEAD, the index and each ref
// are one side's or a conflict, and HEAD goes with the index: that is what git compares with it.

type gitPart int

const (
	gitOther gitPart = iota // no file of git's own, or one that is a text
	gitRef
	gitHead
	gitIndex
	gitNote // of use to a user, and to no command
	gitData
)

// gitPartOf says what a path of the host is to git. ref is the name of a gitRef.
func gitPartOf(p string) (part gitPart, ref string) {
	names := strings.Split(strings.Trim(p, "/"), "/")
	at := slices.IndexFunc(names, isGitDir)
	if at < 0 {
		return gitOther, ""
	}
	names = names[at+1:]
	for first := true; len(names) > 0; first = false {
		switch file := strings.Join(names, "/"); {
		case names[0] == "refs" && len(names) > 1:
			return gitRef, file
		case names[0] == "logs" && len(names) > 1, file == "objects/info/packs", file == "objects/info/commit-graph",
			slices.Contains([]string{"COMMIT_EDITMSG", "ORIG_HEAD", "FETCH_HEAD", "AUTO_MERGE", "gc.log"}, file):
			return gitNote, ""
		case file == "HEAD":
			return gitHead, ""
		case file == "index":
			return gitIndex, ""
		case names[0] == "objects" || names[0] == "rebase-merge" || names[0] == "rebase-apply" ||
			names[0] == "sequencer" || strings.HasSuffix(file, "_HEAD") || file == "packed-refs" || file == "shallow":
			return gitData, ""
		}
		if first && names[0] != "modules" && names[0] != "worktrees" {
			break
		}
		names = names[1:]
	}
	return gitOther, ""
}

// indexTorn reports whether both sides have staged something in the index beside a HEAD.
func (m *merger) indexTorn(ctx context.Context, rel string) (bool, error) {
	at := path.Join(path.Dir(rel), "index")
	i, ok := m.places[at]
	if !ok {
		return false, nil
	}
	s, b := m.upper(i), m.baseOf(at)
	f, err := m.find(at, false)
	if err != nil {
		return false, err
	}
	for _, one := range []side{s, f.side} {
		if same, err := alike(ctx, one, b, m.opts.Owners); err != nil || same {
			return false, err
		}
	}
	if same, err := alike(ctx, s, f.side, m.opts.Owners); err != nil || same {
		return false, err
	}
	_, sure, err := m.resolveIndex(ctx, at, s, b, f.side)
	return !sure, err
}

// noteRef notes what both sides have made of a ref.
func (m *merger) noteRef(ctx context.Context, rel, ref string, s, f side) error {
	r := runtime.AppliedRef{Path: path.Join(m.At, rel), Ref: ref}
	var err error
	if r.Directory, err = refOf(ctx, f); err == nil {
		r.Sandbox, err = refOf(ctx, s)
	}
	m.out.Refs = append(m.out.Refs, r)
	m.plan.refs = append(m.plan.refs, r)
	return err
}

// refOf reads what a loose ref is; empty: there is none, or it is not one.
func refOf(ctx context.Context, s side) (string, error) {
	if !s.isFile() || s.Size > 4096 {
		return "", nil
	}
	f, err := s.open(ctx)
	if err != nil {
		return "", err
	}
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	err = errors.Join(err, f.Close())
	text := strings.TrimSpace(string(data))
	if strings.Trim(text, "0123456789abcdef") != "" {
		return "", err // a symbolic ref, or none
	}
	return text, err
}

// refsHint says what to do about refs that both sides have moved.
func refsHint(list []runtime.AppliedRef, sandbox string) string {
	var b strings.Builder
	for _, r := range list[:min(len(list), 3)] {
		if r.Directory == "" || r.Sandbox == "" {
			continue
		}
		b.WriteString(" Of " + r.Ref + " the directory has " + r.Directory + " and the sandbox " + r.Sandbox +
			": after an apply with --ours, which brings the objects, 'git update-ref refs/agentbox/" + sandbox + "/" +
			strings.TrimPrefix(r.Ref, "refs/") + " " + r.Sandbox + "' names the sandbox's.")
	}
	return b.String()
}
