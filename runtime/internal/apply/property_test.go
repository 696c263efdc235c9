package apply

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// model is what the three sides have, by path: the content of files, and of directories that they
// are some.
type model struct {
	host  map[string]string
	upper map[string]bool   // paths at which the sandbox has its own
	own   map[string]string // what it has there, if anything
	base  map[string]string // what that was made of, or what was applied since
	first map[string]string // what that was made of
	seen  map[string]string // what the sandbox saw in the end
	// What the sandbox has removed that the host did not have leaves no trace, unless a
	// directory above hides it: what the owner makes there later stays or conflicts.
	traceless map[string]bool
}

const isDirectory = "/"

func (m model) clone() model {
	m.host, m.upper, m.own = maps.Clone(m.host), maps.Clone(m.upper), maps.Clone(m.own)
	m.base, m.first, m.traceless = maps.Clone(m.base), maps.Clone(m.first), maps.Clone(m.traceless)
	return m
}

// tree describes a directory as a side of the model.
func tree(t tb, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		out[rel] = isDirectory
		if !d.IsDir() {
			data, err := os.ReadFile(p)
			out[rel] = string(data)
			return err
		}
		return nil
	}))
	return out
}

// onlyFiles leaves the directories out: whether an empty one comes or stays is not the model's.
func onlyFiles(tree map[string]string) map[string]string {
	out := maps.Clone(tree)
	maps.DeleteFunc(out, func(_, s string) bool { return s == isDirectory })
	return out
}

var (
	dirNames  = []string{".", "d", "d/e", "g", "g/h"}
	fileNames = []string{"x", "y", "z.txt"}
	texts     = []string{"1", "2", "3\x00", "4\n", "5\x00"}
)

// scribble draws changes to a directory, and returns how many.
func scribble(t *rapid.T, name, dir string) int {
	n := rapid.IntRange(0, 8).Draw(t, name)
	for i := range n {
		in := rapid.SampledFrom(dirNames).Draw(t, fmt.Sprint(name, i, " dir"))
		p := filepath.Join(dir, in, rapid.SampledFrom(fileNames).Draw(t, fmt.Sprint(name, i, " file")))
		switch rapid.IntRange(0, 7).Draw(t, fmt.Sprint(name, i, " what")) {
		case 0, 1, 2, 3:
			text := rapid.SampledFrom(texts).Draw(t, fmt.Sprint(name, i, " text"))
			must(t, os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(text), 0o644))
		case 4, 5:
			must(t, os.RemoveAll(p))
		case 6:
			if in != "." {
				must(t, os.RemoveAll(filepath.Join(dir, in)))
			}
		case 7: // a directory in the place of another is opaque
			if in != "." {
				must(t, os.RemoveAll(filepath.Join(dir, in)), os.MkdirAll(filepath.Dir(p), 0o755),
					os.WriteFile(p, []byte("anew"), 0o644))
			}
		}
	}
	return n
}

// agent takes over what the sandbox has changed.
func (m *model) agent(before, after map[string]string) {
	m.seen = after
	for p := range union(before, after) {
		a, had := before[p]
		b, has := after[p]
		if had == has && a == b {
			continue
		}
		if !m.upper[p] {
			m.upper[p] = true
			delete(m.base, p)
			if delete(m.first, p); had {
				m.base[p], m.first[p] = a, a
			}
		}
		if delete(m.own, p); has {
			m.own[p] = b
		}
	}
	for p := range m.upper {
		_, has := m.own[p]
		_, there := m.host[p]
		m.traceless[p] = !has && (!there || m.traceless[p])
	}
}

// sure leaves out what the model does not know.
func (m *model) sure(tree map[string]string) map[string]string {
	out := onlyFiles(tree)
	maps.DeleteFunc(out, func(p, _ string) bool { return m.traceless[p] })
	return out
}

// apply is what an apply is to do. It returns the files at which both sides differ.
func (m *model) apply(only []string, ours, theirs bool) (conflicts []string) {
	host := maps.Clone(m.host)
	for p := range m.upper {
		if len(only) > 0 && !slices.ContainsFunc(only, func(top string) bool { return within(p, top) }) {
			continue
		}
		s, hasS := m.own[p]
		b, hasB := m.base[p]
		h, hasH := m.host[p]
		if s == isDirectory || b == isDirectory || h == isDirectory || m.traceless[p] {
			continue
		}
		put := func() {
			if delete(host, p); hasS {
				host[p] = s
			}
		}
		switch {
		case hasS == hasB && s == b, hasS == hasH && s == h:
		case hasH == hasB && h == b:
			put()
		default:
			conflicts = append(conflicts, p)
			if theirs {
				put()
			}
		}
	}
	slices.Sort(conflicts)
	if len(conflicts) > 0 && !ours && !theirs {
		return conflicts
	}
	m.host = host
	for p := range m.upper {
		if len(only) > 0 && !slices.ContainsFunc(only, func(top string) bool { return within(p, top) }) {
			continue
		}
		if delete(m.base, p); m.own[p] != "" {
			m.base[p] = m.own[p]
		}
	}
	return conflicts
}

