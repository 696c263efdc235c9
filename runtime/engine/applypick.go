package engine

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"path"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apply"
)

// picks groups the picked changes by workspace; nil: nothing is picked, and all changes come.
func (w *workspaces) picks(opts runtime.ApplyOptions) (map[string]apply.Picks, error) {
	if opts.Picks == nil {
		return nil, nil
	}
	all := map[string]apply.Picks{}
	for _, v := range w.chosen {
		all[v.Target] = apply.Picks{}
	}
	for _, p := range opts.Picks {
		name := p.Path
		if p.PathB64 != "" {
			raw, err := base64.StdEncoding.DecodeString(p.PathB64)
			if err != nil {
				return nil, fmt.Errorf("%w: the path %q in base64: %w", runtime.ErrInvalid, p.PathB64, err)
			}
			name = string(raw)
		}
		v, ok := w.innermost(name)
		if !ok || name != path.Clean(name) {
			return nil, fmt.Errorf("%w: the path %q is in no workspace that is applied", runtime.ErrInvalid, name)
		}
		rel, _ := apply.Inside(v.Target, name)
		if all[v.Target][rel] != nil {
			return nil, fmt.Errorf("%w: the path %q is picked twice", runtime.ErrInvalid, name)
		}
		all[v.Target][rel] = &apply.Pick{ApplyPick: p}
	}
	return all, nil
}

// pickedNote is the note that an apply of picks leaves. It is complete once the apply is planned.
type pickedNote struct {
	checkpoint string
	list       []apply.Change
}

// MarshalJSON implements json.Marshaler.
func (n pickedNote) MarshalJSON() ([]byte, error) {
	note := appliedNote{Checkpoint: n.checkpoint, Picks: map[string]apply.Taken{}}
	for _, c := range n.list {
		note.Picks[c.At] = c.Taken
	}
	return json.Marshal(note)
}

// appliedAt is what applies have brought from a workspace of one checkpoint.
type appliedAt struct {
	tops  []string              // paths, with all below them
	whole map[string]bool       // paths alone
	parts map[string]apply.Part // files of which a part has come since
	dirs  map[string]bool       // those that lead to whole
}

// add adds what a later apply has brought.
func (a *appliedAt) add(tops []string, picks apply.Taken) {
	if a.whole == nil {
		a.whole, a.parts, a.dirs = map[string]bool{}, map[string]apply.Part{}, map[string]bool{}
	}
	a.tops = append(a.tops, tops...)
	for p := range a.parts {
		for _, top := range tops {
			if inOrAt(p, top) {
				delete(a.parts, p)
			}
		}
	}
	for _, p := range picks.Whole {
		a.whole[string(p)] = true
		delete(a.parts, string(p))
		for dir := path.Dir(string(p)); dir != "." && !a.dirs[dir]; dir = path.Dir(dir) {
			a.dirs[dir] = true
		}
	}
	for _, part := range picks.Parts {
		a.parts[string(part.Path)] = part
	}
}

// has reports whether an apply has brought a path or a part of it.
func (a *appliedAt) has(p string) bool {
	if _, part := a.parts[p]; part || a.whole[p] {
		return true
	}
	for _, top := range a.tops {
		if inOrAt(p, top) {
			return true
		}
	}
	return false
}
