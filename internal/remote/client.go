// Package remote is a client of one repository of a registry, as checkpoints and
// images need it: it tries again what may pass, gives up on connections that
// stand still, continues blobs that broke, sends nothing in the clear that should
// not be, and says what went wrong in a sentence with a hint.
package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/internal/fault"
)

// Options modify Connect.
type Options struct {
	// Plain allows connections without TLS. To this host itself (localhost,
	// 127.0.0.0/8, ::1) they are always allowed.
	Plain bool
	// Elsewhere is asked how to connect to HOST[:PORT] that the registry sends us
	// to, and whether without TLS; nil: as to the registry.
	Elsewhere func(host string) (rt http.RoundTripper, plain bool)
	// Keychain has the credentials; nil: what `docker login` and `podman login` wrote.
	Keychain authn.Keychain
	// Transport makes the connections; nil: a Transport of its own.
	Transport http.RoundTripper
	Pause     time.Duration // before the first retry; 0: half a second
	Idle      time.Duration // how long a transfer may stand still; 0: a minute
	Advice    Advice
}

// Advice is what errors tell to do; "%s" stands for the registry.
type Advice struct {
	Login string // after 401 and 403
	Plain string // when a connection would be in the clear
	Trust string // when no authority vouches for a certificate
}

const (
	Tries      = 6 // of a request that fails in a way that may pass
	maxPause   = 10 * time.Second
	maxWait    = 30 * time.Second // that a registry may ask for with Retry-After
	worthwhile = 1 << 20          // bytes after which a broken transfer has all its tries again
	lookupTime = 5 * time.Second  // for the address of where the registry sends us
	maxOther   = 16 << 20         // bytes of answers whose reader has no bound of its own
)

// Client speaks with one repository.
type Client struct {
	Repo   name.Repository
	Pusher *remote.Pusher
	opts   Options
	http   *http.Client
	close  func()
}

// Transport makes connections and heeds HTTPS_PROXY.
func Transport() *http.Transport {
	t := remote.DefaultTransport.(*http.Transport).Clone()
	t.DialContext = dial
	t.ResponseHeaderTimeout = 5 * time.Minute // some registries copy a blob before they answer
	t.MaxResponseHeaderBytes = 1 << 20
	return t
}

// Connect finds out how the registry wants to be asked. scope is
// transport.PullScope or transport.PushScope. The client must be closed.
func Connect(ctx context.Context, repo name.Repository, scope string, opts Options) (*Client, error) {
	c := &Client{Repo: repo, opts: opts}
	rt, err := c.dial(ctx, repo, []string{repo.Scope(scope)})
	if err != nil {
		return nil, err
	}
	// One try: Retry can be cancelled, theirs cannot.
	c.Pusher, err = remote.NewPusher(remote.WithTransport(rt), remote.WithRetryBackoff(remote.Backoff{Steps: 1}))
	return c, err
}

// Login proves the credentials of opts to a registry.
func Login(ctx context.Context, reg name.Registry, opts Options) error {
	c := &Client{Repo: reg.Repo("any"), opts: opts}
	if _, err := c.dial(ctx, reg, nil); err != nil {
		return err
	}
	defer c.Close()
	return c.Explain(c.Retry(ctx, func() error {
		resp, err := c.request(ctx, http.MethodGet, "/v2/", nil, http.StatusOK)
		if err == nil {
			resp.Body.Close()
		}
		return err
	}))
}

// dial makes the client that sends what what needs to be let in.
func (c *Client) dial(ctx context.Context, what authn.Resource, scopes []string) (http.RoundTripper, error) {
	if c.opts.Pause == 0 {
		c.opts.Pause = 500 * time.Millisecond
	}
	if c.opts.Idle == 0 {
		c.opts.Idle = time.Minute
	}
	base := c.opts.Transport
	c.close = func() {}
	if base == nil {
		t := Transport()
		base, c.close = t, t.CloseIdleConnections
	}
	keys := c.opts.Keychain
	if keys == nil {
		keys = authn.DefaultKeychain
	}
	auth, err := authn.Resolve(ctx, keys, what)
	if err != nil {
		c.close()
		return nil, fmt.Errorf("credentials for %s: %w", what.RegistryStr(), err)
	}
	home := url.URL{Host: c.Repo.RegistryStr()}
	gate := newGuard(home.Hostname(), base, c.opts)
	var rt http.RoundTripper
	err = c.Retry(ctx, func() error {
		rt, err = transport.NewWithContext(ctx, c.Repo.Registry, auth, transport.NewUserAgent(gate, "agentbox"), scopes)
		return err
	})
	if err != nil {
		c.close()
		return nil, c.Explain(err)
	}
	c.http = &http.Client{Transport: rt}
	return rt, nil
}

// Close lets go of what Connect made.
func (c *Client) Close() { c.close() }

// Do sends a request for something of the repository. The answer has one of
// the accepted codes.
func (c *Client) Do(
	ctx context.Context, method, path string, header map[string]string, accepted ...int,
) (*http.Response, error) {
	return c.request(ctx, method, "/v2/"+c.Repo.RepositoryStr()+"/"+path, header, accepted...)
}

func (c *Client) request(
	ctx context.Context, method, path string, header map[string]string, accepted ...int,
) (*http.Response, error) {
	u := url.URL{Scheme: c.Repo.Scheme(), Host: c.Repo.RegistryStr(), Path: path}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		// The query may be the signature that opens what the registry keeps elsewhere.
		if u := (*url.Error)(nil); errors.As(err, &u) {
			u.URL, _, _ = strings.Cut(u.URL, "?")
		}
		return nil, err
	}
	body := resp.Body
	resp.Body = limited(body) // of an error
	if err := transport.CheckError(resp, accepted...); err != nil {
		body.Close()
		if s, e := strconv.Atoi(resp.Header.Get("Retry-After")); e == nil && s > 0 {
			err = later{err, time.Duration(min(s, 1<<20)) * time.Second}
		}
		return nil, err
	}
	resp.Body = body
	return resp, nil
}