func union(a, b map[string]string) map[string]bool {
	out := map[string]bool{}
	for p := range a {
		out[p] = true
	}
	for p := range b {
		out[p] = true
	}
	return out
}

func (m model) bases() map[string]BaseEntry {
	out := map[string]BaseEntry{}
	all := maps.Clone(m.seen)
	for p := range m.upper {
		if delete(all, p); m.base[p] != "" {
			all[p] = m.base[p]
		}
	}
	for p, s := range all {
		e := overlay.Entry{Path: p, Type: overlay.TypeDir, Mode: 0o755}
		if s != isDirectory {
			e.Type, e.Mode, e.Size = overlay.TypeFile, 0o644, int64(len(s))
		}
		out[p] = BaseEntry{e, memory(s)}
	}
	return out
}

// TestApplyModel has a sandbox and an owner change a directory in turns, at random, with applies of
// all or a part, and undos between: the directory is always what the model says.
func TestApplyModel(t *testing.T) {
	for place := range places {
		t.Run(place, func(t *testing.T) { rapid.Check(t, func(t *rapid.T) { applyModel(t, place) }) })
	}
}

func applyModel(t *rapid.T, place string) {
	l, end := newLab(t, place, 1)
	defer end()
	scribble(t, "start", l.from(0))
	m := model{host: tree(t, l.from(0)), upper: map[string]bool{}, own: map[string]string{}, base: map[string]string{},
		first: map[string]string{}, traceless: map[string]bool{}}
	var undo *model
	for round := range rapid.IntRange(1, 6).Draw(t, "rounds") {
		name := func(s string) string { return fmt.Sprint(round, " ", s) }
		l.inside(t, 0, func(dir string) {
			before := tree(t, dir)
			scribble(t, name("agent"), dir)
			m.agent(before, tree(t, dir))
		})
		if rapid.Bool().Draw(t, name("owner edits")) {
			if scribble(t, name("owner"), l.from(0)) > 0 {
				m.host, undo = tree(t, l.from(0)), nil
			}
		}
		var sees map[string]string
		l.inside(t, 0, func(dir string) { sees = tree(t, dir) })
		still := func() {
			l.inside(t, 0, func(dir string) { same(t, "the sandbox", m.sure(tree(t, dir)), m.sure(sees)) })
		}
		if undo != nil && rapid.IntRange(0, 3).Draw(t, name("undo")) == 0 {
			_, err := Undo(context.Background(), l.home(), false)
			must(t, err)
			m.host = undo.host
			for p := range m.upper { // applies since that had nothing to bring go, too
				base := m.first[p]
				if undo.upper[p] {
					base = undo.base[p]
				}
				if delete(m.base, p); base != "" {
					m.base[p] = base
				}
			}
			undo = nil
			still()
			same(t, "the directory after an undo", m.sure(tree(t, l.from(0))), m.sure(m.host))
			continue
		}
		var only []string
		if rapid.Bool().Draw(t, name("partial")) {
			only = []string{path.Join(rapid.SampledFrom(dirNames[1:]).Draw(t, name("only")),
				rapid.SampledFrom([]string{"", "x", "e"}).Draw(t, name("only file")))}
		}
		opts := rapid.SampledFrom([]runtime.ApplyOptions{{}, {Ours: true}, {Theirs: true}}).Draw(t, name("options"))
		was := m.clone()
		conflicts := m.apply(only, opts.Ours, opts.Theirs)
		l.keep = was.bases()
		out, err := l.run(opts, func(c *Change) { c.Only = only })
		var got []string
		for _, c := range out.Conflicts {
			if p := strings.TrimPrefix(c, "/w0/"); !m.traceless[p] {
				got = append(got, p)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, conflicts) {
			t.Fatalf("conflicts %q, want %q (%v)", got, conflicts, err)
		}
		failed := len(out.Conflicts) > 0 && !opts.Ours && !opts.Theirs
		if failed != errors.Is(err, fault.ErrState) || !failed && err != nil {
			t.Fatalf("apply with conflicts %q: %v", out.Conflicts, err)
		}
		if failed {
			m = was
		} else if len(out.Changes) > 0 {
			undo = &was
		}
		still()
		same(t, "the directory", m.sure(tree(t, l.from(0))), m.sure(m.host))
		m.host = tree(t, l.from(0))
	}
	if left, _ := filepath.Glob(l.from(0) + "/.agentbox-*"); len(left) > 0 {
		t.Fatalf("left: %q", left)
	}
}
