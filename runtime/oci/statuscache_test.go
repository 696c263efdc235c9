package oci

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// The cached state of a container equals what reading all of its files gives, and any change to
// it, by this process or another, is seen at once.
func TestStatusCache(t *testing.T) {
	t.Parallel()
	x := newBox(t)
	id := x.up(spec("sleep", "1000"))
	remembered := func() {
		t.Helper()
		eventually(t, "the container is remembered", func() bool {
			x.inspect(id)
			_, ok := x.cachedView(id)
			return ok
		})
	}
	same := func(want runtime.Status) runtime.Container {
		t.Helper()
		got := x.inspect(id)
		x.cache.mu.Lock()
		clear(x.cache.byID)
		x.cache.mu.Unlock()
		if read := x.inspect(id); !reflect.DeepEqual(got, read) || got.Status != want {
			t.Errorf("%+v, and read again %+v", got, read)
		}
		return got
	}
	x.inspect(id)
	if _, ok := x.cachedView(id); ok {
		t.Error("its files may still change unseen, and it is remembered")
	}
	remembered()
	x.pause(id)
	if _, ok := x.cachedView(id); !ok {
		t.Error("it is not remembered while it is paused")
	}
	same(runtime.Paused)
	remembered()
	must(t, x.Unpause(t.Context(), id))
	first := same(runtime.Running)

	remembered()
	must(t, os.WriteFile(filepath.Join(x.box.StartDir(id, 1), "oom"), nil, 0o600))
	if c := same(runtime.Running); c.OOMAt.IsZero() {
		t.Error("a note that came later is not seen")
	}

	// Killed by another process.
	remembered()
	must(t, unix.Kill(first.Pid, unix.SIGKILL))
	eventually(t, "its end is seen", func() bool { return x.inspect(id).Status == runtime.Exited })
	x.start(id)
	if c := same(runtime.Running); c.Pid == first.Pid {
		t.Errorf("%+v", c)
	}
	remembered()
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{Timeout: time.Millisecond}))
	x.cache.mu.Lock()
	if _, ok := x.cache.byID[id]; ok {
		t.Error("it is stopped, and its process held on to")
	}
	x.cache.mu.Unlock()
	same(runtime.Exited)
	must(t, x.Remove(t.Context(), id))
	if _, err := x.Inspect(t.Context(), id); err == nil {
		t.Error("it is removed, and there")
	}
}
