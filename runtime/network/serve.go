package network

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime/network/egress"
)

// readyFd is the descriptor on which the process that UseProxy makes reports that it listens.
const readyFd = 3

const (
	deniedEvery = 500 * time.Millisecond // how often the set of what was dropped is read
	idleEvery   = 30 * time.Second       // how often it asks itself whether it is needed; at the second no it ends
	memoryLimit = 256 << 20              // from which on the garbage collector works harder
)

// Serve is the life of the process behind all filtered sandboxes of a root. It returns when the
// last of them is removed, or some time after it was stopped; until then it obeys the words on
// its control socket:
//
//	update  read the state, and have the worker serve what it says
//	ping    nothing
//	end     end
//
// It starts itself once more for that worker, and again whenever that dies.
func (m *Manager) Serve(ctx context.Context) error {
	if os.Getenv(workerEnv) != "" {
		return m.work()
	}
	// Its end is the sandboxes', not a terminal's or a login's.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE, syscall.SIGQUIT)
	signal.Reset(syscall.SIGTERM)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	lock, err := flock.Try(filepath.Join(m.proxyDir(), "lock"), 0)
	if errors.Is(err, flock.ErrHeld) {
		return fmt.Errorf("another one serves this root: %w", err)
	}
	if err != nil {
		return err
	}
	defer lock.Unlock()
	l, err := m.listenControl()
	if err != nil {
		return err
	}
	defer l.Close()
	moreFiles()
	s := &server{m: m, worker: &worker{}}
	s.worker.moved = func(gates map[netip.Addr]egress.Ports) {
		if err := s.move(ctx, gates); err != nil {
			slog.Warn("redirection to the proxy not set", "error", err)
		}
	}
	defer s.Close()
	ready()
	go s.watch(ctx, l)
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) ||
			errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ECONNABORTED) {
			slog.Warn("control connection not accepted", "error", err)
			time.Sleep(deniedEvery)
			continue
		}
		if err != nil {
			return err
		}
		if s.serve(c) {
			return nil
		}
	}
}

// moreFiles raises the worker's limit of open files to what it may need, whatever limit it
// inherited.
func moreFiles() {
	var now syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &now); err != nil {
		return
	}
	want := syscall.Rlimit{Cur: max(now.Max, egress.Files), Max: max(now.Max, egress.Files)}
	if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &want) != nil {
		want = syscall.Rlimit{Cur: now.Max, Max: now.Max} // the proxy bounds itself by it
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &want); err != nil {
			slog.Warn("proxy file limit not raised", "error", err, "limit", now.Cur)
		}
	}
}

// server is the process.
type server struct {
	*worker
	m    *Manager
	idle atomic.Bool // unneeded at the last check
}

func (m *Manager) listenControl() (net.Listener, error) {
	address, dir, err := m.control()
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	// Left by one that was killed; we have the lock.
	if err := os.Remove(address); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // by that name it is not there
	return l, nil
}

// ready tells the process that started us. One started by hand has no pipe to write to.
func ready() {
	var st unix.Stat_t
	if unix.Fstat(readyFd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return
	}
	f := os.NewFile(readyFd, "ready")
	_, _ = f.Write([]byte{0}) // the starter may be gone
	_ = f.Close()
}

// serve does what one verb says; at true, the process ends.
func (s *server) serve(c net.Conn) (end bool) {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(proxyWait)); err != nil {
		return false
	}
	word, err := bufio.NewReader(io.LimitReader(c, 100)).ReadString('\n')
	if err != nil {
		return false
	}
	r := proxyReply{Version: proxyVersion}
	switch strings.TrimSpace(word) {
	case "update":
		if r.Ends, r.Gates, err = s.update(); err != nil {
			r.Error = err.Error()
		}
	case "end":
		r.Ends = true
	}
	if r.Ends {
		s.leave()
	}
	if err := json.NewEncoder(c).Encode(r); err != nil {
		slog.Warn("control request not answered", "error", err)
	}
	return r.Ends
}

// leave gives up the socket, under the verbs' lock: the next one starts a new
// process.
func (s *server) leave() {
	s.Close()
	if err := s.m.clearProxy(); err != nil {
		slog.Warn("cleanup failed", "error", err)
	}
}

// update serves what the state says. It takes no lock: the verb that asks holds it.
func (s *server) update() (ends bool, gates map[netip.Addr]egress.Ports, err error) {
	s.idle.Store(false)
	st, err := s.m.load()
	if err != nil {
		return false, nil, err
	}
	// A stopped sandbox may be about to be restored, with connections.
	if !st.filters() {
		return true, nil, nil
	}
	want := map[netip.Addr]egress.Ports{}
	var boxes []egress.Box
	for id, le := range st.Sandboxes {
		if !le.Filtered {
			continue
		}
		b := st.bridge(le.Bridge)
		want[b.gateway()] = egress.Ports{}
		if b.Proxy != nil {
			want[b.gateway()] = *b.Proxy
		}
		boxes = append(boxes, egress.Box{ID: id, Address: le.Address, Rules: le.Egress})
	}
	gates, err = s.Update(want, boxes)
	return false, gates, err
}

