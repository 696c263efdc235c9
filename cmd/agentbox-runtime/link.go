package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/cut"
	"github.com/agentbox/agentbox/criu/stage"
)

// While a restore is under way the container's network is there before its
// sockets are, and what a peer sends to a connection that is yet to be
// restored is answered with a reset. So a hook, run before those by which the
// engine fills the network namespace, cuts it off, and it is connected when the
// sockets are there.
//
// Where the kernel has no nf_tables the hook is run after the engine's, and takes the
// host's ends of the container's veth pairs down: what arrives between the two
// hooks is answered with a reset. Down at the host's end leaves addresses and
// routes inside as they are.

// cutVerb and downVerb are how the hooks call this program.
const cutVerb, downVerb = "agentbox-cut", "agentbox-down"

// cuts reports whether a restore takes the hook.
func cuts(r stage.Restore) bool {
	return slices.Contains(r.Flags, "--empty-ns") && slices.Contains(r.Flags, "--tcp-established")
}

// newNetwork reports whether a bundle asks for a network namespace of its own.
func newNetwork(linux json.RawMessage) bool {
	var spec struct {
		Namespaces []struct{ Type, Path string }
	}
	_ = json.Unmarshal(linux, &spec) // the runtime says what is wrong with it
	return slices.ContainsFunc(spec.Namespaces, func(n struct{ Type, Path string }) bool {
		return n.Type == "network" && n.Path == ""
	})
}

// withHooks adds calls of this program to a bundle's hooks: before all others
// and, once the engine's have been run, after them.
func withHooks(hooks object, before, after [][]string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	of := func(calls [][]string) (list []json.RawMessage, err error) {
		for _, args := range calls {
			hook, err := marshal(struct {
				Path string   `json:"path"`
				Args []string `json:"args"`
			}{self, append([]string{self}, args...)})
			if err != nil {
				return nil, err
			}
			list = append(list, hook)
		}
		return list, nil
	}
	change := func(name string, calls [][]string, first bool) error {
		var list []json.RawMessage
		if raw, ok := hooks[name]; ok {
			if err := json.Unmarshal(raw, &list); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		ours, err := of(calls)
		switch {
		case err != nil || len(ours) == 0:
			return err
		case first:
			list = append(ours, list...)
		default:
			list = append(list, ours...)
		}
		hooks[name], err = marshal(list)
		return err
	}
	// All of prestart come before the first of createRuntime.
	return errors.Join(change("prestart", before, true), change("createRuntime", after, false))
}

// hook reads the container's state, as hooks do, and does its work on the
// container's first process.
func hook(in io.Reader, what string, work func(pid int) error) int {
	var state struct {
		Pid int `json:"pid"`
	}
	err := json.NewDecoder(io.LimitReader(in, 1<<20)).Decode(&state)
	if err == nil {
		err = work(state.Pid)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentbox-runtime: %s: %v\n", what, err)
		return 1
	}
	return 0
}

const holdStill = "hold the network still"

func cutOff(in io.Reader) int {
	return hook(in, holdStill, func(pid int) error { return withNetwork(pid, cut.Begin) })
}

func down(in io.Reader) int {
	return hook(in, holdStill, func(pid int) error { return setPeers(pid, false) })
}

// reconnect ends what either hook began.
func reconnect(pid int) error {
	// Where there could be none it may have no way to tell, either.
	if err := withNetwork(pid, cut.End); err != nil && cut.Possible() {
		return err
	}
	return setPeers(pid, true)
}

// setPeers sets the host's ends of the veth pairs of a process's network
// namespace up or down.
func setPeers(pid int, up bool) error {
	var inside []link
	err := inNetwork(pid, func() (err error) { inside, err = links(); return err })
	if err != nil {
		return err
	}
	outside, err := links()
	if err != nil {
		return err
	}
	var errs []error
	for _, in := range inside {
		for _, out := range outside {
			// Both must name the other: an index means something in one
			// namespace only, and the other end may be in a third.
			if in.veth && out.veth && in.peer == out.index && out.peer == in.index {
				errs = append(errs, setLink(out.name, up))
			}
		}
	}
	return errors.Join(errs...)
}

// link is a network device.
type link struct {
	index, peer int
	name        string
	veth        bool
}

// withNetwork calls fn with the network namespace of a process.
func withNetwork(pid int, fn func(ns *os.File) error) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return err
	}
	defer f.Close()
	return fn(f)
}

// inNetwork runs fn in the network namespace of a process.
func inNetwork(pid int, fn func() error) error {
	return withNetwork(pid, func(f *os.File) error { return within(f, fn) })
}

func within(f *os.File, fn func() error) error {
	done := make(chan error)
	go func() {
		goruntime.LockOSThread() // without Unlock: the thread ends with the goroutine
		err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	return <-done
}

// links lists the devices of this thread's network namespace.
func links() ([]link, error) {
	data, err := syscall.NetlinkRIB(unix.RTM_GETLINK, unix.AF_UNSPEC)
	if err != nil {
		return nil, fmt.Errorf("list network devices: %w", err)
	}
	messages, err := syscall.ParseNetlinkMessage(data)
	if err != nil {
		return nil, fmt.Errorf("list network devices: %w", err)
	}
	var list []link
	for _, m := range messages {
		if m.Header.Type != unix.RTM_NEWLINK || len(m.Data) < unix.SizeofIfInfomsg {
			continue
		}
		attrs, err := syscall.ParseNetlinkRouteAttr(&m)
		if err != nil {
			return nil, fmt.Errorf("list network devices: %w", err)
		}
		l := link{index: int(binary.NativeEndian.Uint32(m.Data[4:]))}
		for _, a := range attrs {
			switch a.Attr.Type {
			case unix.IFLA_IFNAME:
				l.name = string(bytes.TrimRight(a.Value, "\x00"))
			case unix.IFLA_LINK:
				if len(a.Value) >= 4 {
					l.peer = int(binary.NativeEndian.Uint32(a.Value))
				}
			case unix.IFLA_LINKINFO:
				l.veth = kind(a.Value) == "veth"
			}
		}
		list = append(list, l)
	}
	return list, nil
}

// kind finds a device's in its nested attributes.
func kind(info []byte) string {
	for len(info) >= 4 {
		n, t := int(binary.NativeEndian.Uint16(info)), binary.NativeEndian.Uint16(info[2:])
		if n < 4 || n > len(info) {
			return ""
		}
		if t == unix.IFLA_INFO_KIND {
			return string(bytes.TrimRight(info[4:n], "\x00"))
		}
		info = info[min((n+3)&^3, len(info)):]
	}
	return ""
}

func setLink(name string, up bool) error {
	return withFlags(name, func(fd int, req *unix.Ifreq) error {
		flags := req.Uint16() &^ unix.IFF_UP
		if up {
			flags |= unix.IFF_UP
		}
		req.SetUint16(flags)
		return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
	})
}

func isUp(name string) (up bool, err error) {
	err = withFlags(name, func(_ int, req *unix.Ifreq) error {
		up = req.Uint16()&unix.IFF_UP != 0
		return nil
	})
	return up, err
}

// withFlags passes a network device's flags to fn.
func withFlags(name string, fn func(fd int, req *unix.Ifreq) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, req)
	}
	if err == nil {
		err = fn(fd, req)
	}
	if err != nil {
		return fmt.Errorf("network device %s: %w", name, err)
	}
	return nil
}
