package egress

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/policy"
)

// headerLimit is of a request, and of an answer.
const headerLimit = 64 << 10

// http serves the requests of an HTTP connection, each to the name in it: the
// next one may be for another server behind the same address.
func (s *Server) http(ctx context.Context, b *box, f *flow, in *bufio.Reader) {
	quiet := log.New(io.Discard, "", 0)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			name, _, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			return s.dial(ctx, b, name, f.to.Port())
		},
		MaxResponseHeaderBytes: headerLimit, DisableCompression: true, MaxIdleConns: 2,
		IdleConnTimeout: 30 * time.Second,
	}
	defer transport.CloseIdleConnections()
	proxy := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, ErrorLog: quiet,
		Rewrite: func(r *httputil.ProxyRequest) {
			name, _ := cleanHost(r.In.Host)
			r.Out.URL.Scheme, r.Out.URL.Host = "http", hostPort(name, f.to)
			r.Out.Host = r.In.Host
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			s.unreached(b, Event{Protocol: "http", Name: r.Host, Address: addrPort(f.to)}, err)
			refuse(w, http.StatusBadGateway, err.Error())
		},
	}
	l := &oneConn{conn: &heldConn{Conn: f.conn, r: in, done: make(chan struct{})}}
	server := &http.Server{
		MaxHeaderBytes: headerLimit, ReadHeaderTimeout: s.peek, IdleTimeout: 5 * time.Minute, ErrorLog: quiet,
		BaseContext: func(net.Listener) context.Context { return ctx },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			name, port := cleanHost(r.Host)
			e := Event{Protocol: "http", Name: r.Host, Address: addrPort(f.to)}
			switch {
			case r.Method == http.MethodConnect:
				e.Reason = "this is no proxy to CONNECT through"
			case name == "":
				e.Reason = "no rule allows the address, and the request names no host"
			case port != 0 && port != f.to.Port():
				e.Reason = "the request is for another port than the connection"
			}
			if e.Reason == "" {
				// Noted before it is judged: by rules that come in between it is cut.
				if b.lead(f, name); !b.rules.Load().Name(name, f.to.Port()) {
					e.Reason = "no rule allows the name on this port"
				}
			}
			if e.Reason != "" {
				s.deny(b, e)
				refuse(w, http.StatusForbidden, e.Reason)
				return
			}
			// The bytes after an upgrade are not inspected, and HTTP/2 would name another host
			// in each request.
			if h2 := r.Header["Upgrade"]; len(h2) > 0 && !strings.EqualFold(h2[0], "websocket") {
				r.Header.Del("Upgrade")
			}
			proxy.ServeHTTP(w, r)
		}),
	}
	_ = server.Serve(l) // ends with the connection
}

func refuse(w http.ResponseWriter, code int, why string) {
	w.Header().Set("Connection", "close")
	http.Error(w, fmt.Sprintf("agentbox: egress denied: %s", asciiOnly(why)), code)
}

// cleanHost splits a Host header; an invalid name is returned empty.
func cleanHost(host string) (name string, port uint16) {
	if h, p, err := net.SplitHostPort(host); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return "", 0
		}
		host, port = h, uint16(n)
	}
	name, ok := policy.CleanDomain(host)
	if !ok {
		return "", 0
	}
	return name, port
}

// heldConn is a connection of which some has been read; done is closed with it.
type heldConn struct {
	net.Conn
	r    io.Reader
	once sync.Once
	done chan struct{}
}

func (c *heldConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func (c *heldConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.done) })
	return err
}

// CloseWrite lets the server end a connection in good order, so that its last
// words arrive.
func (c *heldConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// oneConn is a listener with one connection, which ends with it.
type oneConn struct {
	conn  *heldConn
	given bool
}

func (l *oneConn) Accept() (net.Conn, error) {
	if !l.given {
		l.given = true
		return l.conn, nil
	}
	<-l.conn.done
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }
