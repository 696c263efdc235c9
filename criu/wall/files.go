package wall

import (
	"encoding/binary"
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/internal/fault"
)

// Types of open files.
const (
	fileReg      = 1
	fileFIFO     = 3
	fileInet     = 4
	fileUnix     = 5
	filePacket   = 10
	fileTTY      = 11
	fileFanotify = 12
	fileNS       = 14
	fileTun      = 15
	fileExternal = 16
	fileBPF      = 19
	fileLast     = 20
)

// bodies are the fields of a file_entry by its type.
var bodies = map[uint32]protowire.Number{
	1: 3, 2: 18, 3: 17, 4: 4, 5: 16, 6: 8, 7: 9, 8: 13, 9: 10, 10: 6, 11: 19, 12: 14, 13: 7, 14: 5, 15: 11, 16: 15,
	17: 12, 18: 20, 19: 21, 20: 22,
}

func (j *judge) files(name string) error {
	return j.each(name, magicFiles, maxEntries, func(data []byte) error {
		e, err := decode(name, "file_entry", data)
		if err != nil {
			return err
		}
		if err := e.once(fields(1, 2), fields(3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
			20, 21, 22)); err != nil {
			return err
		}
		kind := e.number(1)
		if kind == 0 || kind > fileLast {
			return refuse(name, "type",
				"file %#x is of type %d, which is not known to this version of agentbox", e.number(2), kind)
		}
		if !e.has(bodies[kind]) {
			return fmt.Errorf("image %s: file %#x of type %d has no properties: %w", name, e.number(2),
				kind, fault.ErrCorrupt)
		}
		body, err := e.inner(bodies[kind], fmt.Sprintf("file %#x", e.number(2)))
		if err != nil {
			return err
		}
		return j.opened(name, kind, body)
	})
}

// opened judges an open file. CRIU makes those that take a capability with its own.
func (j *judge) opened(name string, kind uint32, f *message) error {
	lacks := func(capability, what string) error {
		if j.spec.can(capability) || j.spec.mounter() {
			return nil
		}
		return refuse(name, f.name, "%s takes CAP_%s, which the container has not", what, capability)
	}
	switch kind {
	case fileReg:
		if err := f.once(fields(1, 2, 7, 9, 10), fields(6)); err != nil {
			return err
		}
		mode := f.number(10)
		switch {
		case up(f.text(6)):
			return refuse(name, f.name, "its name %s leads up", quoted(f.text(6)))
		case f.wide(9) != 0:
			return refuse(name, f.name, "it is external to the dump")
		case mode&unix.S_IFMT == unix.S_IFBLK && !j.spec.hostRoot() && !j.spec.can("MKNOD") &&
			len(j.spec.Linux.Devices) == 0:
			return refuse(name, f.name, "it is a block device")
		}
	case fileInet:
		if err := f.once(fields(1, 3, 4, 5), nil); err != nil {
			return err
		}
		if f.number(4) == unix.SOCK_RAW {
			return lacks("NET_RAW", "a raw socket")
		}
	case fileUnix:
		const flags, socket, dir, external = 6, 11, 14, 1
		if err := f.once(fields(1, 2, flags), fields(socket, dir)); err != nil {
			return err
		}
		if f.number(flags)&external != 0 {
			return refuse(name, f.name, "the unix socket is connected with one outside")
		}
		path, _, _ := strings.Cut(f.text(socket), "\x00") // without what follows; an abstract one is none
		if up(path) || up(f.text(dir)) {
			return refuse(name, f.name, "the unix socket's name %s leads up", quoted(path))
		}
	case filePacket:
		return lacks("NET_RAW", "a packet socket")
	case fileFanotify:
		if len(f.raw[6]) > 0 { // without marks any user may have it
			return lacks("SYS_ADMIN", "fanotify")
		}
	case fileTun:
		return lacks("NET_ADMIN", "a network device of a program (tun)")
	case fileExternal:
		return refuse(name, f.name, "it is external to the dump")
	case fileBPF:
		return lacks("BPF", "a BPF map")
	}
	return nil
}

// up reports whether a path has a part that leads up.
func up(path string) bool {
	for part := range strings.SplitSeq(path, "/") {
		if part == ".." {
			return true
		}
	}
	return strings.ContainsRune(path, 0)
}

// ghost reads how a deleted file is made again.
func (j *judge) ghost(name string) error {
	const mode, rdev = 3, 6
	f, err := j.open(name)
	if err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	defer f.Close()
	begin, err := io.ReadAll(io.LimitReader(f, 12+maxEntry))
	if err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	if len(begin) < 12 || string(begin[:8]) != string(head(magicGhost)) {
		return fmt.Errorf("image %s does not begin as one of its kind: %w", name, fault.ErrCorrupt)
	}
	size := binary.LittleEndian.Uint32(begin[8:])
	if size > maxEntry || int(size) > len(begin)-12 {
		return fmt.Errorf("image %s is cut off: %w", name, fault.ErrCorrupt)
	}
	m, err := decode(name, "ghost_file_entry", begin[12:12+size])
	if err != nil {
		return err
	}
	if err := m.once(fields(1, 2, mode, rdev), nil); err != nil {
		return err
	}
	switch m.number(mode) & unix.S_IFMT {
	case unix.S_IFCHR, unix.S_IFBLK:
		// The kernel's old notation, or the library's, of the number.
		dev := uint64(m.number(rdev))
		block := m.number(mode)&unix.S_IFMT == unix.S_IFBLK
		if major, minor := unix.Major(dev), unix.Minor(dev); !j.spec.can("MKNOD") &&
			!j.spec.device(block, major, minor) {
			return refuse(name, "rdev", "it is device %d:%d, which the container has not", major, minor)
		}
	}
	return nil
}

// ttys judges terminals: the container's own are pseudo-terminals and its console.
func (j *judge) ttys(name string) error {
	const kind, virtual, serial = 2, 3, 6
	return j.each(name, magicTTY, maxEntries, func(data []byte) error {
		m, err := decode(name, "tty_info_entry", data)
		if err != nil {
			return err
		}
		if err := m.once(fields(1, kind, 8), nil); err != nil {
			return err
		}
		if k := m.number(kind); (k == virtual || k >= serial) && !j.spec.mounter() && len(j.spec.Linux.Devices) == 0 {
			return refuse(name, "type", "terminal %#x is one of the host's", m.number(1))
		}
		return nil
	})
}
