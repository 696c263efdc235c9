package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestParseRef(t *testing.T) {
	at := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	for text, want := range map[string]ref{
		"a":                            {base: "a"},
		"@a":                           {base: "a"},
		"HEAD":                         {base: "HEAD", head: true},
		"head":                         {base: "head", head: true},
		"@HEAD":                        {base: "HEAD", head: true},
		"HEAD~":                        {base: "HEAD", head: true, steps: 1},
		"HEAD~0":                       {base: "HEAD", head: true},
		"HEAD~2":                       {base: "HEAD", head: true, steps: 2},
		"before.x-1~12":                {base: "before.x-1", steps: 12},
		"3f2a~999999999":               {base: "3f2a", steps: 999999999},
		"HEADS~1":                      {base: "HEADS", steps: 1},
		"{5m}":                         {age: 5 * time.Minute},
		"@{5m}":                        {age: 5 * time.Minute},
		"{1w2d3h}~3":                   {age: 219 * time.Hour, steps: 3},
		"{0s}":                         {},
		"{2026-01-02T15:04:05Z}":       {at: at},
		"{2026-01-02T17:04:05+02:00}~": {at: at, steps: 1},
		"c@HEAD~2":                     {base: "c@HEAD~2"}, // no checkpoint has this name
		"image":                        {base: "image"},
		"%":                            {base: "%"},
	} {
		got, err := parseRef(text)
		same := got.at.Equal(want.at)
		got.at, want.at = time.Time{}, time.Time{}
		if err != nil || got != want || !same {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
	}
	for text, says := range map[string]string{
		"": "no checkpoint is named", "~1": "no checkpoint is named", "@~1": "no checkpoint is named",
		"HEAD~x": `"x" is none`, "HEAD~-1": `"-1" is none`, "HEAD~~": `"~" is none`, "HEAD~1~1": `"1~1" is none`,
		"HEAD~+1": `"+1" is none`, "HEAD~9999999999": "more than 9 digits",
		"HEAD^": "no name has a ^", "HEAD{5m}": "no name has a ^, {", "a}": "no name has a ^, { or }",
		"{5m": "a { without its }", "{": "a { without its }", "{5m}x": "a { without its }",
		"{}": "neither a duration nor an instant", "{-5m}": "neither a duration", "{5}": "neither a duration",
		"{yesterday}": "neither a duration", "{2026-01-02}": "neither a duration",
	} {
		_, err := parseRef(text)
		if err == nil || !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), says) ||
			len(fault.Hint(err)) != 1 {
			t.Errorf("%q: %v, want %q and a hint", text, err, says)
		}
	}
	for text, want := range map[string]bool{
		"HEAD": true, "@head": true, "HEAD~0": true, "HEAD~1": false, "{5m}": false, "image": false, "a": false,
		"c@HEAD": false, "HEAD^": false,
	} {
		if got := IsHead(text); got != want {
			t.Errorf("%q is HEAD: %v, want %v", text, got, want)
		}
	}
}

// No text makes parseRef panic, each error has a way out, and what it takes is bounded.
func FuzzRef(f *testing.F) {
	for _, text := range []string{
		"a", "HEAD~2", "@{5m}~1", "{2026-01-02T15:04:05Z}", "HEAD^", "~", "{", "c@x~1", "image~",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := parseRef(text)
		if err != nil {
			if !errors.Is(err, fault.ErrInvalid) || len(fault.Hint(err)) != 1 || len(err.Error()) > 1000 {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		if p.steps < 0 || p.steps > 999_999_999 || p.age < 0 || p.head != strings.EqualFold(p.base, "head") {
			t.Fatalf("%q: %+v", text, p)
		}
		if p.base != "" && plainName(p.base) == nil && ValidCheckpointName(p.base) == nil && (p.head || p.image()) {
			t.Fatalf("%q can be a name, and is %+v", text, p)
		}
		again, err := parseRef("@" + strings.TrimPrefix(text, "@"))
		if err != nil || again != p {
			t.Fatalf("%q after an @: %+v, %v, want %+v", text, again, err, p)
		}
	})
}

// No name of a checkpoint can be read as more than a name.
func TestNamesAreNoRefs(t *testing.T) {
	for _, name := range []string{"a~1", "a~", "a^", "{5m}", "a{", "a}", "a@b", "@a", "HEAD", "head", "image"} {
		if err := ValidCheckpointName(name); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q can be a name: %v", name, err)
		}
	}
}

// family is a sandbox c with a history, and a fork f of it.
type family struct {
	*Store
	c, f Sandbox
	made map[string]Checkpoint
}

