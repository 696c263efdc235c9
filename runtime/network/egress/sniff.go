package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"regexp"
	"time"
)

// helloLimit bounds what is read in search of a name: no ClientHello and no
// first line of a request is longer.
const helloLimit = 32 << 10

// What the first bytes of a connection are.
type kind int

const (
	kindOther kind = iota
	kindTLS
	kindHTTP
)

var requestLine = regexp.MustCompile(`^[A-Za-z]{1,20} \S+ HTTP/[0-9]`)

// look tells what a connection begins with, from at least its first byte. It
// reads no further than it has to.
func look(r *bufio.Reader) (kind, error) {
	first, err := r.Peek(1)
	if err != nil {
		return kindOther, err
	}
	switch c := first[0]; {
	case c == 0x16: // a TLS record of the handshake
		return kindTLS, nil
	case c == '\r' || c == '\n' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z':
	default:
		return kindOther, nil
	}
	for n := 1; n <= lineLimit; {
		line, err := r.Peek(n)
		// Servers skip empty lines before a request.
		text := bytes.TrimLeft(line, "\r\n")
		if requestLine.Match(text) {
			return kindHTTP, nil
		}
		if err != nil {
			return kindOther, err
		}
		if bytes.IndexByte(text, '\n') >= 0 {
			return kindOther, nil
		}
		word := bytes.IndexFunc(text, func(r rune) bool { return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') })
		if word < 0 && len(text) > 20 || word > 20 || word >= 0 && text[word] != ' ' {
			return kindOther, nil
		}
		n = max(n+1, r.Buffered())
	}
	return kindOther, nil
}

const lineLimit = 8 << 10

var errHello = errors.New("that is all there is to know")

// hello reads a ClientHello, by the code that servers read it with, and returns
// the name in it, empty if there is none, and all that was read.
func hello(ctx context.Context, r io.Reader) (name string, read []byte, err error) {
	var buf bytes.Buffer
	seen := false
	server := tls.Server(readOnly{io.TeeReader(io.LimitReader(r, helloLimit), &buf)}, &tls.Config{
		MinVersion: tls.VersionTLS10, //nolint:gosec // only to read what it says
		GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			name, seen = h.ServerName, true
			return nil, errHello
		},
	})
	err = server.HandshakeContext(ctx)
	if seen {
		err = nil
	}
	return name, buf.Bytes(), err
}

// readOnly is a connection that swallows the answers to what is read.
type readOnly struct{ r io.Reader }

func (c readOnly) Read(p []byte) (int, error)     { return c.r.Read(p) }
func (readOnly) Write(p []byte) (int, error)      { return len(p), nil }
func (readOnly) Close() error                     { return nil }
func (readOnly) LocalAddr() net.Addr              { return nil }
func (readOnly) RemoteAddr() net.Addr             { return nil }
func (readOnly) SetDeadline(time.Time) error      { return nil }
func (readOnly) SetReadDeadline(time.Time) error  { return nil }
func (readOnly) SetWriteDeadline(time.Time) error { return nil }
