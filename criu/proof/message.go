package proof

import (
	"errors"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// Mailbox is a unix socket that keeps messages apart, with an empty one among those that
// wait in it: CRIU leaves empty ones out.
type Mailbox struct {
	Pid       int      `json:"pid"` // of the receiver, in the container
	FD        int      `json:"fd"`
	SenderPid int      `json:"sender_pid"`
	SenderFD  int      `json:"sender_fd"`
	Messages  [][]byte `json:"messages"`
}

// TakeMailboxes records the messages that CRIU leaves out. senders has the sockets that
// send messages, by those that they send to, both by their inodes.
func (q *Queues) TakeMailboxes(r Record, senders map[uint32]uint32) {
	owners := socketsOf(r)
	room := maxQueued
	for to, from := range senders {
		receiver, ours := owners[strconv.FormatUint(uint64(to), 10)]
		if !ours {
			continue
		}
		list, err := peekMessages(receiver, &room)
		if err == nil && !slices.ContainsFunc(list, func(m []byte) bool { return len(m) == 0 }) {
			continue
		}
		sender, known := owners[strconv.FormatUint(uint64(from), 10)]
		if err == nil && !known {
			err = errors.New("no process has the socket that sent them")
		}
		if err != nil {
			q.Lost = append(q.Lost, fmt.Sprintf("empty messages that may wait in unix socket %d of process %d are not kept: %v", receiver.fd, receiver.pid, err))
			continue
		}
		q.Mailboxes = append(q.Mailboxes, Mailbox{receiver.pid, receiver.fd, sender.pid, sender.fd, list})
	}
}

// peekMessages reads what waits in a socket, and leaves it there. Messages that carry
// descriptors and no empty one are CRIU's alone.
func peekMessages(s socket, room *int) (list [][]byte, err error) {
	fd, err := s.open()
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	was, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0)
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, was)) }()
	empty, carries := false, false
	buf := make([]byte, 256<<10)
	for {
		n, _, flags, _, err := unix.Recvmsg(fd, buf, nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN), err == nil && n == 0 && ended(fd):
			if empty && carries {
				return nil, errors.New("other messages there carry descriptors")
			}
			return list, nil
		case err != nil:
			return nil, err
		}
		empty, carries = empty || n == 0, carries || flags&unix.MSG_CTRUNC != 0
		if *room -= n + 128; *room < 0 || flags&unix.MSG_TRUNC != 0 {
			return nil, fmt.Errorf("more than %d bytes wait in sockets", maxQueued)
		}
		list = append(list, append([]byte{}, buf[:n]...))
	}
}

// fill gives a restored socket its messages again, in their order.
func (m Mailbox) fill(receiver, sender socket) error {
	to, err := receiver.open()
	if err != nil {
		return err
	}
	defer unix.Close(to)
	from, err := sender.open()
	if err != nil {
		return err
	}
	defer unix.Close(from)
	for range len(m.Messages) { // those that CRIU has restored
		if _, _, err := unix.Recvfrom(to, nil, unix.MSG_DONTWAIT); err != nil {
			break
		}
	}
	for _, data := range m.Messages {
		if _, err := unix.SendmsgN(from, data, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL); err != nil {
			return err
		}
	}
	return nil
}

// ended reports whether the other end of a socket has been closed, which reads like an
// empty message.
func ended(fd int) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(poll, 0)
	return err == nil && n > 0 && poll[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
}