// newFamily makes, from the oldest on, a, b (a's child), u (an undo checkpoint beside b), x
// (foreign), d (a's child, tagged t), and of the fork fa (d's child). c is at d.
func newFamily(t *testing.T) family {
	t.Helper()
	ctx := context.Background()
	s := open(t, t.TempDir())
	fam := family{Store: s, c: put(t, s, "c"), f: put(t, s, "f"), made: map[string]Checkpoint{}}
	data, now := sample(1, 100), time.Now()
	mk := func(b Sandbox, name, parent string, age time.Duration, change func(*Checkpoint)) {
		c := of(b, name, KindFiles)
		c.Parent, c.Created = fam.made[parent].ID, now.Add(-age)
		if change != nil {
			change(&c)
		}
		fam.made[name] = taken(t, s, c, data)
	}
	mk(fam.c, "a", "", 3*time.Hour, nil)
	mk(fam.c, "b", "a", 2*time.Hour, nil)
	mk(fam.c, "u", "b", 90*time.Minute, func(c *Checkpoint) { c.Trigger = "undo" })
	mk(fam.c, "x", "b", 80*time.Minute, func(c *Checkpoint) { c.Foreign = true })
	mk(fam.c, "d", "a", time.Hour, nil)
	mk(fam.f, "fa", "d", 30*time.Minute, nil)
	must(t, s.Tag(ctx, fam.made["d"].ID, "t"))
	must(t, s.SetHead(ctx, fam.c.ID, fam.made["d"].ID, 1))
	must(t, s.SetHead(ctx, fam.f.ID, fam.made["fa"].ID, 1))
	return fam
}

