package podman

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// memory is our record of one container: facts that Podman does not know.
type memory struct {
	Started time.Time `json:"started"`        // the start that we made; another's makes Env and Kept void
	Env     []string  `json:"env,omitempty"`  // what it was given, for processes that Exec adds
	Kept    []string  `json:"kept,omitempty"` // the managed files that it left as they were
	// Addresses are those that the container has had, the newest last.
	Addresses []addresses `json:"addresses,omitempty"`
	// Fixed are the addresses that Podman has been told to give it.
	Fixed map[string]address `json:"fixed,omitempty"`
	// Apart are the networks that it is being reconnected to. One left here by a verb that
	// was killed or failed may be connected or not.
	Apart map[string]link `json:"apart,omitempty"`
	// Managed are the managed files and their places on the host, which Podman reports from
	// the container's first start until the host goes down.
	Managed map[string]string `json:"managed,omitempty"`
}

// addresses are a container's in its networks, from a start on.
type addresses struct {
	Since    time.Time          `json:"since"`
	Networks map[string]address `json:"networks"`
}

type address struct {
	IP  string `json:"ip,omitempty"`
	IP6 string `json:"ip6,omitempty"`
	MAC string `json:"mac,omitempty"`
}

// link is how a container is to be connected to a network.
type link struct {
	Aliases []string `json:"aliases,omitempty"`
	Address address  `json:"address"` // zero: Podman chooses
	Fixed   bool     `json:"fixed,omitempty"`
}

// part notes what is about to be disconnected; false: it is noted.
func (m *memory) part(name string, to link) bool {
	if was, ok := m.Apart[name]; ok && reflect.DeepEqual(was, to) {
		return false
	}
	if m.Apart == nil {
		m.Apart = map[string]link{}
	}
	m.Apart[name] = to
	return true
}

// join notes what is connected again.
func (m *memory) join(name string, to link) {
	delete(m.Apart, name)
	delete(m.Fixed, name)
	if !to.Fixed {
		return
	}
	if m.Fixed == nil {
		m.Fixed = map[string]address{}
	}
	m.Fixed[name] = to.Address
}

// maxAddresses bounds the recorded addresses; a restore to an earlier time takes whatever address
// Podman gives.
const maxAddresses = 256

func (b *Backend) memoryFile(id string) string { return filepath.Join(b.root, id+".json") }

// remember loads the record of a container; one that cannot be read is empty.
func (b *Backend) remember(id string) (m memory) {
	err := record.ReadJSON(b.memoryFile(id), &m)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.log.Warn("container record lost", "sandbox", id, "err", err)
		return memory{}
	}
	return m
}

func (b *Backend) write(id string, m memory) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return record.Write(b.memoryFile(id), data, 0o600, true)
}

// note records a change; change reports whether there is one. It does not overwrite what
// other processes note of the container meanwhile.
func (b *Backend) note(id string, change func(*memory) bool) error {
	if m := b.remember(id); !change(&m) {
		return nil
	}
	// ROOT is not ours to make: where it is gone, nothing is to be left.
	if err := os.Mkdir(b.root, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return b.locked(func() error {
		m := b.remember(id)
		if !change(&m) {
			return nil
		}
		return b.write(id, m)
	})
}

// noteSeen is note for what a look at a container finds out: the container, or all of
// agentbox, may be removed meanwhile, and then there is nothing to note.
func (b *Backend) noteSeen(c container, change func(*memory) bool) error {
	err := b.note(c.id(), func(m *memory) bool { return !c.gone() && change(m) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// gone reports whether Podman has removed it.
func (c container) gone() bool {
	_, err := os.Stat(c.StaticDir)
	return c.StaticDir != "" && errors.Is(err, fs.ErrNotExist)
}

// locked runs f while no other process changes the records.
func (b *Backend) locked(f func() error) error {
	l, err := flock.Lock(context.Background(), b.root, flock.Dir)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return f()
}

// forget removes the record of a container that is gone; an earlier look may still hold the
// container.
func (b *Backend) forget(id string) error {
	err := b.locked(func() error { return os.Remove(b.memoryFile(id)) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// managed returns the managed files of a container. After a reboot Podman no longer knows their
// places, though it will make them there again.
func (b *Backend) managed(c container) map[string]string {
	files, told := c.managed()
	if told {
		return files
	}
	for target, source := range b.remember(c.id()).Managed {
		// Podman makes the directory at its first command.
		if info, err := os.Stat(filepath.Dir(source)); err == nil && info.IsDir() {
			files[target] = source
		}
	}
	return files
}

// noteManaged records where Podman has the managed files.
func (b *Backend) noteManaged(c container) error {
	files, told := c.managed()
	return b.noteSeen(c, func(m *memory) bool {
		if !told || maps.Equal(m.Managed, files) {
			return false
		}
		m.Managed = files
		return true
	})
}

// noteAddresses records the addresses of a live container.
func (b *Backend) noteAddresses(c container) error {
	if c.sharesNetwork() { // it has none of its own
		return nil
	}
	now := addresses{Since: c.State.StartedAt, Networks: map[string]address{}}
	for name, n := range c.NetworkSettings.Networks {
		if n.IPAddress != "" || n.GlobalIPv6Address != "" {
			now.Networks[name] = address{IP: n.IPAddress, IP6: n.GlobalIPv6Address, MAC: n.MacAddress}
		}
	}
	return b.noteSeen(c, func(m *memory) bool { return m.add(now) })
}

// add adds addresses; false: it has them.
func (m *memory) add(now addresses) bool {
	n := len(m.Addresses)
	if n == 0 && len(now.Networks) == 0 || n > 0 && reflect.DeepEqual(m.Addresses[n-1].Networks, now.Networks) {
		return false
	}
	if n > 0 && m.Addresses[n-1].Since.Equal(now.Since) { // connected to another one meanwhile
		m.Addresses[n-1] = now
		return true
	}
	m.Addresses = append(m.Addresses, now)
	if over := len(m.Addresses) - maxAddresses; over > 0 {
		m.Addresses = m.Addresses[over:]
	}
	return true
}

// at returns the addresses that the container had at a time.
func (m memory) at(t time.Time) map[string]address {
	for i := len(m.Addresses) - 1; i >= 0; i-- {
		if !m.Addresses[i].Since.After(t) {
			return m.Addresses[i].Networks
		}
	}
	return nil
}
