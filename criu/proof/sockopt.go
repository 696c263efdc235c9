package proof

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket is what a socket was told by setsockopt. CRIU restores some of it.
type Socket struct {
	// Options are the values that are not zero, in hex, by the names of socketOptions.
	Options map[string]string `json:"options,omitempty"`
	Groups  []Membership      `json:"groups,omitempty"`
}

// socketOption is an option that getsockopt returns as setsockopt takes it.
type socketOption struct {
	name          string
	level, option int
}

// optionSize bounds the value of an option.
const optionSize = 16

// socketOptions are the options that a restore compares and sets. Buffer sizes, marks,
// filters and devices, which CRIU restores, are not among them, nor is any other option
// that takes a capability in the container: a record may come from elsewhere.
var socketOptions = []socketOption{
	{"SO_REUSEADDR", unix.SOL_SOCKET, unix.SO_REUSEADDR},
	{"SO_DONTROUTE", unix.SOL_SOCKET, unix.SO_DONTROUTE},
	{"SO_BROADCAST", unix.SOL_SOCKET, unix.SO_BROADCAST},
	{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{"SO_OOBINLINE", unix.SOL_SOCKET, unix.SO_OOBINLINE},
	{"SO_PRIORITY", unix.SOL_SOCKET, unix.SO_PRIORITY},
	{"SO_LINGER", unix.SOL_SOCKET, unix.SO_LINGER},
	{"SO_REUSEPORT", unix.SOL_SOCKET, unix.SO_REUSEPORT},
	{"SO_PASSCRED", unix.SOL_SOCKET, unix.SO_PASSCRED},
	{"SO_RCVLOWAT", unix.SOL_SOCKET, unix.SO_RCVLOWAT},
	{"SO_RCVTIMEO", unix.SOL_SOCKET, unix.SO_RCVTIMEO},
	{"SO_SNDTIMEO", unix.SOL_SOCKET, unix.SO_SNDTIMEO},
	{"SO_TIMESTAMP", unix.SOL_SOCKET, unix.SO_TIMESTAMP},
	{"SO_TIMESTAMPNS", unix.SOL_SOCKET, unix.SO_TIMESTAMPNS},
	{"SO_PASSSEC", unix.SOL_SOCKET, unix.SO_PASSSEC},
	{"SO_RXQ_OVFL", unix.SOL_SOCKET, unix.SO_RXQ_OVFL},
	{"SO_PEEK_OFF", unix.SOL_SOCKET, unix.SO_PEEK_OFF},
	{"SO_MAX_PACING_RATE", unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE},
	{"SO_ZEROCOPY", unix.SOL_SOCKET, unix.SO_ZEROCOPY},
	{"SO_SELECT_ERR_QUEUE", unix.SOL_SOCKET, unix.SO_SELECT_ERR_QUEUE},
	{"SO_PASSPIDFD", unix.SOL_SOCKET, unix.SO_PASSPIDFD},

	{"IP_TOS", unix.SOL_IP, unix.IP_TOS},
	{"IP_TTL", unix.SOL_IP, unix.IP_TTL},
	{"IP_RECVOPTS", unix.SOL_IP, unix.IP_RECVOPTS},
	{"IP_RETOPTS", unix.SOL_IP, unix.IP_RETOPTS},
	{"IP_PKTINFO", unix.SOL_IP, unix.IP_PKTINFO},
	{"IP_MTU_DISCOVER", unix.SOL_IP, unix.IP_MTU_DISCOVER},
	{"IP_RECVERR", unix.SOL_IP, unix.IP_RECVERR},
	{"IP_RECVTTL", unix.SOL_IP, unix.IP_RECVTTL},
	{"IP_RECVTOS", unix.SOL_IP, unix.IP_RECVTOS},
	{"IP_FREEBIND", unix.SOL_IP, unix.IP_FREEBIND},
	{"IP_RECVORIGDSTADDR", unix.SOL_IP, unix.IP_RECVORIGDSTADDR},
	{"IP_MINTTL", unix.SOL_IP, unix.IP_MINTTL},
	{"IP_BIND_ADDRESS_NO_PORT", unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT},
	{"IP_RECVFRAGSIZE", unix.SOL_IP, unix.IP_RECVFRAGSIZE},
	{"IP_MULTICAST_IF", unix.SOL_IP, unix.IP_MULTICAST_IF},
	{"IP_MULTICAST_TTL", unix.SOL_IP, unix.IP_MULTICAST_TTL},
	{"IP_MULTICAST_LOOP", unix.SOL_IP, unix.IP_MULTICAST_LOOP},
	{"IP_MULTICAST_ALL", unix.SOL_IP, unix.IP_MULTICAST_ALL},

	{"IPV6_UNICAST_HOPS", unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS},
	{"IPV6_MULTICAST_IF", unix.SOL_IPV6, unix.IPV6_MULTICAST_IF},
	{"IPV6_MULTICAST_HOPS", unix.SOL_IPV6, unix.IPV6_MULTICAST_HOPS},
	{"IPV6_MULTICAST_LOOP", unix.SOL_IPV6, unix.IPV6_MULTICAST_LOOP},
	{"IPV6_MULTICAST_ALL", unix.SOL_IPV6, unix.IPV6_MULTICAST_ALL},
	{"IPV6_MTU_DISCOVER", unix.SOL_IPV6, unix.IPV6_MTU_DISCOVER},
	{"IPV6_RECVERR", unix.SOL_IPV6, unix.IPV6_RECVERR},
	{"IPV6_V6ONLY", unix.SOL_IPV6, unix.IPV6_V6ONLY},
	{"IPV6_RECVPKTINFO", unix.SOL_IPV6, unix.IPV6_RECVPKTINFO},
	{"IPV6_RECVHOPLIMIT", unix.SOL_IPV6, unix.IPV6_RECVHOPLIMIT},
	{"IPV6_DONTFRAG", unix.SOL_IPV6, unix.IPV6_DONTFRAG},
	{"IPV6_RECVTCLASS", unix.SOL_IPV6, unix.IPV6_RECVTCLASS},
	{"IPV6_TCLASS", unix.SOL_IPV6, unix.IPV6_TCLASS},
	{"IPV6_AUTOFLOWLABEL", unix.SOL_IPV6, unix.IPV6_AUTOFLOWLABEL},
	{"IPV6_MINHOPCOUNT", unix.SOL_IPV6, unix.IPV6_MINHOPCOUNT},
	{"IPV6_FREEBIND", unix.SOL_IPV6, unix.IPV6_FREEBIND},

	{"TCP_NODELAY", unix.SOL_TCP, unix.TCP_NODELAY},
	{"TCP_CORK", unix.SOL_TCP, unix.TCP_CORK},
	{"TCP_KEEPIDLE", unix.SOL_TCP, unix.TCP_KEEPIDLE},
	{"TCP_KEEPINTVL", unix.SOL_TCP, unix.TCP_KEEPINTVL},
	{"TCP_KEEPCNT", unix.SOL_TCP, unix.TCP_KEEPCNT},
	{"TCP_SYNCNT", unix.SOL_TCP, unix.TCP_SYNCNT},
	{"TCP_LINGER2", unix.SOL_TCP, unix.TCP_LINGER2},
	{"TCP_DEFER_ACCEPT", unix.SOL_TCP, unix.TCP_DEFER_ACCEPT},
	{"TCP_CONGESTION", unix.SOL_TCP, unix.TCP_CONGESTION},
	{"TCP_THIN_LINEAR_TIMEOUTS", unix.SOL_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS},
	{"TCP_USER_TIMEOUT", unix.SOL_TCP, unix.TCP_USER_TIMEOUT},
	{"TCP_FASTOPEN", unix.SOL_TCP, unix.TCP_FASTOPEN},
	{"TCP_NOTSENT_LOWAT", unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT},
	{"TCP_SAVE_SYN", unix.SOL_TCP, unix.TCP_SAVE_SYN},
	{"TCP_INQ", unix.SOL_TCP, unix.TCP_INQ},

	{"UDP_CORK", unix.SOL_UDP, unix.UDP_CORK},
	{"UDP_NO_CHECK6_TX", unix.SOL_UDP, unix.UDP_NO_CHECK6_TX},
	{"UDP_NO_CHECK6_RX", unix.SOL_UDP, unix.UDP_NO_CHECK6_RX},
	{"UDP_SEGMENT", unix.SOL_UDP, unix.UDP_SEGMENT},
	{"UDP_GRO", unix.SOL_UDP, unix.UDP_GRO},

	{"NETLINK_PKTINFO", unix.SOL_NETLINK, unix.NETLINK_PKTINFO},
	{"NETLINK_BROADCAST_ERROR", unix.SOL_NETLINK, unix.NETLINK_BROADCAST_ERROR},
	{"NETLINK_NO_ENOBUFS", unix.SOL_NETLINK, unix.NETLINK_NO_ENOBUFS},
	{"NETLINK_CAP_ACK", unix.SOL_NETLINK, unix.NETLINK_CAP_ACK},
	{"NETLINK_EXT_ACK", unix.SOL_NETLINK, unix.NETLINK_EXT_ACK},
	{"NETLINK_GET_STRICT_CHK", unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK},
}

// get returns the value of an option, without the zeros at its end; nil: it is zero, or
// the socket does not have it.
func (o socketOption) get(fd int) []byte {
	var value [optionSize]byte
	size := uint32(len(value))
	if getsockopt(fd, o.level, o.option, unsafe.Pointer(&value), &size) != nil {
		return nil
	}
	return bytes.TrimRight(value[:min(size, optionSize)], "\x00")
}

// set sets an option to a value that get returned.
func (o socketOption) set(fd int, value []byte) error {
	var full [optionSize]byte
	copy(full[:], value)
	if o.option == unix.TCP_CONGESTION && o.level == unix.SOL_TCP {
		return unix.SetsockoptString(fd, o.level, o.option, string(value))
	}
	size := uint32(len(full)) // as long as the kernel's own value
	if err := getsockopt(fd, o.level, o.option, unsafe.Pointer(&[optionSize]byte{}), &size); err != nil {
		return err
	}
	return unix.SetsockoptString(fd, o.level, o.option, string(full[:min(size, optionSize)]))
}

func getsockopt(fd, level, option int, value unsafe.Pointer, size *uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(value),
		uintptr(unsafe.Pointer(size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// takeOptions reads the options of a socket.
func takeOptions(fd int) map[string]string {
	values := map[string]string{}
	kind, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	for _, o := range socketOptions {
		if kind == unix.SOCK_STREAM && strings.Contains(o.name, "_MULTICAST_") {
			continue // the kernel sets them by what it accepts, and refuses any other value
		}
		if value := o.get(fd); len(value) > 0 {
			values[o.name] = hex.EncodeToString(value)
		}
	}
	return values
}

// mendSockets sets the options of restored sockets, and has them join their groups. It names what
// it set. Compare finds the rest.
func mendSockets(w, g Task) (mended []string) {
	for _, wf := range w.FDs {
		gf, ok := g.descriptor(wf.N)
		if !ok || wf.Socket == nil || gf.Socket == nil {
			continue
		}
		options, groups := optionsOff(wf.Socket, gf.Socket), missingGroups(wf.Socket, gf.Socket)
		if len(options)+len(groups) == 0 {
			continue
		}
		fd, err := socket{g.host, gf.N, g.Pid}.open()
		if err != nil {
			continue
		}
		for range 2 { // IP_TOS changes SO_PRIORITY, too
			for _, o := range options {
				value, err := hex.DecodeString(wf.Socket.Options[o.name])
				if err == nil && len(value) <= optionSize {
					_ = o.set(fd, value)
				}
			}
		}
		for _, o := range options {
			mended = append(mended, fmt.Sprintf("process %d: %s of socket %d", w.Pid, o.name, wf.N))
		}
		for _, m := range groups {
			if m.join(fd) == nil {
				mended = append(mended, fmt.Sprintf("process %d: membership of socket %d in %s", w.Pid, wf.N, m.Group))
			}
		}
		_ = unix.Close(fd)
	}
	return mended
}

// optionsOff lists the options of which two sockets have different values.
func optionsOff(w, g *Socket) (list []socketOption) {
	for _, o := range socketOptions {
		if w.Options[o.name] != g.Options[o.name] {
			list = append(list, o)
		}
	}
	return list
}

// compareSockets names the differences of a socket of a process.
func compareSockets(pid, fd int, w, g *Socket) (list []Difference) {
	if w == nil || g == nil {
		return nil // it has been compared by another descriptor
	}
	for _, o := range optionsOff(w, g) {
		list = append(list, Difference{Pid: pid, What: fmt.Sprintf("%s of its socket %d is %s, and was %s", o.name, fd,
			printValue(g.Options[o.name]), printValue(w.Options[o.name]))})
	}
	for _, m := range missingGroups(w, g) {
		list = append(list, Difference{
			Pid: pid, What: fmt.Sprintf("its socket %d is no longer a member of the group %s", fd, m.Group),
		})
	}
	return list
}

// printValue prints a value as a number where it is one.
func printValue(text string) string {
	value, err := hex.DecodeString(text)
	if err != nil || len(value) > 4 {
		return "0x" + text
	}
	n := int32(0)
	for i, b := range value {
		n |= int32(b) << (8 * i)
	}
	return fmt.Sprint(n)
}
