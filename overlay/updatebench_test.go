package overlay

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// laps adds up the time of the steps of a benchmark's operation.
type laps struct {
	b    *testing.B
	last time.Time
	sum  map[string]time.Duration
}

func newLaps(b *testing.B) *laps { return &laps{b, time.Now(), map[string]time.Duration{}} }

func (l *laps) start()          { l.last = time.Now() }
func (l *laps) lap(name string) { l.sum[name] += time.Since(l.last); l.last = time.Now() }
func (l *laps) report() {
	for name, d := range l.sum {
		l.b.ReportMetric(float64(d.Microseconds())/1000/float64(l.b.N), name+"-ms")
	}
}

// BenchmarkUpdate puts 10 changes in 10,000 files of 40 MB right, and compares
// that with what it takes to clear the directory and extract all of it.
func BenchmarkUpdate(b *testing.B) {
	for name, fs := range map[string]func(b *testing.B) string{
		"ext4":  func(b *testing.B) string { return ext4(b, "3g") },
		"tmpfs": func(b *testing.B) string { return tmpfs(b, "size=1g,nr_inodes=0") },
	} {
		b.Run(name, func(b *testing.B) {
			base := fs(b)
			want, dir := filepath.Join(base, "want"), filepath.Join(base, "dir")
			must(b, os.Mkdir(want, 0o755))
			must(b, os.Mkdir(dir, 0o755))
			tenThousand(b, want)
			archive, tree := captureDir(b, want)
			_, err := Apply(context.Background(), bytes.NewReader(archive), dir, ApplyOptions{Sync: true})
			must(b, err)
			l := newLaps(b)
			n := 0
			for b.Loop() {
				for i := range 10 {
					p := filepath.Join(dir, fmt.Sprintf("d%02d/file-%d", i*7, 100*i*7+i*7))
					must(b, os.WriteFile(p, fmt.Appendf(nil, "other %d", n), 0o644))
				}
				n++
				must(b, os.RemoveAll(base+"/memory"))
				_, err := Collect(b.Context(), dir, base+"/memory", nil, CollectOptions{})
				must(b, err)
				l.start()
				_, err = PlanUpdate(b.Context(), base+"/memory", TreeEntries(bytes.NewReader(tree)))
				must(b, err)
				l.lap("plan-entries")
				u, err := PlanUpdateTree(b.Context(), base+"/memory", bytes.NewReader(tree))
				must(b, err)
				if u.Len() != 10 {
					b.Fatal(u.Len())
				}
				l.lap("plan")
				must(b, u.Stage(b.Context(), dir, dir+".stage", &dirSource{dir: want}))
				l.lap("stage")
				must(b, u.Apply(b.Context(), dir, dir+".stage"))
				l.lap("apply")
			}
			for range 3 {
				l.start()
				must(b, os.RemoveAll(dir))
				must(b, os.Mkdir(dir, 0o755))
				l.lap("clear")
				_, err := Apply(b.Context(), bytes.NewReader(archive), dir, ApplyOptions{Sync: true})
				must(b, err)
				l.lap("extract")
			}
			l.sum["clear"] = l.sum["clear"] * time.Duration(b.N) / 3
			l.sum["extract"] = l.sum["extract"] * time.Duration(b.N) / 3
			l.report()
		})
	}
}

// BenchmarkUpdateFresh fills an empty directory with 10,000 files, by an update
// and from an archive.
func BenchmarkUpdateFresh(b *testing.B) {
	for name, fs := range map[string]func(b *testing.B) string{
		"ext4":  func(b *testing.B) string { return ext4(b, "3g") },
		"tmpfs": func(b *testing.B) string { return tmpfs(b, "size=1g,nr_inodes=0") },
	} {
		b.Run(name, func(b *testing.B) {
			base := fs(b)
			want, dir := filepath.Join(base, "want"), filepath.Join(base, "dir")
			must(b, os.Mkdir(want, 0o755))
			tenThousand(b, want)
			archive, tree := captureDir(b, want)
			l := newLaps(b)
			for b.Loop() {
				must(b, os.Mkdir(dir, 0o755))
				l.start()
				u, err := plan(b.Context(), digested(dir), TreeEntries(bytes.NewReader(tree)))
				must(b, err)
				l.lap("plan")
				must(b, u.Stage(b.Context(), dir, dir+".stage", &dirSource{dir: want}))
				l.lap("stage")
				must(b, u.Apply(b.Context(), dir, dir+".stage"))
				l.lap("apply")
				must(b, os.RemoveAll(dir))
				must(b, os.Mkdir(dir, 0o755))
				l.start()
				_, err = Apply(b.Context(), bytes.NewReader(archive), dir, ApplyOptions{})
				must(b, err)
				l.lap("extract")
				must(b, os.RemoveAll(dir))
				must(b, os.Mkdir(dir, 0o755))
				l.start()
				_, err = Apply(b.Context(), bytes.NewReader(archive), dir, ApplyOptions{Sync: true})
				must(b, err)
				l.lap("extract+sync")
				must(b, os.RemoveAll(dir))
			}
			l.report()
		})
	}
}

// BenchmarkPlan compares 10,000 entries of which none differs.
func BenchmarkPlan(b *testing.B) {
	base := tmpfs(b, "size=1g,nr_inodes=0")
	dir, fileCache := base+"/dir", base+"/memory"
	must(b, os.Mkdir(dir, 0o755))
	tenThousand(b, dir)
	tree := treeOf(b, dir)
	_, err := Collect(b.Context(), dir, fileCache, nil, CollectOptions{})
	must(b, err)
	for name, plan := range map[string]func() (*Update, error){
		"entries": func() (*Update, error) {
			return PlanUpdate(b.Context(), fileCache, TreeEntries(bytes.NewReader(tree)))
		},
		"tree": func() (*Update, error) { return PlanUpdateTree(b.Context(), fileCache, bytes.NewReader(tree)) },
	} {
		b.Run(name, func(b *testing.B) {
			defer cpu(b)()
			for b.Loop() {
				u, err := plan()
				must(b, err)
				if !u.Empty() {
					b.Fatal(kinds(b, u))
				}
			}
		})
	}
}
