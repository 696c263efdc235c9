package network

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

const portLimit = 4096 // of one sandbox

// publication is a port of the host in the form the rules have it.
type publication struct {
	address  netip.Addr // 0.0.0.0: every address of the host
	port     uint16
	protocol uint8
}

func (p publication) String() string {
	name := "tcp"
	if p.protocol == unix.IPPROTO_UDP {
		name = "udp"
	}
	if p.address.IsUnspecified() {
		return fmt.Sprintf("%d/%s", p.port, name)
	}
	return fmt.Sprintf("%s:%d/%s", p.address, p.port, name)
}

func (p publication) overlaps(q publication) bool {
	return p.port == q.port && p.protocol == q.protocol &&
		(p.address == q.address || p.address.IsUnspecified() || q.address.IsUnspecified())
}

func published(p runtime.Port) (publication, error) {
	pub := publication{address: netip.IPv4Unspecified(), port: p.Host}
	if p.HostIP != "" {
		a, err := netip.ParseAddr(p.HostIP)
		if err != nil {
			return pub, fmt.Errorf("publish a port on %q: not an address: %w", p.HostIP, fault.ErrInvalid)
		}
		if !a.Unmap().Is4() {
			return pub, fmt.Errorf("publish a port on %s: sandboxes have no IPv6: %w", p.HostIP, fault.ErrUnsupported)
		}
		pub.address = a.Unmap()
	}
	switch p.Protocol {
	case "tcp", "":
		pub.protocol = unix.IPPROTO_TCP
	case "udp":
		pub.protocol = unix.IPPROTO_UDP
	default:
		return pub, fmt.Errorf("publish a port over %q: want tcp or udp: %w", p.Protocol, fault.ErrInvalid)
	}
	if p.Host == 0 || p.Sandbox == 0 {
		return pub, fmt.Errorf("publish port %d as %d: ports begin at 1: %w", p.Sandbox, p.Host, fault.ErrInvalid)
	}
	return pub, nil
}

func validPorts(ports []runtime.Port) error {
	if len(ports) > portLimit {
		return fmt.Errorf("publish %d ports: %d is the limit: %w", len(ports), portLimit, fault.ErrInvalid)
	}
	seen := map[publication]bool{}
	for _, p := range ports {
		pub, err := published(p)
		if err != nil {
			return err
		}
		if seen[pub] {
			return fmt.Errorf("port %s is published twice: %w", pub, fault.ErrInvalid)
		}
		seen[pub] = true
	}
	return nil
}

func equalPorts(a, b []runtime.Port) bool { return slices.Equal(a, b) }

// claimPorts makes sure that the host ports id is to have are free: no sandbox of any root
// has them, and no process listens on them.
func (v *verb) claimPorts(id string, ports []runtime.Port) error {
	if len(ports) == 0 {
		return nil
	}
	var wanted []publication
	for _, p := range ports {
		pub, err := published(p)
		if err != nil {
			return err
		}
		wanted = append(wanted, pub)
	}
	taken := func(p publication, by string) error {
		return &fault.Error{
			Op: "publish port", ID: p.String(), Err: fmt.Errorf("%w: it is in use by %s", fault.ErrExists, by),
			Hint: "Choose another host port, or stop what uses this one.",
		}
	}
	for other, le := range v.state.Sandboxes {
		if other == id || !isNamespace(v.m.namespace(other)) {
			continue // one that is not up holds no ports
		}
		for _, p := range le.Ports {
			have, err := published(p)
			if err != nil {
				return err
			}
			for _, w := range wanted {
				if w.overlaps(have) {
					return taken(w, "sandbox "+other)
				}
			}
		}
	}
	foreign, err := v.foreignPorts()
	if err != nil {
		return err
	}
	for _, w := range wanted {
		for _, have := range foreign {
			if w.overlaps(have) {
				return taken(w, "a sandbox of another agentbox root")
			}
		}
		if err := tryBind(w); errors.Is(err, unix.EADDRINUSE) {
			return taken(w, "a process on the host")
		} else if errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("publish port %s: the host does not have this address: %w", w, fault.ErrInvalid)
		} else if err != nil {
			return fmt.Errorf("publish port %s: %w", w, err)
		}
	}
	return nil
}

// tryBind finds out whether a process has the port. It does not keep it: what
// arrives there never gets as far as a socket of the host.
func tryBind(p publication) error {
	kind := unix.SOCK_STREAM
	if p.protocol == unix.IPPROTO_UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if p.protocol == unix.IPPROTO_TCP {
		// Connections that linger after their listener are no obstacle.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
	}
	return unix.Bind(fd, &unix.SockaddrInet4{Port: int(p.port), Addr: p.address.As4()})
}
