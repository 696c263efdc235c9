package streams

import (
	"bytes"
	"io"
	stdruntime "runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agentbox/agentbox/runtime"
)

// next begins an attempt.
func next(t *testing.T, a *Again) runtime.Streams {
	t.Helper()
	s, same := a.Next()
	if !same {
		t.Fatal("the attempt does not begin where the first did")
	}
	return s
}

func TestAgainInput(t *testing.T) {
	text := strings.Repeat("all of the input\n", 1000)
	a := NewAgain(runtime.Streams{Stdin: iotest.HalfReader(strings.NewReader(text))})
	defer a.Close()
	for _, n := range []int{0, 1, 100, 7000, 50} {
		s := next(t, a)
		got := make([]byte, n)
		if _, err := io.ReadFull(s.Stdin, got); err != nil || string(got) != text[:n] {
			t.Fatalf("%d bytes: %q, %v", n, got, err)
		}
	}
	for range 2 {
		if got, err := io.ReadAll(next(t, a).Stdin); string(got) != text || err != nil {
			t.Fatalf("%d bytes: %v", len(got), err)
		}
	}
}

// TestAgainWaiting has an attempt end while it waits for input, which is then the next one's.
func TestAgainWaiting(t *testing.T) {
	in, typed := io.Pipe()
	a := NewAgain(runtime.Streams{Stdin: in})
	defer a.Close()
	first := next(t, a)
	ended := make(chan string, 1)
	go func() {
		got, _ := io.ReadAll(first.Stdin)
		ended <- string(got)
	}()
	if _, err := typed.Write([]byte("one ")); err != nil { // the first one reads now
		t.Fatal(err)
	}
	second := next(t, a)
	go func() { _, _ = typed.Write([]byte("two")); typed.Close() }()
	if got, err := io.ReadAll(second.Stdin); string(got) != "one two" || err != nil {
		t.Errorf("the second attempt read %q, %v", got, err)
	}
	if got := <-ended; got != "one " && got != "" {
		t.Errorf("the first attempt read %q", got)
	}
}

func TestAgainError(t *testing.T) {
	a := NewAgain(runtime.Streams{Stdin: io.MultiReader(strings.NewReader("some"), iotest.ErrReader(io.ErrClosedPipe))})
	defer a.Close()
	for range 2 {
		if got, err := io.ReadAll(next(t, a).Stdin); string(got) != "some" || err != io.ErrClosedPipe {
			t.Errorf("%q, %v", got, err)
		}
	}
}

// TestAgainLost has an attempt read more than is kept.
func TestAgainLost(t *testing.T) {
	text := bytes.Repeat([]byte("0123456789abcdef"), (againMax+8<<10)/16)
	a := NewAgain(runtime.Streams{Stdin: bytes.NewReader(text)})
	defer a.Close()
	_, _ = io.ReadFull(next(t, a).Stdin, make([]byte, 100))
	if got, err := io.ReadAll(next(t, a).Stdin); !bytes.Equal(got, text) || err != nil {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if _, same := a.Next(); same {
		t.Error("an attempt begins where the first did, without its input")
	}
}

func TestAgainSizes(t *testing.T) {
	sizes := make(chan runtime.Size)
	a := NewAgain(runtime.Streams{Resize: sizes})
	defer a.Close()
	first := next(t, a)
	sizes <- runtime.Size{Width: 1}
	if got := <-first.Resize; got.Width != 1 {
		t.Errorf("the first size: %+v", got)
	}
	sizes <- runtime.Size{Width: 2}
	sizes <- runtime.Size{Width: 3} // 2 has been passed on
	second := next(t, a)
	// 3 may come at once or after 2: it is the last.
	for got := range second.Resize {
		if got.Width == 3 {
			break
		}
	}
	if s := next(t, a); (<-s.Resize).Width != 3 {
		t.Error("the third attempt does not begin with the last size")
	}
}

// TestAgainMany has what an attempt that is over still reads go beyond the bound: what the next one has
// not read yet is not lost.
func TestAgainMany(t *testing.T) {
	in, typed := io.Pipe()
	a := NewAgain(runtime.Streams{Stdin: in})
	defer a.Close()
	first := next(t, a)
	text := strings.Repeat("0123456789abcdef", againMax/16)
	waits, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.ReadFull(first.Stdin, make([]byte, len(text)))
		close(waits)
		_, _ = first.Stdin.Read(make([]byte, 100))
	}()
	if _, err := io.WriteString(typed, text); err != nil {
		t.Fatal(err)
	}
	<-waits
	a.mu.Lock()
	for !a.reading {
		a.mu.Unlock()
		stdruntime.Gosched()
		a.mu.Lock()
	}
	a.mu.Unlock()
	second := next(t, a)
	if _, err := io.WriteString(typed, "the end"); err != nil { // to the first one's read
		t.Fatal(err)
	}
	<-ended
	typed.Close()
	if got, err := io.ReadAll(second.Stdin); string(got) != text+"the end" || err != nil {
		t.Errorf("the second attempt read %d bytes of %d, %v", len(got), len(text)+7, err)
	}
}
