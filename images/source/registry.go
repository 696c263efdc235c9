package source

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
)

var advice = remote.Advice{
	Login: "Run `agentbox image login %s`; some registries say this of what is not there, too.",
	Plain: "If the network between is yours, use --insecure or configure the registry, and where it sends us, in registries.toml; else ask for TLS.",
	Trust: "Put the certificate of the authority that signed it into /etc/agentbox/certs.d/%s/ca.crt, or name its directory with --cert-dir.",
}

// Schema 1 is asked for so that it can be told from what is not there.
var acceptManifests = strings.Join([]string{string(types.OCIManifestSchema1), string(types.OCIImageIndex),
	string(types.DockerManifestSchema2), string(types.DockerManifestList),
	string(types.DockerManifestSchema1Signed) + ";q=0.1", string(types.DockerManifestSchema1) + ";q=0.1"}, ", ")

// endpoint is a repository at one registry or mirror, connected when first needed.
type endpoint struct {
	repo   name.Repository
	mirror bool
	plain  bool // HTTP will do
	any    bool // any certificate will do
	certs  []string
	keys   *keychain
	opts   image.SourceOptions
	conf   image.SourceConfig
	scope  string
	mu     sync.Mutex
	client *remote.Client
	idle   func()
}

// endpoints are where a repository lies: at its mirrors, then at its registry.
func endpoints(ref reference.Reference, opts image.SourceOptions, scope string) ([]*endpoint, error) {
	conf, err := configOf(opts)
	if err != nil {
		return nil, err
	}
	repo, err := name.NewRepository(ref.Name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	keys := newKeychain(opts)
	var list []*endpoint
	host, path, _ := strings.Cut(ref.Name, "/")
	reg := registryOf(conf, host)
	if scope == transport.PullScope {
		for _, m := range reg.Mirrors {
			scheme, rest, ok := strings.Cut(m, "://")
			if !ok {
				scheme, rest = "https", m
			}
			at, err := name.NewRepository(strings.TrimSuffix(rest, "/") + "/" + path)
			if err != nil {
				return nil, fmt.Errorf("mirror %q of %s: %w: %w", m, host, fault.ErrInvalid, err)
			}
			own := registryOf(conf, hostOf(at.Registry))
			list = append(list, &endpoint{
				repo: at, mirror: true, plain: scheme == "http" || own.Insecure, any: own.Insecure,
				certs: certDirs(hostOf(at.Registry), own.CertDir), keys: keys, opts: opts, conf: conf, scope: scope,
			})
		}
	}
	loose := opts.Insecure || reg.Insecure
	dir := opts.CertDir
	if dir == "" {
		dir = reg.CertDir
	}
	return append(list, &endpoint{
		repo: repo, plain: loose, any: loose, certs: certDirs(host, dir), keys: keys, opts: opts,
		conf: conf, scope: scope,
	}), nil
}

// hostOf is what people call a registry.
func hostOf(r name.Registry) string {
	if r.RegistryStr() == name.DefaultRegistry {
		return reference.DockerHub
	}
	return r.RegistryStr()
}

// connect returns the client. It is closed with the endpoint.
func (e *endpoint) connect(ctx context.Context) (*remote.Client, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.client != nil {
		return e.client, nil
	}
	t, err := newConnections(e.certs, e.any, e.conf)
	if err != nil {
		return nil, err
	}
	repo := e.repo
	if e.plain {
		// Only so does the library try without TLS, should there be none.
		if repo, err = name.NewRepository(repo.Name(), name.Insecure); err != nil {
			return nil, err
		}
	}
	c, err := remote.Connect(ctx, repo, e.scope, remote.Options{
		Plain: e.plain, Keychain: e.keys, Transport: t.home, Elsewhere: t.elsewhere, Pause: e.opts.Pause,
		Idle: e.opts.Idle, Advice: advice,
	})
	if err != nil {
		t.close()
		return nil, e.keys.blame(err)
	}
	e.client, e.idle = c, t.close
	return c, nil
}

func (e *endpoint) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.client != nil {
		e.client.Close()
		e.idle()
	}
}

