package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	skopts "github.com/checkpoint-restore/go-criu/v7/crit/images/sk-opts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// severance is what a dump does about unix sockets whose other end belongs to a stray. CRIU
// refuses half a connection; told to accept it, it writes an image that no restore takes. sever
// changes the image so that the peer of the end inside has closed. The connection itself stays as
// it is.
type severance struct {
	inodes   []uint32 // of sockets whose peer is a stray's alone
	flying   []uint32 // those of them that no process has received yet
	warnings []string
}

// severed looks for such sockets in a frozen container, and for TCP connections that are to
// be dumped with one end.
func severed(initPid int, members []int, tcp string) (severance, error) {
	strays, err := Strays(initPid, members)
	if err != nil || len(strays) == 0 {
		return severance{}, err
	}
	inside, outside := map[uint32]Stray{}, map[uint32]Stray{}
	networks := map[string]int{}
	for _, p := range members {
		at := slices.IndexFunc(strays, func(s Stray) bool { return s.Pid == p })
		if at < 0 {
			for _, ino := range sockets(p) {
				inside[ino] = Stray{p, cmdline(p)}
			}
			continue
		}
		for _, ino := range sockets(p) {
			outside[ino] = strays[at]
		}
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p)); err == nil {
			networks[ns] = p
		}
	}
	for ino := range inside {
		delete(outside, ino) // the dump has it
	}
	if len(outside) == 0 {
		return severance{}, nil
	}
	var list []unixSocket
	var errs []error
	for _, p := range networks {
		some, err := unixSockets(p)
		list, errs = append(list, some...), append(errs, err)
	}
	s := severanceOf(list, inside, outside)
	if tcp == "" || tcp == TCPEstablished {
		s.warnings = append(s.warnings, strayTCP(initPid, inside, outside)...)
	}
	return s, errors.Join(errs...)
}

// severanceOf judges sockets by what holds them: processes of the dump (inside), or
// strays alone (outside).
func severanceOf(list []unixSocket, inside, outside map[uint32]Stray) (s severance) {
	byInode := make(map[uint32]unixSocket, len(list))
	for _, u := range list {
		byInode[u.ino] = u
	}
	warn := func(text string) {
		if !slices.Contains(s.warnings, text) {
			s.warnings = append(s.warnings, text)
		}
	}
	for _, u := range list {
		stray, is := outside[u.peer]
		if u.peer != 0 && is {
			s.inodes = append(s.inodes, u.ino)
			holder, held := inside[u.ino]
			if !held {
				s.flying = append(s.flying, u.ino)
			}
			switch {
			case held:
				warn(fmt.Sprintf("the connection of process %d (%s) to %s is closed by a restore", stray.Pid,
					stray.Cmdline, severedName(u, byInode[u.peer], holder)))
			case outside[u.ino].Pid == 0:
				warn(fmt.Sprintf("the connection of process %d (%s) with a socket that is on its way to another process is closed by a restore", stray.Pid, stray.Cmdline))
			}
		}
		server, own := inside[u.ino]
		stray, strays := outside[u.ino]
		for _, client := range u.waiting {
			switch holder, held := inside[client]; {
			case own && outside[client].Pid != 0:
				stray := outside[client]
				warn(fmt.Sprintf("the connection of process %d (%s) to %s, which process %d (%s) has not accepted yet, is closed by a restore",
					stray.Pid, stray.Cmdline, u.address(), server.Pid, server.Cmdline))
			case strays && held:
				// CRIU names the listener as the peer.
				s.inodes = append(s.inodes, client)
				warn(fmt.Sprintf("the connection of process %d (%s) to %s, which process %d (%s) has not accepted yet, is closed by a restore",
					holder.Pid, holder.Cmdline, u.address(), stray.Pid, stray.Cmdline))
			}
		}
	}
	return s
}

func severedName(u, peer unixSocket, holder Stray) string {
	for _, s := range []unixSocket{u, peer} {
		if s.name != "" {
			return s.address()
		}
	}
	return fmt.Sprintf("process %d (%s)", holder.Pid, holder.Cmdline)
}

