package proof

import (
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// A socket is told what another one was told, option by option.
func TestSocketOptions(t *testing.T) {
	open := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	from, to := open(), open()
	for option, n := range map[int]int{
		unix.IP_TTL: 7, unix.IP_MULTICAST_TTL: 8, unix.IP_MULTICAST_LOOP: 0, unix.IP_TOS: 16,
	} {
		if err := unix.SetsockoptInt(from, unix.SOL_IP, option, n); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.SetsockoptTimeval(from, unix.SOL_SOCKET, unix.SO_RCVTIMEO,
		&unix.Timeval{Sec: 3, Usec: 4000}); err != nil {
		t.Fatal(err)
	}
	w, g := &Socket{Options: takeOptions(from)}, &Socket{Options: takeOptions(to)}
	off := optionsOff(w, g)
	if len(off) != 6 { // the priority comes with IP_TOS
		t.Fatalf("different: %v", off)
	}
	for _, o := range off {
		value, err := hex.DecodeString(w.Options[o.name])
		if err == nil {
			err = o.set(to, value)
		}
		if err != nil {
			t.Errorf("%s: %v", o.name, err)
		}
	}
	if got := takeOptions(to); !reflect.DeepEqual(got, w.Options) {
		t.Errorf("%v, want %v", got, w.Options)
	}
}

// A socket joins the groups of another one, with their sources.
func TestMemberships(t *testing.T) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range []string{"239.1.2.3", "ff12::1234"} {
		addr := netip.MustParseAddr(group)
		m := Membership{Interface: lo.Name, Group: addr, Exclude: true, index: lo.Index}
		for _, sources := range [][]netip.Addr{nil, {addr.Next(), addr.Next().Next()}} {
			if m.Sources = nil; len(sources) > 0 {
				m.Exclude = false
				for _, s := range sources {
					raw := s.AsSlice()
					raw[0] = 10 // not a group
					s, _ := netip.AddrFromSlice(raw)
					m.Sources = append(m.Sources, s)
				}
			}
			domain := unix.AF_INET
			if addr.Is6() {
				domain = unix.AF_INET6
			}
			fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.join(fd); err != nil {
				t.Fatalf("join %v: %v", m, err)
			}
			all, err := joined(os.Getpid())
			if err != nil {
				t.Fatal(err)
			}
			got := &Socket{Groups: takeGroups(fd, all)}
			if len(missingGroups(&Socket{Groups: []Membership{m}}, got)) != 0 || len(got.Groups) != 1 {
				t.Errorf("%+v, want %+v", got.Groups, m)
			}
			unix.Close(fd)
		}
	}
}

func TestParseGroups(t *testing.T) {
	four := parseIGMP("Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n1\tlo        :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n2\teth0      :     2      V3\n\t\t\t\t030201EF     1 0:00000000\t\t0\n")
	six := parseIGMP6("2    eth0            ff0200000000000000000000000000fb     1 0000000C 0\nnonsense\n")
	want := []Membership{
		{Interface: "lo", Group: netip.MustParseAddr("224.0.0.1"), index: 1},
		{Interface: "eth0", Group: netip.MustParseAddr("239.1.2.3"), index: 2},
		{Interface: "eth0", Group: netip.MustParseAddr("ff02::fb"), index: 2},
	}
	if got := append(four, six...); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
