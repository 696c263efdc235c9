package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/agentbox/agentbox/policy"
)

const (
	datagramLimit = 4 << 10 // of a question
	streamTime    = 30 * time.Second
	streamLimit   = 100 // questions over one connection
)

// answerUDP answers until the socket is closed.
func (s *Server) answerUDP(c net.PacketConn) {
	buf := make([]byte, datagramLimit)
	for {
		n, from, err := c.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(10 * time.Millisecond) // the kernel is out of something
			continue
		}
		a, ok := from.(*net.UDPAddr)
		if !ok {
			continue
		}
		b := s.box(a.AddrPort().Addr())
		if b == nil {
			continue
		}
		select {
		case b.queries <- struct{}{}:
		default:
			continue // it will ask again
		}
		question := append([]byte(nil), buf[:n]...)
		go func() {
			defer func() { <-b.queries }()
			defer s.survive(b)
			if answer := s.answer(context.Background(), b, question); answer != nil {
				_, _ = c.WriteTo(answer, from) // it will ask again
			}
		}()
	}
}

// answerTCP answers the questions of one connection.
func (s *Server) answerTCP(ctx context.Context, b *box, f *flow) {
	for range streamLimit {
		if err := f.conn.SetDeadline(time.Now().Add(streamTime)); err != nil {
			return
		}
		var size [2]byte
		if _, err := io.ReadFull(f.conn, size[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(size[:]))
		if n > datagramLimit {
			return
		}
		question := make([]byte, n)
		if _, err := io.ReadFull(f.conn, question); err != nil {
			return
		}
		answer := s.answer(ctx, b, question)
		if answer == nil {
			return
		}
		if _, err := f.conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))),
			answer...)); err != nil {
			return
		}
	}
}

// answer returns the reply to a sandbox; nil: none at all.
func (s *Server) answer(ctx context.Context, b *box, question []byte) []byte {
	h, q, err := parseQuestion(question)
	if err != nil {
		return nil
	}
	code, addrs := s.lookUp(ctx, b, h, q)
	out, err := buildAnswer(h, q, code, addrs)
	if err != nil {
		s.complain("build a DNS answer", "sandbox", b.id, "error", err)
		return nil
	}
	return out
}

var errNoQuestion = errors.New("not one question")

// parseQuestion reads a message that asks one thing.
func parseQuestion(msg []byte) (h dnsmessage.Header, q dnsmessage.Question, err error) {
	var p dnsmessage.Parser
	if h, err = p.Start(msg); err != nil {
		return h, q, err
	}
	if h.Response {
		return h, q, errNoQuestion
	}
	if q, err = p.Question(); err != nil {
		return h, q, err
	}
	if _, err := p.Question(); !errors.Is(err, dnsmessage.ErrSectionDone) {
		return h, q, errNoQuestion
	}
	return h, q, nil
}

func buildAnswer(
	h dnsmessage.Header, q dnsmessage.Question, code dnsmessage.RCode, addrs []netip.Addr,
) ([]byte, error) {
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{
		ID: h.ID, Response: true, OpCode: h.OpCode, RecursionDesired: h.RecursionDesired,
		RecursionAvailable: true, RCode: code,
	})
	b.EnableCompression()
	if err := errors.Join(b.StartQuestions(), b.Question(q), b.StartAnswers()); err != nil {
		return nil, err
	}
	for _, a := range addrs {
		head := dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: answerTTL}
		if err := b.AResource(head, dnsmessage.AResource{A: a.As4()}); err != nil {
			return nil, err
		}
	}
	return b.Finish()
}

// lookUp answers for allowed names only, and only with IPv4 addresses: other
// records could carry data out, or lead around the proxy.
func (s *Server) lookUp(
	ctx context.Context, b *box, h dnsmessage.Header, q dnsmessage.Question,
) (dnsmessage.RCode, []netip.Addr) {
	if h.OpCode != 0 {
		return dnsmessage.RCodeNotImplemented, nil
	}
	if q.Class != dnsmessage.ClassINET {
		return dnsmessage.RCodeRefused, nil
	}
	e := Event{Protocol: "dns", Name: q.Name.String()}
	b.mu.Lock()
	slow := b.bucket.take(queryRate, queryBurst)
	b.mu.Unlock()
	if !slow {
		e.Reason = errTooMany.Error()
		s.deny(b, e)
		return dnsmessage.RCodeRefused, nil
	}
	name, ok := policy.CleanDomain(q.Name.String())
	if !ok || !b.rules.Load().Name(name, 0) {
		e.Reason = "no rule allows the name"
		s.deny(b, e)
		return dnsmessage.RCodeNameError, nil
	}
	if q.Type != dnsmessage.TypeA {
		return dnsmessage.RCodeSuccess, nil
	}
	addrs, err := s.resolve(ctx, b, name, 0)
	var dns *net.DNSError
	switch {
	case errors.Is(err, errNowhere):
		s.unreached(b, e, err)
		return dnsmessage.RCodeNameError, nil
	case errors.Is(err, errTooMany):
		s.unreached(b, e, err)
		return dnsmessage.RCodeRefused, nil
	case errors.As(err, &dns) && dns.IsNotFound:
		return dnsmessage.RCodeNameError, nil
	case err != nil:
		e.Reason = fmt.Sprintf("it cannot be looked up: %v", err)
		s.deny(b, e)
		return dnsmessage.RCodeServerFailure, nil
	}
	b.pin(name, addrs)
	return dnsmessage.RCodeSuccess, addrs
}
