package proof

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tcpSendQueue is the queue of what is not sent yet, or not acknowledged, for TCP_REPAIR_QUEUE.
const tcpSendQueue = 2

// maxHandshake is how long a connection to a listener of the same container may take.
const maxHandshake = 2 * time.Second

// Put brings back what waited in sockets when the queues were taken. The restored
// processes, of which got is the record, stand still; first is the first of them, by its
// pid on the host. It names what it cannot bring back.
func (q Queues) Put(first int, got Record) (lost []Difference) {
	hosts := map[int]int{}
	for _, t := range got.Tasks {
		hosts[t.Pid] = t.host
	}
	for _, c := range q.Connections {
		if err := c.connect(socket{hosts[c.Pid], c.FD, c.Pid}); err != nil {
			lost = append(lost, Difference{
				Pid: c.Pid, What: fmt.Sprintf("its connection from %s to %s, which is not accepted yet, is lost: %v",
					c.Client, c.Server, err),
			})
		}
	}
	for _, m := range q.Mailboxes {
		if err := m.fill(socket{hosts[m.Pid], m.FD, m.Pid},
			socket{hosts[m.SenderPid], m.SenderFD, m.SenderPid}); err != nil {
			lost = append(lost, Difference{
				Pid: m.Pid, What: fmt.Sprintf("of the messages that wait in its socket %d some are lost: %v", m.FD,
					err),
			})
		}
	}
	if len(q.Datagrams) == 0 {
		return lost
	}
	err := inNetwork(first, func() error {
		for _, d := range q.Datagrams {
			if err := d.send(); err != nil {
				lost = append(lost, Difference{
					Pid: d.Pid, What: fmt.Sprintf("a datagram from %s to %s is lost: %v", d.From, d.To, err),
				})
			}
		}
		return nil
	})
	if err != nil {
		lost = append(lost, Difference{Pid: 1, What: fmt.Sprintf("the datagrams that waited are lost: %v", err)})
	}
	return lost
}

// connect makes a connection again by the client's own socket, between the same
// addresses, and sends what had been sent: the listener finds it in its backlog.
func (c Connection) connect(client socket) (err error) {
	fd, err := client.open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if local, err := unix.Getsockname(fd); err != nil || addrPort(local) != c.Client {
		return errors.Join(err, errors.New("the client's socket has been closed"))
	}
	sent, err := c.unsent(fd)
	if err != nil {
		return err
	}
	restore, err := pliable(fd)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return err
	}
	// A socket that has been bound, and not only connected, is bound still.
	if local, err := unix.Getsockname(fd); err != nil || addrPort(local) != c.Client {
		if err := errors.Join(err, unix.Bind(fd, sockaddr(domain, c.Client))); err != nil {
			return fmt.Errorf("bind %s: %w", c.Client, err)
		}
	}
	if err := unix.Connect(fd, sockaddr(domain, c.Server)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return fmt.Errorf("connect: %w", err)
	}
	deadline := time.Now().Add(maxHandshake)
	for data := append(append([]byte{}, c.Sent...), sent...); ; {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		left := time.Until(deadline)
		if n, err := unix.Poll(poll, int(max(left, 0)/time.Millisecond)); n == 0 && err == nil {
			return errors.New("the listener does not answer")
		}
		if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
			return errors.Join(err, unix.Errno(code))
		}
		if len(data) == 0 {
			break
		}
		n, err := unix.SendmsgN(fd, data, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("send: %w", err)
		}
		data = data[max(n, 0):]
	}
	if c.Ended {
		return unix.Shutdown(fd, unix.SHUT_WR)
	}
	return nil
}

// unsent returns what waits in the client's socket to be sent, and disconnects the
// socket, without a word to a peer.
func (c Connection) unsent(fd int) (data []byte, err error) {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1); err != nil {
		return nil, fmt.Errorf("repair: %w", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err == nil && n > 0 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, tcpSendQueue)
		data = make([]byte, n)
		if err == nil {
			n, _, err = unix.Recvfrom(fd, data, unix.MSG_PEEK|unix.MSG_DONTWAIT)
			data = data[:max(n, 0)]
		}
	}
	if err == nil {
		err = disconnect(fd)
	}
	_, e := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR) // that it was disconnected
	return data, errors.Join(err, e, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 0))
}

// pliable has a socket neither wait nor mind that its address was in use a moment ago,
// until restore is called.
func pliable(fd int) (restore func() error, err error) {
	reuse, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR)
	if err != nil {
		return nil, err
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	restore = func() error {
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags)
		return errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, reuse))
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags|unix.O_NONBLOCK)
	return restore, errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
}

func sockaddr(domain int, a netip.AddrPort) unix.Sockaddr {
	if domain == unix.AF_INET6 {
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
}

// disconnect is connect to no address, which package unix does not have.
func disconnect(fd int) error {
	var none [16]byte // of the family AF_UNSPEC
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none[0])), unsafe.Sizeof(none))
	if errno != 0 {
		return errno
	}
	return nil
}