// connections lead to a registry and to where it sends us. Those
// elsewhere check certificates unless the host itself is configured otherwise.
type connections struct {
	strict, loose *http.Transport
	home          *http.Transport // one of them
	conf          image.SourceConfig
}

func newConnections(certs []string, anyCert bool, conf image.SourceConfig) (*connections, error) {
	strict, err := httpTransport(certs)
	if err != nil {
		return nil, err
	}
	t := &connections{strict: strict, loose: strict.Clone(), home: strict, conf: conf}
	t.loose.TLSClientConfig.InsecureSkipVerify = true // only where the user said so
	if anyCert {
		t.home = t.loose
	}
	return t, nil
}

func (t *connections) elsewhere(host string) (http.RoundTripper, bool) {
	if registryOf(t.conf, host).Insecure {
		return t.loose, true
	}
	return t.strict, false
}

func (t *connections) close() {
	t.strict.CloseIdleConnections()
	t.loose.CloseIdleConnections()
}

// httpTransport trusts what lies in the directories in addition to the
// system's authorities.
func httpTransport(certs []string) (*http.Transport, error) {
	t := remote.Transport()
	t.TLSClientConfig = &tls.Config{}
	for _, dir := range certs {
		list, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("certificates of a registry: %w", err)
		}
		for _, f := range list {
			path := filepath.Join(dir, f.Name())
			switch filepath.Ext(path) {
			case ".crt":
				pem, err := os.ReadFile(path)
				if err != nil {
					return nil, err
				}
				if t.TLSClientConfig.RootCAs == nil {
					if t.TLSClientConfig.RootCAs, err = x509.SystemCertPool(); err != nil {
						return nil, err
					}
				}
				if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
					return nil, fmt.Errorf("%s: %w: there is no certificate in it", path, fault.ErrInvalid)
				}
			case ".cert":
				pair, err := tls.LoadX509KeyPair(path, strings.TrimSuffix(path, ".cert")+".key")
				if err != nil {
					return nil, fmt.Errorf("%s: %w: %w", path, fault.ErrInvalid, err)
				}
				t.TLSClientConfig.Certificates = append(t.TLSClientConfig.Certificates, pair)
			}
		}
	}
	return t, nil
}

// certDirs are the directories with certificates for a registry; dir, if one is
// configured, stands for all of them.
func certDirs(host, dir string) []string {
	if dir != "" {
		return []string{dir}
	}
	var list []string
	for _, d := range certsRoots {
		if fi, err := os.Stat(filepath.Join(d, host)); err == nil && fi.IsDir() {
			list = append(list, filepath.Join(d, host))
		}
	}
	return list
}

var certsRoots = []string{"/etc/agentbox/certs.d", "/etc/containers/certs.d", "/etc/docker/certs.d"}

// repository is a place: a repository and its mirrors. The first endpoint is
// asked first.
type repository struct {
	list []*endpoint
	opts image.SourceOptions
}

