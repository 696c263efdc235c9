package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// freebind lets a listener be there before its address is.
func freebind(_, _ string, c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
	}); e != nil {
		return e
	}
	return err
}

// listenTCP prefers a port. A sandbox that is frozen, or restored a while
// after it was stopped, finds its connections alive: they are given up only
// after keepAlive.
func listenTCP(a netip.Addr, port uint16) (net.Listener, error) {
	lc := net.ListenConfig{Control: freebind, KeepAliveConfig: keepAlive}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp4", netip.AddrPortFrom(a, port).String())
	if errors.Is(err, unix.EADDRINUSE) && port != 0 {
		return lc.Listen(context.Background(), "tcp4", netip.AddrPortFrom(a, 0).String())
	}
	return l, err
}

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 40}

func listenUDP(a netip.Addr, port uint16) (net.PacketConn, error) {
	lc := net.ListenConfig{Control: freebind}
	c, err := lc.ListenPacket(context.Background(), "udp4", netip.AddrPortFrom(a, port).String())
	if errors.Is(err, unix.EADDRINUSE) && port != 0 {
		return lc.ListenPacket(context.Background(), "udp4", netip.AddrPortFrom(a, 0).String())
	}
	return c, err
}

func portOf(a net.Addr) uint16 {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.AddrPort().Port()
	case *net.UDPAddr:
		return a.AddrPort().Port()
	}
	return 0
}

// original returns the destination of a connection before it was led here.
func original(c net.Conn) (netip.AddrPort, error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("a %T has no destination", c)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var to netip.AddrPort
	var callErr error
	err = raw.Control(func(fd uintptr) {
		// SO_ORIGINAL_DST gives a sockaddr_in, which fits into this.
		var m *unix.IPv6Mreq
		if m, callErr = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); callErr == nil {
			b := m.Multiaddr
			to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), uint16(b[2])<<8|uint16(b[3]))
		}
	})
	return to, errors.Join(err, callErr)
}

// reset has a connection end by a reset instead of in good order.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // the end is all that matters
	}
	_ = c.Close()
}
