package criu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	filelock "github.com/checkpoint-restore/go-criu/v7/crit/images/file-lock"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"

	"github.com/agentbox/agentbox/criu/criutest"
)

// A restored container that has not run matches the images; a change of either is found.
func TestCompare(t *testing.T) {
	ctx := context.Background()
	talk := filepath.Join(t.TempDir(), "talk")
	build(t, talk, "talk")
	b, rt := start(t, []string{
		"sh", "-c", "echo text >/file; exec 5</file; while [ ! -e /bin/talk ]; do sleep 0.02; done; talk lock & sleep 1000 & wait",
	}, nil)
	install(t, b, talk, "talk")
	b.Until("the lock is taken", func() bool { return lockHeld(filepath.Join(b.Files, "lock")) })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	b.End()
	restore(t, b, rt, Options{}, "leave-stopped")
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	got, err := Compare(ctx, b.Images, b.Pid())
	if err != nil || len(got.Differs) > 0 || got.Processes != 3 || got.Threads < 4 || got.Descriptors < 10 ||
		got.Locks != 1 || got.Pages < 50 {
		t.Fatalf("%+v, %v", got, err)
	}

	for _, c := range []struct {
		name, file string
		magic      uint32
		edit       func(d []byte) []byte
		want       string
	}{
		{"a process group", "pstree.img", magicPstree, edited(func(e *pstree.PstreeEntry) {
			e.Pgid = proto.Uint32(77)
		}), "the process group of process 1 (sh) is 1, not 77"},
		{"a position", "files.img", magicFiles, edited(func(e *fdinfo.FileEntry) {
			if e.GetReg().GetName() == "/file" || e.GetReg().GetName() == "file" {
				e.Reg.Pos = proto.Uint64(3)
			}
		}), "descriptor 5 of process 1 (sh) is at 0, not at 3"},
		{"a path", "files.img", magicFiles, edited(func(e *fdinfo.FileEntry) {
			if strings.Contains(e.GetReg().GetName(), "file") {
				e.Reg.Name = proto.String("/other")
			}
		}), "is /file, not /other"},
		{"a descriptor", "fdinfo-*.img", magicFdinfo, edited(func(e *fdinfo.FdinfoEntry) {
			if e.GetFd() == 5 {
				e.Fd = proto.Uint32(55)
			}
		}), "descriptor 55 of process 1 (sh) is not open"},
		{
			"a lock", "filelocks.img", magicLocks, edited(func(e *filelock.FileLockEntry) { e.Start = proto.Int64(9) }),
			"does not hold its FLOCK lock",
		},
		{"memory", "pages-1.img", 0, nil, "the memory of process 1 (sh) differs at 0x"},
		{"shared memory", pagesWith(t, b.Images, "shared by all"), 0, nil, "(talk) differs at 0x"},
	} {
		dir := filepath.Join(t.TempDir(), "images")
		if err := os.CopyFS(dir, os.DirFS(b.Images)); err != nil {
			t.Fatal(err)
		}
		if c.magic != 0 {
			rewrite(t, dir, c.file, c.magic, c.edit)
		} else if data, err := os.ReadFile(filepath.Join(dir, c.file)); err != nil {
			t.Fatal(err)
		} else {
			data[len("shared by")] ^= 1
			if err := os.WriteFile(filepath.Join(dir, c.file), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		got, err := Compare(ctx, dir, b.Pid())
		if err != nil || !strings.Contains(strings.Join(got.Differs, "\n"), c.want) {
			t.Errorf("%s: %q, %v", c.name, got.Differs, err)
		}
	}

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Compare(cancelled, b.Images, b.Pid()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	// One that is gone.
	pids, err := insidePids(b.Pid())
	if err != nil {
		t.Fatal(err)
	}
	last := slices.Max(slices.Collect(maps.Keys(pids)))
	if err := unix.Kill(pids[last], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	b.Until("it is found", func() bool {
		got, err := Compare(ctx, b.Images, b.Pid())
		return err == nil && strings.Contains(strings.Join(got.Differs, "\n"), fmt.Sprintf("process %d (", last))
	})
}

// pagesWith returns the name of the image of pages that begins with a text.
func pagesWith(t *testing.T, dir, text string) string {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(dir, "pages-*.img"))
	for _, f := range files {
		if data, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(data), text) {
			return filepath.Base(f)
		}
	}
	t.Fatalf("no pages begin with %q", text)
	return ""
}

// install puts a program into a container's /bin whole.
func install(t *testing.T, b *criutest.Box, program, name string) {
	t.Helper()
	data, err := os.ReadFile(program)
	path := filepath.Join(b.Files, "bin", name)
	if err == nil {
		err = os.WriteFile(path+".new", data, 0o755)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		t.Fatal(err)
	}
}
