package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Docker's limit for one secret, and our own limits.
const (
	maxSecret  = 500 << 10
	maxSecrets = 64
)

var (
	secretName   = lazy.Regexp(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$`)
	variableName = lazy.Regexp(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// checkSecrets refuses invalid secrets.
func checkSecrets(s runtime.Spec) error {
	if len(s.Secrets) > maxSecrets {
		return fmt.Errorf("%w: %d secrets, at most %d", runtime.ErrInvalid, len(s.Secrets), maxSecrets)
	}
	for i, secret := range s.Secrets {
		if err := checkSecret(secret); err != nil {
			return err
		}
		if _, err := os.Stat(secret.File); secret.File != "" && errors.Is(err, fs.ErrNotExist) {
			return missingSecret(secret.File)
		}
		if slices.ContainsFunc(s.Secrets[:i], func(o runtime.Secret) bool { return o.Name == secret.Name }) {
			return fmt.Errorf("%w: secret %s is given twice", runtime.ErrInvalid, secret.Name)
		}
	}
	for _, m := range s.Mounts {
		if at := path.Clean(m.Target); len(s.Secrets) > 0 && fsx.Within(runtime.SecretsDir, at) {
			return fmt.Errorf("%w: %s is where the secrets are: nothing can be mounted at %s", runtime.ErrInvalid,
				runtime.SecretsDir, m.Target)
		}
	}
	return nil
}

func missingSecret(file string) error {
	return hint(fmt.Errorf("the secret's file %s: %w", file, runtime.ErrNotFound),
		"It is read at each start, and has to be there.")
}

func checkSecret(s runtime.Secret) error {
	switch {
	case !secretName().MatchString(s.Name):
		return fmt.Errorf("%w: secret %.140q: a name is 1 to 128 letters, digits, '_', '.' and '-', and does not begin with a '.'", runtime.ErrInvalid, s.Name)
	case (s.File == "") == (s.Env == ""):
		return fmt.Errorf("%w: secret %s comes from a file or from a variable", runtime.ErrInvalid, s.Name)
	case s.File != "" && !filepath.IsAbs(s.File):
		return fmt.Errorf("%w: secret %s: its file %q must be an absolute path", runtime.ErrInvalid, s.Name, s.File)
	case s.Env != "" && !variableName().MatchString(s.Env):
		return fmt.Errorf("%w: secret %s: %q is not the name of a variable", runtime.ErrInvalid, s.Name, s.Env)
	}
	return nil
}

// sources returns where the secrets of a spec come from: the sources given now, otherwise
// the known ones. Those in the spec itself do not count, since it may be from elsewhere.
func sources(s runtime.Spec, given, known []runtime.Secret) ([]runtime.Secret, error) {
	for _, g := range given {
		if err := checkSecret(g); err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(s.Secrets, func(o runtime.Secret) bool { return o.Name == g.Name }) {
			return nil, fmt.Errorf("%w: the sandbox has no secret %s", runtime.ErrInvalid, g.Name)
		}
	}
	list := slices.Clone(s.Secrets)
	for i := range list {
		list[i] = runtime.Secret{Name: list[i].Name}
		for _, from := range slices.Concat(known, given) {
			if from.Name == list[i].Name {
				list[i] = from
			}
		}
		if list[i].File == "" && list[i].Env == "" {
			name := list[i].Name
			return nil, hint(fmt.Errorf("%w: where the secret %s comes from is not known: no checkpoint says it",
				runtime.ErrInvalid, name),
				"Say it: --secret "+name+"=file:PATH, or --secret "+name+"=env:VARIABLE.")
		}
	}
	s.Secrets = list
	return list, checkSecrets(s)
}

// readSecrets reads the secrets of a sandbox from their sources. An empty secret is an
// error: a sandbox that needs it had better not start.
func (bx *sandboxes) readSecrets(
	ctx context.Context, s runtime.Spec, from []runtime.Secret,
) ([]runtime.SecretFile, error) {
	var files []runtime.SecretFile
	if len(from) > 0 {
		// From here on this process has secrets in memory: the kernel writes no core of it,
		// to a file or to a program. Its children are not affected.
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return nil, err
		}
	}
	for _, secret := range from {
		var data []byte
		var err error
		if secret.Env != "" {
			data, err = bx.variable(ctx, secret.Env)
		} else {
			data, err = readSecret(s, secret.File)
		}
		if err == nil && len(data) == 0 {
			err = fmt.Errorf("%w: it is empty", runtime.ErrInvalid)
		}
		if err == nil && len(data) > maxSecret {
			err = fmt.Errorf("%w: it is larger than %d bytes", runtime.ErrInvalid, maxSecret)
		}
		if err != nil {
			return nil, fmt.Errorf("secret %s: %w", secret.Name, err)
		}
		files = append(files, runtime.SecretFile{Name: secret.Name, Data: data})
	}
	return files, nil
}

// variable returns the value of an environment variable and removes it from the
// environment, so that programs that we start do not inherit it.
func (bx *sandboxes) variable(ctx context.Context, name string) ([]byte, error) {
	if vars, ok := runtime.Variables(ctx); ok {
		value, ok := vars[name]
		if !ok {
			return nil, missingVariable(name)
		}
		return []byte(value), nil
	}
	bx.mu.Lock()
	defer bx.mu.Unlock()
	value, ok := os.LookupEnv(name)
	if ok {
		bx.kept[name] = value
		if err := os.Unsetenv(name); err != nil {
			return nil, err
		}
	}
	if value, ok = bx.kept[name]; !ok {
		return nil, missingVariable(name)
	}
	return []byte(value), nil
}

func missingVariable(name string) error {
	return hint(fmt.Errorf("the variable %s: %w in the environment", name, runtime.ErrNotFound),
		"It is kept nowhere, and has to be set for each command that starts the sandbox.")
}

// secretMount is the mount as which a policy judges a secret from a file.
func secretMount(file string) policy.Mount {
	return policy.Mount{Type: "secret", Source: file, Target: runtime.SecretsDir, ReadOnly: true}
}

// readSecret reads a file after judging its resolved path. It follows no symlink from there,
// so it reads the file that was judged.
func readSecret(s runtime.Spec, file string) (_ []byte, err error) {
	real, err := filepath.EvalSymlinks(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missingSecret(file)
	}
	if err != nil {
		return nil, err
	}
	p, err := recorded(s)
	if err == nil && p != nil {
		err = p.Mounts([]policy.Mount{secretMount(real)})
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, real, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: real, Err: err}
	}
	f := os.NewFile(uintptr(fd), real)
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, hint(fmt.Errorf("%w: %s is not a regular file", runtime.ErrInvalid, file),
			"Give the value in a variable: --secret NAME=env:VARIABLE.")
	}
	return io.ReadAll(io.LimitReader(f, maxSecret+1))
}

// nameless returns a stored spec as checkpoints have it, without the sources of secrets:
// checkpoints travel, and must not reveal where on this host a secret comes from. Nor can a
// checkpoint from elsewhere name a file of this host.
func nameless(s runtime.Spec, stored json.RawMessage) (json.RawMessage, error) {
	if len(s.Secrets) == 0 {
		return stored, nil
	}
	s.Secrets = slices.Clone(s.Secrets)
	for i := range s.Secrets {
		s.Secrets[i] = runtime.Secret{Name: s.Secrets[i].Name}
	}
	return json.Marshal(s)
}

// inherited returns where the secrets of a fork come from: the sources of its origin, as
// long as the origin exists.
func (bx *sandboxes) inherited(
	ctx context.Context, row store.Checkpoint, s runtime.Spec, given []runtime.Secret,
) ([]runtime.Secret, error) {
	var known runtime.Spec
	if row.Foreign { // its origin is only what it claims
		return sources(s, given, nil)
	}
	if origin, err := bx.store.Sandbox(ctx, row.SandboxID); err == nil {
		if known, err = spec(origin); err != nil {
			return nil, err
		}
	} else if !errors.Is(err, runtime.ErrNotFound) {
		return nil, err
	}
	return sources(s, given, known.Secrets)
}

// secretsPart is the secrets that the start puts into the restored sandbox.
type secretsPart struct {
	noWork
	*restoration
	given []runtime.Secret // new sources, if any
	files []runtime.SecretFile
}

// check reads the secrets.
func (r *secretsPart) check(ctx context.Context) error { return r.arrange(ctx) }

// arrange reads them, unless check has.
func (r *secretsPart) arrange(ctx context.Context) error {
	if !r.starts() || len(r.spec.Secrets) == 0 || r.files != nil {
		return nil
	}
	from, err := sources(r.spec, r.given, r.spec.Secrets)
	if err == nil {
		r.files, err = r.e.sandboxes.readSecrets(ctx, r.spec, from)
	}
	return err
}

// checkSize proves that a secret that a process of the checkpoint has open still has its
// size: CRIU refuses a file of another size.
func (r *secretsPart) checkSize(name string, size int64) error {
	for _, s := range r.files {
		if s.Name == name && int64(len(s.Data)) != size {
			return hint(fmt.Errorf("%w: a process of the checkpoint has the secret %s open, which had %d bytes then and has %d now", runtime.ErrState, name, size, len(s.Data)),
				fmt.Sprintf("Restore the files alone: agentbox restore %s %s --files-only", r.sb.Name, short(r.row.ID)))
		}
	}
	return nil
}
