package criu

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// States of a TCP socket, the kernel's.
const (
	tcpClose  = 7
	tcpListen = 10
)

// Addresses lists the addresses, except loopback ones, that sockets of a dump are bound to: CRIU
// binds them again, so a namespace whose contents it leaves out must have them. With TCPClose
// those of connections are left out.
func Addresses(dir, tcp string) (list []netip.Addr, err error) {
	err = optionalImage(dir, "files.img", magicFiles, func(data []byte) error {
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		s := e.GetIsk()
		connected := s.GetProto() == unix.IPPROTO_TCP && s.GetState() != tcpListen && s.GetState() != tcpClose
		if s == nil || connected && tcp == TCPClose {
			return nil
		}
		var raw []byte
		for _, word := range s.GetSrcAddr() { // in the order of the network, as they lay in memory
			raw = binary.LittleEndian.AppendUint32(raw, word)
		}
		if s.GetFamily() == unix.AF_INET && len(raw) > 4 {
			raw = raw[:4]
		}
		a, ok := netip.AddrFromSlice(raw)
		if a = a.Unmap(); ok && a.IsGlobalUnicast() && !slices.Contains(list, a) {
			list = append(list, a)
		}
		return nil
	})
	return list, err
}
