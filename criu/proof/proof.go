// Package proof records what the kernel says of each process of a frozen container,
// and proves after a restore that the kernel says the same again.
//
// CRIU restores what its images hold, and some of it wrongly: the locks of a mapped
// file, the owner of a pipe, the semantics of an eventfd. So the record is taken from
// /proc and not from the images. It travels with them (File). The OCI runtime wrapper
// reads it when CRIU has ended and no restored thread has run: Mend sets what can be
// set from outside, Compare names what is different all the same.
//
// The wrapper imports this package and starts for every call of an engine, so it
// depends on nothing but the standard library and package unix.
package proof

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// File is the name of a record beside the images of a dump.
const File = "agentbox-proof.json"

// maxFile is the size in bytes up to which a record is read, maxFDs the number of
// descriptors of one container up to which a record has them.
const (
	maxFile = 256 << 20
	maxFDs  = 1 << 18
)

// Record is what the kernel says of the processes of a container.
type Record struct {
	Version int    `json:"version"`
	Tasks   []Task `json:"tasks"` // in the order of their pids
	Queues  Queues `json:"queues,omitzero"`
}

const version = 1

// Task is one process. Its ids are those in the container.
type Task struct {
	Pid     int      `json:"pid"`
	Parent  int      `json:"ppid"` // 0: it is outside
	Group   int      `json:"pgid"`
	Session int      `json:"sid"`
	Zombie  bool     `json:"zombie,omitempty"`
	Stopped bool     `json:"stopped,omitempty"`
	Cwd     string   `json:"cwd,omitempty"`
	CwdIno  uint64   `json:"cwd_ino,omitempty"` // inode number, if it is of the root filesystem
	Root    string   `json:"root,omitempty"`
	Exe     string   `json:"exe,omitempty"`
	TTY     uint64   `json:"tty,omitempty"` // the device of its controlling terminal
	Umask   string   `json:"umask,omitempty"`
	Pending string   `json:"shdpnd,omitempty"` // signals to the process
	Ignored string   `json:"sigign,omitempty"`
	Caught  string   `json:"sigcgt,omitempty"`
	OOM     string   `json:"oom_score_adj,omitempty"`
	Core    string   `json:"coredump_filter,omitempty"`
	Persona string   `json:"personality,omitempty"`
	THP     string   `json:"thp,omitempty"` // 0: PR_SET_THP_DISABLE
	Limits  []string `json:"limits,omitempty"`
	Timers  []string `json:"timers,omitempty"` // POSIX timers: id, signal, notification, clock
	Threads []Thread `json:"threads,omitempty"`
	FDs     []FD     `json:"fds,omitempty"`
	Locks   []Lock   `json:"locks,omitempty"`

	host int // its pid on the host
}

// Thread is one thread of a process.
type Thread struct {
	Tid      int    `json:"tid"`
	Name     string `json:"name,omitempty"`
	Uids     string `json:"uids"`
	Gids     string `json:"gids"`
	Groups   string `json:"groups,omitempty"`
	Caps     string `json:"caps"` // inheritable, permitted, effective, bounding, ambient
	NoPrivs  string `json:"no_new_privs"`
	Seccomp  string `json:"seccomp"`
	Blocked  string `json:"sigblk"`
	Pending  string `json:"sigpnd,omitempty"`
	CPUs     string `json:"cpus"`
	Slack    string `json:"timer_slack,omitempty"` // ns
	Policy   string `json:"policy"`
	Priority string `json:"priority"`
	Nice     string `json:"nice"`
	IO       int    `json:"ioprio,omitempty"` // class and data, as ioprio_set takes them

	host int
}

// FD is one file descriptor.
type FD struct {
	N      int    `json:"n"`
	Target string `json:"target"` // a path in the container, or the kind of another object
	// Object numbers pipes, sockets and eventfds in the order in which they are met:
	// the same number, the same pipe.
	Object    int    `json:"object,omitempty"`
	Flags     uint64 `json:"flags"`
	Pos       int64  `json:"pos,omitempty"` // of a regular file
	Ino       uint64 `json:"ino,omitempty"` // inode number of a directory of the root filesystem
	Owner     string `json:"owner,omitempty"`
	Semaphore bool   `json:"semaphore,omitempty"` // of an eventfd: EFD_SEMAPHORE
	Count     string `json:"count,omitempty"`     // of an eventfd, in hex
	Watched   bool   `json:"watched,omitempty"`   // by an epoll of its process
	Mask      string `json:"mask,omitempty"`      // of a signalfd
	Clock     string `json:"clock,omitempty"`     // of a timerfd
	TTY       uint64 `json:"tty,omitempty"`       // the device of a terminal
	// Socket is of the first descriptor alone of those that have a socket.
	Socket *Socket `json:"socket,omitempty"`
}

func (t Task) descriptor(n int) (FD, bool) {
	at := slices.IndexFunc(t.FDs, func(fd FD) bool { return fd.N == n })
	if at < 0 {
		return FD{}, false
	}
	return t.FDs[at], true
}

// Lock is a lock of a file that a process holds.
type Lock struct {
	FD    int    `json:"fd"`    // by which it can be had again
	Kind  string `json:"kind"`  // POSIX, FLOCK, OFDLCK, LEASE
	Write bool   `json:"write"` // exclusive
	Start int64  `json:"start"`
	End   int64  `json:"end"` // the last byte; -1: of the file, however long
	Path  string `json:"path"`
}

// Host returns the pid on the host, when the record was taken, of a process; 0: there
// was none.
func (r Record) Host(pid int) int {
	for _, t := range r.Tasks {
		if t.Pid == pid {
			return t.host
		}
	}
	return 0
}

// Limited is a record of processes that have at most the capabilities given as bits, and, if
// so, take no new privileges: those of a container that gives less than the one of the dump.
func (r Record) Limited(capabilities uint64, noNewPrivileges bool) Record {
	r.Tasks = slices.Clone(r.Tasks)
	for i := range r.Tasks {
		t := &r.Tasks[i]
		t.Threads = slices.Clone(t.Threads)
		for k := range t.Threads {
			th := &t.Threads[k]
			sets := strings.Fields(th.Caps)
			for n, set := range sets {
				if bits, err := strconv.ParseUint(set, 16, 64); err == nil && bits&^capabilities != 0 {
					sets[n] = fmt.Sprintf("%016x", bits&capabilities)
				}
			}
			th.Caps = strings.Join(sets, " ")
			if noNewPrivileges {
				th.NoPrivs = "1"
			}
		}
	}
	return r
}

// Write publishes a record beside the images in dir.
func (r Record) Write(dir string) error {
	data, err := json.Marshal(r)
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%d bytes", len(data))
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, File), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("record of the processes: %w", err)
	}
	return nil
}

// Read returns the record beside the images in dir. Without one, as dumps of earlier
// versions are, it is ErrNotFound.
func Read(dir string) (r Record, err error) {
	f, err := os.Open(filepath.Join(dir, File))
	if errors.Is(err, fs.ErrNotExist) {
		return r, fmt.Errorf("record of the processes: %w", fault.ErrNotFound)
	}
	if err != nil {
		return r, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err == nil && r.Version != version {
		err = fmt.Errorf("version %d is not known here", r.Version)
	}
	if err != nil {
		return r, fmt.Errorf("record of the processes: %w: %w", err, fault.ErrCorrupt)
	}
	return r, nil
}
