package proof

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// peekDatagrams reads what waits in a UDP socket, and leaves it there.
func peekDatagrams(s socket, room *int) (list []Datagram, err error) {
	fd, err := s.open()
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	local, err := unix.Getsockname(fd)
	if err != nil {
		return nil, err
	}
	was, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0)
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, was)) }()
	buf := make([]byte, 64<<10)
	for {
		n, from, err := unix.Recvfrom(fd, buf, unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		if errors.Is(err, unix.EAGAIN) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		if *room -= n + 128; *room < 0 || n > len(buf) {
			return nil, fmt.Errorf("more than %d bytes wait in sockets", maxQueued)
		}
		d := Datagram{
			Pid: s.pid, FD: s.fd, From: addrPort(from), To: addrPort(local), Data: append([]byte(nil), buf[:n]...),
		}
		if a := d.To.Addr(); a.IsUnspecified() {
			// It was sent to an address of the container, which is not known.
			if d.From.Addr().Is4() {
				a = netip.AddrFrom4([4]byte{127, 0, 0, 1})
			} else {
				a = netip.IPv6Loopback()
			}
			d.To = netip.AddrPortFrom(a, d.To.Port())
		}
		list = append(list, d)
	}
}

// send has a datagram come to its socket again, from where it came.
func (d Datagram) send() error {
	if d.From.Addr().Is4() != d.To.Addr().Is4() {
		return fmt.Errorf("from %s to %s: two families", d.From, d.To)
	}
	if !d.From.IsValid() || !d.To.IsValid() || d.To.Addr().IsMulticast() {
		return fmt.Errorf("from %s to %s: not an address of the sandbox", d.From, d.To)
	}
	family, packet := unix.AF_INET6, d.packet6()
	var to unix.Sockaddr = &unix.SockaddrInet6{Addr: d.To.Addr().As16()}
	if d.To.Addr().Is4() {
		family, packet, to = unix.AF_INET, d.packet4(), &unix.SockaddrInet4{Addr: d.To.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW) // with headers of our own
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, to); err != nil { // nothing leaves the sandbox: the record may come from elsewhere
		return fmt.Errorf("%s is not an address of the sandbox: %w", d.To.Addr(), err)
	}
	if err := unix.Connect(fd, to); err != nil {
		return err
	}
	_, err = unix.Write(fd, packet)
	return err
}

func (d Datagram) udp() []byte {
	p := binary.BigEndian.AppendUint16(nil, d.From.Port())
	p = binary.BigEndian.AppendUint16(p, d.To.Port())
	p = binary.BigEndian.AppendUint16(p, uint16(8+len(d.Data)))
	return append(append(p, 0, 0), d.Data...)
}

func (d Datagram) packet4() []byte {
	udp := d.udp() // without a checksum, which IPv4 allows
	head := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	from, to := d.From.Addr().As4(), d.To.Addr().As4()
	head = append(append(head, from[:]...), to[:]...) // the kernel fills in length and checksum
	return append(head, udp...)
}

func (d Datagram) packet6() []byte {
	udp := d.udp()
	from, to := d.From.Addr().As16(), d.To.Addr().As16()
	pseudo := append(append([]byte{}, from[:]...), to[:]...)
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(udp)))
	pseudo = append(append(pseudo, 0, 0, 0, unix.IPPROTO_UDP), udp...)
	binary.BigEndian.PutUint16(udp[6:], checksum(pseudo))
	head := []byte{0x60, 0, 0, 0}
	head = binary.BigEndian.AppendUint16(head, uint16(len(udp)))
	head = append(append(append(head, unix.IPPROTO_UDP, 64), from[:]...), to[:]...)
	return append(head, udp...)
}

// checksum is that of the internet protocols; 0 would mean that there is none.
func checksum(p []byte) uint16 {
	var sum uint32
	for i := 0; i < len(p); i += 2 {
		word := uint32(p[i]) << 8
		if i+1 < len(p) {
			word |= uint32(p[i+1])
		}
		sum += word
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if sum == 0xffff {
		return 0xffff
	}
	return ^uint16(sum)
}

// inNetwork runs fn in the network namespace of a process.
func inNetwork(pid int, fn func() error) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	return <-guard.Start(func() error {
		goruntime.LockOSThread() // for good: the thread ends with this
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return fn()
	})
}
