// Package network makes and keeps the network of each sandbox.
//
// A sandbox's network namespace is pinned by a bind mount at RUN/ID/netns, so
// it outlives the processes in it: the OCI runtime is given the path, a
// checkpoint does not have to dump the namespace, and a restore finds the same
// address again. There are four modes.
//
//	none    an own namespace in which only lo is up
//	host    no namespace; the sandbox shares the host's network
//	bridge  eth0, one end of a veth pair whose other end is a port of a bridge
//	        of this root; a fixed IPv4 address, a default route through the
//	        bridge, masquerading to the outside, published ports from outside
//	filtered  as bridge, but what the sandbox sends ends at a proxy and a
//	        resolver of this root, which let it reach what its rules allow
//
// # What reaches what in bridge mode
//
//   - Sandboxes without a group reach none of the others: their bridge ports
//     are isolated from each other, and the host forwards nothing between them.
//   - Sandboxes of one group share a bridge of their own and reach each other.
//     Nothing is forwarded between the bridges of different groups.
//   - A sandbox reaches the outside, and services of the host that listen on
//     any of its addresses but loopback, as under Docker. A host firewall that
//     filters INPUT applies.
//   - A published port is open to any client outside that can reach the host
//     address it is published on: other machines and the host itself, 127.0.0.1
//     included. Publish on 127.0.0.1 to keep all but the host out. Sandboxes
//     reach it only within its group; here Docker is more generous.
//   - Nothing else from outside is forwarded to a sandbox, even when a
//     neighbour of the host routes the subnet to it.
//   - A sandbox can send only from its own address: the host drops what comes
//     from another one, its address resolution for sandboxes is fixed, and
//     bridge ports are locked to the sandbox's MAC where the kernel can
//     (5.18 and later).
//   - IPv6 is disabled on eth0 and on the bridge. lo has ::1.
//
// # What leaves a filtered sandbox
//
// The rules lead its TCP to the proxy and its DNS to the resolver, which listen
// on the bridge's address, and drop all else that it begins; what they drop
// they note in a set, from which the proxy's process makes events. They are in
// force before the sandbox's link is up. Package egress judges. While its
// process is dead the ports are closed: nothing leaves. The next verb of any sandbox
// starts it again. It ends when the last filtered sandbox is removed, or half a
// minute to a minute after it was stopped: a restore may bring back connections.
//
// # How data flows
//
// ROOT/network.json says which bridges this root has, with their subnets, and
// which sandbox owns which address and wants which ports. It is written,
// durably, before the kernel is asked for anything, so whatever is in the
// kernel has an owner that List knows. A sandbox is up when its namespace is
// mounted; that is read from the kernel, never stored. Every verb makes links
// and rules from these two and so repairs what an interrupted one left. All
// verbs hold a lock on ROOT/network.lock, except Isolate, which must not wait.
// Subnets are chosen under a lock on the host's network namespace itself,
// because several roots share it.
//
// Rules live in one nftables table per root. Beside Docker, or any other
// firewall that drops forwarded packets in the table "ip filter", accept rules
// are put where that firewall looks for them (chain DOCKER-USER if there is
// one); see firewall.go. net.ipv4.ip_forward is switched on when it is off,
// and stays on, since others may have come to rely on it meanwhile.
package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/network/egress"
)

// DefaultRoot is the root whose bridges and table have the plain names
// agentbox0, agentbox1, ... and agentbox.
const DefaultRoot = "/var/lib/agentbox"

// bridgePrefixes are the prefixes of the names of all roots' bridges.
var bridgePrefixes = []string{"agentbox", "abx"}

// Manager makes and keeps the networks of one root's sandboxes. Several
// processes may each have one for the same root, and several roots may exist
// on one host.
type Manager struct {
	root, run string
	tag       string // identifies the root among others, in 12 hex digits
	bridge    string // what this root's bridge names begin with
	table     string // this root's nftables table

	resolv []string // files with the host's resolvers, most general first
	proxy  proxyCommand
}

// Endpoint is a sandbox's place in the network.
type Endpoint struct {
	Path        string       // of the namespace, for the OCI runtime; empty in host mode
	Address     netip.Addr   // bridge mode only, as are Gateway, Prefix and MAC
	Gateway     netip.Addr   // the host's address on the bridge
	Prefix      netip.Prefix // the bridge's subnet, host bits zero
	MAC         string       // of eth0
	Nameservers []string     // the host's resolvers that the sandbox can reach; none in mode none
	Search      []string     // the host's search domains
	Options     []string     // the host's resolver options
	Warnings    []string     // full sentences for the user
}

