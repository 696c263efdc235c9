package remote

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/agentbox/agentbox/internal/fault"
)

// errEarly is for a body that ended as if it were whole. It may come from a
// connection that broke behind a proxy.
var errEarly = fmt.Errorf("it ends too early: %w", fault.ErrCorrupt)

// later is an error after which the registry asks to wait.
type later struct {
	error
	wait time.Duration
}

func (l later) Unwrap() error { return l.error }

// passing reports whether trying again may help.
func passing(err error) bool {
	if l := (later{}); errors.As(err, &l) && l.wait > maxWait {
		return false
	}
	if t := (*transport.Error)(nil); errors.As(err, &t) {
		switch t.StatusCode {
		case http.StatusRequestTimeout, http.StatusTooManyRequests,
			http.StatusInternalServerError, http.StatusBadGateway,
			http.StatusServiceUnavailable, http.StatusGatewayTimeout, 499, 522: // nginx's and Cloudflare's ways to say 408 and 504
			return true
		}
		return false
	}
	if errors.Is(err, errEarly) {
		return true
	}
	for _, lasting := range []error{
		fault.ErrDenied, fault.ErrCorrupt, syscall.ECONNREFUSED, syscall.ENOSPC, http.ErrSchemeMismatch,
	} {
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

// Explain adds the sentinel, and what to do.
func (c *Client) Explain(err error) error {
	if err == nil {
		return nil
	}
	host := c.Repo.RegistryStr()
	if c.Repo.RegistryStr() == name.DefaultRegistry {
		host = "docker.io"
	}
	hint := func(text string, err error) error {
		return &fault.Error{Hint: strings.ReplaceAll(text, "%s", host), Err: err}
	}
	// First, because to this host the library goes on without TLS, and what it
	// is told there says nothing.
	if cert := (*tls.CertificateVerificationError)(nil); errors.As(err, &cert) {
		return hint(c.opts.Advice.Trust, fmt.Errorf("%s: %w: %w", host, fault.ErrDenied, cert))
	}
	if t := (*transport.Error)(nil); errors.As(err, &t) {
		said := short(t)
		switch {
		case t.StatusCode == http.StatusUnauthorized, t.StatusCode == http.StatusForbidden:
			return hint(c.opts.Advice.Login, fmt.Errorf("%s: %w: %s", host, fault.ErrDenied, said))
		case t.StatusCode == http.StatusNotFound:
			return fmt.Errorf("%s: %w: %s", host, fault.ErrNotFound, said)
		case t.StatusCode == http.StatusTooManyRequests:
			text := "Try again later, or log in: registries allow more then."
			if l := (later{}); errors.As(err, &l) {
				text = fmt.Sprintf("Try again in %s, or log in: registries allow more then.", l.wait)
			}
			return hint(text, fmt.Errorf("%s: %w: %s", host, fault.ErrBusy, said))
		case t.StatusCode >= 500:
			return hint("The registry is in trouble; try again later.",
				fmt.Errorf("%s: %w: %s", host, fault.ErrBusy, said))
		}
		return fmt.Errorf("%s: %s", host, said)
	}
	if errors.Is(err, errPlain) || errors.Is(err, http.ErrSchemeMismatch) {
		return hint(c.opts.Advice.Plain, fmt.Errorf("%s: %w", host, err))
	}
	ours := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, fault.ErrDenied)
	if errors.Is(err, errStalled) || errors.As(err, new(net.Error)) && !ours {
		return hint("Is the registry up, and reachable from here? HTTPS_PROXY names a proxy, if there is one.", err)
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
