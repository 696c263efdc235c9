package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/network/egress"
)

const (
	stateVersion = 1
	// filterVersion keeps programs away that would let filtered sandboxes out.
	filterVersion = 2
	stateLimit    = 64 << 20 // a root with 100,000 sandboxes needs a third of it
)

// state is ROOT/network.json.
type state struct {
	Version   int               `json:"version"`
	Bridges   []bridge          `json:"bridges"`
	Sandboxes map[string]*lease `json:"sandboxes"`
}

// bridge carries one group, or as many sandboxes without one as it has addresses.
type bridge struct {
	Name   string       `json:"name"`
	Group  string       `json:"group,omitempty"`
	Subnet netip.Prefix `json:"subnet"`         // always a /24
	Last   uint8        `json:"last,omitempty"` // last byte of the address given out last

	Proxy *egress.Ports `json:"proxy,omitempty"` // where filtered sandboxes are led to
}

// lease is a sandbox's claim to an address and to ports of the host.
type lease struct {
	Bridge  string         `json:"bridge"`
	Group   string         `json:"group,omitempty"`
	Address netip.Addr     `json:"address"`
	Ports   []runtime.Port `json:"ports,omitempty"`

	Filtered bool     `json:"filtered,omitempty"`
	Egress   []string `json:"egress,omitempty"` // all that it may reach, if it is filtered
}

func (b *bridge) gateway() netip.Addr { return b.Subnet.Addr().Next() }

func (s *state) bridge(name string) *bridge {
	for i := range s.Bridges {
		if s.Bridges[i].Name == name {
			return &s.Bridges[i]
		}
	}
	return nil
}

func (s *state) empty(bridge string) bool {
	for _, l := range s.Sandboxes {
		if l.Bridge == bridge {
			return false
		}
	}
	return true
}

// filters reports whether any sandbox is filtered.
func (s *state) filters() bool {
	for _, l := range s.Sandboxes {
		if l.Filtered {
			return true
		}
	}
	return false
}

