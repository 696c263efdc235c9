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
	"strconv"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
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

// filters tells whether any sandbox is filtered.
func (s *state) filters() bool {
	for _, l := range s.Sandboxes {
		if l.Filtered {
			return true
		}
	}
	return false
}

// free returns an address of b that nobody has. It goes round, so that an
// address rests for as long as possible before it has another owner.
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

// check refuses a state that this code would not have written; everything
// behind it may rely on that.
func (s *state) check() error {
	names := map[string]bool{}
	for _, b := range s.Bridges {
		if b.Name == "" || len(b.Name) >= unix.IFNAMSIZ || names[b.Name] {
			return fmt.Errorf("bridge name %q", b.Name)
		}
		names[b.Name] = true
		if !b.Subnet.Addr().Is4() || b.Subnet.Bits() != 24 || b.Subnet != b.Subnet.Masked() {
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
		return syncDir(v.m.root)
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
	// left is overwritten by the next save.
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return syncDir(v.m.root)
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// verb is one call that may change things: the lock, the state as it was when
// the lock was taken, and the sockets to the kernel.
type verb struct {
	m      *Manager
	state  *state
	host   *handle
	tables *nftables.Conn // opened when first needed
	lock   *os.File
}

// begin waits for the lock and reads the state.
func (m *Manager) begin(ctx context.Context) (*verb, error) {
	lock, err := flock(ctx, filepath.Join(m.root, "network.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW)
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
	v.lock.Close() // which unlocks it
	if v.host != nil {
		v.host.Close()
	}
	if v.tables != nil {
		// Closing this socket waits, some 10 ms, until the kernel has freed
		// what the last transaction removed. Nobody else has to wait for that.
		guard.Start(v.tables.CloseLasting)
	}
}

// flock opens path and waits until it is locked for this open file alone.
func flock(ctx context.Context, path string, flag int) (*os.File, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, flag|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	locked := guard.Start(func() error {
		for {
			if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != unix.EINTR {
				return err
			}
		}
	})
	select {
	case err := <-locked:
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		return f, nil
	case <-ctx.Done():
		// flock(2) cannot be called off: let it have the lock, then drop it.
		guard.Go(func() { <-locked; f.Close() })
		return nil, fmt.Errorf("lock %s: %w: %w", path, fault.ErrBusy, ctx.Err())
	}
}
