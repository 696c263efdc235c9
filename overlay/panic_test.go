package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/guard"
)

// brokenSink and brokenSource panic over every file.
type (
	brokenSink   struct{}
	brokenSource struct{}
)

func (brokenSink) Data(context.Context, int64, io.Reader) (string, []Chunk, error) { panic("sink") }
func (brokenSource) Data(context.Context, Entry) (io.ReadCloser, error)            { panic("source") }

// A panic in a goroutine of a capture or an update is that operation's error: no goroutine waits
// for what it would have done, and none goes on as if it had.
func TestPanics(t *testing.T) {
	base := t.TempDir()
	full, empty := filepath.Join(base, "full"), filepath.Join(base, "empty")
	for i := range 300 { // more than one batch
		dir := filepath.Join(full, fmt.Sprint(i%7))
		must(t, os.MkdirAll(dir, 0o755))
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte(fmt.Sprint(i)), 0o644))
	}
	must(t, os.MkdirAll(empty, 0o755))
	broken := func(string) bool { panic("skip") }
	for name, do := range map[string]func() error{
		"collect, its sink": func() error {
			_, err := Collect(t.Context(), full, base+"/out", brokenSink{}, CollectOptions{})
			return err
		},
		"collect, its lister": func() error {
			_, err := Collect(t.Context(), full, base+"/out", nil, CollectOptions{Skip: broken})
			return err
		},
		"capture, its lister": func() error {
			_, err := Capture(t.Context(), full, io.Discard, CaptureOptions{Skip: broken})
			return err
		},
		"stage": func() error {
			u := planDirs(t, empty, full)
			return u.Stage(t.Context(), empty, base+"/stage", brokenSource{})
		},
	} {
		err := guard.Do(do)
		if p := (*guard.Panic)(nil); !errors.As(err, &p) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
