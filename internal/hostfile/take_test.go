package hostfile

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// again takes a file that was taken before, and reports whether it was read.
func again(t *testing.T, path string, before *Taken) (*Taken, bool) {
	t.Helper()
	k := &kept{}
	got, err := Take(ctx, path, k, limit, before)
	must(t, err)
	return got, k.data != nil
}

// A file that has not changed since it was taken is not opened again, and a changed one is.
func TestTakeAgain(t *testing.T) {
	path, _ := dirOf(t)
	name := filepath.Join(path, "f")
	must(t, os.WriteFile(name, []byte("one"), 0o600))
	first, read := again(t, name, nil)
	if !read || first.Entry.Size != 3 {
		t.Fatalf("%+v, read %v", first.Entry, read)
	}
	lease := leased(t, name) // so that it cannot be opened
	if got, read := again(t, name, first); read || got != first {
		t.Errorf("unchanged: %+v, read %v", got.Entry, read)
	}
	must(t, lease.Close())
	at := time.Unix(first.Entry.Mtime.Sec, first.Entry.Mtime.Nsec)
	for what, change := range map[string]func() error{
		"written, with its old time": func() error {
			return errors.Join(os.WriteFile(name, []byte("two"), 0o600), os.Chtimes(name, at, at))
		},
		"its mode":     func() error { return os.Chmod(name, 0o640) },
		"an attribute": func() error { return unix.Setxattr(name, "user.x", []byte("y"), 0) },
		"another file": func() error {
			return errors.Join(os.WriteFile(name+"2", []byte("one"), 0o600), os.Rename(name+"2", name))
		},
		"renamed back":  func() error { return errors.Join(os.Rename(name, name+"2"), os.Rename(name+"2", name)) },
		"it is longer":  func() error { return os.Truncate(name, 10) },
		"it is removed": func() error { return os.Remove(name) },
	} {
		must(t, os.RemoveAll(name), os.WriteFile(name, []byte("one"), 0o600))
		before, _ := again(t, name, nil)
		must(t, change())
		got, read := again(t, name, before)
		if gone := what == "it is removed"; read == gone || got == before || (got.Entry == nil) != gone {
			t.Errorf("%s: %+v, read %v", what, got.Entry, read)
		}
	}
	none, _ := again(t, name+"3", nil)
	if got, _ := again(t, name+"3", none); got != none || got.Entry != nil {
		t.Errorf("none: %+v", got)
	}
	must(t, os.WriteFile(name+"3", []byte("came"), 0o600))
	if got, read := again(t, name+"3", none); !read || got.Entry == nil || got.Entry.Size != 4 {
		t.Errorf("it came: %+v, read %v", got.Entry, read)
	}
}

// A store through a mapping after a file was taken is a change like any other, and nothing that
// Put would replace.
func TestMapped(t *testing.T) {
	at := mounted(t)
	name := filepath.Join(at, "f")
	must(t, os.WriteFile(name, []byte("old"), 0o600))
	want := state(t, name)
	must(t, os.WriteFile(name, make([]byte, 3*4096), 0o600))
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, 3*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	defer unix.Munmap(m)
	m[5000] = 1 // the page is dirty from here on, and further stores are not announced
	first, _ := again(t, name, nil)
	m[5001] = 2
	second, read := again(t, name, first)
	if !read {
		t.Error("a store after the first look was not noticed")
	}
	now := state(t, name)
	if _, read := again(t, name, second); read {
		t.Error("read again though nothing has changed")
	}
	m[5002] = 3
	d, err := Open(at)
	must(t, err)
	defer d.Close()
	if action, err := d.Put(ctx, "f", ".temp", want, &now, nil); action != "" || !errors.Is(err, ErrChanged) {
		t.Errorf("a store before the put: %q, %v", action, err)
	}
	now = state(t, name)
	if action, err := d.Put(ctx, "f", ".temp", want, &now, func() error { m[5003] = 4; return nil }); action != "" ||
		!errors.Is(err, ErrChanged) {
		t.Errorf("a store during the put: %q, %v", action, err)
	}
	alone(t, at, "f", "lost+found")
}

// leased has a lease on a file, as a file server would.
func leased(t *testing.T, name string) *os.File {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	must(t, err)
	return f
}

