package proof

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fsx"
)

// CRIU dumps no connection of unix sockets that waits in a backlog and has data, or whose client
// has closed it, and only accept takes one out of there. So such connections are accepted for the
// dump, into descriptors of the server that its program does not know of: CRIU finds connected
// pairs. Once the dump is made, and in a restore before a process runs, a new socket of the
// client connects to the listener, gets what the client had sent, and takes the place of the
// client's descriptors; see requeue.go.

// Unaccepted is such a connection, in the record of a dump that has it as an accepted one.
// Pids are those in the container.
type Unaccepted struct {
	Server    int `json:"server"`
	Listener  int `json:"listener"`         // its descriptor
	Accepted  int `json:"accepted"`         // a descriptor of the server, of which its program knows nothing
	Connecter int `json:"connecter"`        // the process that connects again
	Client    int `json:"client,omitempty"` // a process that has the client's socket; 0: it is closed
	ClientFD  int `json:"client_fd,omitempty"`
	Shut      int `json:"shut,omitempty"` // by the client: shutRead, shutWrite
	// Messages are what waits in one that keeps messages apart, if an empty one is among
	// them: CRIU takes that for the end.
	Messages [][]byte `json:"messages,omitempty"`
}

// The directions in which a client has shut down its socket.
const (
	shutRead  = 1
	shutWrite = 2
)

// Backlog is what the kernel says of the connections that a listener has not accepted.
type Backlog struct {
	Listener uint32 // its inode
	Name     string // for messages
	Clients  []Waiter
}

// Waiter is the client of such a connection.
type Waiter struct {
	Inode uint32 // 0: it has closed its socket
	Shut  int
}

// Held are connections that were accepted for a dump, and what has been done since to put
// them back. It is written to a file before each step, so that what a killed process has
// begun can be brought to its end.
type Held struct {
	path     string
	Carriers []carrier     `json:"carriers,omitempty"`
	List     []*connection `json:"connections"` // in the order of their backlogs
}

// carrier is a pair of sockets in a process, by which it is given descriptors.
type carrier struct {
	Pid    int       `json:"pid"`
	Inodes [2]uint64 `json:"inodes"`        // [0] is where it receives
	For    []int     `json:"for,omitempty"` // the places in Held.List of what may be on its way
}

// connection is one of Held. Pids are those of the host.
type connection struct {
	Server    int    `json:"server"`
	Listener  uint64 `json:"listener"` // inodes
	Accepted  uint64 `json:"accepted,omitempty"`
	Client    uint64 `json:"client,omitempty"`
	Connecter int    `json:"connecter,omitempty"`
	Shut      int    `json:"shut,omitempty"`
	Name      string `json:"name"`
	// Empty are the indexes of empty messages. The kernel skips them on a second peek.
	Empty []int `json:"empty,omitempty"`

	Socket uint64  `json:"socket,omitempty"` // the new one's inode
	Temps  []place `json:"temps,omitempty"`  // descriptors that it has for the time being
	Sent   int     `json:"sent,omitempty"`   // bytes, or messages
	// Before is what waited in the new socket before the piece that is being sent; -1: none is.
	Before int    `json:"before"`
	Piece  int    `json:"piece,omitempty"` // its size
	Lost   string `json:"lost,omitempty"`  // why it cannot be put back
	Done   bool   `json:"done,omitempty"`

	messages [][]byte // in the place of what CRIU has restored
}

// place is a descriptor of a process of the host.
type place struct {
	Pid int `json:"pid"`
	FD  int `json:"fd"`
}

func (p place) open() (int, error) { return socket{p.Pid, p.FD, p.Pid}.open() }

// placesOf lists the descriptors of some processes that are sockets, by inodes.
func placesOf(pids []int) map[uint64][]place {
	found := map[uint64][]place{}
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/fd/", pid)
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // it has ended
		}
		for _, e := range entries {
			if inode := inodeAt(dir + e.Name()); inode != 0 {
				n, _ := strconv.Atoi(e.Name())
				found[inode] = append(found[inode], place{pid, n})
			}
		}
	}
	return found
}

// inodeAt is the inode of the socket that a link of /proc leads to; 0: it leads to none.
func inodeAt(link string) uint64 {
	to, err := os.Readlink(link)
	text, is := strings.CutPrefix(to, "socket:[")
	if err != nil || !is {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSuffix(text, "]"), 10, 64)
	return n
}

