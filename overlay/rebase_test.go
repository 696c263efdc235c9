package overlay

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/thorough"
)

// dataSource has data by its digest.
type dataSource map[string][]byte

func (s dataSource) Data(_ context.Context, e Entry) (io.ReadCloser, error) {
	data, ok := s[e.Digest]
	if !ok {
		return nil, os.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

// shownBy is what a user of a mount sees. A copied-up file of the lower directory is linked to none of
// its other names.
func shownBy(t tb, root string) map[string]string {
	group := regexp.MustCompile(` group .*$`)
	seen := peek(t, root)
	for p, s := range seen {
		seen[p] = group.ReplaceAllString(s, "")
	}
	return seen
}

// TestRebase takes random upperdirs over random directories, which then change at random: what is
// seen over the changed directory must be what was seen before.
func TestRebase(t *testing.T) {
	thorough.Checks(t, 60)
	base := noDevices(t)
	whole := 0
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(base, "round-")
		must(t, err)
		defer os.RemoveAll(dir)
		sub := func(name string) string {
			p := filepath.Join(dir, name)
			must(t, os.Mkdir(p, 0o755))
			return p
		}
		m := Mount{Lower: []string{sub("lower")}, Upper: sub("upper"), Work: sub("work"), Target: sub("merged")}
		c := &chaos{done: map[string]int{}, root: m.Lower[0]}
		c.run(rt, 40)
		must(t, m.Mount())
		defer Unmount(m.Target, UnmountOptions{Lazy: true})
		c.root = m.Target
		c.run(rt, 40)
		want := shownBy(rt, m.Target)
		must(t, Unmount(m.Target, UnmountOptions{}))

		source := dataSource{}
		read := func(of string) (list []Entry) {
			for e, err := range digested(of) {
				must(t, err)
				if list = append(list, e); e.Type == TypeFile && e.Hardlink == "" {
					r, err := (&dirSource{dir: of}).Data(t.Context(), e)
					must(t, err)
					source[e.Digest], err = io.ReadAll(r)
					must(t, errors.Join(err, r.Close()))
				}
			}
			return list
		}
		l := Layers{Upper: seqOf(read(m.Upper)), Was: seqOf(read(m.Lower[0]))}

		l.Now = l.Was
		if got := collected(t, Rebase(l)); !slices.EqualFunc(got, collected(t, l.Upper), equalEntries) {
			rt.Errorf("over the same directory: %v", got)
		}

		c.root = m.Lower[0]
		c.run(rt, 40)
		l.Now = seqOf(read(m.Lower[0]))
		again := collected(t, Rebase(l))
		if len(again) > len(collected(t, l.Upper)) {
			whole++
		}
		u, err := plan(t.Context(), digested(m.Upper), seqOf(again))
		must(t, err)
		stage := m.Upper + ".stage"
		must(t, u.Stage(t.Context(), m.Upper, stage, source))
		must(t, u.Apply(t.Context(), m.Upper, stage))
		must(t, u.Close())
		m.Work = sub("work2")
		must(t, m.Mount())
		samePeek(rt, "rebased", want, shownBy(rt, m.Target))
		must(t, Unmount(m.Target, UnmountOptions{}))
	})
	if !t.Failed() && whole == 0 {
		t.Error("no upperdir has grown")
	}
}

func equalEntries(a, b Entry) bool {
	what, err := differ(&a, &b, &CompareOptions{Block: 4096})
	return a.Path == b.Path && len(what) == 0 && err == nil
}

func collected(t tb, seq iter.Seq2[Entry, error]) (list []Entry) {
	t.Helper()
	for e, err := range seq {
		must(t, err)
		list = append(list, e)
	}
	return list
}

// TestRebaseRefuses: a sequence that is out of order or broken is an error, not a tree.
func TestRebaseRefuses(t *testing.T) {
	own := errors.New("own")
	root, a, b := Entry{Path: ".", Type: TypeDir}, Entry{Path: "a", Type: TypeFile}, Entry{Path: "b", Type: TypeFile}
	broken := func(yield func(Entry, error) bool) {
		if yield(root, nil) {
			yield(Entry{}, own)
		}
	}
	good := seqOf([]Entry{root, a})
	for name, c := range map[string]struct {
		l    Layers
		want error
	}{
		"broken upperdir":       {Layers{broken, good, good}, own},
		"broken lower":          {Layers{good, broken, good}, own},
		"broken now":            {Layers{good, good, broken}, own},
		"upperdir out of order": {Layers{seqOf([]Entry{root, b, a}), good, good}, fault.ErrCorrupt},
		"lower out of order":    {Layers{good, seqOf([]Entry{root, b, a}), good}, fault.ErrCorrupt},
		"no root":               {Layers{seqOf(nil), good, good}, fault.ErrCorrupt},
		"dangling hard link": {Layers{seqOf([]Entry{root}), seqOf([]Entry{root, {Path: "b", Type: TypeFile, Hardlink: "c"}}),
			seqOf([]Entry{root})}, fault.ErrCorrupt},
	} {
		var last error
		for _, err := range Rebase(c.l) {
			last = err
		}
		if !errors.Is(last, c.want) {
			t.Errorf("%s: %v", name, last)
		}
	}
	for range Rebase(Layers{good, good, good}) { // a consumer that stops early
		break
	}
}
