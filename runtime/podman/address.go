package podman

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// fixAddresses has Podman give the container the addresses that it had at the
// time of a dump: its processes are bound to them, and Podman gives new ones at
// every start. They are the container's own from then on, until a start fails:
// fixed are the networks of those to give up then, whenever they were fixed.
func (b *Backend) fixAddresses(ctx context.Context, c container, r stage.Restore) (fixed []string, err error) {
	m := b.remember(c.id())
	for name, want := range m.at(r.Taken) {
		if _, connected := c.NetworkSettings.Networks[name]; !connected {
			continue
		}
		if m.Fixed[name] != want {
			if err := b.reconnect(ctx, c, name, link{Address: want, Fixed: true}); err != nil {
				return fixed, fmt.Errorf("give the container its address %s back: %w", want.IP, err)
			}
			b.log.Info("address fixed", "sandbox", c.id(), "network", name, "address", want.IP)
		}
		fixed = c.giveUp(fixed, name, want)
	}
	return fixed, nil
}

// giveUp adds a network to those whose address is to be given up. An address that the
// container was created with stays.
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
		if connected && (names(err, a.IP) || names(err, a.IP6)) {
			fixed = c.giveUp(fixed, name, a)
		}
	}
	return fixed
}

// names reports whether an error has an address in its text, which is in no longer one.
func names(err error, ip string) bool {
	words := strings.FieldsFunc(err.Error(), func(r rune) bool {
		return !strings.ContainsRune("0123456789abcdefABCDEF.:", r)
	})
	return slices.ContainsFunc(words, func(word string) bool { return sameIP(strings.TrimRight(word, ".:"), ip) })
}

// unfix has Podman choose addresses again, except those the container was created with. An
// address taken by another container meanwhile would prevent any start.
func (b *Backend) unfix(ctx context.Context, id string, fixed []string) (err error) {
	if len(fixed) == 0 {
		return nil
	}
	now, err := b.look(ctx, id)
	if err != nil || now.live() {
		return err // it was started after all, and is not to lose its network
	}
	m := b.remember(id)
	for _, name := range fixed {
		if rerr := b.reconnect(ctx, now, name, link{Address: now.asked(m.Fixed[name])}); rerr != nil {
			err = errors.Join(err, fmt.Errorf("take the address %s of the container back: %w", m.Fixed[name].IP, rerr))
		}
	}
	return err
}

// mend reconnects the container to networks that an interrupted or failed verb took it off.
// Podman has no record of these any more.
func (b *Backend) mend(ctx context.Context, c container) (container, error) {
	apart := b.remember(c.id()).Apart
	if len(apart) == 0 {
		return c, nil
	}
	for _, name := range slices.Sorted(maps.Keys(apart)) {
		// It may be connected already, with an unknown address.
		err := b.reconnect(ctx, c, name, apart[name])
		if _, still := b.remember(c.id()).Apart[name]; err != nil && still {
			return c, &fault.Error{
				Err:  fmt.Errorf("connect container %s to its network %s again, which a start that was broken off took it off: %w", c.Name, name, err),
				Hint: "If that network is gone, make it again: podman network create " + name,
			}
		}
		b.log.Info("network reconnected", "sandbox", c.id(), "network", name, "address",
			apart[name].Address.IP, "err", err)
	}
	return b.look(ctx, c.id())
}

// reconnect connects a stopped container to its network again, with an address or,
// at zero, with whatever Podman will give it. That comes, too, when it cannot have the
// address, which is an error. While it is disconnected what it takes is noted.
func (b *Backend) reconnect(ctx context.Context, c container, name string, to link) error {
	n, connected := c.NetworkSettings.Networks[name]
	was, again := b.remember(c.id()).Apart[name]
	for _, alias := range slices.Concat(n.Aliases, was.Aliases) {
		if alias != c.ID[:12] && !slices.Contains(to.Aliases, alias) { // Podman's own
			to.Aliases = append(to.Aliases, alias)
		}
	}
	if err := b.note(c.id(), func(m *memory) bool { return m.part(name, to) }); err != nil {
		return err
	}
	if connected {
		if err := b.do(ctx, "network", "disconnect", name, c.id()); err != nil {
			now, lerr := b.look(context.WithoutCancel(ctx), c.id())
			if lerr != nil {
				return errors.Join(err, lerr)
			}
			if _, still := now.NetworkSettings.Networks[name]; still {
				if !again {
					err = errors.Join(err, b.note(c.id(), func(m *memory) bool { delete(m.Apart, name); return true }))
				}
				return err
			}
		}
	}
	if err := failpoint.Hit("podman.connect.after-disconnect"); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	err := b.do(ctx, to.connect(name, c.id())...)
	if err != nil && to.Address != (address{}) {
		to.Address, to.Fixed = address{}, false
		if err2 := b.do(ctx, to.connect(name, c.id())...); err2 != nil {
			return errors.Join(err, err2)
		}
	} else if err != nil {
		return err
	}
	return errors.Join(err, b.note(c.id(), func(m *memory) bool { m.join(name, to); return true }))
}

// connect is the command that makes a link.
func (l link) connect(name, id string) []string {
	args := []string{"network", "connect"}
	for _, alias := range l.Aliases {
		args = append(args, "--alias", alias)
	}
	for _, f := range [][2]string{{"--ip", l.Address.IP}, {"--ip6", l.Address.IP6}, {"--mac-address", l.Address.MAC}} {
		if f[1] != "" {
			args = append(args, f[0], f[1])
		}
	}
	return append(args, name, id)
}

// asked returns the part of an address that was requested by the command that made the container.
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