func (p place) inode() uint64 { return inodeAt(fmt.Sprintf("/proc/%d/fd/%d", p.Pid, p.FD)) }

// inodeOf is the inode of a descriptor of ours.
func inodeOf(fd int) uint64 { return inodeAt(fmt.Sprintf("/proc/self/fd/%d", fd)) }

// write publishes the journal. Without a path there is none.
func (h *Held) write() error {
	if h.path == "" {
		return nil
	}
	data, err := json.Marshal(h)
	if err == nil {
		err = fsx.Write(h.path, data, fsx.Options{Temp: h.path + ".new", Volatile: true})
	}
	if err != nil {
		return fmt.Errorf("journal of connections: %w", err)
	}
	return nil
}

// ReadHeld reads the journal that a killed process has left; nil: it has left none.
func ReadHeld(path string) (*Held, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	h := &Held{path: path}
	if err == nil {
		err = json.Unmarshal(data, h)
	}
	if err != nil {
		return nil, fmt.Errorf("journal of connections: %w", err)
	}
	return h, nil
}

// accepting is an Accept under way.
type accepting struct {
	held   *Held
	record *Record
	inner  map[int]int // pids in the container of the processes of the record
	places map[uint64][]place
	lost   []string
}

// queue is a backlog that can be accepted and put back.
type queue struct {
	Backlog
	listener place
	holders  []place // of each client one; the zero place: it is closed
}

// Accept accepts connections that wait in backlogs of the processes of a record. members
// are all processes of the frozen container, and a journal is kept in path. lost names
// what stays as it is because it could not be put back.
func Accept(
	ctx context.Context, c freezer.Container, r *Record, members []int, backlogs []Backlog, path string,
) (held *Held, lost []string, err error) {
	a := accepting{held: &Held{path: path}, record: r, inner: map[int]int{}, places: placesOf(members)}
	for _, t := range r.Tasks {
		if !t.Zombie {
			a.inner[t.host] = t.Pid
		}
	}
	var queues []queue
	var threads []int
	for _, b := range backlogs {
		q, pids, err := a.plan(b)
		if err != nil {
			a.cannot(b, err)
			continue
		}
		queues = append(queues, q)
		for _, pid := range pids {
			if tid := threadOf(pid); tid != 0 && !slices.Contains(threads, tid) {
				threads = append(threads, tid)
			}
		}
	}
	if len(queues) == 0 {
		return nil, a.lost, nil
	}
	begun := false
	err = c.InjectTogether(ctx, threads, func(ts map[int]*freezer.Tracee) error {
		begun = true
		for _, q := range queues {
			if err := a.mayConnect(q, ts); err != nil {
				a.cannot(q.Backlog, err)
				continue
			}
			if err := a.accept(q, ts); err != nil {
				return fmt.Errorf("accept the connections that wait at %s: %w", q.Name, err)
			}
		}
		return nil
	})
	if err != nil && !begun { // nothing has been done
		for _, q := range queues {
			a.cannot(q.Backlog, err)
		}
		return nil, a.lost, nil
	}
	if len(a.held.List) == 0 {
		return nil, a.lost, err
	}
	return a.held, a.lost, err
}

// Rest accepts what is left in backlogs of which a process that was killed has accepted
// some: those would come behind it otherwise. members are all processes of the frozen container.
func (h *Held) Rest(ctx context.Context, c freezer.Container, members []int, backlogs []Backlog) error {
	a := accepting{held: h, record: &Record{}, inner: map[int]int{}, places: placesOf(members)}
	for _, pid := range members {
		a.inner[pid] = pid
	}
	begun, left := map[uint64]bool{}, map[uint64]bool{}
	for _, o := range h.List {
		begun[o.Listener] = begun[o.Listener] || o.Accepted != 0 && !o.Done
		left[o.Listener] = left[o.Listener] || o.Accepted == 0 && !o.Done
	}
	var queues []queue
	var threads []int
	for _, b := range backlogs {
		if !begun[uint64(b.Listener)] || !left[uint64(b.Listener)] {
			continue
		}
		q, pids, err := a.plan(b)
		if err != nil {
			continue // they stay where they are
		}
		queues = append(queues, q)
		for _, pid := range pids {
			if tid := threadOf(pid); tid != 0 && !slices.Contains(threads, tid) {
				threads = append(threads, tid)
			}
		}
	}
	return c.InjectTogether(ctx, threads, func(ts map[int]*freezer.Tracee) error {
		for _, q := range queues {
			for _, o := range h.List {
				o.Done = o.Done || o.Accepted == 0 && o.Listener == uint64(q.Listener)
			}
			if err := a.accept(q, ts); err != nil {
				return err
			}
		}
		return nil
	})
}

