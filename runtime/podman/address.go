package podman

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/criu/stage"
)

// fixAddresses has Podman give the container the addresses that it had at the
// time of a dump: its processes are bound to them, and Podman gives new ones at
// every start. They are the container's own from then on, until a start fails:
// fixed are the networks of those to give up then, whenever they were fixed.
func (b *Backend) fixAddresses(ctx context.Context, c container, m memory, r stage.Restore) (_ memory, fixed []string, err error) {
	for name, want := range m.at(r.Taken) {
		if _, connected := c.NetworkSettings.Networks[name]; !connected {
			continue
		}
		if m.Fixed[name] == want {
			fixed = c.giveUp(fixed, name, want)
			continue
		}
		if err := b.reconnect(ctx, c, name, want); err != nil {
			return m, fixed, fmt.Errorf("give the container its address %s back: %w", want.IP, err)
		}
		b.log.Info("address fixed", "sandbox", c.id(), "network", name, "address", want.IP)
		fixed = c.giveUp(fixed, name, want)
		if m.Fixed == nil {
			m.Fixed = map[string]address{}
		}
		m.Fixed[name] = want
		if err := b.keep(c.id(), m); err != nil {
			return m, fixed, err
		}
	}
	return m, fixed, nil
}

// giveUp adds a network to those whose address is to be given up. What the container's
// maker has asked for stays.
func (c container) giveUp(fixed []string, name string, a address) []string {
	if own := c.asked(a); own.IP == a.IP && own.IP6 == a.IP6 {
		return fixed
	}
	return append(fixed, name)
}

// taken are the networks of those fixed addresses that a failed start complains of.
func (c container) taken(m memory, err error) (fixed []string) {
	for name, a := range m.Fixed {
		_, connected := c.NetworkSettings.Networks[name]
		if connected && (a.IP != "" && strings.Contains(err.Error(), a.IP) || a.IP6 != "" && strings.Contains(err.Error(), a.IP6)) {
			fixed = c.giveUp(fixed, name, a)
		}
	}
	return fixed
}

// unfix has Podman choose addresses again, all but what its maker has asked for. One
// that somebody else has by now would keep the container from any start.
func (b *Backend) unfix(ctx context.Context, c container, m memory, fixed []string) (err error) {
	if len(fixed) == 0 {
		return nil
	}
	if now, lerr := b.look(ctx, c.id()); lerr != nil || now.live() {
		return lerr // it was started after all, and is not to lose its network
	}
	for _, name := range fixed {
		if rerr := b.reconnect(ctx, c, name, c.asked(m.Fixed[name])); rerr != nil {
			err = errors.Join(err, fmt.Errorf("take the address %s of the container back: %w", m.Fixed[name].IP, rerr))
			continue
		}
		delete(m.Fixed, name)
	}
	return errors.Join(err, b.keep(c.id(), m))
}

// reconnect connects a stopped container to its network again, with an address or,
// at zero, with whatever Podman will give it.
func (b *Backend) reconnect(ctx context.Context, c container, name string, with address) error {
	args := []string{"network", "connect"}
	flag := func(name, value string) {
		if value != "" {
			args = append(args, name, value)
		}
	}
	for _, alias := range c.NetworkSettings.Networks[name].Aliases {
		if alias != c.ID[:12] { // Podman's own
			flag("--alias", alias)
		}
	}
	plain := slices.Clip(append(slices.Clone(args), name, c.id()))
	flag("--ip", with.IP)
	flag("--ip6", with.IP6)
	flag("--mac-address", with.MAC)
	if err := b.do(ctx, "network", "disconnect", name, c.id()); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	err := b.do(ctx, append(args, name, c.id())...)
	if err != nil && with != (address{}) {
		err = errors.Join(err, b.do(ctx, plain...))
	}
	return err
}

// asked is what of an address the command that made the container asks for.
func (c container) asked(a address) (own address) {
	is := func(flag, value string) {
		switch flag {
		case "ip":
			if sameIP(value, a.IP) {
				own.IP = a.IP
			}
		case "ip6":
			if sameIP(value, a.IP6) {
				own.IP6 = a.IP6
			}
		case "mac", "mac-address":
			if sameMAC(value, a.MAC) {
				own.MAC = a.MAC
			}
		}
	}
	args := c.Config.CreateCommand
	for i, arg := range args {
		flag, long := strings.CutPrefix(arg, "--")
		if !long {
			continue
		}
		flag, value, joined := strings.Cut(flag, "=")
		if !joined && i+1 < len(args) {
			value = args[i+1]
		}
		if flag != "network" && flag != "net" {
			is(flag, value)
			continue
		}
		_, options, _ := strings.Cut(value, ":")
		for option := range strings.SplitSeq(options, ",") {
			name, value, _ := strings.Cut(option, "=")
			is(name, value)
		}
	}
	return own
}

func sameIP(a, b string) bool {
	x, err := netip.ParseAddr(a)
	y, err2 := netip.ParseAddr(b)
	return err == nil && err2 == nil && x.Unmap() == y.Unmap()
}

func sameMAC(a, b string) bool {
	x, err := net.ParseMAC(a)
	y, err2 := net.ParseMAC(b)
	return err == nil && err2 == nil && slices.Equal(x, y)
}
