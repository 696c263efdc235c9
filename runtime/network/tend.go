package network

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
)

// Plugged lists the sandboxes of this root of which there is a link.
func (m *Manager) Plugged(context.Context) (ids []string, err error) {
	h, err := openHost()
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	defer h.Close()
	links, err := h.links()
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	for _, l := range links {
		if id, ok := strings.CutPrefix(l.Attrs().Alias, m.alias("")); ok && validID(id) == nil {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Tend removes bridges and rules of this root that no sandbox needs, and restores those that
// sandboxes need if another program removed them or a firewall was started. It returns a
// sentence per action.
func (m *Manager) Tend(ctx context.Context) (did []string, err error) {
	if _, err := os.Lstat(filepath.Join(m.root, "network.lock")); errors.Is(err, os.ErrNotExist) {
		return nil, nil // there never was one
	}
	v, err := m.begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("tend networks: %w", err)
	}
	defer v.end()
	links, err := v.host.links()
	if err != nil {
		return nil, fmt.Errorf("tend networks: %w", err)
	}
	var errs []error
	for _, l := range links {
		name := l.Attrs().Name
		number, ours := strings.CutPrefix(name, m.bridge)
		if _, isBridge := l.(*netlink.Bridge); !isBridge || !ours || number == "" ||
			strings.Trim(number, "0123456789") != "" || v.state.bridge(name) != nil {
			continue
		}
		if slices.ContainsFunc(links, func(port netlink.Link) bool {
			return port.Attrs().MasterIndex == l.Attrs().Index
		}) {
			continue // whatever is on it, we did not record it
		}
		if err := v.host.deleteLink(name); err != nil {
			errs = append(errs, err)
			continue
		}
		did = append(did, fmt.Sprintf("removed the bridge %s, which no sandbox has", name))
	}
	there, err := v.hasTable()
	if err != nil {
		return did, errors.Join(append(errs, err)...)
	}
	up := slices.ContainsFunc(slices.Collect(maps.Keys(v.state.Sandboxes)), func(id string) bool {
		return isNamespace(m.namespace(id))
	})
	switch {
	case there && len(v.state.Bridges) == 0:
		if err := v.dropRules(); err != nil {
			errs = append(errs, err)
			break
		}
		did = append(did, "removed the rules of the network, which no sandbox has")
	case !there && up:
		if err := v.applyRules(); err != nil {
			errs = append(errs, err)
			break
		}
		did = append(did, "restored the rules of the network, which had been removed")
	}
	if up {
		// A firewall may have been started or reloaded.
		added, _, err := v.openFirewall() // what it warns of, the sandbox's start has said
		if added {
			did = append(did, "let the sandboxes through the host's firewall again")
		}
		errs = append(errs, err)
	}
	return did, errors.Join(errs...)
}

// Leave takes off the host what is there for sandboxes that do not run: bridges,
// rules, the process behind filtered ones. It keeps their addresses, and the next
// start of one makes all of that again, as after a boot. While any of them has its
// namespace it does nothing and returns false. It is idempotent.
func (m *Manager) Leave(ctx context.Context) (left bool, err error) {
	if _, err := os.Lstat(filepath.Join(m.root, "network.lock")); errors.Is(err, os.ErrNotExist) {
		return true, nil // there never was one
	}
	v, err := m.begin(ctx)
	if err != nil {
		return false, fmt.Errorf("leave the host's network: %w", err)
	}
	defer v.end()
	for id := range v.state.Sandboxes {
		if isNamespace(m.namespace(id)) {
			return false, nil
		}
	}
	var errs []error
	if _, err := os.Lstat(m.proxyDir()); err == nil {
		ctx, cancel := context.WithTimeout(ctx, proxyWait)
		defer cancel()
		if _, err := m.tell(ctx, "end"); err != nil && !noProxy(err) {
			errs = append(errs, fmt.Errorf("end the proxy of filtered sandboxes: %w", err))
		}
	}
	for _, b := range v.state.Bridges {
		errs = append(errs, v.host.deleteLink(b.Name))
	}
	if err := errors.Join(append(errs, v.dropRules())...); err != nil {
		return false, fmt.Errorf("leave the host's network: %w", err)
	}
	return true, nil
}

// hasTable reports whether this root has a table of rules.
func (v *verb) hasTable() (bool, error) {
	c, err := v.openTables()
	if err != nil {
		return false, err
	}
	tables, err := dump(func() ([]*nftables.Table, error) { return c.ListTablesOfFamily(nftables.TableFamilyIPv4) })
	if err != nil {
		return false, nil // a kernel without nftables has none
	}
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == v.m.table }), nil
}