func (a *accepting) cannot(b Backlog, err error) {
	a.lost = append(a.lost, fmt.Sprintf("%d connections to %s, which are not accepted yet, are not kept: %v",
		len(b.Clients), b.Name, err))
}

// plan finds the processes that a backlog concerns.
func (a *accepting) plan(b Backlog) (q queue, pids []int, err error) {
	q = queue{Backlog: b}
	at := slices.IndexFunc(a.places[uint64(b.Listener)], func(p place) bool { return a.inner[p.Pid] != 0 })
	if at < 0 {
		return q, nil, errors.New("no process of the checkpoint has the listener")
	}
	if !freezer.CanInject {
		return q, nil, errors.New("this kind of machine cannot")
	}
	q.listener = a.places[uint64(b.Listener)][at]
	pids = []int{q.listener.Pid}
	for _, w := range b.Clients {
		if w.Inode == 0 {
			q.holders = append(q.holders, place{})
			continue
		}
		holders := a.places[uint64(w.Inode)]
		if len(holders) == 0 {
			return q, nil, errors.New("the client of one is outside of the sandbox, or on its way to another process")
		}
		named, err := bound(holders[0])
		if err != nil {
			return q, nil, err
		}
		if named {
			return q, nil, errors.New("the client of one has bound its socket to a name")
		}
		q.holders = append(q.holders, holders[0])
		for _, h := range holders {
			pids = append(pids, h.Pid)
		}
	}
	for _, pid := range pids {
		if err := hasRoom(pid, len(b.Clients)+4); err != nil {
			return q, nil, err
		}
	}
	return q, pids, nil
}

// bound reports whether a socket has a name of its own.
func bound(p place) (bool, error) {
	fd, err := p.open()
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	name, err := rawName(fd)
	return len(name) > 2, err
}

// hasRoom fails if a process cannot open some more descriptors.
func hasRoom(pid, n int) error {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return err
	}
	var limit unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit); err != nil {
		return err
	}
	if uint64(len(entries)+n) > limit.Cur {
		return fmt.Errorf("process %d is at its limit of open files", pid)
	}
	return nil
}

// mayConnect fails if the clients of a backlog could not connect once more.
func (a *accepting) mayConnect(q queue, ts map[int]*freezer.Tracee) error {
	l, err := q.listener.open()
	if err != nil {
		return err
	}
	defer unix.Close(l)
	asked := map[int]bool{}
	for _, h := range q.holders {
		if h.Pid == 0 {
			h = q.listener
		}
		if asked[h.Pid] {
			continue
		}
		asked[h.Pid] = true
		to, err := addressFor(l, q.listener.Pid, h.Pid)
		if err != nil {
			return err
		}
		t := ts[threadOf(h.Pid)]
		if t == nil {
			return fmt.Errorf("process %d has ended", h.Pid)
		}
		if to.path == "" {
			continue
		}
		at, err := t.Page(append([]byte(to.path), 0))
		if err == nil {
			const atCwd, write = ^uint64(99), 2 // AT_FDCWD, W_OK
			_, err = t.Call(unix.SYS_FACCESSAT2, atCwd, at, write, unix.AT_EACCESS)
		}
		if err != nil {
			return fmt.Errorf("process %d may not connect to it any more: %w", h.Pid, err)
		}
	}
	return nil
}

