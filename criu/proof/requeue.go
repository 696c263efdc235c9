package proof

import (
	"context"
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
)

// putting is a PutBack under way.
type putting struct {
	*Held
	box    freezer.Container
	pids   []int
	places map[uint64][]place
	own    map[*connection]int // descriptors of ours of accepted sockets
}

// PutBack puts connections into their backlogs again, in order, of a frozen container. lost
// names those that cannot be. Done once more, after it was killed, it comes to the same end.
//
// New sockets connect first. With the container frozen again they get what the clients had
// sent, so that a killed process leaves nothing half-sent to programs that run. Then they
// take the place of the clients' sockets.
func (h *Held) PutBack(ctx context.Context, box freezer.Container) (lost []string, err error) {
	p := putting{Held: h, box: box}
	if err := p.look(); err != nil {
		return nil, err
	}
	p.own = h.underWay(p.places)
	defer func() {
		for _, fd := range p.own {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	for _, c := range h.List {
		_, has := p.own[c]
		if at := p.places[c.Accepted]; !c.Done && !has && c.Accepted != 0 && len(at) > 0 {
			fd, err := at[0].open()
			if err != nil {
				return nil, err
			}
			p.own[c], has = fd, true
		}
		c.Done = c.Done || !has // it was not accepted yet, or its server has closed it
	}
	if err := p.connect(ctx); err != nil {
		return nil, err
	}
	if err := errors.Join(p.look(), failpoint.Hit("unaccepted.connected")); err != nil {
		return nil, err
	}
	for _, c := range h.List {
		if c.Done || c.Lost != "" {
			continue
		}
		if err := p.fill(c); err != nil {
			c.Lost = err.Error()
		}
	}
	if err := errors.Join(h.write(), failpoint.Hit("unaccepted.filled")); err != nil {
		return nil, err
	}
	if err := p.replace(ctx); err != nil {
		return nil, err
	}
	for _, c := range h.List {
		if c.Lost != "" {
			lost = append(lost, fmt.Sprintf("a connection to %s, which was not accepted yet, is lost: %s", c.Name,
				c.Lost))
		}
	}
	return lost, h.Forget()
}

// Forget removes the journal.
func (h *Held) Forget() error {
	if h.path == "" {
		return nil
	}
	if err := os.Remove(h.path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (p *putting) look() (err error) {
	if p.pids, err = p.box.Processes(); err == nil {
		p.places = placesOf(p.pids)
	}
	return err
}

// connecter is the process that connects for a client; 0: there is none.
func (p *putting) connecter(c *connection) int {
	candidates := []int{c.Connecter}
	for _, inode := range []uint64{c.Client, c.Listener} {
		if at := p.places[inode]; inode != 0 && len(at) > 0 {
			candidates = append(candidates, at[0].Pid)
		}
	}
	for _, pid := range candidates {
		if slices.Contains(p.pids, pid) && threadOf(pid) != 0 {
			return pid
		}
	}
	return 0
}

// connect has the clients connect by new sockets.
func (p *putting) connect(ctx context.Context) error {
	type dial struct {
		c    *connection
		pid  int
		to   address
		kind int
	}
	var dials []dial
	var threads []int
	for _, c := range p.List {
		if c.Done || c.Lost != "" {
			continue
		}
		d := dial{c: c}
		if at := p.places[c.Socket]; c.Socket != 0 && len(at) > 0 {
			if p.connected(at[0]) {
				continue
			}
			c.Connecter = at[0].Pid
		} else {
			c.Socket, c.Temps, c.Sent = 0, nil, 0
		}
		var err error
		if d.pid = p.connecter(c); d.pid == 0 {
			err = errors.New("the processes of it have ended")
		} else if at := p.places[c.Listener]; len(at) == 0 {
			err = errors.New("the listener is closed")
		} else {
			var l int
			if l, err = at[0].open(); err == nil {
				d.to, err = addressFor(l, at[0].Pid, d.pid)
				_ = unix.Close(l)
			}
		}
		if err == nil {
			d.kind, err = unix.GetsockoptInt(p.own[c], unix.SOL_SOCKET, unix.SO_TYPE)
		}
		if err != nil {
			c.Lost = err.Error()
			continue
		}
		dials = append(dials, d)
		if tid := threadOf(d.pid); !slices.Contains(threads, tid) {
			threads = append(threads, tid)
		}
	}
	return p.box.InjectTogether(ctx, threads, func(ts map[int]*freezer.Tracee) error {
		for _, d := range dials {
			if err := p.dial(ts[threadOf(d.pid)], d.c, d.pid, d.to, d.kind); err != nil {
				return err
			}
		}
		return nil
	})
}

// connected reports whether a socket is.
func (p *putting) connected(at place) bool {
	fd, err := at.open()
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	_, err = unix.Getpeername(fd)
	return err == nil
}

// dial has a process connect by a new socket, which is noted before that can be seen.
func (p *putting) dial(t *freezer.Tracee, c *connection, pid int, to address, kind int) error {
	if t == nil {
		c.Lost = fmt.Sprintf("process %d has ended", pid)
		return nil
	}
	if c.Socket == 0 {
		made, err := t.Call(unix.SYS_SOCKET, unix.AF_UNIX, uint64(kind)|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			c.Lost = fmt.Sprintf("socket: %v", err)
			return nil
		}
		at := place{pid, int(made)}
		c.Socket, c.Connecter, c.Temps, c.Before = at.inode(), pid, []place{at}, -1
		if err := errors.Join(p.write(), failpoint.Hit("unaccepted.socket")); err != nil {
			return err
		}
	}
	at, err := t.Page(to.raw)
	if err == nil {
		_, err = t.Call(unix.SYS_CONNECT, uint64(c.Temps[0].FD), at, uint64(len(to.raw)))
	}
	if errors.Is(err, unix.EAGAIN) {
		err = errors.New("the backlog is full")
	}
	if err != nil {
		c.Lost = fmt.Sprintf("connect: %v", err)
		return nil
	}
	return failpoint.Hit("unaccepted.connect")
}

// fill makes a new socket what the client's was, and sends what the client had sent.
func (p *putting) fill(c *connection) error {
	at := p.places[c.Socket]
	if len(at) == 0 {
		return errors.New("its new socket has been closed")
	}
	fd, err := at[0].open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if holders := p.places[c.Client]; c.Client != 0 && len(holders) > 0 {
		old, err := holders[0].open()
		if err != nil {
			return err
		}
		err = copySocket(fd, old)
		_ = unix.Close(old)
		if err != nil {
			return err
		}
	}
	if c.Before >= 0 { // it was killed while it sent a piece
		if now, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ); err != nil || now != c.Before {
			c.Sent += c.Piece
		}
		c.Before = -1
	}
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return err
	}
	list, err := p.waiting(c, kind)
	defer func() {
		for _, piece := range list {
			for _, fd := range piece.fds {
				_ = unix.Close(fd)
			}
		}
	}()
	if err != nil {
		return err
	}
	restore, err := roomy(fd)
	if err != nil {
		return err
	}
	for _, piece := range list {
		if err = p.send(c, fd, kind, piece); err != nil {
			break
		}
	}
	if err = errors.Join(err, restore()); err == nil && c.Shut != 0 {
		err = unix.Shutdown(fd, c.Shut-1)
	}
	return err
}

// waiting is what the client has sent and the new socket has not got yet.
func (p *putting) waiting(c *connection, kind int) (list []piece, err error) {
	if kind == unix.SOCK_STREAM {
		return pieces(p.own[c], kind, c.Sent)
	}
	if c.messages != nil {
		for _, m := range c.messages {
			list = append(list, piece{data: m})
		}
	} else {
		list, err = pieces(p.own[c], kind, 0)
		for _, at := range c.Empty {
			list = slices.Insert(list, min(at, len(list)), piece{})
		}
	}
	for n := min(c.Sent, len(list)); n > 0; n-- {
		for _, fd := range list[0].fds {
			_ = unix.Close(fd)
		}
		list = list[1:]
	}
	return list, err
}

// send sends a piece as the connecting process.
func (p *putting) send(c *connection, fd, kind int, piece piece) (err error) {
	if c.Before, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ); err != nil {
		return err
	}
	c.Piece = len(piece.data)
	if kind != unix.SOCK_STREAM {
		c.Piece = 1
	}
	if err := errors.Join(p.write(), failpoint.Hit("unaccepted.sending")); err != nil {
		return err
	}
	var oob []byte
	if s, err := readStatus(fmt.Sprintf("/proc/%d/status", c.Connecter)); err == nil {
		number := func(key string) uint32 {
			n, _ := strconv.ParseUint(strings.Fields(s[key] + " 0")[0], 10, 32)
			return uint32(n)
		}
		oob = unix.UnixCredentials(&unix.Ucred{Pid: int32(c.Connecter), Uid: number("Uid"), Gid: number("Gid")})
	}
	if len(piece.fds) > 0 {
		oob = append(oob, unix.UnixRights(piece.fds...)...)
	}
	if len(piece.data) == 0 {
		oob = nil // with it package unix sends a byte
	}
	n, err := unix.SendmsgN(fd, piece.data, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err == nil && n != len(piece.data) {
		err = fmt.Errorf("%d of %d bytes", n, len(piece.data))
	}
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	c.Sent, c.Before = c.Sent+c.Piece, -1
	return errors.Join(p.write(), failpoint.Hit("unaccepted.sent"))
}

// replace puts new sockets in the place of the clients' old ones, and closes what was accepted.
func (p *putting) replace(ctx context.Context) error {
	clients := map[uint64]bool{}
	involved := map[int]bool{}
	note := func(list []place) {
		for _, at := range list {
			involved[at.Pid] = true
		}
	}
	for _, c := range p.List {
		if c.Accepted != 0 {
			note(p.places[c.Accepted])
		}
		note(c.Temps)
		if c.Client != 0 {
			clients[c.Client] = true
			note(p.places[c.Client])
		}
	}
	for _, c := range p.Carriers {
		note(slices.Concat(p.places[c.Inodes[0]], p.places[c.Inodes[1]]))
	}
	var threads []int
	for pid := range involved {
		if tid := threadOf(pid); tid != 0 && slices.Contains(p.pids, pid) {
			threads = append(threads, tid)
		}
	}
	watches := watchesOf(p.pids, clients)
	return p.box.InjectTogether(ctx, threads, func(ts map[int]*freezer.Tracee) error {
		for _, c := range p.Carriers { // of a process that was killed
			p.close(ts, slices.Concat(p.places[c.Inodes[0]], p.places[c.Inodes[1]]), 0)
		}
		p.Carriers = nil
		for _, c := range p.List {
			var kept []place
			if !c.Done && c.Lost == "" && c.Client != 0 {
				kept = p.places[c.Client]
				if err := p.takeOver(ts, c, watches); errors.Is(err, errBroken) {
					return err
				} else if err != nil {
					c.Lost = err.Error()
				}
				if err := errors.Join(p.write(), failpoint.Hit("unaccepted.replaced")); err != nil {
					return err
				}
			}
			p.close(ts, slices.DeleteFunc(slices.Clone(c.Temps), func(at place) bool {
				return slices.Contains(kept, at)
			}), c.Socket)
			if c.Accepted != 0 {
				p.close(ts, p.places[c.Accepted], c.Accepted)
			}
			c.Done = true
			if err := errors.Join(p.write(), failpoint.Hit("unaccepted.closed")); err != nil {
				return err
			}
		}
		return nil
	})
}

// close closes descriptors of processes that are of one socket; 0: of any.
func (p *putting) close(ts map[int]*freezer.Tracee, list []place, inode uint64) {
	for _, at := range list {
		if t := ts[threadOf(at.Pid)]; t != nil && (inode == 0 || at.inode() == inode) {
			_, _ = t.Call(unix.SYS_CLOSE, uint64(at.FD))
		}
	}
}

// errBroken is of a step at which a test breaks off.
var errBroken = errors.New("broken off")

// takeOver puts the new socket in the place of the client's old one in all processes.
func (p *putting) takeOver(ts map[int]*freezer.Tracee, c *connection, watches []watch) error {
	made := c.Temps[0]
	sources := map[int]int{made.Pid: made.FD}
	holders := p.places[c.Client]
	for _, at := range holders {
		t := ts[threadOf(at.Pid)]
		if t == nil {
			continue
		}
		source, has := sources[at.Pid]
		if !has {
			g, err := p.carry(t, at.Pid)
			if err != nil {
				return err
			}
			if source, err = g.takes(made.open, nil); err != nil {
				return errors.Join(err, g.end())
			}
			sources[at.Pid] = source
			c.Temps = append(c.Temps, place{at.Pid, source})
			if err := errors.Join(g.end(), p.write()); err != nil {
				return err
			}
			if err := failpoint.Hit("unaccepted.given"); err != nil {
				return fmt.Errorf("%w: %w", errBroken, err)
			}
		}
		flags := uint64(0)
		if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", at.Pid, at.FD)); err == nil {
			var fd FD
			fd.info(string(data))
			flags = fd.Flags & unix.O_CLOEXEC
		}
		if _, err := t.Call(unix.SYS_DUP3, uint64(source), uint64(at.FD), flags); err != nil {
			return fmt.Errorf("dup: %w", err)
		}
	}
	// The old one is closed by now, and by that no epoll watches it any more.
	for _, w := range watches {
		t := ts[threadOf(w.Pid)]
		if w.inode != c.Client || t == nil || !slices.Contains(holders, w.place) {
			continue
		}
		at, err := t.Page(w.event)
		if err == nil {
			_, err = t.Call(unix.SYS_EPOLL_CTL, uint64(w.epoll), unix.EPOLL_CTL_ADD, uint64(w.FD), at)
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("watch: %w", err)
		}
	}
	return nil
}

// Requeue puts the connections of a record's backlogs back in restored processes, of which
// got is a record, in a frozen container. It names those that are lost.
func (q Queues) Requeue(ctx context.Context, box freezer.Container, got Record) (lost []Difference, err error) {
	hosts := map[int]int{}
	for _, t := range got.Tasks {
		hosts[t.Pid] = t.host
	}
	h := &Held{}
	for _, u := range q.Unaccepted {
		inode := func(pid, fd int) uint64 { return place{hosts[pid], fd}.inode() }
		c := &connection{
			Server: hosts[u.Server], Listener: inode(u.Server, u.Listener), Accepted: inode(u.Server, u.Accepted),
			Connecter: hosts[u.Connecter], Shut: u.Shut & (shutRead | shutWrite), Before: -1, messages: u.Messages,
			Name: fmt.Sprintf("socket %d of process %d", u.Listener, u.Server),
		}
		if u.Client != 0 {
			c.Client = inode(u.Client, u.ClientFD)
		}
		if c.Accepted == 0 || c.Listener == 0 {
			lost = append(lost, Difference{
				Pid: u.Server, What: "a connection to " + c.Name +
					", which was not accepted yet, is not among its restored sockets",
			})
			continue
		}
		h.List = append(h.List, c)
	}
	if len(h.List) == 0 {
		return lost, nil
	}
	texts, err := h.PutBack(ctx, box)
	for _, text := range texts {
		lost = append(lost, Difference{Pid: 1, What: text})
	}
	return lost, err
}
