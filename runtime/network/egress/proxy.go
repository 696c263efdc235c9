package egress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/agentbox/agentbox/policy"
)

// denied is the TLS alert that reports the refusal to a client.
var denied = []byte{0x15, 3, 3, 0, 2, 2, 49}

// proxy takes a connection where its rules let it go.
func (s *Server) proxy(ctx context.Context, b *box, f *flow) {
	rules := *b.rules.Load()
	if s.guard.address(rules, f.to) {
		s.direct(ctx, b, f, nil)
		return
	}
	in := bufio.NewReaderSize(f.conn, helloLimit)
	what, err := s.begins(ctx, b, f, in)
	if err != nil {
		s.deny(b, Event{
			Protocol: "tcp", Address: addrPort(f.to),
			Reason: "no rule allows the address, and the connection does not say what name it is for",
		})
		reset(f.conn)
		return
	}
	switch what {
	case kindTLS:
		s.tls(ctx, b, f, in)
	case kindHTTP:
		s.http(ctx, b, f, in)
	case kindUnclear:
		s.deny(b, Event{Protocol: "tcp", Address: addrPort(f.to), Reason: unclear})
		reset(f.conn)
	default:
		s.other(ctx, b, f, in)
	}
}

const unclear = "it begins like HTTP or TLS, but in a form that says no name for certain"

// begins waits for what a connection begins with. Where the other side may be
// the one to begin, silence is an answer.
func (s *Server) begins(ctx context.Context, b *box, f *flow, in *bufio.Reader) (kind, error) {
	wait := s.peek
	mayListen := !web(f.to.Port()) && s.named(ctx, b, f.to) != ""
	if mayListen {
		wait = s.silent
	}
	if err := f.conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return kindOther, err
	}
	what, err := look(in)
	if mayListen && errors.Is(err, os.ErrDeadlineExceeded) {
		if err = nil; in.Buffered() > 0 { // it may yet become a request
			if err := f.conn.SetReadDeadline(time.Now().Add(s.peek)); err != nil {
				return kindOther, err
			}
			what, err = look(in)
		}
	}
	if errors.Is(err, io.EOF) && in.Buffered() > 0 {
		err = nil // no more is to come
	}
	return what, errors.Join(err, f.conn.SetReadDeadline(time.Now().Add(s.peek)))
}

// web are the ports at which one address is that of many names, so that only
// a name says where a connection leads.
func web(port uint16) bool { return port == 80 || port == 443 }

// tls takes a TLS connection to the name in its ClientHello.
func (s *Server) tls(ctx context.Context, b *box, f *flow, in *bufio.Reader) {
	said, read, err := hello(ctx, in)
	name, ok := policy.CleanDomain(said)
	e := Event{Protocol: "tls", Name: said, Address: addrPort(f.to)}
	switch {
	case err != nil:
		e.Reason = "it begins like TLS, but there is no ClientHello"
	case said == "":
		e.Reason = "no rule allows the address, and the ClientHello names no server"
	case !ok || !b.rules.Load().Name(name, f.to.Port()):
		e.Reason = "no rule allows the name on this port"
	}
	if e.Reason != "" {
		s.deny(b, e)
		_, _ = f.conn.Write(denied)
		return
	}
	b.lead(f, name)
	out, err := s.dial(ctx, b, name, f.to.Port())
	if err != nil {
		s.unreached(b, e, err)
		reset(f.conn)
		return
	}
	s.relay(b, f, out, read, in, nil)
}

// other takes a connection of any other protocol to the address of a name.
func (s *Server) other(ctx context.Context, b *box, f *flow, in *bufio.Reader) {
	e := Event{Protocol: "tcp", Address: addrPort(f.to)}
	if web(f.to.Port()) {
		e.Reason = "on this port only TLS and HTTP say what name they are for"
	} else if e.Name = s.named(ctx, b, f.to); e.Name == "" {
		e.Reason = "no rule allows the address, and it is none of an allowed name"
	}
	if e.Reason != "" {
		s.deny(b, e)
		reset(f.conn)
		return
	}
	b.lead(f, e.Name)
	s.direct(ctx, b, f, in)
}

// direct takes a connection to the address that it was for. With in, what has
// been read of it is there, and if that is nothing, what comes must be no
// connection to another name.
func (s *Server) direct(ctx context.Context, b *box, f *flow, in *bufio.Reader) {
	out, err := s.dialAddress(ctx, f.to)
	if err != nil {
		// As if there were nothing in between.
		reset(f.conn)
		return
	}
	if in == nil {
		s.relay(b, f, out, nil, f.conn, nil)
		return
	}
	check := &checks{answer: func(r *bufio.Reader) error { return s.answers(b, f, r) }}
	if in.Buffered() == 0 {
		check.words = func() error { return s.late(b, f, in) }
	}
	s.relay(b, f, out, nil, in, check)
}

// late inspects the first bytes of a client whose server spoke first. A TLS or HTTP client
// would have spoken first itself.
func (s *Server) late(b *box, f *flow, in *bufio.Reader) error {
	what, err := look(in)
	if what == kindOther {
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	e := Event{
		Protocol: "tcp", Name: f.name, Address: addrPort(f.to),
		Reason: "it began to speak TLS or HTTP only after the server might have spoken",
	}
	s.deny(b, e)
	return errors.New(e.Reason)
}

// answers looks at the first words of a server that was taken for one of another
// protocol. If it speaks HTTP all the same, it has read a request that was not
// judged, and is to read no further one.
func (s *Server) answers(b *box, f *flow, out *bufio.Reader) error {
	const version = "HTTP/"
	for n := 1; n <= len(version); n++ {
		if word, err := out.Peek(n); err != nil || string(word) != version[:n] {
			return nil // copying will meet the error, too
		}
	}
	e := Event{
		Protocol: "tcp", Name: f.name, Address: addrPort(f.to),
		Reason: "the server speaks HTTP, but what it was sent is no request",
	}
	s.deny(b, e)
	return errors.New(e.Reason)
}

// unreached records that a name which is allowed leads where it must not. That
// a server is down is between it and the sandbox.
func (s *Server) unreached(b *box, e Event, err error) {
	if errors.Is(err, errNowhere) || errors.Is(err, errTooMany) {
		e.Reason = err.Error()
		s.deny(b, e)
	}
}

// checks look at the first words of either side of a connection; an error ends it.
type checks struct {
	words  func() error // nil: already checked
	answer func(*bufio.Reader) error
}

// relay moves bytes both ways until both are through: first those already
// read, then what comes in. check is asked before the first byte goes out.
func (s *Server) relay(b *box, f *flow, out net.Conn, first []byte, in io.Reader, check *checks) {
	defer out.Close()
	b.mu.Lock()
	f.out = out
	b.mu.Unlock()
	if !s.allows(b, f) { // the rules have changed meanwhile
		reset(f.conn)
		return
	}
	if err := f.conn.SetReadDeadline(time.Time{}); err != nil {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if check != nil {
			r := bufio.NewReaderSize(out, 16)
			err := check.answer(r)
			if err == nil {
				_, err = io.CopyN(f.conn, r, int64(r.Buffered()))
			}
			if err != nil {
				reset(f.conn)
				reset(out)
				return
			}
		}
		finish(f.conn, out)
	}()
	err := func() error {
		if len(first) > 0 {
			if _, err := out.Write(first); err != nil {
				return err
			}
		}
		if check != nil && check.words != nil {
			if err := check.words(); err != nil {
				return err
			}
		}
		if br, ok := in.(*bufio.Reader); ok {
			// First its buffer, and then without it: the kernel copies by itself.
			if _, err := io.CopyN(out, br, int64(br.Buffered())); err != nil {
				return err
			}
		}
		return nil
	}()
	if err != nil {
		reset(f.conn)
		reset(out)
	} else {
		finish(out, f.conn)
	}
	<-done
}

// finish copies until the end and passes that on. After an error neither
// direction is of use.
func finish(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if c, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		err = c.CloseWrite()
	}
	if err != nil {
		reset(to)
		reset(from)
	}
}

func hostPort(name string, to netip.AddrPort) string {
	return net.JoinHostPort(name, fmt.Sprint(to.Port()))
}
