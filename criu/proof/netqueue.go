package proof

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Queues is what waits in sockets and no image of CRIU has: datagrams that nothing has
// received, and connections that a listener has not accepted.
type Queues struct {
	Datagrams   []Datagram   `json:"datagrams,omitempty"`
	Connections []Connection `json:"connections,omitempty"`
	Mailboxes   []Mailbox    `json:"mailboxes,omitempty"`
	Unaccepted  []Unaccepted `json:"unaccepted,omitempty"`
	// Lost says, in a sentence each, what a restore does not bring back.
	Lost []string `json:"-"`
}

// Datagram waits in a UDP socket.
type Datagram struct {
	Pid  int            `json:"pid"` // of the receiver, in the container
	FD   int            `json:"fd"`
	From netip.AddrPort `json:"from"`
	To   netip.AddrPort `json:"to"`
	Data []byte         `json:"data"`
}

// Connection waits, between two sockets of the container, for a listener to accept it.
type Connection struct {
	Pid    int            `json:"pid"` // of the client, in the container
	FD     int            `json:"fd"`
	Client netip.AddrPort `json:"client"`
	Server netip.AddrPort `json:"server"`
	Sent   []byte         `json:"sent,omitempty"` // by the client, and not read
	Ended  bool           `json:"ended,omitempty"`
}

// maxQueued is how many bytes of all queues together a record has.
const maxQueued = 16 << 20

// socket is a descriptor of a process.
type socket struct {
	host, fd int
	pid      int
}

// socketsOf finds sockets by their inodes.
func socketsOf(r Record) map[string]socket {
	found := map[string]socket{}
	for _, t := range r.Tasks {
		for _, fd := range t.FDs {
			if fd.Target != "socket" {
				continue
			}
			link, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", t.host, fd.N))
			inode := strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")
			if _, known := found[inode]; !known {
				found[inode] = socket{t.host, fd.N, t.Pid}
			}
		}
	}
	return found
}

// open returns a descriptor of ours of a process's socket.
func (s socket) open() (int, error) {
	process, err := unix.PidfdOpen(s.host, 0)
	if err != nil {
		return -1, fmt.Errorf("process %d: %w", s.pid, err)
	}
	defer unix.Close(process)
	fd, err := unix.PidfdGetfd(process, s.fd, 0)
	if err != nil {
		return -1, fmt.Errorf("socket %d of process %d: %w", s.fd, s.pid, err)
	}
	return fd, nil
}

// TakeQueues looks into the sockets of the processes of a record, which stand still. first is the
// container's first process, by its pid on the host. It accepts connections whose bytes can be
// read only that way, and makes them again.
func TakeQueues(first int, r Record) (q Queues, err error) {
	q.Lost = watchedEvents(r)
	owners := socketsOf(r)
	if len(owners) == 0 {
		return q, nil
	}
	room := maxQueued
	for _, name := range []string{"udp", "udp6"} {
		rows, err := socketTable(first, name)
		if err != nil {
			return q, err
		}
		for _, row := range rows {
			owner, ours := owners[row.inode]
			if !ours || row.rx == 0 {
				continue
			}
			list, err := peekDatagrams(owner, &room)
			if err != nil {
				q.Lost = append(q.Lost,
					fmt.Sprintf("the datagrams that wait in the UDP socket at %s of process %d are not kept: %v",
						row.local, owner.pid, err))
				continue
			}
			q.Datagrams = append(q.Datagrams, list...)
		}
	}
	return q, q.takeBacklogs(first, owners, &room)
}

// watchedEvents names the watches of files of which events have not been read.
func watchedEvents(r Record) (lost []string) {
	for _, t := range r.Tasks {
		for _, fd := range t.FDs {
			if fd.Target != "anon_inode:inotify" && fd.Target != "anon_inode:[fanotify]" {
				continue
			}
			n := 0
			if own, err := (socket{t.host, fd.N, t.Pid}).open(); err == nil {
				n, _ = unix.IoctlGetInt(own, unix.TIOCINQ)
				_ = unix.Close(own)
			}
			if n > 0 {
				lost = append(lost, fmt.Sprintf("%d bytes of events of watched files, which process %d has not read from descriptor %d, are not kept", n, t.Pid, fd.N))
			}
		}
	}
	return lost
}

// States of a TCP socket, the kernel's, as /proc has them.
const (
	stateEstablished = 1
	stateFinWait2    = 5
	stateCloseWait   = 8
	stateListen      = 10
)

// takeBacklogs records the connections that listeners have not accepted.
func (q *Queues) takeBacklogs(first int, owners map[string]socket, room *int) error {
	var rows []socketRow
	for _, name := range []string{"tcp", "tcp6"} {
		more, err := socketTable(first, name)
		if err != nil {
			return err
		}
		rows = append(rows, more...)
	}
	for _, l := range rows {
		owner, ours := owners[l.inode]
		if l.state != stateListen || !ours || l.rx == 0 {
			continue
		}
		pending, local := l.pending(rows, owners)
		if local && len(pending) == int(l.rx) {
			made, err := keepBacklog(owner, pending, room)
			if err == nil {
				q.Connections = append(q.Connections, made...)
				continue
			}
			q.Lost = append(q.Lost, fmt.Sprintf("%d connections in the backlog of port %d are not kept: %v",
				l.rx, l.local.Port(), err))
			continue
		}
		q.Lost = append(q.Lost, fmt.Sprintf("the backlog of port %d has %d connections that a restore resets: process %d has not accepted them", l.local.Port(), l.rx, owner.pid))
	}
	return nil
}

