package proof

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Membership is one of a socket in a multicast group.
type Membership struct {
	Interface string     `json:"interface"`
	Group     netip.Addr `json:"group"`
	// Exclude: packets come from all but Sources. Otherwise they come from Sources only.
	Exclude bool         `json:"exclude,omitempty"`
	Sources []netip.Addr `json:"sources,omitempty"`

	index int // of the interface
}

func (m Membership) equal(o Membership) bool {
	return m.Interface == o.Interface && m.Group == o.Group && m.Exclude == o.Exclude &&
		slices.Equal(m.Sources, o.Sources)
}

// Bounds of what is asked of the kernel: the groups of a network namespace, and the
// sources of a membership (igmp_max_msf is 10 as a rule).
const (
	maxGroups  = 4096
	maxSources = 128
)

// joined lists the groups that any socket of a process's network namespace is in.
func joined(pid int) (list []Membership, err error) {
	read := func(name string, parse func(string) []Membership) {
		data, e := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, name))
		if errors.Is(e, os.ErrNotExist) {
			return // no IPv6
		}
		list, err = append(list, parse(string(data))...), cmp.Or(err, e)
	}
	read("igmp", parseIGMP)
	read("igmp6", parseIGMP6)
	if err == nil && len(list) > maxGroups {
		err = fmt.Errorf("the network has joined %d multicast groups; up to %d are kept", len(list), maxGroups)
	}
	return list, err
}

// parseIGMP reads /proc/net/igmp: a line of each interface, and below it one of each
// group, whose address is a word in the order of the machine.
func parseIGMP(text string) (list []Membership) {
	var at Membership
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
		case line[0] != '\t':
			if index, err := strconv.Atoi(f[0]); err == nil && len(f) > 1 {
				at = Membership{Interface: f[1], index: index}
			}
		default:
			word, err := strconv.ParseUint(f[0], 16, 32)
			if err != nil || at.index == 0 {
				continue
			}
			at.Group = netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, uint32(word))))
			list = append(list, at)
		}
	}
	return list
}

// parseIGMP6 reads /proc/net/igmp6: index, interface, address and more.
func parseIGMP6(text string) (list []Membership) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		index, err := strconv.Atoi(f[0])
		raw, e := hex.DecodeString(f[2])
		if group, ok := netip.AddrFromSlice(raw); ok && err == nil && e == nil {
			list = append(list, Membership{Interface: f[1], Group: group, index: index})
		}
	}
	return list
}

// groupFilter is struct group_filter of linux/in.h with maxSources sources.
type groupFilter struct {
	index   uint32
	_       uint32
	group   [128]byte // a sockaddr
	mode    uint32
	count   uint32
	sources [maxSources][128]byte
}

const (
	filterHead    = 144 // bytes of a groupFilter without sources
	filterExclude = 0   // MCAST_EXCLUDE; MCAST_INCLUDE is 1
	filterInclude = 1
)

// takeGroups lists which of the groups of its network a socket is in.
func takeGroups(fd int, all []Membership) (list []Membership) {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	kind, e := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || e != nil || domain != unix.AF_INET && domain != unix.AF_INET6 || kind == unix.SOCK_STREAM {
		return nil
	}
	for _, m := range all {
		if m.Group.Is6() && domain != unix.AF_INET6 {
			continue
		}
		f := groupFilter{index: uint32(m.index), group: rawAddr(m.Group), count: maxSources}
		size := uint32(unsafe.Sizeof(f))
		if getsockopt(fd, m.level(), unix.MCAST_MSFILTER, unsafe.Pointer(&f), &size) != nil {
			continue // it is not a member
		}
		m.Exclude = f.mode == filterExclude
		for i := range min(f.count, maxSources) {
			m.Sources = append(m.Sources, addrOf(f.sources[i]))
		}
		slices.SortFunc(m.Sources, netip.Addr.Compare)
		list = append(list, m)
	}
	return list
}

// join makes a socket a member of a group.
func (m Membership) join(fd int) error {
	request, err := unix.NewIfreq(m.Interface)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request)
	}
	if err != nil {
		return fmt.Errorf("interface %s: %w", m.Interface, err)
	}
	f := groupFilter{index: request.Uint32(), group: rawAddr(m.Group), mode: filterInclude}
	join := (*[filterHead - 8]byte)(unsafe.Pointer(&f)) // struct group_req
	if err := unix.SetsockoptString(fd, m.level(), unix.MCAST_JOIN_GROUP, string(join[:])); err != nil &&
		!errors.Is(err, unix.EADDRINUSE) {
		return err
	}
	if m.Exclude {
		f.mode = filterExclude
	}
	for i, s := range m.Sources[:min(len(m.Sources), maxSources)] {
		f.sources[i], f.count = rawAddr(s), uint32(i+1)
	}
	filter := (*[unsafe.Sizeof(f)]byte)(unsafe.Pointer(&f))
	return unix.SetsockoptString(fd, m.level(), unix.MCAST_MSFILTER, string(filter[:filterHead+128*f.count]))
}

func (m Membership) level() int {
	if m.Group.Is6() {
		return unix.SOL_IPV6
	}
	return unix.SOL_IP
}

// rawAddr returns a sockaddr_in or a sockaddr_in6 without a port.
func rawAddr(a netip.Addr) (raw [128]byte) {
	if a.Is6() {
		binary.NativeEndian.PutUint16(raw[:], unix.AF_INET6)
		copy(raw[8:], a.AsSlice())
		return raw
	}
	binary.NativeEndian.PutUint16(raw[:], unix.AF_INET)
	copy(raw[4:], a.AsSlice())
	return raw
}

func addrOf(raw [128]byte) netip.Addr {
	if binary.NativeEndian.Uint16(raw[:]) == unix.AF_INET6 {
		return netip.AddrFrom16([16]byte(raw[8:24]))
	}
	return netip.AddrFrom4([4]byte(raw[4:8]))
}

// missingGroups lists the memberships that a socket has not, or has with other sources.
func missingGroups(w, g *Socket) (list []Membership) {
	for _, m := range w.Groups {
		if !slices.ContainsFunc(g.Groups, m.equal) {
			list = append(list, m)
		}
	}
	return list
}
