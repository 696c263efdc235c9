package apply

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestMerge has a sandbox and an owner change the same directory: each case says what comes of it.
func TestMerge(t *testing.T) {
	const start = `
put text one\ntwo\nthree\nfour\nfive\n
put file f
put dir/a a
put dir/b b
put dir/sub/c c
put gone/x x
put gone/y/z z`
	all := map[string]string{
		"text": "one\ntwo\nthree\nfour\nfive\n", "file": "f", "dir/a": "a", "dir/b": "b", "dir/sub/c": "c",
		"gone/x": "x", "gone/y/z": "z",
	}
	// with is all with some paths otherwise; an empty text: it is not there
	with := func(list ...string) map[string]string {
		out := maps.Clone(all)
		for i := 0; i < len(list); i += 2 {
			if out[list[i]] = list[i+1]; list[i+1] == "" {
				delete(out, list[i])
			}
		}
		return out
	}
	for name, c := range map[string]struct {
		agent, owner string
		opts         runtime.ApplyOptions
		only, hidden []string
		want         map[string]string
		conflicts    string // of them what fails it, if want is nil
		merged       string
	}{
		"nothing": {want: all},
		"changes": {
			agent: "put file F\nrm dir/a\nput new/deep/n n\nln l file\nrm gone",
			want:  with("file", "F", "dir/a", "", "new/deep/n", "n", "l", "-> file", "gone/x", "", "gone/y/z", ""),
		},
		"the owner's stay": {
			agent: "put file F", owner: "put dir/a A\nrm gone\nput more m",
			want: with("file", "F", "dir/a", "A", "gone/x", "", "gone/y/z", "", "more", "m"),
		},
		"both the same": {
			agent: "put file F\nrm dir/a", owner: "put file F\nrm dir/a",
			want: with("file", "F", "dir/a", ""),
		},
		"merged": {
			agent: `put text ONE\ntwo\nthree\nfour\nfive\n`, owner: `put text one\ntwo\nthree\nfour\nFIVE\n`,
			want: with("text", "ONE\ntwo\nthree\nfour\nFIVE\n"), merged: "/w0/text",
		},
		"conflict": {agent: "put file F", owner: "put file O", conflicts: "/w0/file"},
		"conflict, ours": {
			agent: "put file F\nput n n", owner: "put file O", opts: runtime.ApplyOptions{Ours: true},
			want: with("file", "O", "n", "n"), conflicts: "/w0/file",
		},
		"theirs": {
			agent: "put file F", owner: "put file O", opts: runtime.ApplyOptions{Theirs: true},
			want: with("file", "F"), conflicts: "/w0/file",
		},
		"force is theirs": {
			agent: "put file F", owner: "put file O", opts: runtime.ApplyOptions{Force: true},
			want: with("file", "F"), conflicts: "/w0/file",
		},
		"markers": {
			agent: `put text ONE\ntwo\nthree\nfour\nfive\n`, owner: `put text 1\ntwo\nthree\nfour\nFIVE\n`,
			opts: runtime.ApplyOptions{Markers: true}, conflicts: "/w0/text", merged: "/w0/text",
			want: with("text", "<<<<<<< directory\n1\n=======\nONE\n>>>>>>> sandbox\ntwo\nthree\nfour\nFIVE\n"),
		},
		"markers, both new": {
			agent: `put n a\n`, owner: `put n o\n`, opts: runtime.ApplyOptions{Markers: true},
			conflicts: "/w0/n", merged: "/w0/n",
			want: with("n", "<<<<<<< directory\no\n=======\na\n>>>>>>> sandbox\n"),
		},
		"binaries": {
			agent: "put file F\x00", owner: "put file O", opts: runtime.ApplyOptions{Markers: true},
			conflicts: "/w0/file",
		},
		"both new":            {agent: "put n a", owner: "put n o", conflicts: "/w0/n"},
		"edit against delete": {agent: "put file F", owner: "rm file", conflicts: "/w0/file"},
		"delete against edit": {agent: "rm file", owner: "put file O", conflicts: "/w0/file"},
		"delete, theirs": {
			agent: "rm file", owner: "put file O", opts: runtime.ApplyOptions{Theirs: true},
			want: with("file", ""), conflicts: "/w0/file",
		},
		"delete, ours": {
			agent: "rm file", owner: "put file O", opts: runtime.ApplyOptions{Ours: true},
			want: with("file", "O"), conflicts: "/w0/file",
		},
		"all deleted against an edit": {agent: "rm gone", owner: "put gone/y/z Z", conflicts: "/w0/gone/y/z"},
		"all deleted against a new file": {
			agent: "rm gone", owner: "put gone/y/new n", want: with("gone/x", "", "gone/y/z", "", "gone/y/new", "n"),
		},
		"directory replaced by an opaque one": {
			agent: "rm dir\nput dir/n n", owner: "put dir/mine m",
			want: with("dir/a", "", "dir/b", "", "dir/sub/c", "", "dir/n", "n", "dir/mine", "m"),
		},
		"opaque against an edit": {
			agent: "rm dir\nput dir/n n", owner: "put dir/sub/c C",
			conflicts: "/w0/dir/sub/c",
		},
		"opaque, the same again": {
			agent: "rm dir\nput dir/a a\nput dir/b b\nput dir/sub/c c", owner: "put dir/a A",
			want: with("dir/a", "A"),
		},
		"file in a directory that went": {agent: "put gone/x X", owner: "rm gone", conflicts: "/w0/gone/x"},
		"new file in a directory that went": {
			agent: "put gone/new n", owner: "rm gone", want: with("gone/x", "", "gone/y/z", "", "gone/new", "n"),
		},
		"unchanged in a directory that went": {
			agent: "mode gone/x 600\nmode gone/x 644", owner: "rm gone", want: with("gone/x", "", "gone/y/z", ""),
		},
		"directory becomes a file": {
			agent: "rm gone\nput gone file",
			want:  with("gone/x", "", "gone/y/z", "", "gone", "file"),
		},
		"directory becomes a file against an edit": {
			agent: "rm gone\nput gone file", owner: "put gone/x X", conflicts: "/w0/gone/x",
		},
		"file becomes a directory": {agent: "rm file\nput file/in in", want: with("file", "", "file/in", "in")},
		"file becomes a directory against an edit": {
			agent: "rm file\nput file/in in", owner: "put file O", conflicts: "/w0/file",
		},
		"directory against a link": {agent: "put dir/a A", owner: "rm dir\nln dir /etc", conflicts: "/w0/dir"},
		"link in place of a directory, untouched": {
			agent: "mode dir/a 600\nmode dir/a 644", owner: "rm dir\nln dir /etc",
			want: with("dir/a", "", "dir/b", "", "dir/sub/c", "", "dir", "-> /etc"),
		},
		"only": {
			agent: "put file F\nput dir/a A\nput new/deep/n n\nput new/other o\nrm gone",
			only:  []string{"dir", "new/deep", "gone/y"},
			want:  with("dir/a", "A", "new/deep/n", "n", "gone/y/z", ""),
		},
		"hidden": {
			agent: "put dir/sub/c C\nput dir/a A", hidden: []string{"dir/sub"},
			want: with("dir/a", "A"),
		},
		"hidden in what is removed": {
			agent: "rm dir", hidden: []string{"dir/sub"},
			want: with("dir/a", "", "dir/b", ""),
		},
	} {
		for place := range places {
			t.Run(name+"/"+place, func(t *testing.T) {
				l, end := newLab(t, place, 1)
				defer end()
				edit(t, l.from(0), start)
				l.begin(t)
				l.inside(t, 0, func(dir string) { edit(t, dir, c.agent) })
				view := map[string]string{}
				edit(t, l.from(0), c.owner)
				l.inside(t, 0, func(dir string) { view = files(t, dir) })
				had := files(t, l.from(0))
				out, err := l.run(c.opts, func(to *Change) { to.Only, to.Hidden = c.only, c.hidden })
				if got := strings.Join(out.Conflicts, " "); got != c.conflicts {
					t.Errorf("conflicts %q", got)
				}
				if got := strings.Join(out.Merged, " "); got != c.merged {
					t.Errorf("merged %q", got)
				}
				want := c.want
				if want == nil {
					if !errors.Is(err, fault.ErrState) || !strings.Contains(err.Error(), c.conflicts) {
						t.Errorf("apply: %v", err)
					}
					same(t, "the directory", files(t, l.from(0)), had)
					return
				}
				must(t, err)
				same(t, "the directory", files(t, l.from(0)), want)
				if len(c.hidden) == 0 && len(c.only) == 0 && c.merged == "" && c.owner == "" {
					l.inside(t, 0, func(dir string) { same(t, "the sandbox", files(t, dir), view) })
				}
				_, err = Undo(context.Background(), l.home(), false)
				if nothing := len(out.Changes) == 0; nothing != errors.Is(err, fault.ErrState) || !nothing && err != nil {
					t.Fatalf("undo of %d changes: %v", len(out.Changes), err)
				}
				same(t, "the directory after the undo", files(t, l.from(0)), had)
				if left, _ := filepath.Glob(l.from(0) + "/.agentbox-*"); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		}
	}
}

// TestMergeListsChanges: the list is of what really comes.
func TestMergeListsChanges(t *testing.T) {
	l, end := newLab(t, "near", 1)
	defer end()
	edit(t, l.from(0), "put a a\nput d/x x\nput d/y y\nput keep/k k\nput t t")
	l.begin(t)
	l.inside(t, 0, func(dir string) {
		edit(t, dir, "put a A\nrm d\nput n/deep/f f\nput keep/k k\nmode keep 700\nmode a 600\nrm t\nln t a")
	})
	out, err := l.run(runtime.ApplyOptions{DryRun: true}, nil)
	must(t, err)
	var got []string
	for _, c := range out.Changes {
		got = append(got, c.Change+" "+c.Path+" "+strings.Join(c.What, ","))
	}
	want := []string{"M /w0/a content,mode,mtime", "D /w0/d ", "D /w0/d/x ", "D /w0/d/y ", "M /w0/keep mode",
		"M /w0/keep/k mtime", "A /w0/n ", "A /w0/n/deep ", "A /w0/n/deep/f ", "T /w0/t type"}
	if !slices.Equal(got, want) {
		t.Errorf("listed %q, want %q", got, want)
	}
	had := files(t, l.from(0))
	same(t, "the directory", had, map[string]string{"a": "a", "d/x": "x", "d/y": "y", "keep/k": "k", "t": "t"})
}

// TestMergeRefuses: what would have git run programs comes only if it is named.
func TestMergeRefuses(t *testing.T) {
	l, end := newLab(t, "near", 1)
	defer end()
	edit(t, l.from(0), `put .git/config c
put .git/HEAD h
put .git/hooks/one 1
put .git/hooks/two 2
put sub/.git gitdir`)
	l.begin(t)
	l.inside(t, 0, func(dir string) {
		edit(t, dir, `put .git/config C
put .git/HEAD H
put .git/hooks/three 3
rm sub/.git
ln sub/.git /tmp
put new/.git/config n`)
	})
	out, err := l.run(runtime.ApplyOptions{}, nil)
	if !errors.Is(err, fault.ErrDenied) {
		t.Fatalf("apply: %v", err)
	}
	var got []string
	for _, r := range out.Refused {
		got = append(got, r.Path)
		if !r.MayAllow || r.Reason == "" {
			t.Errorf("%+v", r)
		}
	}
	slices.Sort(got)
	want := []string{"/w0/.git/config", "/w0/.git/hooks/three", "/w0/new/.git/config", "/w0/sub/.git"}
	if !slices.Equal(got, want) {
		t.Errorf("refused %q, want %q", got, want)
	}
	if data, _ := os.ReadFile(l.from(0) + "/.git/HEAD"); string(data) != "h" {
		t.Errorf("HEAD has come: %q", data)
	}
	allow := []string{"/w0/.git/config", "/w0/.git/hooks", "/w0/new", "/w0/sub/.git"}
	_, err = l.run(runtime.ApplyOptions{Allow: allow}, nil)
	must(t, err)
	if data, _ := os.ReadFile(l.from(0) + "/.git/config"); string(data) != "C" {
		t.Errorf("config: %q", data)
	}
}

func TestMergeText(t *testing.T) {
	ctx := context.Background()
	names := [3]string{"directory", "base", "sandbox"}
	base := []byte("a\nb\nc\nd\ne\n")
	got, clean, err := mergeText(ctx, []byte("a\nb\nc\nd\nE\n"), base, []byte("A\nb\nc\nd\ne\n"), names)
	if string(got) != "A\nb\nc\nd\nE\n" || !clean || err != nil {
		t.Errorf("%q %v %v", got, clean, err)
	}
	got, clean, err = mergeText(ctx, []byte("o\n"), []byte("b\n"), []byte("s\n"), names)
	if string(got) != "<<<<<<< directory\no\n=======\ns\n>>>>>>> sandbox\n" || clean || err != nil {
		t.Errorf("%q %v %v", got, clean, err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, _, err := mergeText(ctx, nil, nil, nil, names); !errors.Is(err, errNoText) {
		t.Errorf("without git: %v", err)
	}
}

// TestNotes: what is known of an apply goes with its undo, as does what is known of those since that
// had nothing to bring.
func TestNotes(t *testing.T) {
	l, end := newLab(t, "near", 2)
	defer end()
	l.begin(t)
	notes := func(want string) {
		t.Helper()
		list, err := l.home().Notes()
		must(t, err)
		var got []string
		for _, n := range list {
			var s string
			must(t, json.Unmarshal(n, &s))
			got = append(got, s)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("notes %q, want %q", got, want)
		}
	}
	run := func(note string) {
		t.Helper()
		l.note = note
		_, err := l.run(runtime.ApplyOptions{}, nil)
		must(t, err)
	}
	run("nothing")
	notes("nothing")
	l.inside(t, 0, func(dir string) { edit(t, dir, "put a a") })
	run("a")
	for range 2 {
		run("still a")
	}
	notes("nothing a still a")
	l.inside(t, 1, func(dir string) { edit(t, dir, "put b b") })
	run("b")
	notes("nothing a still a b")
	_, err := Undo(context.Background(), l.home(), false)
	must(t, err)
	notes("nothing a still a")
	if _, err := Undo(context.Background(), l.home(), false); !errors.Is(err, fault.ErrState) {
		t.Errorf("one more undo: %v", err)
	}
	same(t, "the first directory", files(t, l.from(0)), map[string]string{"a": "a"})
	same(t, "the second", files(t, l.from(1)), map[string]string{})
}

// TestOverlapping: workspaces over the same directory are applied one after the other.
func TestOverlapping(t *testing.T) {
	l, end := newLab(t, "near", 2)
	defer end()
	l.begin(t)
	l.same = true
	l.inside(t, 0, func(dir string) { edit(t, dir, "put a a") })
	_, err := l.run(runtime.ApplyOptions{}, nil)
	must(t, err)
	l.inside(t, 0, func(dir string) { edit(t, dir, "put b b") })
	l.inside(t, 1, func(dir string) { edit(t, dir, "put c c") })
	if _, err := l.run(runtime.ApplyOptions{}, nil); !errors.Is(err, fault.ErrState) {
		t.Errorf("apply of both: %v", err)
	}
	same(t, "the directory", files(t, l.from(0)), map[string]string{"a": "a"})
}

// TestAppliedAdd: no note is lost to an equal one before it.
func TestAppliedAdd(t *testing.T) {
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	at := time.Now()
	var a applied
	for i, c := range []struct {
		note  json.RawMessage
		later []json.RawMessage
		added bool
	}{
		{raw("1"), nil, true},
		{raw("1"), nil, false},
		{raw(" 1"), []json.RawMessage{raw("2"), raw("3")}, true},
		{nil, nil, false},
		{raw("3"), []json.RawMessage{raw("3"), raw("1")}, true},
	} {
		head := header{Began: at.Add(time.Duration(i) * time.Second), Note: c.note, Later: c.later}
		if got := a.add(head); got != c.added {
			t.Errorf("%d: %v", i, got)
		}
		if c.added && a.add(head) {
			t.Errorf("%d: added twice", i)
		}
	}
	var got []string
	for _, n := range a.List {
		got = append(got, string(n.Note))
	}
	if want := []string{"1", "2", "3", "1"}; !slices.Equal(got, want) {
		t.Errorf("notes %q, want %q", got, want)
	}
}