// A lease holder is waited for if it lets go, and reported if it does not.
func TestLease(t *testing.T) {
	path, d := dirOf(t)
	name := filepath.Join(path, "f")
	must(t, os.WriteFile(name, []byte("then"), 0o600))
	want := state(t, name)
	must(t, os.WriteFile(name, []byte("now"), 0o600))
	f := leased(t, name)
	for what, try := range map[string]func(context.Context) error{
		"take":  func(ctx context.Context) error { _, err := Take(ctx, name, &kept{}, limit, nil); return err },
		"check": func(ctx context.Context) error { _, _, err := d.Check(ctx, "f", want, limit); return err },
		"put":   func(ctx context.Context) error { _, err := d.Put(ctx, "f", ".temp", want, nil, nil); return err },
	} {
		begun := time.Now()
		if err := try(ctx); !errors.Is(err, fault.ErrBusy) || !strings.Contains(err.Error(), "a lease") ||
			time.Since(begun) < leaseWait || time.Since(begun) > 10*leaseWait {
			t.Errorf("%s: %v after %v", what, err, time.Since(begun))
		}
		ended, end := context.WithCancel(ctx)
		end()
		if err := try(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, cancelled: %v", what, err)
		}
	}
	must(t, f.Close())
	f = leased(t, name)
	done := make(chan error, 1)
	go func() {
		for { // until the lease is to be broken
			if kind, err := unix.FcntlInt(f.Fd(), unix.F_GETLEASE, 0); err != nil || kind != unix.F_WRLCK {
				done <- errors.Join(err, f.Close())
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	if action, err := d.Put(ctx, "f", ".temp", want, nil, nil); action != Written || err != nil {
		t.Errorf("with one that lets go: %q, %v", action, err)
	}
	must(t, <-done)
}

// Reading ends when its caller no longer waits for it.
func TestTakeEnds(t *testing.T) {
	path, _ := dirOf(t)
	name := filepath.Join(path, "f")
	must(t, os.WriteFile(name, make([]byte, limit), 0o600))
	ended, end := context.WithCancel(ctx)
	to := sinkFunc(func(r io.Reader) error {
		_, err := io.ReadFull(r, make([]byte, 4096))
		end()
		_, e2 := io.Copy(io.Discard, r)
		return errors.Join(err, e2)
	})
	if _, err := Take(ended, name, to, limit, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

type sinkFunc func(io.Reader) error

func (f sinkFunc) Data(_ context.Context, _ int64, r io.Reader) (string, []overlay.Chunk, error) {
	return "", nil, f(r)
}

// The file that is renamed is the one that was written, or none is.
func TestExchanged(t *testing.T) {
	path, d := dirOf(t)
	name, temp := filepath.Join(path, "f"), filepath.Join(path, ".temp")
	must(t, os.WriteFile(name, []byte("then"), 0o600))
	want := state(t, name)
	must(t, os.WriteFile(name, []byte("now"), 0o600))
	before := facts(t, name)
	for what, exchange := range map[string]func() error{
		"a symlink": func() error { return errors.Join(os.Remove(temp), os.Symlink("elsewhere", temp)) },
		"another file": func() error {
			return errors.Join(os.Remove(temp),
				os.WriteFile(temp, []byte("then"), 0o600))
		},
		"more in it":     func() error { return os.WriteFile(temp, []byte("more"), 0o600) },
		"a second name":  func() error { return os.Link(temp, temp+"2") },
		"nothing":        func() error { return os.Remove(temp) },
		"another's mode": func() error { return os.Chmod(temp, 0o666) },
	} {
		if action, err := d.Put(ctx, "f", ".temp", want, nil, exchange); action != "" || !errors.Is(err, ErrChanged) {
			t.Errorf("%s: %q, %v", what, action, err)
		}
		if after := facts(t, name); after != before {
			t.Errorf("%s: it is %s, and was %s", what, after, before)
		}
		must(t, os.RemoveAll(temp), os.RemoveAll(temp+"2"))
		alone(t, path, "f")
	}
}

// A file that cannot be kept is known before it would have to be.
func TestCheckBound(t *testing.T) {
	path, d := dirOf(t)
	name := filepath.Join(path, "f")
	must(t, os.WriteFile(name, []byte("then"), 0o600))
	want := state(t, name)
	must(t, os.Truncate(name, limit+1))
	if _, _, err := d.Check(ctx, "f", want, limit); !errors.Is(err, fault.ErrState) ||
		!strings.Contains(err.Error(), "at most 1048576") {
		t.Errorf("%v", err)
	}
	if action, _, err := d.Check(ctx, "f", want, limit+1); action != Written || err != nil {
		t.Errorf("%q, %v", action, err)
	}
}

// An entry that no list of files can have is refused when it is taken.
func TestRecordable(t *testing.T) {
	e := overlay.Entry{
		Type: overlay.TypeFile, Xattrs: map[string]string{"user.\xff": "\x00\xff"},
		Mtime: overlay.Time{Sec: -5, Nsec: 7},
	}
	must(t, recordable(e))
	e.Mtime.Nsec = 1e9
	if err := recordable(e); !errors.Is(err, fault.ErrUnsupported) || errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("%v", err)
	}
}

// A filesystem that does not tell its size, and whose directories cannot be made
// durable, as proc is one, is not refused for that.
func TestTellsNothing(t *testing.T) {
	d, err := Open("/proc")
	must(t, err)
	defer d.Close()
	if _, free, err := d.Free(); free != math.MaxInt64 || err != nil {
		t.Errorf("free: %d, %v", free, err)
	}
	if err := d.f.Sync(); !errors.Is(err, unix.EINVAL) {
		t.Fatalf("this kernel can: %v", err)
	}
	must(t, d.sync())
}
