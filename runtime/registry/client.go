package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
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

// Options modify Push and Pull.
type Options struct {
	// PlainHTTP allows connections without TLS to any host. To this host
	// itself (localhost, 127.0.0.0/8, ::1) they are always allowed.
	PlainHTTP bool
	// Keychain has the credentials; nil: what `docker login` and `podman login` wrote.
	Keychain authn.Keychain
	// Transport makes the connections; nil: one that heeds HTTPS_PROXY.
	Transport http.RoundTripper
	// Scratch is a directory of the caller's, on a disk with room for a pack (1
	// GiB at most). A pull that was cut short leaves half a pack there, *.part,
	// for the next one, and a push that was killed a directory push-*; while
	// neither is under way both may be deleted. Empty: a temporary directory,
	// removed at the end.
	Scratch string
	// Progress is called now and then with done of total bytes: of raw pieces by
	// Push, of packs by Pull. The total of Pull grows as it learns what it lacks.
	Progress func(done, total int64)

	// For tests.
	packSize int64         // of packs that are made; 0: maxNew
	pause    time.Duration // before the first retry; 0: half a second
	idle     time.Duration // how long a transfer may stand still; 0: a minute
}

const (
	tries      = 6
	maxPause   = 10 * time.Second
	worthwhile = 1 << 20 // bytes after which a broken transfer has all its tries again
)

// client speaks with one repository.
type client struct {
	repo   name.Repository
	opts   Options
	base   http.RoundTripper
	rt     http.RoundTripper // base with credentials
	http   *http.Client
	pusher *remote.Pusher
	close  func()
}

// parse reads a reference. One without a registry is refused: a checkpoint
// has secrets in it and is not to land at Docker Hub for want of a word.
func parse(ref string, opts Options) (name.Reference, error) {
	host, rest, ok := strings.Cut(ref, "/")
	if !ok || rest == "" || !strings.ContainsAny(host, ".:") && host != "localhost" {
		return nil, &fault.Error{Hint: "Write the registry too: HOST/NAME:TAG, for example docker.io/me/web:before-upgrade.",
			Err: fmt.Errorf("reference %q names no registry: %w", ref, fault.ErrInvalid)}
	}
	var o []name.Option
	if opts.PlainHTTP {
		o = append(o, name.Insecure)
	}
	r, err := name.ParseReference(ref, o...)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	return r, nil
}

// connect finds out how the registry wants to be asked. scope is
// transport.PullScope or transport.PushScope.
func connect(ctx context.Context, repo name.Repository, scope string, opts Options) (*client, error) {
	if opts.pause == 0 {
		opts.pause = 500 * time.Millisecond
	}
	if opts.idle == 0 {
		opts.idle = time.Minute
	}
	if opts.packSize == 0 {
		opts.packSize = maxNew
	}
	c := &client{repo: repo, opts: opts, base: opts.Transport, close: func() {}}
	if c.base == nil {
		t := remote.DefaultTransport.(*http.Transport).Clone()
		t.ResponseHeaderTimeout = 5 * time.Minute // some registries copy a blob before they answer
		t.MaxResponseHeaderBytes = 1 << 20
		c.base, c.close = t, t.CloseIdleConnections
	}
	keys := opts.Keychain
	if keys == nil {
		keys = authn.DefaultKeychain
	}
	auth, err := authn.Resolve(ctx, keys, repo)
	if err != nil {
		return nil, fmt.Errorf("credentials for %s: %w", repo.RegistryStr(), err)
	}
	err = c.retry(ctx, func() error {
		c.rt, err = transport.NewWithContext(ctx, repo.Registry, auth, transport.NewUserAgent(guard{c.base, opts.PlainHTTP}, "agentbox"), []string{repo.Scope(scope)})
		return err
	})
	if err != nil {
		c.close()
		return nil, c.explain(err)
	}
	c.http = &http.Client{Transport: c.rt, CheckRedirect: checkRedirect}
	// One try: retry here can be cancelled, theirs cannot.
	c.pusher, err = remote.NewPusher(remote.WithTransport(c.rt), remote.WithRetryBackoff(remote.Backoff{Steps: 1}))
	return c, err
}

