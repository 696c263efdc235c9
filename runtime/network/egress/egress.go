// Package egress is the proxy and the resolver that filtered sandboxes are
// confined to: it knows rules and addresses, and nothing of bridges.
//
// Every TCP connection that a filtered sandbox opens, to any destination, arrives
// here, and so does every DNS query; package network's rules see to that, and drop
// all else. The sandbox is identified by its source address, which it cannot
// choose. A connection goes on
//
//   - to the address that it was for, if a rule about addresses allows that one;
//   - to the name in a TLS ClientHello or in an HTTP request, if a rule allows
//     the name on this port. The name is resolved here; the address that the
//     connection was for does not matter. Each request of an HTTP connection is
//     judged by itself;
//   - to the address that it was for, on ports other than 80 and 443, when it
//     speaks neither TLS nor HTTP and the address is one of an allowed name.
//
// Names lead to public addresses only, unless a rule about addresses allows
// the private one as well, so that the owner of an allowed name cannot point
// it at the host's network. Loopback, link-local and metadata addresses are
// out of reach whatever the rules say; the host's own addresses need a rule
// for just this address, and other sandboxes have none.
//
// A denied connection or query is an Event, a line in the sandbox's file.
package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds of one sandbox, except the last.
const (
	connLimit  = 256  // open connections
	queryLimit = 64   // questions being answered
	queryRate  = 50   // questions per second, after the first queryBurst
	queryBurst = 200  //
	pinLimit   = 4096 // recorded addresses
	totalLimit = 4096 // open connections of all sandboxes
	saidLimit  = 1000 // lines in the log
)

// Files is the number of files a Server may have open: three for each connection, since a new one
// may be tried to several addresses. With a lower limit it serves fewer connections.
const Files = 3*totalLimit + spareFiles

const spareFiles = 256 // for what is no connection

// limits returns the maximum numbers of connections.
func limits() (total, each int) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return totalLimit, connLimit
	}
	have := int(min(files.Cur, Files))
	total = max(have-min(spareFiles, have/4), 12) / 3
	return total, min(connLimit, max(total/4, 1))
}

const (
	peekTime    = 10 * time.Second       // for a connection to say where it leads
	silentTime  = 500 * time.Millisecond // after which the other side may be the one to begin
	dialTime    = 10 * time.Second
	dialAllTime = 30 * time.Second // for all addresses of a name
	resolveTime = 10 * time.Second
	answerLimit = 16
	answerTTL   = 60        // seconds
	pinTime     = time.Hour // for which an answer is one that we gave
)

// Box is a sandbox and what it may reach.
type Box struct {
	ID      string
	Address netip.Addr
	Rules   []string
}

// Ports are the ports of a gateway; 0 leaves the choice to the kernel.
type Ports struct {
	DNS uint16 `json:"dns"` // UDP and TCP
	TCP uint16 `json:"tcp"`
}

// Options make a Server. The zero value of every field but Events works.
type Options struct {
	Events string // the directory of the sandboxes' events
	Log    *slog.Logger
	// Local returns the host's addresses and the subnets of sandboxes.
	Local func() ([]netip.Addr, []netip.Prefix, error)
}

// Server is the proxy and the resolver of a root's sandboxes.
type Server struct {
	events   string
	log      *slog.Logger
	resolver *net.Resolver
	names    cache
	guard    guard
	peek     time.Duration // peekTime
	silent   time.Duration // silentTime
	total    chan struct{}
	each     int          // connections of one sandbox
	said     atomic.Int64 // complaints, which sandboxes can bring about

	mu    sync.Mutex
	boxes map[netip.Addr]*box
	gates map[netip.Addr]*gate
}

