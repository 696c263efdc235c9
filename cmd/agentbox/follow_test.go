package main

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"
)

// TestRelay: connections that come one after the other read all of the input, each what the ones
// before it have left, and a read that is under way when its connection ends loses nothing.
func TestRelay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, "input")
		writes := rapid.SliceOfN(rapid.IntRange(1, 40), 1, 20).Draw(t, "writes")
		from, to := io.Pipe()
		go func() {
			rest := want
			for _, n := range writes {
				n = min(n, len(rest))
				_, _ = to.Write(rest[:n])
				rest = rest[n:]
			}
			_, _ = to.Write(rest)
			_ = to.Close()
		}()
		r := newRelay(from)
		var got []byte
		read := func(in io.Reader, most int) error {
			buf := make([]byte, most)
			n, err := in.Read(buf)
			got = append(got, buf[:n]...)
			return err
		}
		for range rapid.IntRange(0, 10).Draw(t, "connections") {
			left := make(chan error, 1)
			most := rapid.IntRange(1, 50).Draw(t, "read")
			_ = r.connection(func(in io.Reader) error {
				go func() { left <- read(in, most) }() // as an attach leaves it behind
				return nil
			})
			if err := <-left; err != nil && !errors.Is(err, errLineEnded) && !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
		}
		_ = r.connection(func(in io.Reader) error {
			rest, err := io.ReadAll(in)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, rest...)
			return nil
		})
		if !bytes.Equal(got, want) {
			t.Fatalf("read %q of %q", got, want)
		}
	})
}
