package progress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// halves returns the first half of its data, and the rest when it is released.
type halves struct {
	first, rest io.Reader
	may         <-chan struct{}
}

func (h *halves) Read(p []byte) (int, error) {
	n, err := h.first.Read(p)
	if err != io.EOF {
		return n, err
	}
	<-h.may
	return h.rest.Read(p)
}

func (h *halves) Close() error { return nil }

type halvesSource struct{ *halves }

func (h halvesSource) Data(context.Context, overlay.Entry) (io.ReadCloser, error) {
	return h.halves, nil
}

// TestGrow: the progress of a large file is reported while it is read, in both directions.
func TestGrow(t *testing.T) {
	const half = 4 << 20
	for name, use := range map[string]func(*Meter, *halves) error{
		"sink": func(s *Meter, h *halves) error {
			_, _, err := s.Sink(runtime.PhaseStaging, store.Cutter{}).Data(t.Context(), 2*half, h)
			return err
		},
		"source": func(s *Meter, h *halves) error {
			r, err := s.Source(runtime.PhaseStaging, halvesSource{h}).Data(t.Context(), overlay.Entry{Size: 2 * half})
			if err == nil {
				_, err = io.Copy(io.Discard, r)
				err = errors.Join(err, r.Close())
			}
			return err
		},
	} {
		told := make(chan runtime.Step, 100)
		s := Follow(func(s runtime.Step) { told <- s })
		s.Begin(runtime.PhaseStaging, 2*half)
		on := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			done <- use(s, &halves{bytes.NewReader(make([]byte, half)), bytes.NewReader(make([]byte, half)), on})
		}()
		for step := range told {
			if step.Done == half {
				break
			}
			if step.Done > half || step.Total != 2*half {
				t.Fatalf("%s: %+v", name, step)
			}
		}
		close(on)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		s.End()
		close(told)
		var last runtime.Step
		for step := range told {
			last = step
		}
		if last != (runtime.Step{Phase: runtime.PhaseStaging, Done: 2 * half, Total: 2 * half}) {
			t.Errorf("%s: %+v", name, last)
		}
	}
}

// TestAllocate: counting small files allocates nothing, and without a progress callback
// nothing is counted.
func TestAllocate(t *testing.T) {
	sink := discarding{}
	s := Follow(func(runtime.Step) {})
	defer s.End()
	counted, r := s.Sink(runtime.PhaseFiles, sink), bytes.NewReader(nil)
	if n := testing.AllocsPerRun(1000, func() { _, _, _ = counted.Data(t.Context(), 1000, r) }); n != 0 {
		t.Errorf("%v allocations a file", n)
	}
	if got := (*Meter)(nil).Sink(runtime.PhaseFiles, sink); got != overlay.Sink(sink) {
		t.Errorf("%T", got)
	}
}

type discarding struct{}

func (discarding) Data(context.Context, int64, io.Reader) (string, []overlay.Chunk, error) {
	return "", nil, nil
}