func openRegistry(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (_ *opened, err error) {
	ctx, cancel := bounded(ctx, opts.Timeout)
	defer cancel()
	list, err := endpoints(ref, opts, transport.PullScope)
	if err != nil {
		return nil, err
	}
	r := &repository{list: list, opts: opts}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	var raw []byte
	var said string
	err = r.each(ctx, func(i int, c *remote.Client) error {
		var at name.Reference = c.Repo.Tag(ref.Tag)
		if ref.Digest != "" {
			at = c.Repo.Digest(ref.Digest)
		}
		raw, said, err = c.Manifest(ctx, at, acceptManifests, maxManifest)
		if errors.Is(err, fault.ErrNotFound) {
			return &fault.Error{Hint: "Check the name and the tag.", Err: err}
		}
		if err != nil {
			return err
		}
		r.list = append(r.list[i:len(r.list):len(r.list)], r.list[:i]...) // a registry with the manifest has the layers
		return nil
	})
	if err != nil {
		return nil, err
	}
	img, err := resolve(ctx, r, raw, said, opts)
	if err != nil {
		return nil, err
	}
	img.close = func() error { r.close(); return nil }
	return img, nil
}

func (r *repository) close() {
	for _, e := range r.list {
		e.close()
	}
}

// each calls op for one endpoint after the other until it succeeds. The error is
// that of the registry itself.
func (r *repository) each(ctx context.Context, op func(i int, c *remote.Client) error) error {
	var own error
	var mirrors []error
	for i, e := range r.list {
		c, err := e.connect(ctx)
		if err == nil {
			err = e.keys.blame(op(i, c))
		}
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(r.list) > 1 && e.opts.Log != nil {
			e.opts.Log.Info("image not available from this source", "registry", e.repo.RegistryStr(), "error", err)
		}
		if e.mirror {
			mirrors = append(mirrors, err)
		} else {
			own = err
		}
	}
	if len(mirrors) > 0 {
		// only the registry itself decides what kind of error it is
		return fmt.Errorf("%w (and its mirrors: %v)", own, errors.Join(mirrors...))
	}
	return own
}

func (r *repository) manifest(ctx context.Context, d v1.Descriptor) (raw []byte, err error) {
	ctx, cancel := bounded(ctx, r.opts.Timeout)
	defer cancel()
	err = r.each(ctx, func(_ int, c *remote.Client) error {
		if raw, _, err = c.Manifest(ctx, c.Repo.Digest(d.Digest.String()), string(d.MediaType),
			maxManifest); err != nil {
			return err
		}
		if int64(len(raw)) != d.Size {
			return fmt.Errorf("%s: %w: it has %d bytes, its index says %d", d.Digest,
				fault.ErrCorrupt, len(raw), d.Size)
		}
		return nil
	})
	return raw, err
}

func (r *repository) small(ctx context.Context, d v1.Descriptor) (b []byte, err error) {
	err = r.each(ctx, func(_ int, c *remote.Client) error {
		b, err = c.Small(ctx, d)
		return err
	})
	return b, err
}

func (r *repository) layer(d v1.Descriptor) Layer {
	resume := func(ctx context.Context, have io.Reader) (io.ReadCloser, error) {
		ctx, cancel := bounded(ctx, r.opts.Timeout)
		t := &transfer{ctx: ctx, from: r, d: d}
		all := io.MultiReader(&had{have, &t.n}, t)
		if have == nil {
			all = t
		}
		p := prove(all, t, d.Digest.String(), d.Size)
		p.done = cancel
		return p, nil
	}
	return Layer{Resume: resume, Open: func(ctx context.Context) (io.ReadCloser, error) { return resume(ctx, nil) }}
}

// had counts the bytes of an earlier try.
type had struct {
	r io.Reader
	n *int64
}

func (h *had) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	*h.n += int64(n)
	return n, err
}

// transfer downloads a blob from any endpoint that has it: what one does not give, the next may.
type transfer struct {
	ctx  context.Context
	from *repository
	d    v1.Descriptor
	n    int64 // bytes that are here
	at   int   // the endpoint
	body io.ReadCloser
	errs []error
}

func (t *transfer) Read(p []byte) (int, error) {
	for {
		err := t.open()
		if err == nil {
			n, e := t.body.Read(p)
			t.n += int64(n)
			if n > 0 || e == nil || e == io.EOF {
				return n, e
			}
			err = t.from.list[t.at].keys.blame(e)
		}
		if t.ctx.Err() != nil {
			return 0, context.Cause(t.ctx)
		}
		t.errs = append(t.errs, err)
		if t.at++; t.at >= len(t.from.list) {
			return 0, errors.Join(t.errs...)
		}
		_ = t.Close()
	}
}

func (t *transfer) open() error {
	if t.body != nil {
		return nil
	}
	c, err := t.from.list[t.at].connect(t.ctx)
	if err == nil {
		t.body = c.Blob(t.ctx, t.d, t.n)
	}
	return err
}

// Close ends the transfer.
func (t *transfer) Close() error {
	if t.body == nil {
		return nil
	}
	err := t.body.Close()
	t.body = nil
	return err
}
