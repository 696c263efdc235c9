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

// kind is what the first bytes of a connection are.
type kind int

const (
	kindOther kind = iota
	kindTLS
	kindHTTP
	// kindUnclear is data that a lenient server may take for HTTP or TLS, in a form that is
	// not judged: it is refused.
	kindUnclear
)

// token is a character of a method.
const token = "[A-Za-z0-9!#$%&'*+.^_`|~-]"

var (
	// method is the first word of a line; that of no request is longer.
	method = regexp.MustCompile("^" + token + "{1,256}")
	// requestLine is the form in which a request is judged.
	requestLine = regexp.MustCompile("^" + token + `{1,64} [!-~\x80-\xff]+ HTTP/[0-9]`)
	// looseLine has all that some server reads as the first line of a request:
	// more blanks, or others, and any version of the protocol, also none.
	looseLine = regexp.MustCompile("^" + token +
		`+[ \t\v\f\r]+([/*]|[A-Za-z][A-Za-z0-9+.-]*://|(.*[ \t\v\f\r])?(?i:HTTP/))`)
)

// look reports what a connection begins with, from at least its first byte. It
// reads no further than it has to.
func look(r *bufio.Reader) (kind, error) {
	first, err := r.Peek(1)
	if err != nil {
		return kindOther, err
	}
	switch c := first[0]; {
	case c == 0x16: // a TLS record of the handshake
		return kindTLS, nil
	case c == 0x14 || c == 0x15:
		// TLS servers ignore some records before the handshake.
		if b, _ := r.Peek(5); len(b) == 5 && b[1] == 3 && b[3] == 0 && b[4] <= 2 {
			return kindUnclear, nil
		}
		return kindOther, nil
	case c >= 0x80: // the hello of SSL 2, in which old clients asked for TLS
		if b, _ := r.Peek(5); len(b) == 5 && b[2] == 1 && (b[3] == 3 || b[3] == 0 && b[4] == 2) {
			return kindUnclear, nil
		}
		return kindOther, nil
	}
	for n := 1; n <= helloLimit; {
		b, err := r.Peek(n)
		if errors.Is(err, io.EOF) {
			b = append(bytes.Clone(b), '\n') // no more is to come
		}
		if what, decided := lookLine(b); decided {
			return what, nil
		}
		if err != nil {
			return kindOther, err
		}
		n = max(n+1, r.Buffered())
	}
	return kindUnclear, nil // so long a line is that of no other protocol
}

// lookLine reports what a first line of text is, and whether the bytes suffice
// to know.
func lookLine(b []byte) (what kind, decided bool) {
	other := kindOther
	text := bytes.TrimLeft(b, " \t\v\f\r\n")
	if len(text) < len(b) {
		// Servers skip blanks and empty lines before a request, and what PROXY
		// (version 2) begins with is a line break and a NUL.
		other = kindUnclear
	}
	line, _, whole := bytes.Cut(text, []byte("\n"))
	word := len(method.Find(line))
	switch {
	case word == len(line) && !whole:
		return other, word > 256
	case word == 0, word < len(line) && !bytes.ContainsRune([]byte(" \t\v\f\r"), rune(line[word])):
		return other, true
	case string(line[:word]) == "PROXY": // before a request it names a client
		return kindUnclear, true
	case bytes.IndexByte(line, 0) >= 0: // as in the first packet of git
		return other, true
	case !whole:
		return other, false
	case requestLine.Match(line):
		return kindHTTP, true
	case looseLine.Match(line):
		return kindUnclear, true
	}
	return other, true
}

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
