package source

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// credentials is what concerns us of docker's config.json.
type credentials struct {
	Auths       map[string]authn.AuthConfig `json:"auths"`
	CredsStore  string                      `json:"credsStore"`
	CredHelpers map[string]string           `json:"credHelpers"`
}

// helper is the credential helper for key; empty: none.
func (c credentials) helper(key string) string {
	if h := c.CredHelpers[key]; h != "" {
		return h
	}
	return c.CredsStore
}

func readCredentials(path string) (credentials, error) {
	var c credentials
	b, err := os.ReadFile(path)
	if err == nil && len(bytes.TrimSpace(b)) > 0 {
		if err = json.Unmarshal(b, &c); err != nil {
			err = fmt.Errorf("%s: %w: %w", path, fault.ErrInvalid, err)
		}
	}
	return c, err
}

// dockerAuthFile is where `docker login` writes.
func dockerAuthFile() (string, error) {
	if dir := os.Getenv("DOCKER_CONFIG"); dir != "" {
		return filepath.Join(dir, "config.json"), nil
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".docker", "config.json"), err
}

// authFiles are all that credentials are looked for in: Docker's, then Podman's.
func authFiles(o image.SourceOptions) []string {
	if o.AuthFile != "" {
		return []string{o.AuthFile}
	}
	var list []string
	add := func(base string, rest ...string) {
		if base != "" {
			list = append(list, filepath.Join(append([]string{base}, rest...)...))
		}
	}
	if p, err := dockerAuthFile(); err == nil {
		add(p)
	}
	add(os.Getenv("REGISTRY_AUTH_FILE"))
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		add(dir, "containers", "auth.json")
	} else {
		add(fmt.Sprintf("/run/containers/%d/auth.json", os.Getuid()))
	}
	if dir, err := os.UserConfigDir(); err == nil {
		add(dir, "containers", "auth.json")
	}
	return list
}

// keychain finds credentials, once for each repository.
type keychain struct {
	opts  image.SourceOptions
	mu    sync.Mutex
	known map[string]authn.Authenticator
	err   error // why a credential helper or a file gave none
}

func newKeychain(opts image.SourceOptions) *keychain {
	return &keychain{opts: opts, known: map[string]authn.Authenticator{}}
}

// Resolve implements authn.Keychain.
func (k *keychain) Resolve(r authn.Resource) (authn.Authenticator, error) {
	return k.ResolveContext(context.Background(), r)
}

// ResolveContext implements authn.ContextKeychain. Failures are no errors: many registries need
// no credentials. See blame.
func (k *keychain) ResolveContext(ctx context.Context, r authn.Resource) (authn.Authenticator, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if a := k.known[r.String()]; a != nil {
		return a, nil
	}
	a := authn.Anonymous
	for _, path := range authFiles(k.opts) {
		c, err := readCredentials(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var found authn.AuthConfig
		if err == nil {
			found, err = c.find(ctx, r.String())
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			k.err = errors.Join(k.err, err)
			if k.opts.Log != nil {
				k.opts.Log.Warn("credentials not available", "registry", r.RegistryStr(), "error", err)
			}
			continue
		}
		if found != (authn.AuthConfig{}) {
			a = authn.FromConfig(found)
			break
		}
	}
	k.known[r.String()] = a
	return a, nil
}

// blame adds to a refusal why there were no credentials.
func (k *keychain) blame(err error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil && errors.Is(err, fault.ErrDenied) {
		return fmt.Errorf("%w (its credentials could not be had: %w)", err, k.err)
	}
	return err
}

// find looks for repo, a whole name, then for what is above it.
func (c credentials) find(ctx context.Context, repo string) (authn.AuthConfig, error) {
	for at := repo; ; at = at[:strings.LastIndexByte(at, '/')] {
		host := !strings.Contains(at, "/")
		for _, key := range keysOf(at) {
			if h := c.helper(key); h != "" && host {
				a, err := helperGet(ctx, h, key)
				if err != nil || a != (authn.AuthConfig{}) {
					return a, err
				}
			}
			if a := c.Auths[key]; a != (authn.AuthConfig{}) {
				return a, nil
			}
		}
		if host {
			return authn.AuthConfig{}, nil
		}
	}
}

// keysOf are the names of a registry or repository in config.json.
func keysOf(s string) []string {
	rest, hub := strings.CutPrefix(s, name.DefaultRegistry)
	if hub && rest == "" {
		return []string{authn.DefaultAuthKey, reference.DockerHub, name.DefaultRegistry}
	}
	if hub {
		return []string{reference.DockerHub + rest}
	}
	// as old versions of Docker wrote them
	return []string{s, "https://" + s, "https://" + s + "/v1/", "https://" + s + "/v2/"}
}

// A helper may prompt; a user that is not there must not block us for ever.
const helperTime = time.Minute

// helper runs docker-credential-NAME.
func helper(ctx context.Context, which, verb string, in []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, helperTime)
	defer cancel()
	bin := "docker-credential-" + which
	if strings.ContainsRune(which, '/') {
		return nil, fmt.Errorf("credential helper %q: %w", which, fault.ErrInvalid)
	}
	cmd := exec.CommandContext(ctx, bin, verb)
	cmd.WaitDelay = time.Second
	cmd.Stdin = bytes.NewReader(in)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, &fault.Error{
			Hint: fmt.Sprintf("Install %s, or take it out of docker's config.json.", bin),
			Err:  fmt.Errorf("%w: %w", fault.ErrNotFound, err),
		}
	}
	if err != nil {
		said := strings.TrimSpace(string(out) + stderr.String())
		if strings.Contains(said, "credentials not found") {
			return nil, fmt.Errorf("%s %s: %w", bin, verb, fault.ErrNotFound)
		}
		return nil, fmt.Errorf("%s %s: %w: %.300q", bin, verb, err, said)
	}
	return out, nil
}

func helperGet(ctx context.Context, which, key string) (authn.AuthConfig, error) {
	out, err := helper(ctx, which, "get", []byte(key))
	if err != nil {
		if errors.Is(err, fault.ErrNotFound) && !errors.Is(err, exec.ErrNotFound) {
			return authn.AuthConfig{}, nil // it has none
		}
		return authn.AuthConfig{}, err
	}
	var got struct{ Username, Secret string }
	if err := json.Unmarshal(out, &got); err != nil {
		return authn.AuthConfig{}, fmt.Errorf("docker-credential-%s: %w: its answer cannot be read",
			which, fault.ErrCorrupt)
	}
	if got.Username == "<token>" {
		return authn.AuthConfig{IdentityToken: got.Secret}, nil
	}
	return authn.AuthConfig{Username: got.Username, Password: got.Secret}, nil
}