// accept accepts the connections of one backlog, in order, into the server.
func (a *accepting) accept(q queue, ts map[int]*freezer.Tracee) error {
	h, server := a.held, ts[threadOf(q.listener.Pid)]
	if server == nil {
		return fmt.Errorf("process %d has ended", q.listener.Pid)
	}
	l, err := q.listener.open()
	if err != nil {
		return err
	}
	defer unix.Close(l)
	first := len(h.List)
	for i, w := range q.Clients {
		h.List = append(h.List, &connection{
			Server: q.listener.Pid, Listener: uint64(q.Listener), Client: uint64(w.Inode),
			Connecter: cmp.Or(q.holders[i].Pid, q.listener.Pid), Shut: w.Shut, Name: q.Name, Before: -1,
		})
	}
	var own []int
	for i := first; i < len(h.List); i++ {
		own = append(own, i)
	}
	give, err := h.carry(server, q.listener.Pid, own...)
	if err != nil {
		return err
	}
	for i, c := range h.List[first:] {
		var messages [][]byte
		fd, err := give.takes(func() (int, error) {
			own, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return own, err
		}, func(own int) error {
			c.Accepted = inodeOf(own)
			c.Connecter = a.connecter(own, c.Connecter, q.listener.Pid)
			if messages, err = a.empty(c, own); err != nil {
				return err
			}
			return errors.Join(h.write(), failpoint.Hit("unaccepted.accepted"))
		})
		if err != nil {
			return err
		}
		u := Unaccepted{
			Server: a.inner[c.Server], Listener: q.listener.FD, Accepted: fd, Connecter: a.inner[c.Connecter],
			Shut: c.Shut, Messages: messages,
		}
		if holder := q.holders[i]; a.inner[holder.Pid] != 0 { // else the restore has no client
			u.Client, u.ClientFD = a.inner[holder.Pid], holder.FD
		}
		if u.Connecter == 0 {
			u.Connecter = u.Server
		}
		a.record.Queues.Unaccepted = append(a.record.Queues.Unaccepted, u)
		if err := failpoint.Hit("unaccepted.received"); err != nil {
			return err
		}
	}
	return give.end()
}

// empty looks for empty messages in an accepted socket, and returns all of them if there is one.
func (a *accepting) empty(c *connection, fd int) (messages [][]byte, err error) {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind == unix.SOCK_STREAM {
		return nil, err
	}
	list, err := pieces(fd, kind, 0)
	carry := false
	for i, p := range list {
		if len(p.data) == 0 {
			c.Empty = append(c.Empty, i)
		}
		for _, fd := range p.fds {
			carry = true
			_ = unix.Close(fd)
		}
		messages = append(messages, p.data)
	}
	if err != nil || len(c.Empty) == 0 {
		return nil, err
	}
	if carry {
		a.lost = append(a.lost, fmt.Sprintf("of the messages that wait in a connection to %s, which is not accepted yet, those after an empty one are not kept: some carry descriptors", c.Name))
		return nil, nil
	}
	return messages, nil
}

// connecter chooses the process that connects again. The server sees the user of it: the
// best is the process that had connected, else one of the same user.
func (a *accepting) connecter(accepted, holder, server int) int {
	peer, err := unix.GetsockoptUcred(accepted, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return holder
	}
	candidates := []int{int(peer.Pid), holder, server}
	for _, t := range a.record.Tasks {
		candidates = append(candidates, t.host)
	}
	for _, pid := range candidates {
		if uid, gid, ok := idsOf(pid); ok && (pid == holder || a.inner[pid] != 0) &&
			uid == peer.Uid && gid == peer.Gid {
			return pid
		}
	}
	return holder
}

// idsOf are the effective user and group of a process.
func idsOf(pid int) (uid, gid uint32, ok bool) {
	s, err := readStatus(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, false
	}
	u, g := strings.Fields(s["Uid"]), strings.Fields(s["Gid"])
	if len(u) < 2 || len(g) < 2 {
		return 0, 0, false
	}
	un, err := strconv.ParseUint(u[1], 10, 32)
	gn, err2 := strconv.ParseUint(g[1], 10, 32)
	return uint32(un), uint32(gn), err == nil && err2 == nil
}

// threadOf is a thread of a process that can be made to call the kernel; 0: none.
func threadOf(pid int) int {
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, e := range entries {
		s, err := readStatus(fmt.Sprintf("/proc/%d/task/%s/status", pid, e.Name()))
		if err == nil && s["State"][:1] != "Z" && s["State"][:1] != "X" {
			tid, _ := strconv.Atoi(e.Name())
			return tid
		}
	}
	return 0
}
