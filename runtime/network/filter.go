package network

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/eventlog"
	"github.com/agentbox/agentbox/runtime/network/egress"
)

// proxyVersion is the version of the protocol between Serve and its clients. A process of
// another version is replaced.
const proxyVersion = 1

// proxyWait is how long a verb waits for the process to start or to answer.
const proxyWait = 10 * time.Second

// proxyCommand makes the process that calls Serve.
type proxyCommand struct {
	make  func() *exec.Cmd
	start func(*exec.Cmd) error
}

// UseProxy sets how the process that calls Serve is made and started. Without it there is no
// network mode filtered.
func (m *Manager) UseProxy(command func() *exec.Cmd, start func(*exec.Cmd) error) {
	m.proxy = proxyCommand{command, start}
}

// proxyDir has the process's control socket, lock and messages.
func (m *Manager) proxyDir() string { return filepath.Join(m.run, "egress") }

// EventsDir returns the eventlog directory of denials, each an egress.Event.
func (m *Manager) EventsDir() string { return filepath.Join(m.root, "egress") }

func (m *Manager) forgetEvents(id string) error {
	err := eventlog.Remove(m.EventsDir(), id)
	if _, e := os.Lstat(m.proxyDir()); e != nil { // else the worker may write to it
		_ = os.Remove(m.EventsDir()) // if it was the last
	}
	return err
}

// clearProxy removes what a process leaves that ends, or has ended.
func (m *Manager) clearProxy() error {
	err := os.RemoveAll(m.proxyDir())
	_ = os.Remove(m.EventsDir()) // if nothing is in it
	return err
}

// proxyReply is the answer of the process.
type proxyReply struct {
	Version int                         `json:"version"`
	Error   string                      `json:"error,omitempty"`
	Gates   map[netip.Addr]egress.Ports `json:"gates,omitempty"`
	Ends    bool                        `json:"ends,omitempty"` // no sandbox needs it any more
}

// startFilter makes the process serve what the state says, and starts it if
// need be. The state is saved and the sandbox's namespace there.
func (v *verb) startFilter(ctx context.Context) error {
	m := v.m
	if m.proxy.make == nil {
		return fmt.Errorf("network mode filtered: no backend here starts its proxy: %w", fault.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, proxyWait)
	defer cancel()
	reply, err := m.tell(ctx, "update")
	if err == nil && reply.Version != proxyVersion {
		if _, err = m.tell(ctx, "end"); err == nil {
			err = unix.ECONNREFUSED
		}
	}
	if noProxy(err) {
		if err = m.startProxy(ctx); err == nil {
			reply, err = m.tell(ctx, "update")
		}
	}
	if err == nil && reply.Error != "" {
		err = errors.New(reply.Error)
	}
	if err != nil {
		return fmt.Errorf("the proxy of filtered sandboxes: %w", err)
	}
	return v.setGates(reply.Gates)
}

// noProxy reports whether a request failed because no proxy runs.
func noProxy(err error) bool {
	return errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, os.ErrNotExist)
}

// setGates records where the proxy listens.
func (v *verb) setGates(gates map[netip.Addr]egress.Ports) error {
	changed := false
	for i := range v.state.Bridges {
		b := &v.state.Bridges[i]
		if p, ok := gates[b.gateway()]; ok && (b.Proxy == nil || *b.Proxy != p) {
			b.Proxy, changed = &p, true
		}
	}
	if changed {
		return v.save()
	}
	return nil
}

