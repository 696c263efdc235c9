package network

import (
	"errors"
	"io"
	"net/netip"
	"os"
	"strings"
)

// resolvers fills in what the sandbox's resolv.conf should say. With local
// set, the sandbox is in the host's own network and loopback is as good there.
func (m *Manager) resolvers(e *Endpoint, local bool) {
	var loopback bool
	var failed error
	for _, path := range m.resolv {
		conf, err := readResolv(path)
		if err != nil {
			if !errors.Is(err, os.ErrNotExist) {
				failed = err
			}
			continue
		}
		// The first file's words on searching hold, also when its only
		// resolver is one on loopback: that file merely says where to ask.
		if e.Search == nil {
			e.Search = conf.search
		}
		if e.Options == nil {
			e.Options = conf.options
		}
		for _, s := range conf.nameservers {
			switch usable, loop := reachable(s); {
			case local, usable:
				e.Nameservers = append(e.Nameservers, s)
			case loop:
				loopback = true
			}
		}
		if len(e.Nameservers) > 0 {
			return
		}
	}
	if local {
		return
	}
	switch {
	case failed != nil:
		e.Warnings = append(e.Warnings, "Names cannot be resolved in the sandbox: "+failed.Error()+".")
	case loopback:
		e.Warnings = append(e.Warnings,
			"Names cannot be resolved in the sandbox: all of the host's resolvers listen on its loopback only. Name another in /etc/resolv.conf.")
	default:
		e.Warnings = append(e.Warnings,
			"Names cannot be resolved in the sandbox: the host has no IPv4 resolver in /etc/resolv.conf.")
	}
}

// reachable reports whether a sandbox on a bridge, which has only IPv4, can ask
// this resolver, and whether it is one on the host's loopback.
func reachable(server string) (usable, loop bool) {
	a, err := netip.ParseAddr(server)
	if err != nil {
		return false, false
	}
	a = a.Unmap()
	return a.Is4() && !a.IsLoopback() && !a.IsUnspecified(), a.IsLoopback() || a.IsUnspecified()
}

type resolvConf struct{ nameservers, search, options []string }

func readResolv(path string) (resolvConf, error) {
	var c resolvConf
	f, err := os.Open(path)
	if err != nil {
		return c, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return c, err
	}
	for line := range strings.Lines(string(b)) {
		w := strings.Fields(line)
		if len(w) < 2 || w[0][0] == '#' || w[0][0] == ';' {
			continue
		}
		switch w[0] {
		case "nameserver":
			if _, err := netip.ParseAddr(w[1]); err == nil {
				c.nameservers = append(c.nameservers, w[1])
			}
		case "search", "domain":
			c.search = w[1:] // the last line counts
		case "options":
			c.options = append(c.options, w[1:]...)
		}
	}
	return c, nil
}