// Manifest reads what lies under a tag or a digest: at most limit bytes of one
// of the accepted types. A digest is proven; not there is ErrNotFound.
func (c *Client) Manifest(
	ctx context.Context, ref name.Reference, accept string, limit int64,
) (raw []byte, mediaType string, err error) {
	err = c.Retry(ctx, func() error {
		return c.watched(ctx, func(ctx context.Context, alive func()) error {
			resp, err := c.Do(ctx, http.MethodGet, "manifests/"+ref.Identifier(),
				map[string]string{"Accept": accept}, http.StatusOK)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			mediaType = resp.Header.Get("Content-Type")
			raw, err = io.ReadAll(io.LimitReader(tick{resp.Body, alive}, limit+1))
			return err
		})
	})
	if err != nil {
		return nil, "", c.Explain(err)
	}
	if int64(len(raw)) > limit {
		return nil, "", fmt.Errorf("%s: %w: its manifest has more than %d bytes", ref, fault.ErrCorrupt, limit)
	}
	if d, ok := ref.(name.Digest); ok {
		if got := Describe("", raw).Digest.String(); got != d.DigestStr() {
			return nil, "", fmt.Errorf("%s: %w: the registry sent %s", ref, fault.ErrCorrupt, got)
		}
	}
	return raw, mediaType, nil
}

// Small reads a blob that fits into memory, and proves it.
func (c *Client) Small(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	var b []byte
	err := c.Retry(ctx, func() error {
		return c.watched(ctx, func(ctx context.Context, alive func()) error {
			resp, err := c.Do(ctx, http.MethodGet, "blobs/"+d.Digest.String(), rawBytes(), http.StatusOK)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if n := resp.ContentLength; n >= 0 && n != d.Size {
				return fmt.Errorf("%w: the registry sends %d bytes in place of %d", fault.ErrCorrupt, n, d.Size)
			}
			b, err = readExactly(tick{resp.Body, alive}, d.Size)
			return err
		})
	})
	if err != nil {
		return nil, c.Explain(fmt.Errorf("%s: %w", d.Digest, err))
	}
	if got := Describe(d.MediaType, b); got.Digest != d.Digest {
		return nil, fmt.Errorf("%s: %w: its bytes are those of %s", d.Digest, fault.ErrCorrupt, got.Digest)
	}
	return b, nil
}

// Describe makes the descriptor of data.
func Describe(media types.MediaType, data []byte) v1.Descriptor {
	h, n, _ := v1.SHA256(bytes.NewReader(data)) // a reader of memory does not fail
	return v1.Descriptor{MediaType: media, Size: n, Digest: h}
}

// readExactly returns the n bytes that r has; more or fewer are ErrCorrupt.
func readExactly(r io.Reader, n int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, n+1))
	if err == nil && int64(len(b)) != n {
		err = errEarly
		if int64(len(b)) > n {
			err = fmt.Errorf("more than %d bytes: %w", n, fault.ErrCorrupt)
		}
	}
	return b, err
}

// rawBytes keeps net/http from asking for gzip, which would make sizes and
// ranges those of something else.
func rawBytes() map[string]string { return map[string]string{"Accept-Encoding": "identity"} }

// Exists reports whether the repository has the blob, in that size.
func (c *Client) Exists(ctx context.Context, d v1.Descriptor) (there bool, err error) {
	err = c.Retry(ctx, func() error {
		resp, err := c.Do(ctx, http.MethodHead, "blobs/"+d.Digest.String(), rawBytes(),
			http.StatusOK, http.StatusNotFound)
		if err != nil {
			return err
		}
		resp.Body.Close()
		there = resp.StatusCode == http.StatusOK && (resp.ContentLength < 0 || resp.ContentLength == d.Size)
		return nil
	})
	return there, c.Explain(err)
}

// errStalled is the cause when a connection is given up.
var errStalled = errors.New("the connection stood still")

// watched calls op, which is cancelled when it has not called alive for a while.
func (c *Client) watched(ctx context.Context, op func(ctx context.Context, alive func()) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// Until the first byte the transport has its own limit.
	var timer *time.Timer
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	err := op(ctx, func() {
		if timer == nil {
			timer = time.AfterFunc(c.opts.Idle, func() { cancel(errStalled) })
		} else {
			timer.Reset(c.opts.Idle)
		}
	})
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return errStalled
	}
	return err
}

// tick calls alive whenever a Read begins.
type tick struct {
	r     io.Reader
	alive func()
}

func (t tick) Read(p []byte) (int, error) { t.alive(); return t.r.Read(p) }

// Retry calls op until it succeeds, or fails in a way that will not pass.
func (c *Client) Retry(ctx context.Context, op func() error) error {
	for n := 1; ; n++ {
		err := op()
		if err == nil || n == Tries || !passing(err) {
			return err
		}
		if err := c.sleep(ctx, n, err); err != nil {
			return err
		}
	}
}

// sleep waits before the n-th retry.
func (c *Client) sleep(ctx context.Context, n int, after error) error {
	pause := min(c.opts.Pause<<(n-1), maxPause)
	if l := (later{}); errors.As(after, &l) {
		pause = max(pause, l.wait)
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
