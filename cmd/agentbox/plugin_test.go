package main

import (
	"context"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// When the docker command goes, the verb is interrupted, once.
func TestWatchDocker(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv(pluginSocket, path)
	ctx, s := catchSignals(context.Background())
	defer s.stop()
	new(app).watchDocker(s)
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if ctx.Err() != nil {
		t.Fatal("interrupted at once")
	}
	c.Close()
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
		t.Fatal("not interrupted")
	}
	if s.caught() != syscall.SIGTERM {
		t.Errorf("by %v", s.caught())
	}
}
