package proof

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watch is that of an epoll for a descriptor.
type watch struct {
	place
	epoll int
	inode uint64
	event []byte // as epoll_ctl takes it
}

// watchesOf finds the watches of some sockets.
func watchesOf(pids []int, inodes map[uint64]bool) (list []watch) {
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/", pid)
		entries, _ := os.ReadDir(dir + "fd")
		for _, e := range entries {
			if to, err := os.Readlink(dir + "fd/" + e.Name()); err != nil || to != "anon_inode:[eventpoll]" {
				continue
			}
			data, _ := os.ReadFile(dir + "fdinfo/" + e.Name())
			for line := range strings.Lines(string(data)) {
				// tfd: 8 events: 19 data: 8 pos:0 ino:1234 sdev:8
				w := watch{place: place{Pid: pid}}
				var events uint32
				var word uint64
				var pos int64
				line = strings.ReplaceAll(line, ":", ": ")
				if n, _ := fmt.Sscanf(strings.Join(strings.Fields(line), " "),
					"tfd: %d events: %x data: %x pos: %d ino: %x", &w.FD, &events, &word, &pos,
					&w.inode); n != 5 || !inodes[w.inode] {
					continue
				}
				w.epoll, _ = strconv.Atoi(e.Name())
				w.event = binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint32(nil, events), word)
				list = append(list, w)
			}
		}
	}
	return list
}

// piece is what one message has, or a part of a stream.
type piece struct {
	data []byte
	fds  []int
}

// pieces reads what waits in a socket, from some byte of a stream on, and leaves it there.
func pieces(fd, kind, from int) (list []piece, err error) {
	was, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF)
	if err != nil {
		return nil, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, from); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, was)) }()
	buf, oob := make([]byte, 256<<10), make([]byte, 4096)
	for room := maxQueued; ; {
		n, used, flags, _, err := unix.Recvmsg(fd, buf, oob, unix.MSG_PEEK|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EAGAIN) || err == nil && n == 0 && (kind == unix.SOCK_STREAM || ended(fd)) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		fds := rights(oob[:used])
		if room -= n + 128; room < 0 || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			return append(list, piece{fds: fds}), fmt.Errorf("more than %d bytes wait in it", maxQueued)
		}
		list = append(list, piece{bytes.Clone(buf[:n]), fds})
	}
}

// roomy has a socket take more than it would, until restore is called.
func roomy(fd int) (restore func() error, err error) {
	size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size*2)
	}
	return func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size/2) }, err
}

// copySocket gives a socket the options, flags and owner of another.
func copySocket(to, from int) error {
	was, is := &Socket{Options: takeOptions(from)}, &Socket{Options: takeOptions(to)}
	for _, o := range optionsOff(was, is) {
		if value, err := hex.DecodeString(was.Options[o.name]); err == nil {
			_ = o.set(to, value) // what it is not, a restore finds
		}
	}
	for get, set := range map[int]int{unix.SO_SNDBUF: unix.SO_SNDBUFFORCE, unix.SO_RCVBUF: unix.SO_RCVBUFFORCE} {
		size, err := unix.GetsockoptInt(from, unix.SOL_SOCKET, get)
		if err == nil {
			err = unix.SetsockoptInt(to, unix.SOL_SOCKET, set, size/2)
		}
		if err != nil {
			return err
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	flags, err := unix.FcntlInt(uintptr(from), unix.F_GETFL, 0)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(to), unix.F_SETFL, flags)
	}
	return errors.Join(err, unix.Fchown(to, int(st.Uid), int(st.Gid)))
}

// address is where a client connects to. path is empty for an abstract name.
type address struct {
	raw  []byte
	path string
}

// rawName is the name of a socket as connect takes it.
func rawName(fd int) ([]byte, error) {
	raw := make([]byte, 128)
	size := uint32(len(raw))
	_, _, errno := unix.Syscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&raw[0])),
		uintptr(unsafe.Pointer(&size)))
	if errno != 0 {
		return nil, errno
	}
	return raw[:min(int(size), len(raw))], nil
}

// siocUnixFile opens the file that a unix socket is bound to, whatever its path is now.
const siocUnixFile = 0x89e0

// addressFor is the address of a listener as a process reaches it.
func addressFor(listener, server, client int) (to address, err error) {
	raw, err := rawName(listener)
	if err != nil {
		return to, err
	}
	if len(raw) <= 2 {
		return to, errors.New("the listener has no name")
	}
	if raw[2] == 0 {
		return address{raw: raw}, nil
	}
	name, _, _ := strings.Cut(string(raw[2:]), "\x00")
	file, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), siocUnixFile, 0)
	if errno != 0 {
		return to, fmt.Errorf("file of %s: %w", name, errno)
	}
	defer unix.Close(int(file))
	var want unix.Stat_t
	if err := unix.Fstat(int(file), &want); err != nil {
		return to, err
	}
	shown, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file))
	cwd, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", server))
	for _, path := range []string{name, shown, filepath.Join(cwd, name)} {
		if filepath.IsAbs(path) && len(path) < 108 && isAt(client, path, want) {
			raw := binary.NativeEndian.AppendUint16(nil, unix.AF_UNIX)
			return address{append(append(raw, path...), 0), path}, nil
		}
	}
	return to, fmt.Errorf("process %d does not find %s by that name", client, name)
}

// isAt reports whether a process finds a file by a path.
func isAt(pid int, path string, want unix.Stat_t) bool {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT,
	})
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Dev == want.Dev && st.Ino == want.Ino
}
