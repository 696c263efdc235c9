package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/agentbox/agentbox/criu/cut"
)

// A Cut blocks all packets between a network namespace and the outside.
//
// The kernel keeps acknowledging what peers send to frozen processes. If the processes do not run
// on after a dump, data that arrives after it would be lost, while the peers believe that it was
// delivered.
type Cut struct{ ns *os.File }

// CutOff cuts off the network namespace of a container; pid is its first process. It leaves a
// namespace alone that processes outside the container share, and returns nil.
func CutOff(pid int) (*Cut, error) {
	path := fmt.Sprintf("/proc/%d/ns/net", pid)
	shared, err := sharesNetwork(pid)
	if err != nil || shared {
		return nil, err
	}
	ns, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("network namespace of process %d: %w", pid, err)
	}
	c := &Cut{ns}
	if err := cut.Begin(ns); err != nil {
		return nil, errors.Join(fmt.Errorf("cut process %d off its network: %w", pid, err), ns.Close())
	}
	return c, nil
}

// Reconnect ends a cut that another process began, by the pid of the
// container's first process. Without one it does nothing.
func Reconnect(pid int) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return (&Cut{ns}).End()
}

// End ends the cut. A nil one has ended.
func (c *Cut) End() error {
	if c == nil {
		return nil
	}
	defer c.ns.Close()
	return cut.End(c.ns)
}

// sharesNetwork reports whether processes outside a container are in its network
// namespace.
func sharesNetwork(pid int) (bool, error) {
	ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return false, err
	}
	members, err := Members(pid)
	if err != nil {
		return false, err
	}
	all, err := hostPids()
	if err != nil {
		return false, err
	}
	for _, p := range all {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p))
		if err == nil && link == ns && !slices.Contains(members, p) {
			return true, nil
		}
	}
	return false, nil
}
