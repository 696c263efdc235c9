package overlay

import (
	"context"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// fuse kills its process when it is lit for the n-th time.
type fuse struct {
	mu   sync.Mutex
	left int
}

func (f *fuse) burn() {
	f.mu.Lock() // never unlocked in the last one: no goroutine goes on
	if f.left--; f.left < 0 {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {}
	}
	f.mu.Unlock()
}

// fuseContext is asked for its end before each operation of Apply.
type fuseContext struct {
	context.Context
	*fuse
}

func (c fuseContext) Err() error { c.burn(); return nil }

// fuseSource is asked for the data of each file while Stage works.
type fuseSource struct {
	dirSource
	*fuse
}

func (s *fuseSource) Data(ctx context.Context, e Entry) (io.ReadCloser, error) {
	s.burn()
	return s.dirSource.Data(ctx, e)
}

// TestUpdateChild is the process that is killed.
func TestUpdateChild(t *testing.T) {
	dir, want := os.Getenv("OVERLAY_TEST_DIR"), os.Getenv("OVERLAY_TEST_WANT")
	if dir == "" {
		t.Skip("only as a child of TestUpdateKilled")
	}
	n, err := strconv.Atoi(os.Getenv("OVERLAY_TEST_POINT"))
	must(t, err)
	f := &fuse{left: n}
	src := &fuseSource{dirSource{dir: want}, f}
	if os.Getenv("OVERLAY_TEST_ASIDE") != "" {
		updateDisplacing(t, fuseContext{context.Background(), f}, dir, want, src)
		return
	}
	u := planDirs(t, dir, want)
	stage := dir + ".stage"
	must(t, u.Stage(context.Background(), dir, stage, src))
	must(t, u.Apply(fuseContext{context.Background(), f}, dir, stage))
}

// runKilled updates dir in a process that is killed at its n-th point, and
// reports whether it came that far.
func runKilled(t *testing.T, dir, want string, n int, env ...string) (killed bool) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestUpdateChild$")
	cmd.Env = append(append(os.Environ(), env...), "OVERLAY_TEST_DIR="+dir, "OVERLAY_TEST_WANT="+want,
		"OVERLAY_TEST_POINT="+strconv.Itoa(n))
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() && ws.Signal() == unix.SIGKILL {
		return true
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// TestUpdateKilled kills an update at every operation, and the next one must
// find its way from there.
func TestUpdateKilled(t *testing.T) {
	base := noDevices(t)
	// A rich pair: much has happened to the two sides of it.
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	everything(t, src)
	archive, _ := captureDir(t, src)
	want, _ := applyTo(t, base, archive)
	from, _ := applyTo(t, base, archive)
	for i, root := range []string{from, want} {
		c := &chaos{root: root}
		for n := range 400 {
			c.rand = rand.New(rand.NewPCG(uint64(i), uint64(n)))
			_ = operations[operationNames[c.n(len(operationNames)-1)]](c) // many fail for good reasons
		}
	}
	fromArchive, _ := captureDir(t, from)
	n, ended := 0, false
	for ; !ended; n++ {
		dir, _ := applyTo(t, base, fromArchive)
		ended = !runKilled(t, dir, want, n)
		if !ended {
			must(t, os.RemoveAll(dir+".stage"))
			update(t, dir, want)
		} else {
			proven(t, dir, want)
		}
		must(t, os.RemoveAll(dir))
	}
	u := planDirs(t, from, want)
	t.Logf("killed at %d points of an update with %d changes", n-1, u.Len())
	if n < u.Len() || u.Len() < 50 {
		t.Errorf("only %d points and %d changes", n, u.Len())
	}
	// And again and again: an update of what a killed one left is killed, too.
	dir, _ := applyTo(t, base, fromArchive)
	for n := 3; runKilled(t, dir, want, n); n += 5 {
		must(t, os.RemoveAll(dir+".stage"))
	}
	proven(t, dir, want)
}