// do sends a request for something of the repository. The answer has one of
// the accepted codes.
func (c *client) do(ctx context.Context, method, path string, header map[string]string, accepted ...int) (*http.Response, error) {
	u := url.URL{Scheme: c.repo.Scheme(), Host: c.repo.RegistryStr(), Path: "/v2/" + c.repo.RepositoryStr() + "/" + path}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if err := transport.CheckError(resp, accepted...); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

var manifestTypes = strings.Join([]string{string(types.OCIManifestSchema1), string(types.OCIImageIndex), string(types.DockerManifestSchema2), string(types.DockerManifestList)}, ",")

// artifact reads and parses what lies under a tag or digest. Not there is
// ErrNotFound.
func (c *client) artifact(ctx context.Context, ref name.Reference) (*artifact, error) {
	var raw []byte
	err := c.retry(ctx, func() error {
		return c.watched(ctx, func(ctx context.Context, alive func()) error {
			resp, err := c.do(ctx, http.MethodGet, "manifests/"+ref.Identifier(), map[string]string{"Accept": manifestTypes}, http.StatusOK)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			raw, err = io.ReadAll(io.LimitReader(tick{resp.Body, alive}, maxArtifact+1))
			return err
		})
	})
	if err != nil {
		return nil, c.explain(err)
	}
	if len(raw) > maxArtifact {
		return nil, fmt.Errorf("%s: %w: its manifest has more than %d bytes", ref, fault.ErrCorrupt, maxArtifact)
	}
	digest, _, _ := v1.SHA256(bytes.NewReader(raw)) // a reader of memory does not fail
	if d, ok := ref.(name.Digest); ok && d.DigestStr() != digest.String() {
		return nil, fmt.Errorf("%s: %w: the registry sent %s", ref, fault.ErrCorrupt, digest)
	}
	a, err := parseArtifact(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", ref, err)
	}
	a.digest = digest
	return a, nil
}

// small reads a blob that fits into memory, and proves it.
func (c *client) small(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	var b []byte
	err := c.retry(ctx, func() error {
		return c.watched(ctx, func(ctx context.Context, alive func()) error {
			resp, err := c.do(ctx, http.MethodGet, "blobs/"+d.Digest.String(), rawBytes(), http.StatusOK)
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
		return nil, c.explain(fmt.Errorf("%s: %w", d.Digest, err))
	}
	if got := describe(d.MediaType, b); got.Digest != d.Digest {
		return nil, fmt.Errorf("%s: %w: its bytes are those of %s", d.Digest, fault.ErrCorrupt, got.Digest)
	}
	return b, nil
}

// rawBytes keeps net/http from asking for gzip, which would make sizes and
// ranges those of something else.
func rawBytes() map[string]string { return map[string]string{"Accept-Encoding": "identity"} }

// exists tells whether the repository has the blob, in that size.
func (c *client) exists(ctx context.Context, d v1.Descriptor) (there bool, err error) {
	err = c.retry(ctx, func() error {
		resp, err := c.do(ctx, http.MethodHead, "blobs/"+d.Digest.String(), rawBytes(), http.StatusOK, http.StatusNotFound)
		if err != nil {
			return err
		}
		resp.Body.Close()
		there = resp.StatusCode == http.StatusOK && (resp.ContentLength < 0 || resp.ContentLength == d.Size)
		return nil
	})
	return there, c.explain(err)
}

// subject describes the manifest with that digest; nil: the repository does
// not have it, so that nothing can refer to it.
func (c *client) subject(ctx context.Context, digest string) (d *v1.Descriptor, err error) {
	h, err := v1.NewHash(digest)
	if err != nil || h.Algorithm != "sha256" {
		return nil, nil
	}
	err = c.retry(ctx, func() error {
		resp, err := c.do(ctx, http.MethodHead, "manifests/"+digest, map[string]string{"Accept": manifestTypes}, http.StatusOK, http.StatusNotFound, http.StatusBadRequest)
		if err != nil {
			return err
		}
		resp.Body.Close()
		media := types.MediaType(resp.Header.Get("Content-Type"))
		if resp.StatusCode == http.StatusOK && resp.ContentLength > 0 && (media.IsImage() || media.IsIndex()) {
			d = &v1.Descriptor{MediaType: media, Size: resp.ContentLength, Digest: h}
		}
		return nil
	})
	return d, c.explain(err)
}

// errStalled is the cause when watched gives up.
var errStalled = errors.New("the connection stood still")

// watched calls op, which is cancelled when it has not called alive for a while.
func (c *client) watched(ctx context.Context, op func(ctx context.Context, alive func()) error) error {
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
			timer = time.AfterFunc(c.opts.idle, func() { cancel(errStalled) })
		} else {
			timer.Reset(c.opts.idle)
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

// retry calls op until it succeeds, or fails in a way that will not pass.
func (c *client) retry(ctx context.Context, op func() error) error {
	for n := 1; ; n++ {
		err := op()
		if err == nil || n == tries || !passing(err) {
			return err
		}
		if err := c.sleep(ctx, n); err != nil {
			return err
		}
	}
}

// sleep waits before the n-th retry.
func (c *client) sleep(ctx context.Context, n int) error {
	t := time.NewTimer(min(c.opts.pause<<(n-1), maxPause))
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
