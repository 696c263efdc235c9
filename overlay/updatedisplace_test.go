package overlay

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// asideOf is where an update of dir keeps what it replaces.
func displacedOf(dir string) (all, stage, before string) {
	return dir + ".old", dir + ".old/new", dir + ".old/before"
}

// updateDisplacing makes dir what want is and keeps what it had.
func updateDisplacing(t tb, ctx context.Context, dir, want string, src Source) {
	t.Helper()
	u, err := plan(ctx, digested(dir), digested(want))
	must(t, err)
	all, stage, before := displacedOf(dir)
	must(t, os.Mkdir(all, 0o700))
	if ok, err := u.CanDisplace(all); !ok || err != nil {
		t.Fatalf("CanDisplace: %v, %v", ok, err)
	}
	must(t, u.Stage(ctx, dir, stage, src))
	must(t, u.WriteBefore(before))
	must(t, u.ApplyDisplacing(ctx, dir, stage))
}

// eitherSource has what was displaced, and what was wanted.
type eitherSource struct {
	displaced *Displaced
	want      *dirSource
}

func (s eitherSource) Data(ctx context.Context, e Entry) (io.ReadCloser, error) {
	r, err := s.displaced.Data(ctx, e)
	if errors.Is(err, fault.ErrNotFound) {
		return s.want.Data(ctx, e)
	}
	return r, err
}

// goBack makes dir what it was before updateDisplacing, wherever that ended.
func goBack(t tb, dir, want string) {
	t.Helper()
	ctx := context.Background()
	all, stage, before := displacedOf(dir)
	was, err := Before(before, digested(want))
	if errors.Is(err, os.ErrNotExist) {
		return // it had not begun
	}
	must(t, err)
	must(t, os.Rename(stage, all+"/was-1"))
	displaced, err := OpenDisplaced(ctx, all)
	must(t, err)
	u, err := plan(ctx, digested(dir), was)
	must(t, err)
	if !u.Empty() {
		must(t, u.Stage(ctx, dir, stage, eitherSource{displaced, &dirSource{dir: want}}))
		must(t, u.Apply(ctx, dir, stage))
	}
}

// TestUpdateAside kills updates that keep what they replace, at many of their
// operations, and goes back from there.
func TestUpdateDisplacing(t *testing.T) {
	base := noDevices(t)
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	everything(t, src)
	archive, _ := captureDir(t, src)
	want, _ := applyTo(t, base, archive)
	from, _ := applyTo(t, base, archive)
	for i, root := range []string{from, want} {
		c := &chaos{root: root}
		for n := range 300 {
			c.rand = rand.New(rand.NewPCG(uint64(i), uint64(n)))
			_ = operations[operationNames[c.n(len(operationNames)-1)]](c) // many fail for good reasons
		}
	}
	fromArchive, _ := captureDir(t, from)
	kills := 0
	for n := 1; ; n += 7 {
		dir, _ := applyTo(t, base, fromArchive)
		killed := runKilled(t, dir, want, n, "OVERLAY_TEST_ASIDE=1")
		if !killed {
			proven(t, dir, want)
		}
		goBack(t, dir, want)
		samePeek(t, "gone back", peek(t, from), peek(t, dir))
		all, _, _ := displacedOf(dir)
		must(t, errors.Join(os.RemoveAll(dir), os.RemoveAll(all)))
		if !killed {
			break
		}
		kills++
	}
	if kills < 10 {
		t.Errorf("killed %d times only", kills)
	}
}

func TestBeforeDamaged(t *testing.T) {
	base := noDevices(t)
	dir, want := filepath.Join(base, "dir"), filepath.Join(base, "want")
	for _, d := range []string{dir, want} {
		must(t, os.Mkdir(d, 0o755))
		must(t, os.WriteFile(d+"/file", []byte(d), 0o644))
	}
	updateDisplacing(t, context.Background(), dir, want, &dirSource{dir: want})
	_, _, before := displacedOf(dir)
	whole, err := os.ReadFile(before)
	must(t, err)
	for at := range whole {
		hurt := append([]byte{}, whole...)
		hurt[at] ^= 1
		for _, b := range [][]byte{hurt, whole[:at]} {
			must(t, os.WriteFile(before, b, 0o600))
			_, err := Before(before, digested(want))
			if cut := len(b) < len(whole); !errors.Is(err, fault.ErrCorrupt) ||
				cut && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("damage at %d: %v", at, err)
			}
		}
	}
}

// TestDisplacingNotForMuch: what is too much for memory is not displaced.
func TestDisplacingNotForMuch(t *testing.T) {
	base := noDevices(t)
	dir, want := filepath.Join(base, "dir"), filepath.Join(base, "want")
	must(t, errors.Join(os.Mkdir(dir, 0o755), os.Mkdir(want, 0o755), os.WriteFile(want+"/file", nil, 0o644)))
	defer func(n int) { spillAt = n }(spillAt)
	spillAt = 1
	u, err := plan(context.Background(), digested(dir), digested(want))
	must(t, err)
	defer u.Close()
	if ok, err := u.CanDisplace(base); ok || err != nil {
		t.Errorf("CanDisplace: %v, %v", ok, err)
	}
}
