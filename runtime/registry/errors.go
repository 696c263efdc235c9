package registry

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/agentbox/agentbox/internal/fault"
)

// errPlain is why guard refuses a request.
var errPlain = fmt.Errorf("the connection would not be encrypted: %w", fault.ErrDenied)

// errEarly is for a body that ended as if it were whole. It may come from a
// connection that broke behind a proxy.
var errEarly = fmt.Errorf("it ends too early: %w", fault.ErrCorrupt)

// guard lets nothing out in the clear, but to this host. The library would
// speak plain HTTP to private addresses and to *.local as well.
type guard struct {
	inner http.RoundTripper
	plain bool
}

func (g guard) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !g.plain && !loopback(req.URL.Hostname()) {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, errPlain
	}
	resp, err := g.inner.RoundTrip(req)
	// The library reads the answer to its first question to the end.
	if err == nil && req.URL.Path == "/v2/" {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, 1<<20), resp.Body}
	}
	return resp, err
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// checkRedirect follows a registry to where it keeps its blobs, but not to a
// service inside the network of whoever pulls.
func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) >= 10 {
		return errors.New("too many redirects")
	}
	if host := req.URL.Hostname(); host != via[0].URL.Hostname() {
		ip, err := netip.ParseAddr(host)
		ip = ip.Unmap()
		if host == "localhost" || err == nil && (ip.IsLoopback() || ip.IsPrivate() || ip.IsLinkLocalUnicast() || ip.IsUnspecified()) {
			return fmt.Errorf("the registry sends us to %s: %w", host, fault.ErrDenied)
		}
	}
	return nil
}

// passing tells whether trying again may help.
func passing(err error) bool {
	if t := (*transport.Error)(nil); errors.As(err, &t) {
		switch t.StatusCode {
		case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError, http.StatusBadGateway,
			http.StatusServiceUnavailable, http.StatusGatewayTimeout, 499, 522: // nginx's and Cloudflare's ways to say 408 and 504
			return true
		}
		return false
	}
	if errors.Is(err, errEarly) {
		return true
	}
	for _, lasting := range []error{fault.ErrDenied, fault.ErrCorrupt, syscall.ECONNREFUSED, syscall.ENOSPC, http.ErrSchemeMismatch} {
		if errors.Is(err, lasting) {
			return false
		}
	}
	if dns := (*net.DNSError)(nil); errors.As(err, &dns) && dns.IsNotFound {
		return false
	}
	if cert := (*tls.CertificateVerificationError)(nil); errors.As(err, &cert) {
		return false
	}
	if header := (tls.RecordHeaderError{}); errors.As(err, &header) {
		return false
	}
	// All else that comes from net/http is a connection that broke.
	var broken *url.Error
	return errors.As(err, &broken) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, errStalled) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.As(err, new(net.Error))
}

// explain adds the sentinel, and what to do.
func (c *client) explain(err error) error {
	if err == nil {
		return nil
	}
	host := c.repo.RegistryStr()
	// First, because to this host the library goes on without TLS, and what it
	// is told there says nothing.
	if cert := (*tls.CertificateVerificationError)(nil); errors.As(err, &cert) {
		return &fault.Error{Hint: "Have the system trust the authority that signed it (update-ca-certificates).", Err: fmt.Errorf("%s: %w", host, cert)}
	}
	if t := (*transport.Error)(nil); errors.As(err, &t) {
		said := short(t)
		switch t.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return &fault.Error{Hint: fmt.Sprintf("Run `docker login %s` as the user who runs agentbox.", host), Err: fmt.Errorf("%s: %w: %s", host, fault.ErrDenied, said)}
		case http.StatusNotFound:
			return fmt.Errorf("%s: %w: %s", host, fault.ErrNotFound, said)
		case http.StatusTooManyRequests:
			return &fault.Error{Hint: "Try again later, or log in: registries allow more then.", Err: fmt.Errorf("%s: %w: %s", host, fault.ErrBusy, said)}
		}
		return fmt.Errorf("%s: %s", host, said)
	}
	if errors.Is(err, errPlain) || errors.Is(err, http.ErrSchemeMismatch) {
		return &fault.Error{Hint: "If the network between is yours, use --plain-http; else ask for TLS.", Err: fmt.Errorf("%s: %w", host, err)}
	}
	return err
}

// short is what a registry said, in a line that is fit for a terminal: it may
// be hostile, or a whole HTML page.
func short(t *transport.Error) string {
	s := fmt.Sprintf("%d %s", t.StatusCode, http.StatusText(t.StatusCode))
	for _, e := range t.Errors {
		s += ", " + string(e.Code)
		if e.Message != "" {
			s += ": " + e.Message
		}
	}
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfffd {
			return ' '
		}
		return r
	}, s)
	if len(s) > 300 {
		s = strings.ToValidUTF8(s[:300], "") + "..."
	}
	return s
}
