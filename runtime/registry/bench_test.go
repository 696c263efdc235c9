package registry

import (
	"io"
	"log"
	"net/http/httptest"
	"strings"
	"testing"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
)

// BenchmarkPushPull moves 1,000 chunks of 200 KiB, half of which compress, to a
// registry in memory and back.
func BenchmarkPushPull(b *testing.B) {
	src := sample(1, 1000, 200<<10)
	b.SetBytes(src.bytes())
	b.ReportAllocs()
	o := Options{Scratch: b.TempDir()}
	for b.Loop() {
		b.StopTimer()
		s := httptest.NewServer(ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))))
		ref := strings.TrimPrefix(s.URL, "http://") + "/web:one"
		b.StartTimer()
		if _, err := Push(b.Context(), ref, src, about(id1), o); err != nil {
			b.Fatal(err)
		}
		dst := newMemory()
		if _, err := Pull(b.Context(), ref, dst.begin, o); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		s.Close()
		b.StartTimer()
	}
}
