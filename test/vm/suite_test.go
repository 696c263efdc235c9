package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fakeGuest is a machine whose guest is a function.
func fakeGuest(t *testing.T, guest func(context.Context, *replies)) *machine {
	t.Helper()
	q, opts := fakeQEMU(t, "exec sleep 60")
	l, err := net.Listen("unix", filepath.Join(opts.Dir, "port"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		out := &replies{enc: json.NewEncoder(conn)}
		_ = out.send(reply{Ready: "a guest"})
		for in := bufio.NewScanner(conn); in.Scan(); {
			guest(ctx, out)
		}
	}()
	m, _, err := boot(t.Context(), q, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.off)
	return m
}

const beginning = "\x16=== RUN   TestA\nat work\n"

// A suite whose machine does not answer, is refused, or is interrupted has the reason
// and a fail as its last events.
func TestEventsEnd(t *testing.T) {
	for name, c := range map[string]struct {
		guest func(context.Context, *replies)
		want  string
	}{
		"its bound": {func(_ context.Context, out *replies) {
			_, _ = out.Write([]byte(beginning))
			_ = out.send(reply{Ended: true, Err: "ended after 5 s, which is its bound"})
		}, "ended after 5 s"},
		"interrupted": {func(ctx context.Context, out *replies) {
			_, _ = out.Write([]byte(beginning))
			<-ctx.Done()
		}, errInterrupted.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			m := fakeGuest(t, c.guest)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			if name == "interrupted" {
				time.AfterFunc(2*time.Second, func() { cancel(errInterrupted) })
			}
			dir := t.TempDir()
			r := m.runSuite(ctx, suite{pkg: "p"}, options{timeout: time.Minute}, dir)
			if r.err == nil || !strings.Contains(r.err.Error(), c.want) || strings.Join(r.failures, "") != "TestA (it did not end)" {
				t.Errorf("the result is %+v", r)
			}
			data, err := os.ReadFile(filepath.Join(dir, "p.json"))
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(string(data)), "\n")
			var why, last event
			if err := errors.Join(json.Unmarshal([]byte(lines[len(lines)-2]), &why), json.Unmarshal([]byte(lines[len(lines)-1]), &last)); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(why.Output, c.want) || last.Action != "fail" || last.Test != "" {
				t.Errorf("the events end with %+v, %+v", why, last)
			}
		})
	}
}