// sever makes the ends in a dump's images ones whose peers have closed: data that was sent to
// them can still be read. An external peer that is no stray's is ErrUnsupported.
func (s severance) sever(dir string) error {
	if len(s.inodes) == 0 {
		return nil
	}
	const external = 1 // of uflags: it stands for a socket that is not in the dump
	var entries [][]byte
	var socks []*fdinfo.FileEntry // nil: another file
	have := map[uint32]bool{}
	size := 0
	err := readImage(filepath.Join(dir, filesImage), magicFiles, maxFiles, func(data []byte) error {
		if size += len(data); size > maxFileBytes {
			return errors.New("it is past all bounds")
		}
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		if e.GetUsk() == nil {
			entries, socks = append(entries, slices.Clone(data)), append(socks, nil)
			return nil
		}
		if e.GetUsk().GetUflags()&external != 0 {
			return nil
		}
		have[e.GetUsk().GetIno()] = true
		entries, socks = append(entries, slices.Clone(data)), append(socks, proto.Clone(&e).(*fdinfo.FileEntry))
		return nil
	})
	if err != nil {
		return err
	}
	out := binary.LittleEndian.AppendUint32(nil, magicCommon)
	out = binary.LittleEndian.AppendUint32(out, magicFiles)
	for i, data := range entries {
		if u := socks[i].GetUsk(); u.GetPeer() != 0 && !have[u.GetPeer()] {
			if !slices.Contains(s.inodes, u.GetIno()) {
				return fmt.Errorf("a process is connected to a unix socket outside the sandbox: %w",
					fault.ErrUnsupported)
			}
			u.Peer = proto.Uint32(0)
			flying := slices.Contains(s.flying, u.GetIno())
			switch {
			case flying && u.GetType() == unix.SOCK_DGRAM:
				return fmt.Errorf("a datagram socket that a process has sent, and none has received yet, is connected with a process of an exec: %w", fault.ErrUnsupported)
			case flying:
				// CRIU makes the other end in the process that has this one, and
				// crashes where none has.
				u.State = proto.Uint32(tcpClose)
				fallthrough
			case u.GetType() != unix.SOCK_DGRAM:
				u.Shutdown = skopts.SkShutdown_BOTH.Enum()
			}
			if data, err = proto.Marshal(socks[i]); err != nil {
				return err
			}
		}
		out = binary.LittleEndian.AppendUint32(out, uint32(len(data)))
		out = append(out, data...)
	}
	if err := host.Replace(filepath.Join(dir, filesImage), out); err != nil {
		return fmt.Errorf("change the image of open files: %w", err)
	}
	return nil
}

// sockets lists the inodes of the sockets that a process has open.
func sockets(pid int) (list []uint32) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return nil // it has ended
	}
	for _, fd := range fds {
		link, err := os.Readlink(filepath.Join(dir, fd.Name()))
		if err != nil {
			continue
		}
		if in, is := strings.CutPrefix(link, "socket:["); is {
			if n, err := strconv.ParseUint(strings.TrimSuffix(in, "]"), 10, 32); err == nil {
				list = append(list, uint32(n))
			}
		}
	}
	return list
}

// unixSocket is a unix socket as the kernel knows it.
type unixSocket struct {
	kind      byte // SOCK_STREAM and its like
	ino, peer uint32
	name      string
	waiting   []uint32 // sockets whose connections it has not accepted yet; 0: one that is closed
	sent      uint32   // memory of what its peer has not read
	shut      byte     // 1: for reading, 2: for writing
}

// address is its name as programs write it: abstract ones begin with @.
func (u unixSocket) address() string {
	if u.name == "" {
		return "a unix socket"
	}
	return strings.Map(func(r rune) rune {
		if r == 0 {
			return '@'
		}
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return '?'
		}
		return r
	}, u.name[:1]+strings.TrimRight(u.name[1:], "\x00"))
}

// unixSockets asks the kernel for those of a process's network namespace.
func unixSockets(pid int) ([]unixSocket, error) {
	const byFamily, showName, showPeer, showWaiting, showQueues, head = 20, 1 << 0, 1 << 2, 1 << 3, 1 << 4, 16
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, &netlink.Config{NetNS: int(ns.Fd())})
	if err != nil {
		return nil, fmt.Errorf("unix sockets of process %d: %w", pid, err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return nil, err
	}
	req := make([]byte, 24)
	req[0] = unix.AF_UNIX
	binary.NativeEndian.PutUint32(req[4:], ^uint32(0)) // in all states
	binary.NativeEndian.PutUint32(req[12:], showName|showPeer|showWaiting|showQueues)
	answers, err := conn.Execute(netlink.Message{Header: netlink.Header{
		Type: byFamily, Flags: netlink.Request | netlink.Dump,
	}, Data: req})
	if err != nil {
		return nil, fmt.Errorf("unix sockets of process %d: %w", pid, err)
	}
	var list []unixSocket
	for _, m := range answers {
		if len(m.Data) < head {
			continue
		}
		u := unixSocket{kind: m.Data[1], ino: binary.NativeEndian.Uint32(m.Data[4:])}
		attrs, err := netlink.NewAttributeDecoder(m.Data[head:])
		if err != nil {
			return nil, fmt.Errorf("unix sockets of process %d: %w", pid, err)
		}
		for attrs.Next() {
			switch data := attrs.Bytes(); attrs.Type() {
			case 0:
				u.name = string(data)
			case 2:
				u.peer = attrs.Uint32()
			case 3:
				for ; len(data) >= 4; data = data[4:] {
					u.waiting = append(u.waiting, binary.NativeEndian.Uint32(data))
				}
			case 4:
				if len(data) >= 8 {
					u.sent = binary.NativeEndian.Uint32(data[4:])
				}
			case 6:
				u.shut = attrs.Uint8()
			}
		}
		list = append(list, u)
	}
	return list, nil
}
