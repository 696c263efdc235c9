package apply

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// drawText draws a text of lines, or a change of one.
func drawText(t *rapid.T, name, of string) string {
	lines := splitLines(of)
	for i := range rapid.IntRange(1, 5).Draw(t, name+" edits") {
		label := func(s string) string { return fmt.Sprint(name, " ", i, " ", s) }
		at := rapid.IntRange(0, len(lines)).Draw(t, label("at"))
		end := min(len(lines), at+rapid.IntRange(0, 3).Draw(t, label("lines")))
		var in []string
		for range rapid.IntRange(0, 3).Draw(t, label("new")) {
			in = append(in, rapid.SampledFrom([]string{"a\n", "b\n", "\n", "}\n", name + "\n"}).Draw(t, label("line")))
		}
		lines = slices.Replace(lines, at, end, in...)
	}
	text := strings.Join(lines, "")
	if rapid.IntRange(0, 4).Draw(t, name+" open end") == 0 {
		text = strings.TrimSuffix(text, "\n")
	}
	return text
}

func drawSubset(t *rapid.T, name string, n int) []int {
	list := []int{}
	for i := range n {
		if rapid.Bool().Draw(t, fmt.Sprint(name, i)) {
			list = append(list, i)
		}
	}
	return list
}

// TestHunks: all hunks make the new text, none leaves the old one, and some and then the others are all.
// The patch is one that `patch` and git take.
func TestHunks(t *testing.T) {
	git, err := exec.LookPath("git")
	must(t, err)
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		old := drawText(t, "old", strings.Repeat("1\n2\n3\n4\n5\n6\n7\n8\n9\n", rapid.IntRange(0, 4).Draw(t, "size")))
		new := drawText(t, "new", old)
		edits := lineEdits(old, new)
		some := drawSubset(t, "hunk", len(edits))
		part, err := subset(edits, some)
		must(t, err)
		text, err := splice(old, part)
		must(t, err)
		all, err := splice(old, edits)
		if must(t, err); all != new {
			t.Fatalf("all hunks of %q to %q make %q", old, new, all)
		}
		if len(some) == 0 && text != old || len(some) == len(edits) && text != new {
			t.Fatalf("%d of %d hunks of %q to %q make %q", len(some), len(edits), old, new, text)
		}
		signs := ""
		for _, line := range splitLines(unifiedHunks(old, edits)) {
			signs += strings.Map(func(r rune) rune {
				return map[rune]rune{'-': 'x', '+': 'x', ' ': ' ', '@': ' ', '\\': -1}[r]
			}, line[:1])
		}
		if runs := len(strings.Fields(signs)); runs != len(edits) {
			t.Fatalf("%d runs of lines for %d edits:\n%s", runs, len(edits), unifiedHunks(old, edits))
		}
		if n++; n > 40 || len(part) == 0 { // each runs git
			return
		}
		dir, err := os.MkdirTemp(places["near"], "git")
		must(t, err)
		defer os.RemoveAll(dir)
		must(t, os.WriteFile(dir+"/f", []byte(old), 0o600))
		cmd := exec.Command(git, "apply", "--whitespace=nowarn", "-")
		cmd.Dir, cmd.Env = dir, append(gitEnv(), "GIT_DIR=/dev/null")
		cmd.Stdin = strings.NewReader("--- a/f\n+++ b/f\n" + unifiedHunks(old, part))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git apply: %v: %s\n%s", err, out, unifiedHunks(old, part))
		}
		data, err := os.ReadFile(dir + "/f")
		if errors.Is(err, os.ErrNotExist) && text == "" {
			return // to git an empty file is one that is deleted
		}
		if must(t, err); string(data) != text {
			t.Fatalf("git makes %q, want %q", data, text)
		}
	})
	if _, err := subset(lineEdits("a\n", "b\n"), []int{1}); err == nil {
		t.Error("a hunk that is not there is taken")
	}
	if _, err := subset(lineEdits("a\n", "b\n"), []int{0, 0}); err == nil {
		t.Error("a hunk is taken twice")
	}
}

// pickAll picks all that was shown.
func pickAll(out runtime.Applied) (list []runtime.ApplyPick) {
	for _, c := range out.Changes {
		list = append(list, runtime.ApplyPick{Path: c.Path, PathB64: c.PathB64, Seen: c.Seen})
	}
	return list
}

