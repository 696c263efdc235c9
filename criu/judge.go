package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	filelock "github.com/checkpoint-restore/go-criu/v7/crit/images/file-lock"
	crfs "github.com/checkpoint-restore/go-criu/v7/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/pstree"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/internal/fault"
)

// Unrestorable says why CRIU would refuse images that are whole.
type Unrestorable struct {
	Reason string
	Hint   string
}

func (u *Unrestorable) Error() string { return u.Reason }

// Unwrap makes it an ErrUnsupported.
func (u *Unrestorable) Unwrap() error { return fault.ErrUnsupported }

// Judges reports whether Judge reads an image; of copies of deleted files (ghost) it
// looks only whether they are there.
func Judges(name string) (read, ghost bool) {
	if strings.HasPrefix(name, "ghost-file-") {
		return false, true
	}
	for _, prefix := range []string{
		"pstree.", "inventory.", "files.", "remap-fpath.", "filelocks.", "core-", "ids-", "fdinfo-", "mm-", "fs-",
		"mountpoints-", "ipcns-shm-", "memfd.", proof.File,
	} {
		if strings.HasPrefix(name, prefix) {
			return true, false
		}
	}
	return false, false
}

const stopIt = "Stop that process, then try again; --files-only takes the files alone."

// Judge reads the images of a dump as a restore would, and returns *Unrestorable for
// what CRIU is known to refuse, or to restore in part: what a dump accepts is not
// always what a restore takes. Images that are cut off or missing are ErrCorrupt.
// Images of pages are not read, see CheckImages.
func Judge(dir string) error {
	j := &judge{dir: dir, tasks: map[int]*task{}, threads: map[int]int{}, fds: map[uint32]map[uint32]uint32{}}
	for _, step := range []func() error{j.readTree, j.readTasks, j.checkTree, j.checkNamespaces, j.checkMounts} {
		if err := step(); err != nil {
			return err
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, filesImage)); errors.Is(err, fs.ErrNotExist) {
		return nil // a CRIU older than 3.4 has an image for each kind
	}
	files, err := readOpened(dir)
	if err != nil {
		return err
	}
	j.files = files
	for _, step := range []func() error{
		j.readFds, j.checkMemory, j.checkShared, j.checkRemaps, j.checkThreadFiles, j.checkSockets, j.checkLocks,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// judged is Judge of what a dump has just written.
func judged(dir, log string) error {
	err := Judge(dir)
	if err == nil {
		return nil
	}
	why := Diagnosis{Code: "image-damaged", Reason: err.Error()}
	var u *Unrestorable
	if errors.As(err, &u) {
		why = Diagnosis{Code: "unrestorable", Reason: "the checkpoint could not be restored: " + u.Reason, Hint: u.Hint}
	}
	return &DumpError{Diagnosis: why, Log: log, Err: err}
}

type judge struct {
	dir     string
	order   []*task
	tasks   map[int]*task // by pid
	threads map[int]int   // thread, but for leaders: its process
	root    *task
	files   *opened
	fds     map[uint32]map[uint32]uint32 // table of descriptors: descriptor: file
}

// task is one process of the images.
type task struct {
	pid, ppid, pgid, sid int
	threads              []int
	comm                 string
	dead                 bool
	ids                  *criucore.TaskKobjIdsEntry // nil: it is dead
}

func (t *task) String() string { return fmt.Sprintf("process %d (%s)", t.pid, t.comm) }

func (j *judge) read(name string, magic uint32, max int, fn func([]byte) error) error {
	return readImage(filepath.Join(j.dir, name), magic, max, fn)
}

func (j *judge) readTree() error {
	return j.read("pstree.img", magicPstree, maxProcesses, func(data []byte) error {
		var e pstree.PstreeEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		t := &task{pid: int(e.GetPid()), ppid: int(e.GetPpid()), pgid: int(e.GetPgid()), sid: int(e.GetSid())}
		for _, id := range e.GetThreads() {
			t.threads = append(t.threads, int(id))
		}
		j.order = append(j.order, t)
		return nil
	})
}

// readTasks reads what each process is, and proves that its images are there.
func (j *judge) readTasks() error {
	for _, t := range j.order {
		err := j.read(fmt.Sprintf("core-%d.img", t.pid), magicCore, 1, func(data []byte) error {
			var e criucore.CoreEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			t.comm = e.GetTc().GetComm()
			state := e.GetTc().GetTaskState()
			t.dead = state == taskDead || state == taskZombie
			return nil
		})
		if err != nil {
			return err
		}
		if t.dead {
			t.threads = nil // of no meaning, see Processes
			continue
		}
		err = j.read(fmt.Sprintf("ids-%d.img", t.pid), magicIDs, 1, func(data []byte) error {
			t.ids = new(criucore.TaskKobjIdsEntry)
			return proto.Unmarshal(data, t.ids)
		})
		if err != nil {
			return err
		}
		for _, id := range t.threads {
			if err := j.read(fmt.Sprintf("core-%d.img", id), magicCore, 1, func([]byte) error {
				return nil
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (j *judge) checkTree() error {
	broken := func(format string, args ...any) error {
		return &Unrestorable{"the tree of processes cannot be made again: " + fmt.Sprintf(format, args...), stopIt}
	}
	for _, t := range j.order {
		if _, twice := j.tasks[t.pid]; twice {
			return broken("two processes have the pid %d", t.pid)
		}
		j.tasks[t.pid] = t
		if t.ppid == 0 {
			if j.root != nil {
				return broken("%v has no parent, as %v", t, j.root)
			}
			j.root = t
		}
	}
	if j.root == nil {
		return fmt.Errorf("image pstree.img has no first process: %w", fault.ErrCorrupt)
	}
	for _, t := range j.order {
		for _, id := range t.threads {
			if id == t.pid {
				continue
			}
			if other, is := j.tasks[id]; is {
				return broken("a thread of %v has the pid of %v", t, other)
			}
			if of, is := j.threads[id]; is {
				return broken("a thread of %v has the id of one of process %d", t, of)
			}
			j.threads[id] = t.pid
		}
	}
	for _, t := range j.order {
		if parent := j.tasks[t.ppid]; t != j.root && (parent == nil || parent == t) {
			return broken("the parent %d of %v is not among them", t.ppid, t)
		}
	}
	for _, t := range j.order {
		if !j.descends(t) {
			return broken("%v does not descend from the first process", t)
		}
		if _, is := j.threads[t.pgid]; is {
			return broken("the process group %d of %v is a thread", t.pgid, t)
		}
		if _, is := j.threads[t.sid]; is {
			return broken("the session %d of %v is a thread", t.sid, t)
		}
		if !j.inherits(t) {
			return broken("%v is in session %d, of which no ancestor of it is", t, t.sid)
		}
	}
	return nil
}

func (j *judge) descends(t *task) bool {
	for range j.order {
		if t == j.root {
			return true
		}
		t = j.tasks[t.ppid]
	}
	return t == j.root
}

// inherits reports whether CRIU can bring a process into its session: a session is
// inherited from its leader, or from a helper in the leader's place for children of
// the first process.
func (j *judge) inherits(t *task) bool {
	if t == j.root || t.sid == 0 || t.sid == t.pid || t.ppid == j.root.pid {
		return true
	}
	at := t
	for range 2 * len(j.order) {
		if at.pid == t.sid || at != t && at.sid == t.sid {
			return true // or it is the other's, and judged there
		}
		if at == j.root {
			return false
		}
		if next := j.tasks[at.ppid]; next != j.root || at.sid == at.pid || at.sid == j.root.sid {
			at = next
			continue
		}
		leader := j.tasks[at.sid]
		if leader == nil {
			return false // a helper, a child of the first process, leads the session of at alone
		}
		at = leader
	}
	return false
}

// namespaces are those whose contents CRIU makes once, for the first process.
var namespaces = []struct {
	name   string
	of     func(*criucore.TaskKobjIdsEntry) uint32
	nested bool // others may be inside of the sandbox, if the sandbox has one of its own
}{
	{"pid", (*criucore.TaskKobjIdsEntry).GetPidNsId, false},
	{"ipc", (*criucore.TaskKobjIdsEntry).GetIpcNsId, false},
	{"uts", (*criucore.TaskKobjIdsEntry).GetUtsNsId, false},
	{"user", (*criucore.TaskKobjIdsEntry).GetUserNsId, false},
	{"time", (*criucore.TaskKobjIdsEntry).GetTimeNsId, false},
	{"net", (*criucore.TaskKobjIdsEntry).GetNetNsId, true},
	{"mnt", (*criucore.TaskKobjIdsEntry).GetMntNsId, true},
}

func (j *judge) checkNamespaces() error {
	var outside *criucore.TaskKobjIdsEntry
	err := j.read("inventory.img", magicInventory, 1, func(data []byte) error {
		var e inventory.InventoryEntry
		err := proto.Unmarshal(data, &e)
		outside = e.GetRootIds()
		return err
	})
	if _, there := os.Lstat(filepath.Join(j.dir, "inventory.img")); err != nil && there == nil {
		return err
	}
	first := j.root.ids
	if first == nil {
		return fmt.Errorf("image pstree.img: its first process has ended: %w", fault.ErrCorrupt)
	}
	for _, t := range j.order {
		if t.ids == nil {
			continue
		}
		for _, ns := range namespaces {
			own := outside == nil || ns.of(first) != ns.of(outside)
			if ns.of(t.ids) == ns.of(first) || ns.nested && own {
				continue
			}
			u := &Unrestorable{
				fmt.Sprintf("%v is in a %s namespace of its own, which CRIU cannot restore", t, ns.name), stopIt,
			}
			if ns.name == "time" {
				u.Reason = fmt.Sprintf("%v is in another time namespace than the first process, which CRIU cannot restore: it came in through an exec after a restore", t)
				u.Hint = "Stop that process and start it again, or restart the sandbox; --files-only takes the files alone."
			}
			return u
		}
	}
	return nil
}

func (j *judge) checkMounts() error {
	seen := map[uint32]bool{}
	for _, t := range j.order {
		ns := t.ids.GetMntNsId()
		if t.ids == nil || ns == 0 || seen[ns] {
			continue
		}
		seen[ns] = true
		parents, points := map[uint32]uint32{}, map[uint32]string{}
		err := optionalImage(j.dir, fmt.Sprintf("mountpoints-%d.img", ns), magicMnts, func(data []byte) error {
			var e mnt.MntEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			if _, twice := parents[e.GetMntId()]; twice {
				return fmt.Errorf("two mounts have the id %d", e.GetMntId())
			}
			parents[e.GetMntId()], points[e.GetMntId()] = e.GetParentMntId(), e.GetMountpoint()
			return nil
		})
		if err != nil {
			return err
		}
		top := ""
		for id, parent := range parents {
			if _, there := parents[parent]; there && parent != id {
				continue
			}
			if top != "" {
				return &Unrestorable{fmt.Sprintf("of the mounts of %v neither %s nor %s lies in another", t,
					top, points[id]), stopIt}
			}
			top = points[id]
		}
	}
	return nil
}

// checkMemory proves that what is mapped, run and stood in is among the open files.
func (j *judge) checkMemory() error {
	const shared = 1 << 7
	const fileMap, special = 1<<6 | shared, 1<<11 | 1<<13 | 1<<27 // files; sockets, aio rings, plugins
	for _, t := range j.order {
		if t.dead {
			continue
		}
		missing := func(what string, id uint32) error {
			return &Unrestorable{fmt.Sprintf("%s of %v is not in the images (file %#x)", what, t, id), stopIt}
		}
		var lack error
		err := j.read(fmt.Sprintf("mm-%d.img", t.pid), magicMm, 1, func(data []byte) error {
			var e mm.MmEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			switch kind, is := j.files.kinds[e.GetExeFileId()]; {
			case !is:
				lack = missing("the program", e.GetExeFileId())
			case kind != uint64(fdinfo.FdTypes_REG):
				lack = &Unrestorable{fmt.Sprintf("the program of %v was run from memory (memfd_create) and is no file, which CRIU cannot restore", t), stopIt}
			}
			if f := j.files.named[e.GetExeFileId()]; f != nil && f.Mode != nil &&
				f.GetMode()&0o111 == 0 && lack == nil {
				lack = &Unrestorable{fmt.Sprintf("the program of %v, %s, may not be executed any more, and CRIU cannot restore that", t, f.GetName()), "Give the file back its mode (chmod +x), or stop that process; --files-only takes the files alone."}
			}
			for _, v := range e.GetVmas() {
				if lack == nil && v.GetStatus()&shared != 0 && j.sealed(uint32(v.GetShmid())) {
					lack = &Unrestorable{fmt.Sprintf("%v has a sealed memfd (F_SEAL_WRITE) mapped as shared, which CRIU cannot restore", t), stopIt}
				}
				if s := v.GetStatus(); lack == nil && s&fileMap != 0 && s&special == 0 &&
					!j.files.has(uint32(v.GetShmid())) {
					lack = missing(fmt.Sprintf("the file mapped at %#x", v.GetStart()), uint32(v.GetShmid()))
				}
			}
			return nil
		})
		if err == nil {
			err = j.read(fmt.Sprintf("fs-%d.img", t.pid), magicFs, 1, func(data []byte) error {
				var e crfs.FsEntry
				if err := proto.Unmarshal(data, &e); err != nil {
					return err
				}
				if id := e.GetCwdId(); lack == nil && !j.files.has(id) {
					lack = missing("the working directory", id)
				}
				if id := e.GetRootId(); lack == nil && !j.files.has(id) {
					lack = missing("the root directory", id)
				}
				return nil
			})
		}
		if err != nil || lack != nil {
			return errors.Join(lack, err)
		}
	}
	return nil
}

// sealed reports whether a file is a memfd whose content is sealed.
func (j *judge) sealed(id uint32) bool {
	inode, is := j.files.memfds[id]
	return is && j.files.seals[inode]&unix.F_SEAL_WRITE != 0
}

func (j *judge) checkLocks() error {
	var bad error
	err := optionalImage(j.dir, "filelocks.img", magicLocks, func(data []byte) error {
		var e filelock.FileLockEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		t := j.tasks[int(e.GetPid())]
		switch {
		case bad != nil:
		case t == nil || t.dead:
			bad = &Unrestorable{
				fmt.Sprintf("process %d, which holds a file lock, is not in the images", e.GetPid()), stopIt,
			}
		default:
			if _, open := j.fds[t.ids.GetFilesId()][uint32(e.GetFd())]; !open {
				bad = &Unrestorable{fmt.Sprintf("descriptor %d, by which %v holds a file lock, is not in the images",
					e.GetFd(), t), stopIt}
			}
		}
		return nil
	})
	return errors.Join(err, bad)
}
