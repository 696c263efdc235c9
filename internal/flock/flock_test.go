package flock

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func held(t *testing.T, path string, how How, want bool) {
	t.Helper()
	if got, err := Held(path, how); err != nil || got != want {
		t.Fatalf("held: %v, %v", got, err)
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	held(t, path, 0, false)
	if _, err := Try(path, Existing); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	a, err := Try(path, 0)
	must(t, err)
	held(t, path, 0, true)
	held(t, path, Shared, true)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Lock(ctx, path, 0); err != context.DeadlineExceeded {
		t.Fatal(err)
	}
	a.Unlock()
	a.Unlock()

	b, err := Try(path, Shared|Existing)
	must(t, err)
	c, err := Lock(t.Context(), path, Shared)
	must(t, err)
	held(t, path, Shared, false)
	held(t, path, 0, true)
	b.Unlock()
	must(t, c.Remove())
	held(t, path, 0, false)
}

func TestLinks(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	must(t, os.Symlink(dir, link))
	for _, how := range []How{0, Existing} {
		if _, err := Try(link, how); err == nil {
			t.Fatalf("how %d: followed a link", how)
		}
	}
	l, err := Try(link, Dir)
	must(t, err)
	held(t, dir, Dir, true)
	l.Unlock()
}

// A child has the lock only if it was passed on.
func TestPass(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	for _, pass := range []bool{false, true} {
		l, err := Try(path, 0)
		must(t, err)
		cmd := exec.Command("sleep", "600")
		if pass {
			cmd.ExtraFiles = []*os.File{l.Pass()}
		}
		must(t, cmd.Start())
		l.Unlock()
		held(t, path, 0, pass)
		must(t, cmd.Process.Kill())
		_ = cmd.Wait()
		held(t, path, 0, false)
	}
}

// TestPassed: a lock is taken over by its descriptor, and only where the name leads to it.
func TestPassed(t *testing.T) {
	dir := t.TempDir()
	path, other := filepath.Join(dir, "lock"), filepath.Join(dir, "other")
	must(t, os.WriteFile(other, nil, 0o600))
	parent, err := Try(path, Append)
	must(t, err)
	fd, err := unix.Dup(int(parent.Pass().Fd()))
	must(t, err)
	parent.Unlock()
	held(t, path, 0, true)
	for fd, path := range map[int]string{fd: other, 1 << 20: path} {
		if _, err := Passed(fd, path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%d as %s: %v", fd, path, err)
		}
	}

	l, err := Passed(fd, path)
	must(t, err)
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("children get it: %#x, %v", flags, err)
	}
	if !l.Named() {
		t.Error("the name does not lead to it")
	}
	must(t, os.Rename(other, path))
	if l.Named() {
		t.Error("the name leads to another file")
	}
	l.Unlock()

	// An open file that does not hold the lock.
	l, err = Try(path, 0)
	must(t, err)
	fd, err = unix.Open(path, unix.O_RDWR, 0)
	must(t, err)
	if _, err := Passed(fd, path); !errors.Is(err, ErrHeld) {
		t.Error(err)
	}
	l.Unlock()
}

// Locks exclude one another though each holder deletes the file, or directory.
func TestRemoved(t *testing.T) {
	for name, how := range map[string]How{"file": 0, "directory": Dir} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lock")
			var inside sync.Mutex
			var wg sync.WaitGroup
			for i := range 8 {
				wg.Go(func() {
					ctx := context.Background() // which waits in the kernel
					if i%2 == 0 {
						ctx = t.Context()
					}
					for n := 0; n < 100; {
						if how == Dir {
							_ = os.Mkdir(path, 0o700)
						}
						l, err := Lock(ctx, path, how)
						if how == Dir && errors.Is(err, fs.ErrNotExist) {
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						alone := inside.TryLock()
						if !alone {
							t.Error("two hold the lock")
						}
						goruntime.Gosched()
						if alone {
							inside.Unlock()
						}
						if err := l.Remove(); err != nil { // with the name the exclusion ends
							t.Error(err)
						}
						n++
					}
				})
			}
			wg.Wait()
		})
	}
}

// Whichever locks are taken, removed and released: each call answers as the locks of that name
// say, not those of the files that had it before.
func TestProperty(t *testing.T) {
	base := t.TempDir()
	runs := 0
	rapid.Check(t, func(t *rapid.T) {
		runs++
		path := filepath.Join(base, strconv.Itoa(runs))
		type holder struct {
			*Handle
			shared, current bool
		}
		var all []*holder
		defer func() {
			for _, h := range all {
				h.Unlock()
			}
			_ = os.Remove(path)
		}()
		refused := func(how How) bool {
			for _, h := range all {
				if h.current && (how&Shared == 0 || !h.shared) {
					return true
				}
			}
			return false
		}
		hows := rapid.SampledFrom([]How{0, Shared})
		t.Repeat(map[string]func(*rapid.T){
			"try": func(t *rapid.T) {
				how := hows.Draw(t, "how")
				l, err := Try(path, how)
				if want := refused(how); errors.Is(err, ErrHeld) != want || err != nil && !want {
					t.Fatalf("%v; to be refused: %v", err, want)
				}
				if err == nil {
					all = append(all, &holder{l, how == Shared, true})
				}
			},
			"held": func(t *rapid.T) {
				how := hows.Draw(t, "how")
				if got, err := Held(path, how); err != nil || got != refused(how) {
					t.Fatalf("%v, %v", got, err)
				}
			},
			"unlock": func(t *rapid.T) {
				if len(all) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				all[i].Unlock()
				all = append(all[:i], all[i+1:]...)
			},
			"delete": func(t *rapid.T) {
				_ = os.Remove(path)
				for _, h := range all {
					h.current = false
				}
			},
		})
	})
}