func TestRefs(t *testing.T) {
	ctx := context.Background()
	fam := newFamily(t)
	id := func(name string) string { return fam.made[name].ID }
	for text, want := range map[string]string{
		"c@HEAD": "d", "c@head": "d", "c@@HEAD": "d", "c@HEAD~0": "d", "c@HEAD~": "a", "c@HEAD~1": "a", "f@HEAD": "fa",
		"c@b~1": "a", "c@t~1": "a", "c@" + id("b")[:8] + "~1": "a", id("b") + "~1": "a", "b~1": "a", "t~": "a",
		fam.c.ID + "@HEAD~1": "a", fam.c.ID[:8] + "@HEAD": "d", "c@u~1": "b", "c@u~2": "a", "c@x~": "b",
		"c@{0s}": "d", "c@{61m}": "b", "c@@{61m}": "b", "c@{61m}~1": "a", "c@{150m}": "a",
		"c@{" + time.Now().Add(-70*time.Minute).Format(time.RFC3339) + "}": "b",
		"c@{9999-01-01T00:00:00Z}": "d",
	} {
		got, err := fam.Checkpoint(ctx, text)
		if err != nil || got.ID != id(want) {
			t.Errorf("%s leads to %q, %v, want %s", text, got.Name, err, want)
		}
	}
	for text, says := range map[string]string{
		"c@HEAD~7":                 "c@HEAD~7: the history of c has 2 checkpoints: not found",
		"c@@HEAD~7":                "c@HEAD~7: the history of c has 2 checkpoints: not found",
		fam.c.ID + "@HEAD~7":       "c@HEAD~7: the history of c has 2 checkpoints: not found",
		"c@b~999999999":            "c@b~999999999: the history of c@b has 2 checkpoints: not found",
		"a~1":                      "a~1: the history of a has 1 checkpoint: not found",
		"f@HEAD~1":                 "f@HEAD~1: the history of f has 1 checkpoint: not found",
		"c@{4h}":                   "c@{4h}: the oldest checkpoint of c is 3h old: not found",
		"c@{1200-01-01T00:00:00Z}": "c@{1200-01-01T00:00:00Z}: the oldest checkpoint of c is of 20",
		"c@none~1":                 `checkpoint "c@none~1": not found`,
		"c@image":                  "c@image: the image is no checkpoint, but what c had before it changed anything",
		"image":                    "image: the image is no checkpoint, but what a sandbox had",
		"none@HEAD":                `checkpoint "none@HEAD": not found`,
		"none@{5m}":                `checkpoint "none@{5m}": not found`,
		"none@image":               `checkpoint "none@image": not found`,
	} {
		_, err := fam.Checkpoint(ctx, text)
		if !errors.Is(err, fault.ErrNotFound) || !strings.HasPrefix(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
	for _, text := range []string{"HEAD", "HEAD~1", "{5m}", "c@HEAD^", "c@~1", "c@{x}", "~1"} {
		if _, err := fam.Checkpoint(ctx, text); !errors.Is(err, fault.ErrInvalid) || len(fault.Hint(err)) != 1 {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := fam.Checkpoint(ctx, "f@HEAD~1"); !strings.Contains(fmt.Sprint(fault.Hint(err)), id("d")[:12]+" of c") {
		t.Errorf("where the fork began: %q", fault.Hint(err))
	}

	// A fork that has none of its own yet is at none, and c's is not taken for it.
	must(t, fam.RemoveCheckpoint(ctx, id("fa")))
	_, err := fam.Checkpoint(ctx, "f@HEAD")
	wantErr(t, err, fault.ErrNotFound, "f@HEAD: f is at no checkpoint of its own, but began at one of c")
	_, err = fam.Checkpoint(ctx, "f@{5m}")
	wantErr(t, err, fault.ErrNotFound, "f has no checkpoint that was made here")

	// HEAD of what is removed is the one before it; in the end there is none.
	must(t, fam.RemoveCheckpoint(ctx, id("d")))
	b, err := fam.Sandbox(ctx, "c")
	must(t, err)
	if got, err := fam.Head(ctx, b); err != nil || got.ID != id("a") {
		t.Errorf("HEAD after its removal: %q, %v", got.Name, err)
	}
	must(t, fam.RemoveCheckpoint(ctx, id("a")))
	_, err = fam.Checkpoint(ctx, "c@HEAD")
	wantErr(t, err, fault.ErrNotFound, "c@HEAD: c is at no checkpoint")
	must(t, fam.SetHead(ctx, fam.c.ID, id("a"), 1)) // no verb does that
	_, err = fam.Checkpoint(ctx, "c@HEAD")
	wantErr(t, err, fault.ErrNotFound, id("a")[:12]+", which c was last at, was removed")

	must(t, fam.DeleteSandbox(ctx, fam.c.ID))
	for _, text := range []string{"c@HEAD", fam.c.ID + "@HEAD~1"} {
		_, err = fam.Checkpoint(ctx, text)
		wantErr(t, err, fault.ErrNotFound, "c was removed, and is at no checkpoint")
	}
	for _, text := range []string{"c@{61m}", "c@u~1", "c@x~1", fam.c.ID + "@{61m}"} {
		if got, err := fam.Checkpoint(ctx, text); err != nil || got.ID != id("b") {
			t.Errorf("%s of a removed one: %q, %v", text, got.Name, err)
		}
	}
}

// A checkpoint from a version in which HEAD was a name like any other is still found by it,
// unless it came from elsewhere.
func TestRefOldHead(t *testing.T) {
	ctx := context.Background()
	fam := newFamily(t)
	rename := func(id, name string) {
		must(t, fam.write(ctx, "test", func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "UPDATE checkpoints SET name = ? WHERE id = ?", name, id)
			return err
		}))
	}
	rename(fam.made["b"].ID, "head")
	rename(fam.made["x"].ID, "HEAD")
	for text, want := range map[string]string{"c@head": "b", "head": "b", "c@HEAD": "d", "c@head~1": "a"} {
		if got, err := fam.Checkpoint(ctx, text); err != nil || got.ID != fam.made[want].ID {
			t.Errorf("%s: %s, %v", text, got.ID, err)
		}
	}
	b, err := fam.Sandbox(ctx, "c")
	must(t, err)
	if got, err := fam.Head(ctx, b); err != nil || got.ID != fam.made["d"].ID {
		t.Errorf("HEAD: %s, %v", got.ID, err)
	}
}

// Whatever the rows say of parents, a walk ends: at the ancestor that a plain walk finds,
// before the beginning, or where the history comes back to itself.
func TestRefAncestry(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	c, other := put(t, s, "c"), put(t, s, "other")
	data := sample(1, 50)
	var ids []string
	for i := range 6 {
		ids = append(ids, taken(t, s, of(c, fmt.Sprint("n", i), KindFiles), data).ID)
	}
	foreign := taken(t, s, of(other, "o", KindFiles), data).ID
	rapid.Check(t, func(rt *rapid.T) {
		parents := map[string]string{}
		must(t, s.write(ctx, "test", func(tx *sql.Tx) error {
			for _, id := range ids {
				parents[id] = rapid.SampledFrom(append([]string{"", foreign, NewID()}, ids...)).Draw(rt, "parent")
				if _, err := tx.ExecContext(ctx, "UPDATE checkpoints SET parent = ? WHERE id = ?", parents[id], id); err != nil {
					return err
				}
			}
			return nil
		}))
		at := rapid.SampledFrom(ids).Draw(rt, "head")
		must(t, s.SetHead(ctx, c.ID, at, 1))
		n := rapid.OneOf(rapid.IntRange(0, 8), rapid.Just(999_999_999)).Draw(rt, "steps")

		seen, want := map[string]bool{at: true}, error(nil)
		for range n {
			if at = parents[at]; !slices.Contains(ids, at) {
				want = fault.ErrNotFound
				break
			}
			if seen[at] {
				want = fault.ErrCorrupt
				break
			}
			seen[at] = true
		}
		got, err := s.Checkpoint(ctx, fmt.Sprintf("c@HEAD~%d", n))
		switch {
		case want != nil && !errors.Is(err, want):
			rt.Fatalf("%+v, %v, want %v", got.ID, err, want)
		case want == nil && (err != nil || got.ID != at):
			rt.Fatalf("%s, %v, want %s", got.ID, err, at)
		}
	})
}

func TestAgeText(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 10 * time.Second: "10s", 2*time.Minute + 400*time.Millisecond: "2m", 3 * time.Hour: "3h",
		90 * time.Minute: "1h30m", 61 * time.Second: "1m1s", 10 * time.Minute: "10m", 20 * time.Hour: "20h",
	} {
		if got := ageText(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}