// Open returns the Manager for the state in root and the namespaces under run.
// It changes nothing but that root exists afterwards.
func Open(root, run string) (*Manager, error) {
	root, run = filepath.Clean(root), filepath.Clean(run)
	if !filepath.IsAbs(root) || !filepath.IsAbs(run) {
		return nil, fmt.Errorf("network: root %q and run %q must be absolute: %w", root, run, fault.ErrInvalid)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	// One root must have one tag, whichever way its path is spelled.
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	usual, err := filepath.EvalSymlinks(DefaultRoot)
	if err != nil {
		usual = DefaultRoot
	}
	sum := sha256.Sum256([]byte(real))
	m := &Manager{
		root: root, run: run,
		tag:    hex.EncodeToString(sum[:6]),
		bridge: bridgePrefixes[0],
		table:  "agentbox",
		resolv: []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"},
	}
	if real != usual {
		m.bridge = bridgePrefixes[1] + m.tag[:6] + "-"
		m.table = "agentbox_" + m.tag
	}
	return m, nil
}

// veth is the name of the host's end of id's veth pair. It follows from root
// and id alone, so that it can be found when the state cannot.
func (m *Manager) veth(id string) string {
	sum := sha256.Sum256([]byte(m.tag + "/" + id))
	return "abv" + hex.EncodeToString(sum[:6])
}

func (m *Manager) alias(id string) string { return "agentbox " + m.tag + " " + id }

func (m *Manager) namespace(id string) string { return filepath.Join(m.run, id, "netns") }

// Setup gives a sandbox its network and returns where it is. It is idempotent
// and completes or replaces what an interrupted call left. On error, all that
// this call made is gone again.
//
// A sandbox keeps its address and MAC until Release. After Isolate, Setup
// makes a new namespace: the old one still holds the connections that must
// not be heard of again.
func (m *Manager) Setup(ctx context.Context, id string, n runtime.Network) (Endpoint, error) {
	return m.setup(ctx, id, n, setup{connect: true})
}

// Prepare is Setup, but the sandbox stays cut off until Connect. It is for
// restoring connections: a peer that sends into the namespace before its
// socket is back there would be answered with a reset.
func (m *Manager) Prepare(ctx context.Context, id string, n runtime.Network) (Endpoint, error) {
	return m.setup(ctx, id, n, setup{})
}

// Reserve is the half of Prepare that can be done before there is a namespace:
// it returns where the sandbox will be. Then Fill does the rest.
func (m *Manager) Reserve(ctx context.Context, id string, n runtime.Network) (Endpoint, error) {
	return m.setup(ctx, id, n, setup{reserve: true})
}

// Fill is Prepare in a given namespace, as the OCI runtime makes one for a sandbox in a user
// namespace: the network namespace has to belong to that user namespace.
func (m *Manager) Fill(ctx context.Context, id string, n runtime.Network, ns *os.File) (Endpoint, error) {
	return m.setup(ctx, id, n, setup{ns: ns})
}

// setup says how far a set-up goes.
type setup struct {
	connect bool
	reserve bool     // without a namespace
	ns      *os.File // this one
}

func (m *Manager) setup(ctx context.Context, id string, n runtime.Network, how setup) (e Endpoint, err error) {
	if n.Mode == "" {
		n.Mode = runtime.NetworkBridge
	}
	if err := validate(id, n); err != nil {
		return Endpoint{}, err
	}
	v, err := m.begin(ctx)
	if err != nil {
		return Endpoint{}, fmt.Errorf("network of %s: %w", id, err)
	}
	defer v.end()
	defer func() {
		if err != nil {
			err = fmt.Errorf("network of %s: %w", id, err)
		}
	}()

	old := v.state.Sandboxes[id]
	if old != nil && (!onBridge(n.Mode) || old.Group != n.Group) {
		if err := v.release(id); err != nil {
			return Endpoint{}, err
		}
		old = nil
	}
	if how.reserve || how.ns != nil {
		// It is left from an earlier start.
		if err := v.teardown(id); err != nil {
			return Endpoint{}, err
		}
	}
	had := isNamespace(m.namespace(id))
	defer func() {
		if err == nil {
			return
		}
		switch {
		case old == nil && !had:
			err = errors.Join(err, v.release(id))
		case !had:
			err = errors.Join(err, v.teardown(id))
		}
	}()

	switch n.Mode {
	case runtime.NetworkHost:
		if had {
			if err := v.teardown(id); err != nil {
				return Endpoint{}, err
			}
		}
		m.resolvers(&e, true)
		return e, nil
	case runtime.NetworkNone:
		if how.reserve {
			return e, nil
		}
		e.Path = m.namespace(id)
		return e, v.makeNamespace(id, how.ns)
	default:
		return v.join(ctx, id, n, how)
	}
}

// join puts the sandbox on its bridge.
func (v *verb) join(ctx context.Context, id string, n runtime.Network, how setup) (e Endpoint, err error) {
	m := v.m
	if v.isolated(id) {
		// The sockets in there would go on sending what Isolate silenced.
		if err := v.teardown(id); err != nil {
			return e, err
		}
	}
	if err := v.claimPorts(id, n.Ports); err != nil {
		return e, err
	}
	unlock, err := v.reserve(ctx, id, n)
	if err != nil {
		return e, err
	}
	defer unlock()
	if err := failpoint.Hit("network.setup.after-reserve"); err != nil {
		return e, err
	}
	lease := v.state.Sandboxes[id]
	br := v.state.bridge(lease.Bridge)
	e = Endpoint{
		Path:    m.namespace(id),
		Address: lease.Address,
		Gateway: br.gateway(),
		Prefix:  br.Subnet,
		MAC:     mac(lease.Address).String(),
	}
	if lease.Filtered {
		e.Nameservers = []string{e.Gateway.String()}
	} else {
		m.resolvers(&e, false)
	}

	if err := v.ensureBridge(br, len(lease.Ports) > 0); err != nil {
		return e, err
	}
	unlock()
	if err := failpoint.Hit("network.setup.after-bridge"); err != nil {
		return e, err
	}
	if how.reserve {
		e.Path = ""
		return e, nil
	}
	if err := v.makeNamespace(id, how.ns); err != nil {
		return e, err
	}
	if err := failpoint.Hit("network.setup.after-netns"); err != nil {
		return e, err
	}
	link, err := v.ensureVeth(id, lease, br)
	if err != nil {
		return e, err
	}
	if err := failpoint.Hit("network.setup.after-veth"); err != nil {
		return e, err
	}
	if lease.Filtered {
		if err := v.startFilter(ctx); err != nil {
			return e, err
		}
	}
	if err := v.applyRules(); err != nil {
		return e, err
	}
	_, warnings, err := v.openFirewall()
	if err != nil {
		return e, err
	}
	e.Warnings = append(e.Warnings, warnings...)
	if err := enableForwarding(); err != nil {
		return e, err
	}
	if err := failpoint.Hit("network.setup.after-rules"); err != nil {
		return e, err
	}
	// Last: not a packet passes before all of the above is in force.
	if !how.connect {
		return e, v.down(link)
	}
	return e, v.up(link)
}

// Isolate cuts a sandbox off its network at once: packets its processes send from now on,
// those that close its connections included, are lost. It affects bridge mode only, waits
// for no lock, and is undone by Connect or, with a new namespace, by Setup. A sandbox
// without a network is no error.
func (m *Manager) Isolate(ctx context.Context, id string) error {
	if err := validID(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := m.setLink(id, false); err != nil {
		return fmt.Errorf("isolate %s from the network: %w", id, err)
	}
	return nil
}

// Connect ends what Prepare and Isolate do. A sandbox without a bridge is no error.
func (m *Manager) Connect(ctx context.Context, id string) error {
	if err := validID(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := m.setLink(id, true); err != nil {
		return fmt.Errorf("connect %s to the network: %w", id, err)
	}
	return nil
}

// Teardown removes a sandbox's namespace, veth pair and published ports; its
// address stays reserved. It is idempotent. After an error it may be called
// again; the steps that could be done are done.
func (m *Manager) Teardown(ctx context.Context, id string) error {
	return m.remove(ctx, id, (*verb).teardown)
}

// Release does what Teardown does and gives the address back. The last sandbox
// of a bridge takes the bridge along, the last one of a root its rules and
// state file. It is idempotent, as Teardown is.
func (m *Manager) Release(ctx context.Context, id string) error {
	return m.remove(ctx, id, (*verb).release)
}

func (m *Manager) remove(ctx context.Context, id string, how func(*verb, string) error) error {
	if err := validID(id); err != nil {
		return err
	}
	v, err := m.begin(ctx)
	if errors.Is(err, fault.ErrCorrupt) {
		// The owners of the rules are unknown now, but the sandbox can be unplugged.
		err = errors.Join(err, m.unplug(id))
	}
	if err != nil {
		return fmt.Errorf("network of %s: %w", id, err)
	}
	defer v.end()
	if err := how(v, id); err != nil {
		return fmt.Errorf("network of %s: %w", id, err)
	}
	return nil
}

// unplug does the part of Teardown that needs no state.
func (m *Manager) unplug(id string) error {
	h, err := openHost()
	if err != nil {
		return err
	}
	defer h.Close()
	return errors.Join(h.deleteLink(m.veth(id)), dropNamespace(m.namespace(id)))
}

func (v *verb) teardown(id string) error {
	// The veth goes first and by name: a namespace lives as long as anything
	// uses it, and dies some time after, with all that is in it.
	errs := []error{v.host.deleteLink(v.m.veth(id))}
	if err := failpoint.Hit("network.teardown.after-veth"); err != nil {
		return err
	}
	errs = append(errs, dropNamespace(v.m.namespace(id)))
	if err := failpoint.Hit("network.teardown.after-netns"); err != nil {
		return err
	}
	if v.state.Sandboxes[id] != nil {
		errs = append(errs, v.applyRules())
	}
	v.endFilter()
	return errors.Join(errs...)
}

func (v *verb) release(id string) error {
	lease := v.state.Sandboxes[id]
	if lease == nil {
		err := v.teardown(id)
		v.tidy(id)
		return errors.Join(err, v.m.forgetEvents(id))
	}
	// The next owner of the address must not get what was meant for this one.
	// It takes as long as all the rest and depends on none of it.
	forgotten := make(chan struct{})
	guard.Go(func() { defer close(forgotten); forgetFlows(lease.Address) })
	defer func() { <-forgotten }()
	// Links and namespace now, rules below, once for both.
	errs := []error{v.host.deleteLink(v.m.veth(id)), dropNamespace(v.m.namespace(id))}
	delete(v.state.Sandboxes, id)
	if v.state.empty(lease.Bridge) {
		errs = append(errs, v.host.deleteLink(lease.Bridge))
		v.state.Bridges = slices.DeleteFunc(v.state.Bridges, func(b bridge) bool { return b.Name == lease.Bridge })
	} else {
		errs = append(errs, v.host.forgetNeighbour(lease))
	}
	if err := failpoint.Hit("network.release.after-links"); err != nil {
		return err
	}
	if len(v.state.Bridges) == 0 {
		errs = append(errs, v.dropRules())
	} else {
		errs = append(errs, v.applyRules())
	}
	if err := failpoint.Hit("network.release.before-save"); err != nil {
		return err
	}
	if err := errors.Join(errs...); err != nil {
		// Still reserved on disk, so that the next Release tries again.
		v.state.Sandboxes[id] = lease
		return err
	}
	err := v.save()
	v.endFilter()
	v.tidy(id)
	return errors.Join(err, v.m.forgetEvents(id))
}

// tidy removes the sandbox's directory in run if it is empty.
func (v *verb) tidy(id string) {
	_ = os.Remove(filepath.Dir(v.m.namespace(id)))
}

// List returns the ids, sorted, of which anything is left: an address, a
// namespace, or a link in the kernel.
func (m *Manager) List(ctx context.Context) ([]string, error) {
	v, err := m.begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	defer v.end()
	found := map[string]bool{}
	for id := range v.state.Sandboxes {
		found[id] = true
	}
	entries, err := os.ReadDir(m.run)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	for _, e := range entries {
		if _, err := os.Lstat(m.namespace(e.Name())); err == nil {
			found[e.Name()] = true
		}
	}
	links, err := v.host.links()
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	for _, l := range links {
		if id, ok := strings.CutPrefix(l.Attrs().Alias, m.alias("")); ok && validID(id) == nil {
			found[id] = true
		}
	}
	ids := make([]string, 0, len(found))
	for id := range found {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids, nil
}

// onBridge reports whether a mode puts sandboxes on a bridge.
func onBridge(mode string) bool {
	return mode == runtime.NetworkBridge || mode == runtime.NetworkFiltered
}

func validID(id string) error {
	bad := func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '-' && r != '_' && r != '.'
	}
	if id == "" || len(id) > 128 || id[0] == '.' || strings.ContainsFunc(id, bad) {
		return fmt.Errorf("network: %q is not a sandbox id: %w", id, fault.ErrInvalid)
	}
	return nil
}

func validate(id string, n runtime.Network) error {
	if err := validID(id); err != nil {
		return err
	}
	switch n.Mode {
	case runtime.NetworkNone, runtime.NetworkHost:
		if n.Group != "" || len(n.Ports) > 0 || len(n.Egress) > 0 {
			return fmt.Errorf("network mode %s has no groups, published ports or egress rules: %w",
				n.Mode, fault.ErrInvalid)
		}
		return nil
	case runtime.NetworkBridge:
		if len(n.Egress) > 0 {
			return fmt.Errorf("network mode %s has no egress rules: %w", n.Mode, fault.ErrInvalid)
		}
	case runtime.NetworkFiltered:
		if n.Group != "" {
			return fmt.Errorf("a filtered sandbox is in no network group: %w", fault.ErrInvalid)
		}
		if _, err := egress.ParseRules(n.Egress); err != nil {
			return err
		}
	default:
		return fmt.Errorf("network mode %q: want none, host, bridge or filtered: %w", n.Mode, fault.ErrInvalid)
	}
	if len(n.Group) > 128 {
		return fmt.Errorf("network group: %d bytes are too many, 128 is the limit: %w", len(n.Group), fault.ErrInvalid)
	}
	return validPorts(n.Ports)
}