// pair is a connection that a listener has not accepted, of which both ends are here.
type pair struct {
	client socketRow
	owner  socket // of the client
	server socketRow
}

// pending lists the connections in the backlog of a listener, and reports whether the
// clients of all of them are in the container.
func (l socketRow) pending(rows []socketRow, owners map[string]socket) (list []pair, local bool) {
	local = true
	for _, s := range rows {
		if s.inode != "0" || s.state != stateEstablished && s.state != stateCloseWait ||
			s.local.Port() != l.local.Port() {
			continue
		}
		if a := l.local.Addr(); !a.IsUnspecified() && a != s.local.Addr() {
			continue
		}
		at := slices.IndexFunc(rows, func(c socketRow) bool {
			_, owned := owners[c.inode]
			return owned && c.local == s.remote && c.remote == s.local &&
				(c.state == stateEstablished || c.state == stateFinWait2)
		})
		if at < 0 {
			local = false
			continue
		}
		list = append(list, pair{rows[at], owners[rows[at].inode], s})
	}
	return list, local
}

// keepBacklog records the connections of one listener.
func keepBacklog(listener socket, pending []pair, room *int) (list []Connection, err error) {
	read := false
	for _, p := range pending {
		list = append(list, Connection{
			Pid: p.owner.pid, FD: p.owner.fd, Client: p.client.local, Server: p.server.local,
			Ended: p.server.state == stateCloseWait,
		})
		read = read || p.server.rx > 0
	}
	if !read {
		return list, nil
	}
	l, err := listener.open()
	if err != nil {
		return nil, err
	}
	defer unix.Close(l)
	var taken []Connection
	var servers []int
	defer func() {
		for _, fd := range servers {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	// All of them first: what is made again goes to the end of the backlog.
	var errs []error
	for range pending {
		fd, c, err := acceptOne(l, list, room)
		if fd >= 0 {
			servers = append(servers, fd)
		}
		if err != nil {
			errs = append(errs, err)
			break
		}
		taken = append(taken, c)
	}
	for i, c := range taken {
		// In repair it goes without a word to its peer.
		err := unix.SetsockoptInt(servers[i], unix.IPPROTO_TCP, unix.TCP_REPAIR, 1)
		err = errors.Join(err, unix.Close(servers[i]))
		at := slices.IndexFunc(pending, func(p pair) bool { return p.client.local == c.Client })
		if err == nil && at >= 0 {
			err = c.connect(pending[at].owner)
		}
		errs = append(errs, err)
	}
	servers = servers[len(taken):]
	return taken, errors.Join(errs...)
}

// acceptOne takes one connection out of a backlog and looks at what it has received.
func acceptOne(l int, known []Connection, room *int) (fd int, c Connection, err error) {
	fd, from, err := unix.Accept4(l, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
	if err != nil {
		return -1, c, err
	}
	client := addrPort(from)
	at := slices.IndexFunc(known, func(k Connection) bool { return k.Client == client })
	if at < 0 {
		return fd, c, fmt.Errorf("connection from %s was not there before", client)
	}
	c = known[at]
	c.Sent, err = peekStream(fd, room)
	return fd, c, err
}

// peekStream reads what waits in a stream, and leaves it there.
func peekStream(fd int, room *int) ([]byte, error) {
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil || n == 0 {
		return nil, err
	}
	if *room -= n; *room < 0 {
		return nil, fmt.Errorf("more than %d bytes wait in sockets", maxQueued)
	}
	buf := make([]byte, n)
	got, _, err := unix.Recvfrom(fd, buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err == nil && got != n {
		err = fmt.Errorf("%d of %d bytes could be read", got, n)
	}
	return buf, err
}

// socketRow is a line of /proc/net/tcp and its like.
type socketRow struct {
	local, remote netip.AddrPort
	state         int
	rx            int64
	inode         string
}

func socketTable(pid int, name string) (rows []socketRow, err error) {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "net", name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // no IPv6
	}
	if err != nil {
		return nil, err
	}
	first := true
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if first || len(f) < 10 {
			first = false
			continue
		}
		row := socketRow{local: procAddr(f[1]), remote: procAddr(f[2]), inode: f[9]}
		state, _ := strconv.ParseInt(f[3], 16, 32)
		row.state = int(state)
		_, rx, _ := strings.Cut(f[4], ":")
		row.rx, _ = strconv.ParseInt(rx, 16, 64)
		rows = append(rows, row)
	}
	return rows, nil
}

// procAddr reads an address as /proc/net has it: words in the order of the machine.
func procAddr(text string) netip.AddrPort {
	host, port, _ := strings.Cut(text, ":")
	n, _ := strconv.ParseUint(port, 16, 16)
	raw := make([]byte, 0, 16)
	for i := 0; i+8 <= len(host); i += 8 {
		word, _ := strconv.ParseUint(host[i:i+8], 16, 32)
		raw = append(raw, byte(word), byte(word>>8), byte(word>>16), byte(word>>24))
	}
	a, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(a.Unmap(), uint16(n))
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