// New makes a Server that does not serve any sandbox yet.
func New(o Options) *Server {
	total, each := limits()
	s := &Server{
		events: o.Events, log: o.Log,
		// Go's own: it asks the servers of the host's resolv.conf.
		resolver: &net.Resolver{PreferGo: true},
		names:    cache{names: map[string]*found{}},
		peek:     peekTime, silent: silentTime,
		total: make(chan struct{}, total), each: each,
		boxes: map[netip.Addr]*box{}, gates: map[netip.Addr]*gate{},
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.guard.local = o.Local; s.guard.local == nil {
		s.guard.local = func() ([]netip.Addr, []netip.Prefix, error) { return nil, nil, nil }
	}
	return s
}

// Update makes the server listen on these gateways, on the ports it is asked
// for where they are free, and serve these sandboxes. Connections that the new
// rules do not allow end. It returns where it listens.
func (s *Server) Update(gateways map[netip.Addr]Ports, boxes []Box) (map[netip.Addr]Ports, error) {
	parsed := make([]Rules, len(boxes))
	for i, b := range boxes {
		var err error
		if parsed[i], err = ParseRules(b.Rules); err != nil {
			return nil, fmt.Errorf("sandbox %s: %w", b.ID, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := make(map[netip.Addr]Ports, len(gateways))
	for a, want := range gateways {
		g := s.gates[a]
		if g == nil {
			var err error
			if g, err = s.listen(a, want); err != nil {
				return nil, fmt.Errorf("listen on %s: %w", a, err)
			}
			s.gates[a] = g
		}
		at[a] = g.ports
	}
	for a, g := range s.gates {
		if _, ok := gateways[a]; !ok {
			g.close()
			delete(s.gates, a)
		}
	}
	left := s.boxes
	s.boxes = make(map[netip.Addr]*box, len(boxes))
	for i, want := range boxes {
		b := left[want.Address]
		if b != nil && b.id == want.ID {
			delete(left, want.Address)
		} else {
			b = newBox(s.events, want.ID)
		}
		b.rules.Store(&parsed[i])
		s.boxes[want.Address] = b
		b.cut(func(f *flow) bool { return f.led() && !s.allows(b, f) })
	}
	for _, b := range left {
		b.log.close()
		b.cut(func(*flow) bool { return true })
	}
	return at, nil
}

// Close ends all that the server does.
func (s *Server) Close() {
	_, _ = s.Update(nil, nil)
}

func (s *Server) box(a netip.Addr) *box {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.boxes[a.Unmap()]
}

// Denied records what the host's rules have dropped; port 0 is none.
func (s *Server) Denied(from netip.Addr, protocol string, to netip.AddrPort) {
	if b := s.box(from); b != nil {
		s.deny(b, Event{
			Protocol: protocol, Address: addrPort(to),
			Reason: "only TCP, DNS to the resolver, and UDP that a rule about addresses allows leave a filtered sandbox",
		})
	}
}

// complain logs what should not be. The log is in memory and kept as long as
// the process: it is not to grow with what sandboxes do.
func (s *Server) complain(what string, args ...any) {
	if n := s.said.Add(1); n < saidLimit {
		s.log.Warn(what, args...)
	} else if n == saidLimit {
		s.log.Warn("further denials not logged")
	}
}

func (s *Server) deny(b *box, e Event) {
	if err := b.log.add(e); err != nil {
		s.complain("an event is lost", "sandbox", b.id, "error", err)
	}
}

// box is a sandbox that is served.
type box struct {
	id      string
	rules   atomic.Pointer[Rules]
	log     eventLog
	queries chan struct{}

	mu      sync.Mutex
	bucket  bucket // of questions
	lookups bucket // of those, and of connections, for which others have to be asked
	flows   map[*flow]bool
	pins    map[netip.Addr]map[string]time.Time
}

func newBox(events, id string) *box {
	return &box{
		id: id, log: eventLog{dir: events, id: id}, queries: make(chan struct{}, queryLimit),
		flows: map[*flow]bool{}, pins: map[netip.Addr]map[string]time.Time{},
	}
}

// flow is a connection of a sandbox and where it leads: an allowed name, or an
// address. Before that is known it is neither.
type flow struct {
	conn net.Conn
	name string
	to   netip.AddrPort
	out  net.Conn
}

// led reports whether it is known where a flow leads; before, the rules that
// decide are those of then.
func (f *flow) led() bool { return f.name != "" || f.out != nil }

// begin counts a connection; false is one too many.
func (b *box) begin(f *flow, limit int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.flows) >= limit {
		return false
	}
	b.flows[f] = true
	return true
}

func (b *box) end(f *flow) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.flows, f)
}

// lead notes where a flow leads.
func (b *box) lead(f *flow, name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f.name = name
}

// cut ends flows.
func (b *box) cut(which func(*flow) bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for f := range b.flows {
		if which(f) {
			_ = f.conn.Close()
			if f.out != nil {
				_ = f.out.Close()
			}
		}
	}
}

// allows judges a flow again after the rules have changed.
func (s *Server) allows(b *box, f *flow) bool {
	rules := *b.rules.Load()
	return f.name != "" && rules.Name(f.name, f.to.Port()) || s.guard.address(rules, f.to)
}

// pin records the addresses that a name was resolved to.
func (b *box) pin(name string, addrs []netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	for _, a := range addrs {
		if b.pins[a] == nil {
			if len(b.pins) >= pinLimit {
				b.unpin(now)
			}
			if len(b.pins) >= pinLimit {
				return
			}
			b.pins[a] = map[string]time.Time{}
		}
		if len(b.pins[a]) < answerLimit || !b.pins[a][name].IsZero() {
			b.pins[a][name] = now.Add(pinTime)
		}
	}
}

func (b *box) unpin(now time.Time) {
	for a, names := range b.pins {
		for name, until := range names {
			if until.Before(now) {
				delete(names, name)
			}
		}
		if len(names) == 0 {
			delete(b.pins, a)
		}
	}
}

// pinned returns the allowed name that was said to be where a flow leads.
func (b *box) pinned(to netip.AddrPort) string {
	rules := *b.rules.Load()
	b.mu.Lock()
	defer b.mu.Unlock()
	for name, until := range b.pins[to.Addr()] {
		if time.Now().Before(until) && rules.Name(name, to.Port()) {
			return name
		}
	}
	return ""
}

// named finds the allowed name whose address a flow is for: one that we resolved for the sandbox
// or, in case it has cached an answer from a resolver before this one, one that a rule names.
func (s *Server) named(ctx context.Context, b *box, to netip.AddrPort) string {
	rules := *b.rules.Load()
	if !s.guard.answer(rules, to) {
		return ""
	}
	if name := b.pinned(to); name != "" {
		return name
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	tried := 0
	for _, r := range rules {
		if r.Domain == "" || r.Below || !r.TCP(to.Port()) || tried == answerLimit {
			continue
		}
		tried++
		addrs, err := s.resolve(ctx, b, r.Domain, to.Port())
		if errors.Is(err, errTooMany) {
			return ""
		}
		if err != nil {
			continue // it is not this one, then
		}
		b.pin(r.Domain, addrs)
		if name := b.pinned(to); name != "" {
			return name
		}
	}
	return ""
}

// gate is the pair of listeners on a bridge's address.
type gate struct {
	ports  Ports
	tcp    net.Listener
	dnsTCP net.Listener
	dnsUDP net.PacketConn
}

func (g *gate) close() {
	_ = errors.Join(g.tcp.Close(), g.dnsTCP.Close(), g.dnsUDP.Close()) // nothing is lost with them
}

// listen opens a gateway's listeners and serves them. A bridge may come and go
// under them.
func (s *Server) listen(a netip.Addr, want Ports) (_ *gate, err error) {
	g := &gate{}
	if g.tcp, err = listenTCP(a, want.TCP); err != nil {
		return nil, err
	}
	for range 10 { // until a port is free for both
		if g.dnsUDP, err = listenUDP(a, want.DNS); err != nil {
			break
		}
		if g.dnsTCP, err = listenTCP(a, portOf(g.dnsUDP.LocalAddr())); err == nil {
			break
		}
		_ = g.dnsUDP.Close()
		want.DNS = 0
	}
	if err != nil {
		_ = g.tcp.Close()
		return nil, err
	}
	g.ports = Ports{DNS: portOf(g.dnsUDP.LocalAddr()), TCP: portOf(g.tcp.Addr())}
	go s.accept(g.tcp, s.proxy)
	go s.accept(g.dnsTCP, s.answerTCP)
	go s.answerUDP(g.dnsUDP)
	return g, nil
}

// accept hands over the connections of sandboxes, and only theirs.
func (s *Server) accept(l net.Listener, serve func(context.Context, *box, *flow)) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.complain("accept", "error", err) // out of descriptors, for one
			time.Sleep(100 * time.Millisecond)
			continue
		}
		go s.take(c, serve)
	}
}

