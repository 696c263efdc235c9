package store

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// BenchmarkCommit: a commit alone, of what is nearly as in the checkpoint before. On a
// disk most of it is waiting; TMPDIR=/dev/shm shows what is computed.
func BenchmarkCommit(b *testing.B) {
	ctx := context.Background()
	for _, n := range []int{10_000, 100_000} {
		s := open(b, b.TempDir())
		box := put(b, s, "box")
		f := newSmallFiles(n)
		for range 2 {
			f.commit(b, s, of(box, "", KindFiles))
		}
		bench := func(what string, before func()) {
			b.Run(fmt.Sprintf("%d files, %s", n, what), func(b *testing.B) {
				fastest := time.Hour
				for range b.N {
					b.StopTimer()
					before()
					d := f.draft(b, s, of(box, "", KindFiles))
					b.StartTimer()
					began := time.Now()
					must1(d.Commit(ctx, describe()))
					fastest = min(fastest, time.Since(began))
					b.StopTimer()
					must(b, d.Close())
				}
				b.ReportMetric(float64(fastest.Microseconds())/1e3, "min-ms")
			})
		}
		for _, changed := range []int{0, 10, 50, 200} {
			bench(fmt.Sprint(changed, " changed"), func() { f.change(changed) })
		}
		bench("no index cache", func() { must(b, s.dropIndexCaches()) })
	}
}
