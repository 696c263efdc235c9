package proof

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/failpoint"
)

// giver gives descriptors to a process, by a pair of sockets that it has for that.
type giver struct {
	held *Held
	t    *freezer.Tracee
	pid  int
	fds  [2]int // of the process: where it receives, and where it is sent to
	pair [2]uint64
	out  int // ours, of the second
}

// carry makes a giver for a process. list are the places in Held.List of the connections
// that are accepted by it.
func (h *Held) carry(t *freezer.Tracee, pid int, list ...int) (g *giver, err error) {
	if t == nil {
		return nil, fmt.Errorf("process %d has ended", pid)
	}
	at, err := t.Page(make([]byte, 8))
	if err == nil {
		_, err = t.Call(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0, at)
	}
	if err != nil {
		return nil, fmt.Errorf("pair of sockets: %w", err)
	}
	both, err := t.Peek(at, 8)
	if err != nil {
		return nil, err
	}
	g = &giver{held: h, t: t, pid: pid, out: -1}
	c := carrier{Pid: pid, For: list}
	for i := range g.fds {
		g.fds[i] = int(binary.NativeEndian.Uint32(both[4*i:]))
		c.Inodes[i] = place{pid, g.fds[i]}.inode()
	}
	g.pair = c.Inodes
	h.Carriers = append(h.Carriers, c)
	if err := errors.Join(h.write(), failpoint.Hit("unaccepted.carrier")); err != nil {
		return nil, err
	}
	g.out, err = place{pid, g.fds[1]}.open()
	return g, err
}

// takes gives the process a descriptor that get opens here, and returns its number there.
// noted is called while it is on its way, and survives the end of this process.
func (g *giver) takes(get func() (int, error), noted func(own int) error) (fd int, err error) {
	own, err := get()
	if err != nil {
		return -1, err
	}
	defer unix.Close(own)
	if err := unix.Sendmsg(g.out, []byte{0}, unix.UnixRights(own), nil,
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
		return -1, err
	}
	if noted != nil {
		if err := noted(own); err != nil {
			return -1, err
		}
	}
	const message, vector, data, control, controlSize = 0, 64, 128, 192, 24 // where things are in the page
	page := make([]byte, control+controlSize)
	at, err := g.t.Page(page)
	if err != nil {
		return -1, err
	}
	for where, value := range map[int]uint64{
		message + 16: at + vector, message + 24: 1, // msg_iov, msg_iovlen
		message + 32: at + control, message + 40: controlSize, // msg_control, msg_controllen
		vector: at + data, vector + 8: 1,
	} {
		binary.NativeEndian.PutUint64(page[where:], value)
	}
	if _, err = g.t.Page(page); err == nil {
		_, err = g.t.Call(unix.SYS_RECVMSG, uint64(g.fds[0]), at+message, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	}
	if err != nil {
		return -1, fmt.Errorf("receive a descriptor: %w", err)
	}
	got, err := g.t.Peek(at+control, controlSize)
	if err != nil {
		return -1, err
	}
	if binary.NativeEndian.Uint64(got) != 20 || binary.NativeEndian.Uint32(got[12:]) != unix.SCM_RIGHTS {
		return -1, fmt.Errorf("process %d has received no descriptor", g.pid)
	}
	return int(binary.NativeEndian.Uint32(got[16:])), nil
}

// end closes the pair.
func (g *giver) end() error {
	errs := []error{unix.Close(g.out)}
	for _, fd := range g.fds {
		_, err := g.t.Call(unix.SYS_CLOSE, uint64(fd))
		errs = append(errs, err)
	}
	h := g.held
	h.Carriers = slices.DeleteFunc(h.Carriers, func(c carrier) bool { return c.Inodes == g.pair })
	return errors.Join(append(errs, h.write())...)
}

// underWay opens what a killed process has left on its way to another: connections that
// it had accepted.
func (h *Held) underWay(places map[uint64][]place) (own map[*connection]int) {
	own = map[*connection]int{}
	for _, carrier := range h.Carriers {
		ends := places[carrier.Inodes[0]]
		if len(ends) == 0 {
			continue
		}
		fd, err := ends[0].open()
		if err != nil {
			continue
		}
		fds := peekRights(fd)
		_ = unix.Close(fd)
		for _, fd := range fds {
			at := slices.IndexFunc(carrier.For, func(i int) bool {
				return i < len(h.List) && h.List[i].Accepted == inodeOf(fd)
			})
			if at < 0 { // its inode had not been noted
				at = slices.IndexFunc(carrier.For, func(i int) bool {
					return i < len(h.List) && h.List[i].Accepted == 0
				})
			}
			if at < 0 {
				_ = unix.Close(fd)
				continue
			}
			c := h.List[carrier.For[at]]
			c.Accepted, own[c] = inodeOf(fd), fd
		}
	}
	return own
}

// peekRights opens the descriptors in the first message that waits in a socket, and leaves it there.
func peekRights(fd int) (fds []int) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 1), oob, unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return nil
	}
	return rights(oob[:n])
}

// rights are the descriptors of a control message.
func rights(oob []byte) (fds []int) {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range list {
		if some, err := unix.ParseUnixRights(&list[i]); err == nil {
			fds = append(fds, some...)
		}
	}
	return fds
}