// pick applies what is picked, and makes it the base.
func (l *lab) pick(t tb, list []runtime.ApplyPick) (runtime.Applied, error) {
	t.Helper()
	base := map[string]BaseEntry{}
	before, err := l.baseOf(0)(context.Background(), nil)
	must(t, err)
	if l.keep != nil {
		before = l.keep
	}
	maps.Copy(base, before)
	ctx := context.Background()
	upper, err := OpenRoot(l.at(0, "upper"))
	must(t, err)
	defer upper.Close()
	c := Change{Place: l.home().Places[0], Source: Upperdir(ctx, upper)}
	c.Base = func(context.Context, map[string]bool) (map[string]BaseEntry, error) { return before, nil }
	c.Picks = Picks{}
	for _, p := range list {
		rel, _ := Inside(c.At, p.Path)
		c.Picks[rel] = &Pick{ApplyPick: p}
	}
	out := Nothing(runtime.ApplyOptions{})
	all := []Change{c}
	if err := Run(ctx, l.home(), all, runtime.ApplyOptions{Picks: list}, &out); err != nil {
		return out, err
	}
	text, err := json.Marshal(all[0].Taken) // as a note has it
	must(t, err)
	var taken Taken
	must(t, json.Unmarshal(text, &taken))
	own := map[string]BaseEntry{}
	for e, err := range all[0].Source.Entries {
		must(t, err)
		data := memory{}
		if e.Type == overlay.TypeFile {
			data, err = os.ReadFile(l.at(0, "upper/"+e.Path))
			must(t, err)
		}
		own[e.Path] = BaseEntry{e, data}
	}
	for _, p := range taken.Whole {
		if delete(base, string(p)); own[string(p)].Type != overlay.TypeWhiteout {
			base[string(p)] = own[string(p)]
		}
	}
	for _, p := range taken.Parts {
		base[string(p.Path)] = p.Base(own[string(p.Path)])
	}
	l.keep = base
	return out, nil
}

// TestPickProperty: some of the changes, and then the others, make the same of the directory as all at
// once, also where its owner has changed the same files; and an undo takes back just what was picked.
func TestPickProperty(t *testing.T) { rapid.Check(t, pickProperty) }

func pickProperty(t *rapid.T) {
	const lines = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n16\n17\n18\n19\n20\n"
	agent, owner := drawText(t, "agent", lines), lines
	if rapid.Bool().Draw(t, "owner edits") {
		owner = drawText(t, "owner", lines)
	}
	mode := rapid.SampledFrom([]uint32{0o644, 0o755}).Draw(t, "mode")
	var labs [2]*lab
	for i := range labs {
		l, end := newLab(t, "near", 1)
		defer end()
		edit(t, l.from(0), "put gone/a a\nput gone/b b\nput kept k\nput file f\nput d/e e")
		must(t, os.WriteFile(l.from(0)+"/text", []byte(lines), 0o644))
		l.begin(t)
		l.inside(t, 0, func(dir string) {
			must(t, os.WriteFile(dir+"/text", []byte(agent), 0o644), unix.Chmod(dir+"/text", mode))
			edit(t, dir, "rm gone\nput new/a a\nput new/deep/b b\ndir empty\nrm file\nput file/in i\nmode d 700\n"+
				"rm kept\nln kept d")
		})
		must(t, os.WriteFile(l.from(0)+"/text", []byte(owner), 0o644))
		labs[i] = l
	}
	l := labs[0]
	_, err := labs[1].run(runtime.ApplyOptions{}, nil)
	if errors.Is(err, fault.ErrState) {
		return // a conflict
	}
	must(t, err)
	want := files(t, labs[1].from(0))

	for round := range 2 {
		plan, err := l.run(runtime.ApplyOptions{DryRun: true, Patch: true}, nil)
		must(t, err)
		list := []runtime.ApplyPick{}
		for i, c := range plan.Changes {
			name := fmt.Sprint(round, " ", c.Path)
			one := pickAll(runtime.Applied{Changes: plan.Changes[i : i+1]})[0]
			if one.Seen == "" {
				t.Fatalf("%s: no seen", c.Path)
			}
			switch {
			case !rapid.Bool().Draw(t, name):
			case c.Hunks > 0 && rapid.Bool().Draw(t, name+" parts"):
				one.Hunks = drawSubset(t, name, c.Hunks)
				one.Mode = rapid.Bool().Draw(t, name+" mode")
				if len(one.Hunks) > 0 || one.Mode && slices.Contains(c.What, overlay.WhatMode) {
					list = append(list, one)
				}
			case c.Type == "dir" && c.Path != "/w0/empty" && c.Path != "/w0/d" && c.Path != "/w0/file":
				// it follows from what is in it
			case c.Path == "/w0/file":
				list = append(list, pickAll(runtime.Applied{Changes: plan.Changes[i : i+2]})...)
			case c.Path != "/w0/file/in":
				list = append(list, one)
			}
		}
		if len(list) == 0 {
			continue
		}
		before, keep := files(t, l.from(0)), l.keep
		out, err := l.pick(t, list)
		must(t, err)
		if len(out.Changes) == 0 {
			t.Fatal("nothing has come")
		}
		for p, now := range files(t, l.from(0)) {
			if now != before[p] && now != want[p] && p != "text" {
				t.Fatalf("%s is %q, was %q, is to be %q", p, now, before[p], want[p])
			}
		}
		if rapid.Bool().Draw(t, fmt.Sprint(round, " undo")) {
			_, err := Undo(context.Background(), l.home(), false)
			must(t, err)
			same(t, "the directory after the undo", files(t, l.from(0)), before)
			l.keep = keep
		}
	}
	if _, err := l.run(runtime.ApplyOptions{}, nil); err != nil {
		t.Fatalf("apply of the rest over %q: %v", files(t, l.from(0))["text"], err)
	}
	same(t, "the directory in the end", files(t, l.from(0)), want)
	for _, p := range []string{"text", "d", "new/deep"} {
		var modes [2]os.FileMode
		for i, l := range labs {
			st, err := os.Stat(filepath.Join(l.from(0), p))
			must(t, err)
			modes[i] = st.Mode()
		}
		if modes[0] != modes[1] {
			t.Fatalf("%s has the mode %v, want %v", p, modes[0], modes[1])
		}
	}
}

