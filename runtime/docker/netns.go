package docker

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
)

// isolate cuts a container off its network, so that what the kernel says to
// peers when the processes end goes nowhere, and returns what takes the cut
// back: a container that then does not end needs its network. A namespace that
// is not the container's alone is left as it is.
func (b *Backend) isolate(c box) (back func() error, err error) {
	back = func() error { return nil }
	if !ownNetwork(c) {
		return back, nil
	}
	cut, err := criu.CutOff(c.State.Pid)
	if cut != nil {
		return cut.End, nil
	}
	// A kernel without nftables; or others are in the namespace, which the
	// daemon takes the network from as soon as this container ends.
	b.log.Debug("network cut off by its links", "container", c.ID, "err", err)
	if err := b.linksDown(c); err != nil {
		return back, err
	}
	return back, nil
}

// linksDown takes all links of a container's network namespace down. With them
// go its routes.
func (b *Backend) linksDown(c box) error {
	err := within(fmt.Sprintf("/proc/%d/ns/net", c.State.Pid), func(h *netlink.Handle) error {
		links, err := h.LinkList()
		if err != nil {
			return err
		}
		var errs []error
		for _, l := range links {
			errs = append(errs, h.LinkSetDown(l))
		}
		return errors.Join(errs...)
	})
	if err != nil && holds(c.State.Pid, c.ID) {
		return fmt.Errorf("cut container %s off: %w", c.ID, err)
	}
	return nil
}

// within runs fn with sockets of another network namespace.
func within(path string, fn func(*netlink.Handle) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	h, err := netlink.NewHandleAt(netns.NsHandle(int(f.Fd())), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	return fn(h)
}
