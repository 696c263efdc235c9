package images

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestImportFIFO waits for a writer, and no longer than its context.
func TestImportFIFO(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := s.Import(ctx, "x", fifo); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("without a writer: %v", err)
	}
	tree := t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "a"), []byte("a"), 0o644); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- exec.Command("tar", "-C", tree, "-cf", fifo, ".").Run() }()
	img, err := s.Import(context.Background(), "x", fifo)
	if err := errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(img.Lower[0], "a")); err != nil || string(b) != "a" {
		t.Fatalf("%q, %v", b, err)
	}
}