// TestPickBounds: only what was shown comes.
func TestPickBounds(t *testing.T) {
	l, end := newLab(t, "near", 1)
	defer end()
	edit(t, l.from(0), "put text 1\\n2\\n3\\n\nput other o")
	l.begin(t)
	l.inside(t, 0, func(dir string) { edit(t, dir, `put text one\n2\nthree\n`+"\nput other O\nput .git/config c") })
	show := func() runtime.Applied {
		t.Helper()
		out, err := l.run(runtime.ApplyOptions{DryRun: true, Patch: true}, nil)
		must(t, err)
		return out
	}
	of := func(out runtime.Applied, p string) runtime.ApplyPick {
		t.Helper()
		at := slices.IndexFunc(out.Changes, func(c runtime.Change) bool { return c.Path == "/w0/"+p })
		if at < 0 {
			t.Fatalf("no %s in %+v", p, out.Changes)
		}
		return pickAll(runtime.Applied{Changes: out.Changes[at : at+1]})[0]
	}
	first := show()
	had := files(t, l.from(0))
	pick := of(first, "text")
	for name, change := range map[string]func(*runtime.ApplyPick){
		"another text":  func(p *runtime.ApplyPick) { p.Seen = of(first, "other").Seen },
		"no such hunk":  func(p *runtime.ApplyPick) { p.Hunks = []int{2} },
		"nothing of it": func(p *runtime.ApplyPick) { p.Hunks = []int{} },
		"no such file":  func(p *runtime.ApplyPick) { p.Path = "/w0/none" },
	} {
		bad := pick
		change(&bad)
		_, err := l.pick(t, []runtime.ApplyPick{bad})
		if !errors.Is(err, fault.ErrState) && !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		same(t, name+": the directory", files(t, l.from(0)), had)
	}
	// Something else may change; what was shown may not.
	edit(t, l.from(0), "put more m")
	pick.Hunks = []int{1}
	edit(t, l.from(0), `put text 1\n2\n3\nmine\n`)
	if _, err := l.pick(t, []runtime.ApplyPick{pick}); !errors.Is(err, fault.ErrState) ||
		!strings.Contains(err.Error(), "/w0/text") {
		t.Errorf("over a change of the owner: %v", err)
	}
	if got := files(t, l.from(0))["text"]; got != "1\n2\n3\nmine\n" {
		t.Errorf("text: %q", got)
	}
	edit(t, l.from(0), `put text 1\n2\n3\n`)
	pick = of(show(), "text")
	pick.Hunks = []int{1}
	edit(t, l.from(0), "put other changed")
	_, err := l.pick(t, []runtime.ApplyPick{pick}) // neither a refusal nor a conflict elsewhere is in its way
	must(t, err)
	if got := files(t, l.from(0)); got["text"] != "1\n2\nthree\n" || got["other"] != "changed" || len(got) != 3 {
		t.Errorf("the directory has %q", got)
	}
	if _, err := l.pick(t, []runtime.ApplyPick{of(first, ".git/config")}); !errors.Is(err, fault.ErrDenied) {
		t.Errorf("a configuration of git: %v", err)
	}

	// What the sandbox makes later of a part that has come is no conflict with it.
	l.inside(t, 0, func(dir string) { edit(t, dir, `put text one\n2\nTHREE\n`+"\nrm .git\nput other changed") })
	_, err = l.run(runtime.ApplyOptions{}, nil)
	must(t, err)
	if got := files(t, l.from(0))["text"]; got != "one\n2\nTHREE\n" {
		t.Errorf("text in the end: %q", got)
	}
}

// TestNotesAreBounded: of many large notes the newest are kept.
func TestNotesAreBounded(t *testing.T) {
	var a applied
	large := strings.Repeat("x", maxNotes/4)
	for i := range 10 {
		note, err := json.Marshal(fmt.Sprint(i, large))
		must(t, err)
		a.add(header{Began: time.Now().Add(time.Duration(i) * time.Second), Note: note})
	}
	if n := len(a.List); n != 3 || !strings.HasPrefix(string(a.List[2].Note), `"9x`) {
		t.Errorf("%d notes are kept", n)
	}
}