// free returns an unassigned address of b. It goes round, so that an address rests for as
// long as possible before it is assigned again.
func (s *state) free(b *bridge) (netip.Addr, bool) {
	taken := map[netip.Addr]bool{}
	for _, l := range s.Sandboxes {
		taken[l.Address] = true
	}
	base := b.Subnet.Addr().As4()
	last := max(int(b.Last), 1)
	for i := range 253 {
		base[3] = byte(2 + (last-1+i)%253)
		if a := netip.AddrFrom4(base); !taken[a] {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// unused returns the first bridge name that is not taken.
func (s *state) unused(prefix string) string {
	for i := 0; ; i++ {
		if name := prefix + strconv.Itoa(i); s.bridge(name) == nil {
			return name
		}
	}
}

// bridgePattern is the form of the names of all roots' bridges: a root may have been moved.
var bridgePattern = lazy.Regexp(`^(agentbox|abx[0-9a-f]{6}-)[0-9]+$`)

// check refuses a state that this code would not have written; everything
// behind it may rely on that.
func (s *state) check() error {
	names := map[string]bool{}
	for _, b := range s.Bridges {
		// It is removed with its last sandbox: one of the host, or of another program, must not be.
		if !bridgePattern().MatchString(b.Name) || len(b.Name) >= unix.IFNAMSIZ || names[b.Name] {
			return fmt.Errorf("bridge name %.40q", b.Name)
		}
		names[b.Name] = true
		if !b.Subnet.Addr().Is4() || b.Subnet.Bits() != 24 || b.Subnet != b.Subnet.Masked() ||
			!slices.ContainsFunc(pools, func(p netip.Prefix) bool { return p.Contains(b.Subnet.Addr()) }) {
			return fmt.Errorf("subnet %s of bridge %s", b.Subnet, b.Name)
		}
	}
	owner := map[netip.Addr]string{}
	for id, l := range s.Sandboxes {
		if validID(id) != nil || l == nil || !names[l.Bridge] {
			return fmt.Errorf("sandbox %q has no bridge", id)
		}
		b := s.bridge(l.Bridge)
		if !b.Subnet.Contains(l.Address) || l.Group != b.Group {
			return fmt.Errorf("sandbox %s does not fit bridge %s", id, b.Name)
		}
		if o, ok := owner[l.Address]; ok {
			return fmt.Errorf("address %s belongs to both %s and %s", l.Address, o, id)
		}
		owner[l.Address] = id
		if err := validPorts(l.Ports); err != nil {
			return fmt.Errorf("sandbox %s: %w", id, err)
		}
		if _, err := egress.ParseRules(l.Egress); err != nil {
			return fmt.Errorf("sandbox %s: %w", id, err)
		}
	}
	return nil
}

func (m *Manager) statePath() string { return filepath.Join(m.root, "network.json") }

func (m *Manager) load() (*state, error) {
	s := &state{Version: stateVersion, Sandboxes: map[string]*lease{}}
	f, err := os.Open(m.statePath())
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, stateLimit+1))
	if err != nil {
		return nil, err
	}
	corrupt := func(why any) error {
		return &fault.Error{
			Op: "read", ID: m.statePath(), Err: fmt.Errorf("%w: %v", fault.ErrCorrupt, why),
			Hint: "Stop all sandboxes of this root and remove the file; their addresses are then assigned anew.",
		}
	}
	if len(data) > stateLimit {
		return nil, corrupt("too long")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(s); err != nil {
		return nil, corrupt(err)
	}
	if s.Version != stateVersion && s.Version != filterVersion {
		return nil, fmt.Errorf("%s has version %d, this program writes %d: %w",
			m.statePath(), s.Version, filterVersion, fault.ErrUnsupported)
	}
	if s.Sandboxes == nil {
		s.Sandboxes = map[string]*lease{}
	}
	if err := s.check(); err != nil {
		return nil, corrupt(err)
	}
	return s, nil
}

// save publishes the state; an empty one is no file.
func (v *verb) save() error {
	path := v.m.statePath()
	if len(v.state.Bridges) == 0 && len(v.state.Sandboxes) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return fsx.SyncDir(v.m.root)
	}
	v.state.Version = stateVersion
	if v.state.filters() {
		v.state.Version = filterVersion
	}
	data, err := json.MarshalIndent(v.state, "", "\t")
	if err != nil {
		return err
	}
	// The name is fixed because the lock is held: a temp file that a crash
	// left is replaced by the next save.
	return fsx.Write(path, append(data, '\n'), fsx.Options{Temp: path + ".tmp"})
}

// verb is one call that may change things: the lock, the state as it was when
// the lock was taken, and the sockets to the kernel.
type verb struct {
	m      *Manager
	state  *state
	host   *handle
	tables *nftables.Conn // opened when first needed
	lock   *flock.Handle
}

// begin waits for the lock and reads the state.
func (m *Manager) begin(ctx context.Context) (*verb, error) {
	lock, err := waitLock(ctx, filepath.Join(m.root, "network.lock"), 0)
	if err != nil {
		return nil, err
	}
	v := &verb{m: m, lock: lock}
	if v.state, err = m.load(); err == nil {
		v.host, err = openHost()
	}
	if err != nil {
		v.end()
		return nil, err
	}
	return v, nil
}

func (v *verb) end() {
	v.lock.Unlock()
	if v.host != nil {
		v.host.Close()
	}
	if v.tables != nil {
		// Closing this socket waits, some 10 ms, until the kernel has freed what the last
		// transaction removed. The caller does not have to wait for that.
		guard.Start(v.tables.CloseLasting)
	}
}

// waitLock waits for a lock. It is ErrBusy when the context ends meanwhile.
func waitLock(ctx context.Context, path string, how flock.How) (*flock.Handle, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l, err := flock.Lock(ctx, path, how)
	if err != nil && err == ctx.Err() {
		return nil, fmt.Errorf("lock %s: %w: %w", path, fault.ErrBusy, err)
	}
	return l, err
}
