package criu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	filelock "github.com/checkpoint-restore/go-criu/v7/crit/images/file-lock"
	crfs "github.com/checkpoint-restore/go-criu/v7/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/internal/fault"
)

// Real images, changed field by field.
func TestJudge(t *testing.T) {
	ctx := context.Background()
	talk := filepath.Join(t.TempDir(), "talk")
	build(t, talk, "talk")
	b, rt := start(t, []string{
		"sh", "-c", "echo x >/gone; exec 5</gone; rm /gone; (while [ ! -e /bin/talk ]; do sleep 0.02; done; talk lock; :) & i=0; while :; do i=$((i+1)); " + criutest.Store + "; sleep 0.05; done",
	}, nil)
	install(t, b, talk, "talk")
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	b.Until("the lock is taken", func() bool { return lockHeld(filepath.Join(b.Files, "lock")) })
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true}); err != nil {
		t.Fatal(err)
	}
	list, err := Processes(b.Images)
	if err != nil || len(list) < 3 {
		t.Fatalf("%+v, %v", list, err)
	}
	files, err := readOpened(b.Images)
	if err != nil {
		t.Fatal(err)
	}
	noFile := uint32(0)
	for id, kind := range files.kinds {
		if kind != uint64(fdinfo.FdTypes_REG) {
			noFile = id
		}
	}
	if noFile == 0 {
		t.Fatalf("no process has anything open but files: %v", files.kinds)
	}
	// The second process is a child of the first.
	const other = 1 << 20
	second := list[1].Pid
	for _, c := range []struct {
		name, file string
		magic      uint32
		edit       func(d []byte) []byte
		want       string // of an *Unrestorable; empty: the images are corrupt
	}{
		{"a parent that is not there", "pstree.img", magicPstree, edited(func(e *pstree.PstreeEntry) {
			if e.GetPpid() != 0 {
				e.Ppid = proto.Uint32(other)
			}
		}), "the parent 1048576 of process"},
		{"one pid twice", "pstree.img", magicPstree, edited(func(e *pstree.PstreeEntry) {
			if int(e.GetPid()) == list[2].Pid {
				e.Pid = proto.Uint32(uint32(second))
			}
		}), "two processes have the pid"},
		{
			"two first processes", "pstree.img", magicPstree,
			edited(func(e *pstree.PstreeEntry) { e.Ppid = proto.Uint32(0) }), "has no parent",
		},
		{"a thread that is a process", "pstree.img", magicPstree, edited(func(e *pstree.PstreeEntry) {
			if e.GetPpid() == 0 {
				e.Threads = append(e.Threads, uint32(second))
			}
		}), "a thread of process 1 (sh) has the pid of process"},
		{
			"a thread without image", "pstree.img", magicPstree,
			edited(func(e *pstree.PstreeEntry) { e.Threads = append(e.Threads, other) }), "",
		},
		{"a session of no ancestor", "pstree.img", magicPstree, edited(func(e *pstree.PstreeEntry) {
			if e.GetPpid() != 0 && e.GetPpid() != 1 {
				e.Sid = proto.Uint32(other)
			}
		}), "is in session 1048576"},
		{
			"another time namespace", idsOf(second), magicIDs,
			edited(func(e *criucore.TaskKobjIdsEntry) { e.TimeNsId = proto.Uint32(99) }), "in another time namespace",
		},
		{
			"another pid namespace", idsOf(second), magicIDs,
			edited(func(e *criucore.TaskKobjIdsEntry) { e.PidNsId = proto.Uint32(99) }),
			"in a pid namespace of its own",
		},
		{
			"another uts namespace", idsOf(second), magicIDs,
			edited(func(e *criucore.TaskKobjIdsEntry) { e.UtsNsId = proto.Uint32(99) }),
			"in a uts namespace of its own",
		},
		{
			"another ipc namespace", idsOf(second), magicIDs,
			edited(func(e *criucore.TaskKobjIdsEntry) { e.IpcNsId = proto.Uint32(99) }),
			"in a ipc namespace of its own",
		},
		{
			"another user namespace", idsOf(second), magicIDs,
			edited(func(e *criucore.TaskKobjIdsEntry) { e.UserNsId = proto.Uint32(99) }),
			"in a user namespace of its own",
		},
		{
			"no table of descriptors", idsOf(second), magicIDs,
			edited(func(e *criucore.TaskKobjIdsEntry) { e.FilesId = proto.Uint32(99) }), "",
		},
		{
			"a descriptor of no file", "fdinfo-*.img", magicFdinfo,
			edited(func(e *fdinfo.FdinfoEntry) { e.Id = proto.Uint32(other) }), "is not in the images",
		},
		{
			"a descriptor of another type", "fdinfo-*.img", magicFdinfo,
			edited(func(e *fdinfo.FdinfoEntry) { e.Type = fdinfo.FdTypes_SIGNALFD.Enum() }), "of another type",
		},
		{
			"a descriptor twice", "fdinfo-*.img", magicFdinfo,
			edited(func(e *fdinfo.FdinfoEntry) { e.Fd = proto.Uint32(7) }), "twice",
		},
		{"a file twice", "files.img", magicFiles, edited(func(e *fdinfo.FileEntry) { e.Id = proto.Uint32(7) }), ""},
		{
			"a program that is no file", "mm-*.img", magicMm,
			edited(func(e *mm.MmEntry) { e.ExeFileId = proto.Uint32(noFile) }), "was run from memory",
		},
		{"no program", "mm-*.img", magicMm, edited(func(e *mm.MmEntry) {
			e.ExeFileId = proto.Uint32(other)
		}), "the program of"},
		{"a mapped file that is missing", "mm-*.img", magicMm, edited(func(e *mm.MmEntry) {
			for _, v := range e.Vmas {
				if v.GetStatus()&(1<<6) != 0 {
					v.Shmid = proto.Uint64(other)
				}
			}
		}), "the file mapped at"},
		{
			"no working directory", "fs-*.img", magicFs,
			edited(func(e *crfs.FsEntry) { e.CwdId = proto.Uint32(other) }), "the working directory of",
		},
		{
			"no root", "fs-*.img", magicFs, edited(func(e *crfs.FsEntry) { e.RootId = proto.Uint32(other) }),
			"the root directory of",
		},
		{
			"no copy of a deleted file", "remap-fpath.img", magicRemap,
			edited(func(e *remap.RemapFilePathEntry) { e.RemapId = proto.Uint32(other) }), "",
		},
		{
			"a lock of nothing", "filelocks.img", magicLocks,
			edited(func(e *filelock.FileLockEntry) { e.Pid = proto.Int32(other) }), "which holds a file lock",
		},
		{
			"a lock of no descriptor", "filelocks.img", magicLocks,
			edited(func(e *filelock.FileLockEntry) { e.Fd = proto.Int32(99) }),
			"holds a file lock, is not in the images",
		},
		{
			"mounts in nothing", "mountpoints-*.img", magicMnts,
			edited(func(e *mnt.MntEntry) { e.ParentMntId = proto.Uint32(other) }), "lies in another",
		},
		{
			"a mount twice", "mountpoints-*.img", magicMnts,
			edited(func(e *mnt.MntEntry) { e.MntId = proto.Uint32(7) }), "",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "images")
			if err := os.CopyFS(dir, os.DirFS(b.Images)); err != nil {
				t.Fatal(err)
			}
			if err := Judge(dir); err != nil {
				t.Fatalf("as they were: %v", err)
			}
			rewrite(t, dir, c.file, c.magic, c.edit)
			err := Judge(dir)
			var u *Unrestorable
			switch {
			case c.want == "" && !errors.Is(err, fault.ErrCorrupt),
				c.want != "" && (!errors.As(err, &u) || !strings.Contains(err.Error(), c.want) || u.Hint == ""):
				t.Errorf("%v", err)
			}
		})
	}
}

func idsOf(pid int) string { return fmt.Sprintf("ids-%d.img", pid) }

func edited[T any, P interface {
	*T
	proto.Message
}](edit func(P)) func([]byte) []byte {
	return func(data []byte) []byte {
		e := P(new(T))
		if proto.Unmarshal(data, e) != nil {
			return data
		}
		edit(e)
		out, _ := proto.Marshal(e)
		return out
	}
}

// rewrite changes each entry of images.
func rewrite(t *testing.T, dir, pattern string, magic uint32, edit func([]byte) []byte) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %v", pattern, err)
	}
	for _, file := range files {
		out := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, magicCommon), magic)
		err := readImage(file, magic, maxFiles, func(data []byte) error {
			e := edit(data)
			out = append(binary.LittleEndian.AppendUint32(out, uint32(len(e))), e...)
			return nil
		})
		if err == nil {
			err = os.WriteFile(file, out, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// lockHeld reports whether another open file holds a flock on a file.
func lockHeld(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil
}
