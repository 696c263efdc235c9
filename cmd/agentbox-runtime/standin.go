package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
)

// Since version 28 Docker fills a network namespace only between `create` and `start`. By then
// the sockets of a restore have long been bound and connected, which takes their addresses and
// routes. So a hook gives a namespace that is still empty a stand-in: lo up, and a pair of
// devices with the addresses of the sockets and the default routes, with no peer behind it. It is
// removed as soon as the sockets exist, and packets sent to them before the engine has done its
// part meet no network at all.

// standInVerb is how the hook calls this program; the addresses follow.
const standInVerb = "agentbox-standin"

// The ends of the pair.
const standInLink, standInPeer = "agentbox-in0", "agentbox-in1"

const vethInfoPeer = 1 // VETH_INFO_PEER of linux/veth.h

// addresses returns those of a restore that leaves the network to the engine; nil: it does not.
func addresses(r stage.Restore) (list []string) {
	if slices.Contains(r.Flags, "--empty-ns") {
		list = []string{}
	}
	for _, a := range r.Addresses {
		list = append(list, a.String())
	}
	return list
}

func standIn(in io.Reader, args []string) int {
	return hook(in, "stand in for the network", func(pid int) error {
		var list []netip.Addr
		for _, text := range args {
			a, err := netip.ParseAddr(text)
			if err != nil {
				return err
			}
			list = append(list, a)
		}
		return inNetwork(pid, func() error { return makeStandIn(list) })
	})
}

// makeStandIn does nothing in a network namespace that was filled, where lo is up.
func makeStandIn(list []netip.Addr) error {
	up, err := isUp("lo")
	if up || err != nil {
		return err
	}
	if err := setLink("lo", true); err != nil || len(list) == 0 {
		return err
	}
	blank := make([]byte, unix.SizeofIfInfomsg)
	peer := attribute(vethInfoPeer, blank, attribute(unix.IFLA_IFNAME, text(standInPeer)))
	err = tell(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, blank,
		attribute(unix.IFLA_IFNAME, text(standInLink)),
		attribute(unix.IFLA_LINKINFO, attribute(unix.IFLA_INFO_KIND, text("veth")),
			attribute(unix.IFLA_INFO_DATA, peer)))
	if err != nil {
		return fmt.Errorf("make a pair of network devices: %w", err)
	}
	at, err := indexOf(standInLink)
	if err != nil {
		return err
	}
	if err := errors.Join(setLink(standInPeer, true), setLink(standInLink, true)); err != nil {
		return err
	}
	index := binary.NativeEndian.AppendUint32(nil, uint32(at))
	families := map[byte]bool{}
	for _, a := range list {
		family, flags := byte(unix.AF_INET), byte(0)
		if a.Is6() {
			family, flags = unix.AF_INET6, unix.IFA_F_NODAD // else it is not to be bound to for a second
		}
		err := tell(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
			[]byte{family, byte(a.BitLen()), flags, unix.RT_SCOPE_UNIVERSE}, index,
			attribute(unix.IFA_LOCAL, a.AsSlice()), attribute(unix.IFA_ADDRESS, a.AsSlice()))
		if err != nil {
			return fmt.Errorf("address %s: %w", a, err)
		}
		families[family] = true
	}
	for family := range families {
		scope := byte(unix.RT_SCOPE_LINK)
		if family == unix.AF_INET6 {
			scope = unix.RT_SCOPE_UNIVERSE
		}
		err := tell(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
			[]byte{family, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, scope, unix.RTN_UNICAST}, make([]byte, 4),
			attribute(unix.RTA_OIF, index))
		if err != nil {
			return fmt.Errorf("default route: %w", err)
		}
	}
	return nil
}

// endStandIn removes the pair, and the addresses and routes with it.
func endStandIn(pid int) error {
	return inNetwork(pid, func() error {
		at, err := indexOf(standInLink)
		if errors.Is(err, unix.ENODEV) {
			return nil
		}
		if err != nil {
			return err
		}
		gone := make([]byte, unix.SizeofIfInfomsg)
		binary.NativeEndian.PutUint32(gone[4:], uint32(at))
		return tell(unix.RTM_DELLINK, 0, gone)
	})
}

// indexOf is the index of a device of this thread's network namespace.
func indexOf(device string) (int, error) {
	list, err := links()
	if err != nil {
		return 0, err
	}
	if i := slices.IndexFunc(list, func(l link) bool { return l.name == device }); i >= 0 {
		return list[i].index, nil
	}
	return 0, fmt.Errorf("network device %s: %w", device, unix.ENODEV)
}

// tell asks the kernel for a change of this thread's network namespace.
func tell(what, flags uint16, body ...[]byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request := slices.Concat(body...)
	head := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(request)))
	head = binary.NativeEndian.AppendUint16(head, what)
	head = binary.NativeEndian.AppendUint16(head, flags|unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	head = append(head, make([]byte, 8)...) // neither numbers nor a port are needed
	if err := unix.Sendto(fd, append(head, request...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, os.Getpagesize())
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return err
	}
	messages, err := syscall.ParseNetlinkMessage(answer[:n])
	if err != nil {
		return err
	}
	if len(messages) != 1 || messages[0].Header.Type != unix.NLMSG_ERROR || len(messages[0].Data) < 4 {
		return errors.New("the kernel's answer is none")
	}
	if code := int32(binary.NativeEndian.Uint32(messages[0].Data)); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}

// attribute is one of netlink's, of all its parts.
func attribute(kind uint16, parts ...[]byte) []byte {
	value := slices.Concat(parts...)
	out := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	out = append(binary.NativeEndian.AppendUint16(out, kind), value...)
	return append(out, make([]byte, (4-len(out)%4)%4)...)
}

func text(s string) []byte { return append([]byte(s), 0) }