// SetEgress gives a filtered sandbox other rules, at once if it is up. A
// sandbox that never was up gets those of its next Setup.
func (m *Manager) SetEgress(ctx context.Context, id string, rules []string) error {
	if err := validate(id, runtime.Network{Mode: runtime.NetworkFiltered, Egress: rules}); err != nil {
		return err
	}
	v, err := m.begin(ctx)
	if err != nil {
		return fmt.Errorf("egress rules of %s: %w", id, err)
	}
	defer v.end()
	le := v.state.Sandboxes[id]
	if le == nil || !le.Filtered {
		return nil
	}
	le.Egress = rules
	if err := v.save(); err != nil {
		return fmt.Errorf("egress rules of %s: %w", id, err)
	}
	if !isNamespace(m.namespace(id)) {
		return nil
	}
	if err := v.startFilter(ctx); err != nil {
		return fmt.Errorf("egress rules of %s: %w", id, err)
	}
	return v.applyRules() // for a proxy that had to be started
}

// endFilter notifies the process that a sandbox is gone; it may have been the last. A process
// that misses the notice finds out by itself.
func (v *verb) endFilter() {
	if _, err := os.Lstat(v.m.proxyDir()); err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), proxyWait)
	defer cancel()
	_, _ = v.m.tell(ctx, "update")
}

// Revive starts the process again if it is needed and dead, and reports whether
// it was. It costs little where it is not.
func (m *Manager) Revive(ctx context.Context) (dead bool, err error) {
	if _, err := os.Lstat(m.proxyDir()); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*proxyWait)
	defer cancel()
	if _, err := m.tell(ctx, "ping"); err == nil {
		return false, nil
	}
	v, err := m.begin(ctx)
	if err != nil {
		return false, fmt.Errorf("revive the proxy of filtered sandboxes: %w", err)
	}
	defer v.end()
	if !v.filtering() {
		return false, m.clearProxy()
	}
	if _, err := m.tell(ctx, "ping"); err == nil {
		return false, nil // the previous holder of the lock has done it
	}
	return true, errors.Join(v.startFilter(ctx), v.applyRules())
}

// filtering reports whether a filtered sandbox is up.
func (v *verb) filtering() bool { return v.m.filtering(v.state) }

func (m *Manager) filtering(s *state) bool {
	for id, le := range s.Sandboxes {
		if le.Filtered && isNamespace(m.namespace(id)) {
			return true
		}
	}
	return false
}

// control is the address of the process's socket, which is too long for one.
func (m *Manager) control() (address string, dir *os.File, err error) {
	dir, err = os.OpenFile(m.proxyDir(), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/control", dir.Fd()), dir, nil
}

// tell sends a word to the process and returns its answer.
func (m *Manager) tell(ctx context.Context, word string) (r proxyReply, err error) {
	address, dir, err := m.control()
	if err != nil {
		return r, err
	}
	defer dir.Close()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", address)
	if err != nil {
		return r, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.WriteString(c, word+"\n"); err != nil {
		return r, err
	}
	err = json.NewDecoder(io.LimitReader(c, 1<<20)).Decode(&r)
	if ctx.Err() != nil {
		err = fmt.Errorf("it does not answer: %w", ctx.Err())
	} else if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
		err = unix.ECONNREFUSED // it has just ended
	}
	return r, err
}

// startProxy returns when the process listens on its control socket.
func (m *Manager) startProxy(ctx context.Context) error {
	if err := errors.Join(os.MkdirAll(m.proxyDir(), 0o700), os.MkdirAll(m.EventsDir(), 0o700)); err != nil {
		return err
	}
	said, err := os.OpenFile(filepath.Join(m.proxyDir(), "log"),
		os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer said.Close()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	defer theirs.Close()
	cmd := m.proxy.make()
	cmd.Dir, cmd.Stderr, cmd.ExtraFiles = "/", said, []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := m.proxy.start(cmd); err != nil {
		return err
	}
	guard.Start(cmd.Wait) // it outlives us, or its log has the reason
	if err := theirs.Close(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := bufio.NewReader(ready).ReadByte(); err != nil {
		text, _ := io.ReadAll(io.NewSectionReader(said, 0, 4096))
		if t := strings.TrimSpace(string(text)); t != "" {
			return fmt.Errorf("it did not start: %s", t)
		}
		return fmt.Errorf("it did not start: %w", err)
	}
	return nil
}
