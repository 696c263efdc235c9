package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
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
	q, opts := fakeQEMU(t, `echo "$@"; for f in ${0%/*}/failed; do until [ -e $f ]; do sleep 0.05; done; done; echo "I/O error, dev vdc, sector 8"; exec sleep 60`)
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

// A failed write on this host, of the machine's disks or of the results, ends the suite and the
// machine, and is named.
func TestHostFull(t *testing.T) {
	runs := func(ctx context.Context, out *replies) {
		_, _ = out.Write([]byte(beginning + "\x16--- PASS: TestA (0.00s)\n"))
		for range 40000 { // more than pipes hold
			if _, err := out.Write([]byte("a line of something that is said\n")); err != nil {
				return
			}
		}
		_, _ = out.Write([]byte("\x16PASS\n"))
		_ = out.send(reply{Ended: true})
	}
	t.Run("disks", func(t *testing.T) {
		m := fakeGuest(t, runs)
		eventually(t, "QEMU says how it was called", func() bool {
			return strings.Count(m.console.tail(), "werror=report,rerror=report") == 3
		})
		if err := m.diskFailed(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(m.dir, "failed"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the guest has an error", func() bool { return m.diskFailed() != nil })
		r := m.runTests(t.Context(), suite{pkg: "p"}, "", nil, options{timeout: time.Minute}, io.Discard)
		if r.passed != 1 || r.ok() || !strings.Contains(r.String(),
			"machine's disks, which are in "+m.dir) || alive(m) {
			t.Errorf("the result is %s; alive: %v", r, alive(m))
		}
	})
	t.Run("results", func(t *testing.T) {
		m := fakeGuest(t, runs)
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer full.Close()
		r := m.runTests(t.Context(), suite{pkg: "p"}, "", nil, options{timeout: time.Minute}, full)
		if r.ok() || !strings.Contains(r.String(), "no space left on device") ||
			!errors.Is(r.err, errUnkept) || alive(m) {
			t.Errorf("the result is %s; alive: %v", r, alive(m))
		}
	})
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
			r := m.runSuite(ctx, suite{pkg: "p"}, options{timeout: time.Minute}, record{dir: dir}, "")
			if r.err == nil || !strings.Contains(r.err.Error(), c.want) ||
				strings.Join(r.failures, "") != "TestA (it did not end)" {
				t.Errorf("the result is %+v", r)
			}
			data, err := os.ReadFile(filepath.Join(dir, "p.json"))
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(string(data)), "\n")
			var why, last event
			if err := errors.Join(json.Unmarshal([]byte(lines[len(lines)-2]), &why),
				json.Unmarshal([]byte(lines[len(lines)-1]), &last)); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(why.Output, c.want) || last.Action != "fail" || last.Test != "" {
				t.Errorf("the events end with %+v, %+v", why, last)
			}
		})
	}
}

// All suites can be in one payload: none is where another's directory would be.
func TestBinaries(t *testing.T) {
	at := map[string]string{}
	for _, s := range suites {
		path := s.binary("/p")
		if other, taken := at[path]; taken || filepath.Dir(path) != "/p/tests" {
			t.Errorf("%s is at %s, as %q", s.pkg, path, other)
		}
		at[path] = s.pkg
	}
}