// watch reads what the rules have dropped, and ends the process when no
// sandbox needs it any more.
func (s *server) watch(ctx context.Context, l net.Listener) {
	tick := time.NewTicker(deniedEvery)
	defer tick.Stop()
	seen := map[string]bool{}
	asked := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now, err := s.readDenied(seen); err == nil {
			seen = now
		} else if err := s.repair(ctx); err != nil {
			slog.Debug("firewall rules not restored", "error", err) // it tries again
		}
		if time.Since(asked) < idleEvery {
			continue
		}
		asked = time.Now()
		if s.orphaned() {
			_ = l.Close() // ends Serve
			return
		}
	}
}

// repair restores the rules: reloading a host's firewall may flush all there are, and with
// them those that confine the sandboxes.
func (s *server) repair(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, proxyWait)
	defer cancel()
	v, err := s.m.begin(ctx)
	if err != nil {
		return err
	}
	defer v.end()
	if !v.filtering() {
		return nil
	}
	if err := v.applyRules(); err != nil {
		return err
	}
	_, _, err = v.openFirewall() // what it warns of, the sandbox's start has said
	return err
}

// move leads the sandboxes to other ports.
func (s *server) move(ctx context.Context, gates map[netip.Addr]egress.Ports) error {
	ctx, cancel := context.WithTimeout(ctx, proxyWait)
	defer cancel()
	v, err := s.m.begin(ctx)
	if err != nil {
		return err
	}
	defer v.end()
	if err := v.setGates(gates); err != nil {
		return err
	}
	return v.applyRules()
}

// orphaned reports whether no filtered sandbox is up, nor was at the last check, and clears up
// if so.
func (s *server) orphaned() bool {
	lock, err := flock.Try(filepath.Join(s.m.root, "network.lock"), flock.Existing)
	if errors.Is(err, os.ErrNotExist) {
		s.leave() // the root itself is gone
		return true
	}
	if err != nil {
		return false // held: a verb is at work, and will notify us
	}
	defer lock.Unlock()
	st, err := s.m.load()
	if err != nil || s.m.filtering(st) {
		s.idle.Store(false)
		return false
	}
	if !s.idle.Swap(true) {
		return false
	}
	s.leave()
	return true
}

// readDenied reports what was dropped and not seen before.
func (s *server) readDenied(seen map[string]bool) (map[string]bool, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	set, err := c.GetSetByName(&nftables.Table{Name: s.m.table, Family: nftables.TableFamilyIPv4}, deniedSet)
	if err != nil {
		return nil, err
	}
	found, err := c.GetSetElements(set)
	if err == nil {
		err = s.complete(c)
	}
	if err != nil {
		return nil, err
	}
	now := make(map[string]bool, len(found))
	for _, e := range found {
		if len(e.Key) != 16 {
			continue
		}
		now[string(e.Key)] = true
		if seen[string(e.Key)] {
			continue
		}
		from, to := netip.AddrFrom4([4]byte(e.Key[:4])), netip.AddrFrom4([4]byte(e.Key[4:8]))
		s.Denied(from, protocolName(e.Key[8]), netip.AddrPortFrom(to, binary.BigEndian.Uint16(e.Key[12:14])))
	}
	return now, nil
}

// errFlushed means that chains of ours were emptied or removed.
var errFlushed = errors.New("rules are missing")

// complete sees whether every chain is there and has rules.
func (s *server) complete(c *nftables.Conn) error {
	all, err := c.ListChainsOfTableFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return err
	}
	full := 0
	for _, chain := range all {
		if chain.Table.Name != s.m.table || chain.Name == udpChain {
			continue
		}
		rules, err := c.GetRules(chain.Table, chain)
		if err != nil {
			return err
		}
		if len(rules) > 0 {
			full++
		}
	}
	if full < chains {
		return errFlushed
	}
	return nil
}

func protocolName(p byte) string {
	switch p {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	}
	return fmt.Sprint(p)
}

// hostAddresses are the host's own and the subnets of sandboxes.
func hostAddresses() (own []netip.Addr, boxes []netip.Prefix, err error) {
	links, err := net.Interfaces()
	if err != nil {
		return nil, nil, err
	}
	for _, l := range links {
		addrs, err := l.Addrs()
		if err != nil {
			continue // gone meanwhile
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil || !p.Addr().Is4() {
				continue
			}
			own = append(own, p.Addr())
			for _, prefix := range bridgePrefixes {
				if strings.HasPrefix(l.Name, prefix) {
					boxes = append(boxes, p.Masked())
				}
			}
		}
	}
	return own, boxes, nil
}
