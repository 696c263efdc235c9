package test

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// TestPeersThatTalk stops sandboxes by checkpoints while a peer outside sends
// without a pause: nothing that the kernel acknowledged for a frozen process
// may be lost, or the connection stalls for good once it is restored.
func TestPeersThatTalk(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.ok("image", "import", "echo", programRoot(t, "echo"))
	b.start("echo", "--network", "bridge", "echo", "/echo", ":7777")
	b.eventually("it listens", func() bool { return strings.Contains(b.ok("logs", "echo"), "ready") })
	for range 3 {
		conn, err := net.DialTimeout("tcp", b.inspect("echo").Address+":7777", 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		const lines = 1500
		done := make(chan error, 1)
		go func() { // slowly enough to go on through the stop and the restore
			for i := range lines {
				if _, err := fmt.Fprintln(conn, i, "x"); err != nil {
					done <- err
					return
				}
				time.Sleep(2 * time.Millisecond)
			}
			done <- nil
		}()
		heard := make(chan error, 1)
		some := make(chan struct{})
		go func() {
			in := bufio.NewReaderSize(conn, 1<<20)
			for i := range lines {
				line, err := in.ReadString('\n')
				if err == nil && line != fmt.Sprintln(i, "x") {
					err = fmt.Errorf("line %d is %.20q", i, line)
				}
				if err != nil {
					heard <- fmt.Errorf("after %d lines: %w", i, err)
					return
				}
				if i == 100 {
					close(some)
				}
			}
			heard <- nil
		}()
		<-some
		id := b.checkpoint("--stop", "echo")
		b.ok("restore", "echo", id)
		if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		for _, ended := range []chan error{done, heard} {
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
		}
		conn.Close()
		b.ok("checkpoint", "rm", id)
	}
}
