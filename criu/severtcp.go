package criu

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
)

// strayTCP warns of TCP connections between processes of the dump (inside) and strays.
// CRIU dumps the ends inside; after a restore their peers are not there.
func strayTCP(pid int, inside, outside map[uint32]Stray) (warnings []string) {
	type pair struct{ local, remote netip.AddrPort }
	ends := map[pair]uint32{}
	for _, name := range []string{"tcp", "tcp6"} {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, name)) // without IPv6 there is no second one
		for line := range strings.Lines(string(data)) {
			f := strings.Fields(line) // sl local remote state tx:rx tr:when retransmits uid timeout inode
			if len(f) < 10 || f[3] == "0A" {
				continue
			}
			local, ok := kernelAddress(f[1])
			remote, ok2 := kernelAddress(f[2])
			ino, err := strconv.ParseUint(f[9], 10, 32)
			if ok && ok2 && err == nil && ino != 0 {
				ends[pair{local, remote}] = uint32(ino)
			}
		}
	}
	for p, ino := range ends {
		stray, is := outside[ends[pair{p.remote, p.local}]]
		if _, held := inside[ino]; !held || !is {
			continue
		}
		text := fmt.Sprintf("the TCP connection of process %d (%s) with %s has no peer after a restore", stray.Pid,
			stray.Cmdline, p.local)
		if !slices.Contains(warnings, text) {
			warnings = append(warnings, text)
		}
	}
	slices.Sort(warnings)
	return warnings
}

// kernelAddress reads an address as /proc/net/tcp has it: words in the order of the host.
func kernelAddress(text string) (netip.AddrPort, bool) {
	host, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err != nil || err2 != nil || len(raw) != 4 && len(raw) != 16 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		// The text is the number that the word is on this host.
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), ok
}
