package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// threadNamespace is the network namespace of the calling thread.
// /proc/self would be that of the process's first thread.
const threadNamespace = "/proc/thread-self/ns/net"

// isNamespace reports whether a namespace is mounted at path.
func isNamespace(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

// onThread runs f on a thread of its own that ends with f. A thread that has
// changed namespaces must never run another goroutine, and changing it back
// can fail; so it is thrown away. The first thread cannot be: it would be
// parked for good, and /proc/PID/ns/net would show where it was left.
func onThread(f func() error) error {
	return <-guard.Start(func() error {
		goruntime.LockOSThread() // without Unlock: the thread exits with the goroutine
		if unix.Gettid() == unix.Getpid() {
			defer goruntime.UnlockOSThread()
			return onThread(f) // on another one, since this one is locked
		}
		return f()
	})
}

// makeNamespace makes sure that id's namespace is there, with lo up: a new one,
// unless another is given.
func (v *verb) makeNamespace(id string, from *os.File) error {
	path := v.m.namespace(id)
	if isNamespace(path) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return onThread(func() error {
		if from != nil {
			if err := unix.Setns(int(from.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("enter the network namespace: %w", err)
			}
		} else if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		h, err := openHost()
		if err != nil {
			return err
		}
		defer h.Close()
		lo, err := h.LinkByName("lo")
		if err == nil {
			err = h.LinkSetUp(lo)
		}
		if err != nil {
			return fmt.Errorf("lo: %w", err)
		}
		// Future interfaces have no IPv6; the existing lo keeps its ::1.
		if err := sysctl("ipv6/conf/default/disable_ipv6", "1"); err != nil {
			return err
		}
		// As under Docker: the owner of the namespace may use all its ports and ping.
		if err := sysctl("ipv4/ip_unprivileged_port_start", "0"); err != nil {
			return err
		}
		if err := sysctl("ipv4/ping_group_range", "0 2147483647"); err != nil {
			return err
		}
		// CRIU cannot dump Multipath TCP, which Go programs, for one, listen
		// with by default; without it they use TCP.
		if err := sysctl("mptcp/enabled", "0"); err != nil {
			return err
		}
		// Last, so that a namespace that is mounted is complete.
		if err := unix.Mount(threadNamespace, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
		return nil
	})
}

// enter returns sockets that work inside the namespace at path.
func enter(path string) (*handle, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var h *handle
	err = onThread(func() error {
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", path, err)
		}
		h, err = openHost() // a socket stays in the namespace it was made in
		return err
	})
	return h, err
}

// dropNamespace unmounts and removes path. The namespace itself lives on while
// a process is in it.
func dropNamespace(path string) error {
	for range 16 { // more than one only if another process mounted over it
		if !isNamespace(path) {
			break
		}
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// sysctl writes below /proc/sys/net of the calling thread's namespace. A
// setting that this kernel does not have is no error.
func sysctl(name, value string) error {
	f, err := os.OpenFile("/proc/sys/net/"+name, os.O_WRONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// handle is a rtnetlink socket in one namespace.
type handle struct{ *netlink.Handle }

// openHost opens one in the calling thread's namespace, the host's unless the
// caller has seen to another.
func openHost() (*handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return &handle{h}, nil
}
