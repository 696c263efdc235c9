package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/runtime"
)

func TestMarks(t *testing.T) {
	long := strings.Repeat("x", maxMark+1)
	for _, c := range []struct {
		in, out string
		marks   []string
	}{
		{"a\x1b]633;agentbox;make test\ab", "ab", []string{"make test"}},
		{"\x1b]633;agentbox;\a\x1b]633;agentbox;50%25 a;b%0ac\a$ ", "$ ", []string{"", "50% a;b c"}},
		{"\x1b]633;E;ls\a\x1b[31mred\x1b[0m\x1b\x1b]", "\x1b]633;E;ls\a\x1b[31mred\x1b[0m\x1b\x1b]", nil},
		{"\x1b]633;agentbox;ls\nmore\a", "\x1b]633;agentbox;ls\nmore\a", nil},
		{"\x1b]633;agentbox;\x1b]633;agentbox;ls\a", "\x1b]633;agentbox;", []string{"ls"}},
		{"\x1b]633;agentbox;" + long + "\aend", "\x1b]633;agentbox;" + long + "\aend", nil},
		{"\x1b]633;agentbox;never ends", "\x1b]633;agentbox;never ends", nil},
		{"\x1b]633;agentbox;%1b[2J%e2%80%aeevil%zz\a", "", []string{"%1b[2J%e2%80%aeevil%zz"}},
		{"\x1b]633;agentbox;%1b[2J%e2%80%aeevil%ff\a", "", []string{"[2J evil�"}},
		{"\x1b]633;agentbox;" + strings.Repeat("é", 400) + "\a", "", []string{strings.Repeat("é", 250)}},
	} {
		for _, size := range []int{1, 7, len(c.in)} {
			var out bytes.Buffer
			var marks []string
			m := &markReader{out: &out, mark: func(line string) { marks = append(marks, line) }}
			for part := range slices.Chunk([]byte(c.in), size) {
				if n, err := m.Write(part); n != len(part) || err != nil {
					t.Fatal(n, err)
				}
			}
			m.flush()
			if out.String() != c.out || !slices.Equal(marks, c.marks) {
				t.Errorf("%.60q by %d: %.60q and %q, want %.60q and %q", c.in, size, out.String(), marks, c.out, c.marks)
			}
		}
	}
}

// TestMarksAnyOutput: however output is cut, what passes is the same, nothing is held back but what
// may be a mark, and messages are text.
func TestMarksAnyOutput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		piece := rapid.SampledFrom([]string{
			"\x1b", "]", "633;", "agentbox;", markBegin, "\a", "\n", "text", "%41", "%", "\xff", ";", "\u202e", "\x9c",
		})
		in := []byte(strings.Join(rapid.SliceOfN(piece, 0, 40).Draw(t, "output"), ""))
		read := func(cuts []int) (string, []string) {
			var out bytes.Buffer
			var marks []string
			m := &markReader{out: &out, mark: func(line string) {
				if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return !unicode.IsGraphic(r) }) {
					t.Fatalf("a message %q", line)
				}
				marks = append(marks, line)
			}}
			at := 0
			for _, cut := range append(cuts, len(in)) {
				if cut <= at {
					continue
				}
				if _, err := m.Write(in[at:cut]); err != nil {
					t.Fatal(err)
				}
				if at = cut; len(m.held) > 0 && m.held[0] != markBegin[0] {
					t.Fatalf("held back: %q", m.held)
				}
			}
			m.flush()
			return out.String(), marks
		}
		whole, marks := read(nil)
		cuts := rapid.SliceOfN(rapid.IntRange(0, len(in)), 0, 8).Draw(t, "cuts")
		slices.Sort(cuts)
		if out, again := read(cuts); out != whole || !slices.Equal(marks, again) {
			t.Fatalf("%q: %q and %q; by %v: %q and %q", in, whole, marks, cuts, out, again)
		}
	})
}

// TestStepper: steps are taken one at a time, marks that come meanwhile become one, and what the
// last of them was for is taken at the end.
func TestStepper(t *testing.T) {
	began, goOn := make(chan string), make(chan error)
	s := newStepper(t.Context(), func(_ context.Context, message string) error {
		began <- message
		return <-goOn
	})
	next := func(want string) {
		t.Helper()
		if got := <-began; got != want {
			t.Errorf("a step of %q, want %q", got, want)
		}
	}
	s.want("one")
	next("one")
	s.want("two")
	s.want("three")
	s.want("") // an empty line at the prompt
	goOn <- nil
	next("three")
	s.want("four")
	goOn <- errors.New("busy")
	next("four")
	s.want("five")
	said := make(chan string)
	go func() { said <- s.end(t.Context()) }()
	goOn <- errors.New("the shell has ended")
	next("five")
	goOn <- nil
	if got := <-said; got != "" {
		t.Errorf("it says %q", got)
	}

	// What could not be taken in the end is said; a sandbox that is gone needs none.
	for _, c := range []struct {
		err  error
		want string
	}{
		{errors.New("no space"), "2 steps could not be taken: no space"},
		{fmt.Errorf("sandbox c: %w", runtime.ErrNotFound), ""},
	} {
		tried := make(chan bool, 2)
		s := newStepper(t.Context(), func(context.Context, string) error { tried <- true; return c.err })
		s.want("x")
		<-tried
		if got := s.end(t.Context()); got != c.want {
			t.Errorf("%v: %q, want %q", c.err, got, c.want)
		}
		if len(tried) != 1 {
			t.Errorf("it was tried %d more times", len(tried))
		}
	}

	// A cancelled session waits for nothing.
	ctx, cancel := context.WithCancel(t.Context())
	s = newStepper(ctx, func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() })
	cancel()
	if got := s.end(ctx); got != "" {
		t.Errorf("it says %q", got)
	}
	s.want("late") // output that comes after the end
}
