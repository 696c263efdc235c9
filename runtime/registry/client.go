package registry

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
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
	// Progress is called now and then with done of total bytes: of raw chunks by
	// Push, of packs by Pull. The total of Pull grows as it learns what it lacks.
	Progress func(done, total int64)

	// For tests.
	packSize int64         // of packs that are made; 0: maxNew
	pause    time.Duration // before the first retry; 0: half a second
	idle     time.Duration // how long a transfer may stand still; 0: a minute
}

// client speaks with one repository.
type client struct {
	*remote.Client
	opts Options
}

// parse reads a reference. It refuses one without a registry: a checkpoint has secrets in it
// and must not land at Docker Hub for want of a word.
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
	if opts.packSize == 0 {
		opts.packSize = maxNew
	}
	c, err := remote.Connect(ctx, repo, scope, remote.Options{
		Plain: opts.PlainHTTP, Keychain: opts.Keychain, Transport: opts.Transport, Pause: opts.pause, Idle: opts.idle,
		Advice: remote.Advice{
			Login: "Run `docker login %s` as the user who runs agentbox.",
			Plain: "If the network between is yours, use --plain-http; else ask for TLS.",
			Trust: "Have the system trust the authority that signed it (update-ca-certificates).",
		}})
	if err != nil {
		return nil, err
	}
	return &client{c, opts}, nil
}

var manifestTypes = strings.Join([]string{
	string(types.OCIManifestSchema1), string(types.OCIImageIndex), string(types.DockerManifestSchema2),
	string(types.DockerManifestList),
}, ",")

// artifact reads and parses what lies under a tag or digest. Not there is
// ErrNotFound.
func (c *client) artifact(ctx context.Context, ref name.Reference) (*artifact, error) {
	raw, _, err := c.Manifest(ctx, ref, manifestTypes, maxArtifact)
	if err != nil {
		return nil, err
	}
	a, err := parseArtifact(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", ref, err)
	}
	a.digest = remote.Describe("", raw).Digest
	return a, nil
}

// subject describes the manifest with that digest; nil: the repository does
// not have it, so that nothing can refer to it.
func (c *client) subject(ctx context.Context, digest string) (d *v1.Descriptor, err error) {
	h, err := v1.NewHash(digest)
	if err != nil || h.Algorithm != "sha256" {
		return nil, nil
	}
	err = c.Retry(ctx, func() error {
		resp, err := c.Do(ctx, http.MethodHead, "manifests/"+digest, map[string]string{"Accept": manifestTypes},
			http.StatusOK, http.StatusNotFound, http.StatusBadRequest)
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
	return d, c.Explain(err)
}
