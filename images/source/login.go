package source

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/remote"
)

// Login proves the credentials to the registry (HOST[:PORT]; empty: docker.io)
// and keeps them where `docker login` would: in its configuration file, or with
// the credential helper that this names. It returns where that is. user may be
// "<token>", and password an identity token then.
func Login(ctx context.Context, registry, user, password string, opts image.SourceOptions) (where string, err error) {
	ctx, cancel := bounded(ctx, opts.Timeout)
	defer cancel()
	reg, err := parseRegistry(registry)
	if err != nil {
		return "", err
	}
	if user == "" || password == "" {
		return "", fmt.Errorf("%w: a login needs a user and a password", fault.ErrInvalid)
	}
	auth := authn.AuthConfig{Username: user, Password: password}
	if user == "<token>" {
		auth = authn.AuthConfig{IdentityToken: password}
	}
	conf, err := configOf(opts)
	if err != nil {
		return "", err
	}
	own := registryOf(conf, hostOf(reg))
	loose := opts.Insecure || own.Insecure
	dir := opts.CertDir
	if dir == "" {
		dir = own.CertDir
	}
	t, err := newConnections(certDirs(hostOf(reg), dir), loose, conf)
	if err != nil {
		return "", err
	}
	defer t.close()
	if loose {
		if reg, err = name.NewRegistry(reg.RegistryStr(), name.Insecure); err != nil {
			return "", err
		}
	}
	refused := advice
	refused.Login = "Check user and password. Some registries want an access token in place of the password."
	err = remote.Login(ctx, reg, remote.Options{
		Plain: loose, Keychain: only{authn.FromConfig(auth)}, Transport: t.home, Elsewhere: t.elsewhere,
		Pause: opts.Pause, Idle: opts.Idle, Advice: refused,
	})
	if err != nil {
		return "", err
	}
	path, c, err := writableAuth(opts)
	if err != nil {
		return "", err
	}
	key := keysOf(reg.RegistryStr())[0]
	entry := authn.AuthConfig{Auth: encodeAuth(auth), IdentityToken: auth.IdentityToken}
	where = path
	if h := c.helper(key); h != "" {
		in, err := json.Marshal(map[string]string{"ServerURL": key, "Username": user, "Secret": password})
		if err != nil {
			return "", err
		}
		if _, err := helper(ctx, h, "store", in); err != nil {
			return "", err
		}
		entry, where = authn.AuthConfig{}, "docker-credential-"+h
	}
	return where, editAuths(path, func(auths map[string]json.RawMessage) error {
		b, err := json.Marshal(entry)
		auths[key] = b
		return err
	})
}

// only returns the same authenticator for every resource.
type only struct{ auth authn.Authenticator }

func (o only) Resolve(authn.Resource) (authn.Authenticator, error) { return o.auth, nil }

func encodeAuth(a authn.AuthConfig) string {
	var got struct{ Auth string }
	b, err := json.Marshal(a)
	if err == nil {
		err = json.Unmarshal(b, &got)
	}
	if err != nil {
		panic(err) // strings only
	}
	return got.Auth
}

// Logout forgets the credentials for a registry. There being none is
// fault.ErrNotFound.
func Logout(ctx context.Context, registry string, opts image.SourceOptions) error {
	reg, err := parseRegistry(registry)
	if err != nil {
		return err
	}
	path, c, err := writableAuth(opts)
	if err != nil {
		return err
	}
	found := false
	for _, key := range keysOf(reg.RegistryStr()) {
		if h := c.helper(key); h != "" {
			a, err := helperGet(ctx, h, key)
			if err == nil && a != (authn.AuthConfig{}) {
				found = true
				_, err = helper(ctx, h, "erase", []byte(key))
			}
			if err != nil {
				return err
			}
		}
		_, there := c.Auths[key]
		found = found || there
	}
	if !found {
		return fmt.Errorf("%w: there is no login for %s in %s", fault.ErrNotFound, hostOf(reg), path)
	}
	return editAuths(path, func(auths map[string]json.RawMessage) error {
		for _, key := range keysOf(reg.RegistryStr()) {
			delete(auths, key)
		}
		return nil
	})
}

func parseRegistry(s string) (name.Registry, error) {
	if s == reference.DockerHub {
		s = ""
	}
	r, err := name.NewRegistry(s)
	if err != nil {
		return r, &fault.Error{
			Hint: "A registry is HOST[:PORT], without a scheme and without a path.",
			Err:  fmt.Errorf("%w: %w", fault.ErrInvalid, err),
		}
	}
	return r, nil
}

// writableAuth is the file that logins are written to, and what it says.
func writableAuth(opts image.SourceOptions) (path string, c credentials, err error) {
	if path = opts.AuthFile; path == "" {
		if path, err = dockerAuthFile(); err != nil {
			return "", c, err
		}
	}
	if c, err = readCredentials(path); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return path, c, err
}

// editAuths changes the auths of a config.json and nothing else of it.
func editAuths(path string, edit func(auths map[string]json.RawMessage) error) (err error) {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to // it is the user's, and may be kept elsewhere
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	lock, err := flock.Lock(context.Background(), filepath.Dir(path), flock.Dir) // against another login
	if err != nil {
		return err
	}
	defer lock.Unlock()
	all, auths := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	mode, uid, gid := fs.FileMode(0o600), -1, -1
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		mode, uid, gid = fs.FileMode(st.Mode&0o777), int(st.Uid), int(st.Gid)
		if len(bytes.TrimSpace(b)) > 0 {
			if err := json.Unmarshal(b, &all); err != nil {
				return fmt.Errorf("%s: %w: %w", path, fault.ErrInvalid, err)
			}
		}
		if raw := all["auths"]; len(raw) > 0 {
			if err := json.Unmarshal(raw, &auths); err != nil {
				return fmt.Errorf("%s: %w: %w", path, fault.ErrInvalid, err)
			}
		}
	}
	if all == nil || auths == nil { // "null"
		return fmt.Errorf("%s: %w: it is no object", path, fault.ErrInvalid)
	}
	if err := edit(auths); err != nil {
		return err
	}
	if all["auths"], err = json.Marshal(auths); err != nil {
		return err
	}
	if b, err = json.MarshalIndent(all, "", "\t"); err != nil {
		return err
	}
	return replaceFile(path, func(f *os.File) error {
		_, err := f.Write(append(b, '\n'))
		return errors.Join(err, f.Chmod(mode), f.Chown(uid, gid))
	})
}

// replaceFile publishes what fill writes at path. A crash leaves the old file or
// the new one.
func replaceFile(path string, fill func(f *os.File) error) error {
	if fi, err := os.Lstat(path); err == nil && !fi.Mode().IsRegular() {
		return fmt.Errorf("%s: %w: there is something else than a file", path, fault.ErrExists)
	}
	return fsx.Create(path, fsx.Options{}, fill)
}