func (s *Server) take(c net.Conn, serve func(context.Context, *box, *flow)) {
	defer c.Close()
	from, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return
	}
	b := s.box(from.AddrPort().Addr())
	if b == nil {
		return
	}
	f := &flow{conn: c}
	var err error
	if f.to, err = original(c); err != nil {
		s.complain("where a connection was for", "sandbox", b.id, "error", err)
		return
	}
	done, refused := s.admit(b, f)
	if refused != "" {
		s.deny(b, Event{Protocol: "tcp", Address: addrPort(f.to), Reason: refused})
		return
	}
	defer done()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer s.survive(b)
	serve(ctx, b, f)
}

// admit counts a connection until done is called, or says why it is one too many.
// Half of all connections go to the first that ask; each sandbox has its share of the other half.
func (s *Server) admit(b *box, f *flow) (done func(), refused string) {
	limit, half := s.each, cap(s.total)/2
	if len(s.total) >= half {
		s.mu.Lock()
		limit = min(limit, max(half/max(len(s.boxes), 1), 1))
		s.mu.Unlock()
	}
	select {
	case s.total <- struct{}{}:
	default:
		return nil, "all sandboxes together have too many connections"
	}
	if !b.begin(f, limit) {
		<-s.total
		return nil, fmt.Sprintf("the sandbox has %d connections, which is its limit now", limit)
	}
	return func() { b.end(f); <-s.total }, ""
}

// survive keeps what one sandbox sent from ending the others' connections.
func (s *Server) survive(b *box) {
	if r := recover(); r != nil {
		s.complain("a connection or a question is given up", "sandbox", b.id, "panic", r,
			"stack", string(debug.Stack()))
	}
}
