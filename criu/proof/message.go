package proof

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// Message waits in a unix socket that keeps messages apart, behind an empty one: CRIU
// takes an empty message for the end of all.
type Message struct {
	Pid  int    `json:"pid"` // of the sender, in the container
	FD   int    `json:"fd"`
	Data []byte `json:"data"`
}

// TakeMessages records the messages that CRIU leaves out. senders has the sockets that
// send messages, by those that they send to, both by their inodes.
func (q *Queues) TakeMessages(r Record, senders map[uint32]uint32) {
	owners := socketsOf(r)
	room := maxQueued
	for to, from := range senders {
		receiver, ours := owners[strconv.FormatUint(uint64(to), 10)]
		if !ours {
			continue
		}
		behind, err := messagesBehind(receiver, &room)
		if err == nil && len(behind) == 0 {
			continue
		}
		sender, known := owners[strconv.FormatUint(uint64(from), 10)]
		if err == nil && !known {
			err = errors.New("no process has the socket that sent them")
		}
		if err != nil {
			q.Lost = append(q.Lost, fmt.Sprintf("messages that wait in unix socket %d of process %d, an empty one and what is behind it, are not kept: %v", receiver.fd, receiver.pid, err))
			continue
		}
		for _, data := range behind {
			q.Messages = append(q.Messages, Message{sender.pid, sender.fd, data})
		}
	}
}

// messagesBehind reads what waits in a socket from the first empty message on, and
// leaves it there.
func messagesBehind(s socket, room *int) (list [][]byte, err error) {
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
	buf := make([]byte, 256<<10)
	for {
		n, _, flags, _, err := unix.Recvmsg(fd, buf, nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return list, nil
		case err != nil:
			return nil, err
		case n == 0 && flags&unix.MSG_EOR == 0 && ended(fd):
			return list, nil
		case n > 0 && list == nil:
			continue // CRIU has it
		}
		if *room -= n + 128; *room < 0 || flags&unix.MSG_TRUNC != 0 {
			return nil, fmt.Errorf("more than %d bytes wait in sockets", maxQueued)
		}
		if flags&unix.MSG_CTRUNC != 0 {
			return nil, errors.New("descriptors or credentials are sent with them")
		}
		list = append(list, append([]byte{}, buf[:n]...))
	}
}

// ended reports whether the other end of a socket has been closed, which reads like an
// empty message.
func ended(fd int) bool {
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(poll, 0)
	return err == nil && n > 0 && poll[0].Revents&(unix.POLLRDHUP|unix.POLLHUP) != 0
}

// send has a message come to its receiver again.
func (m Message) send(sender socket) error {
	fd, err := sender.open()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.SendmsgN(fd, m.Data, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	return err
}
