package bundle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// SecretFiles returns the directory of the secrets in their tmpfs. An engine that does not see that
// mount, being in a mount namespace of its own, finds nothing there and fails, and does not bind the
// empty directory below it.
func (p Place) SecretFiles() string { return filepath.Join(p.Secrets, "files") }

// PutSecrets writes a sandbox's secrets, for its user only, to a filesystem in
// memory.
func (p Place) PutSecrets(s runtime.Spec, have []runtime.SecretFile, user specs.User) (err error) {
	if len(s.Secrets) == 0 {
		return nil
	}
	if len(have) != len(s.Secrets) {
		return fmt.Errorf("%w: %d of %d are there", fault.ErrInvalid, len(have), len(s.Secrets))
	}
	root, _ := s.IDs.Host(0)
	uid, err := s.IDs.Host(int(user.UID))
	if err != nil {
		return err
	}
	gid, err := s.IDs.Host(int(user.GID))
	if err != nil {
		return err
	}
	page := os.Getpagesize()
	size := page
	for _, s := range have {
		size += len(s.Data) + page
	}
	if err := os.MkdirAll(p.Secrets, 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.DropSecrets())
		}
	}()
	options := "mode=0700,size=" + strconv.Itoa(size) + ",nr_inodes=" + strconv.Itoa(len(have)+3)
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC)
	// Kernels before 6.4 do not know noswap.
	err = unix.Mount("tmpfs", p.Secrets, "tmpfs", flags, options+",noswap")
	if errors.Is(err, unix.EINVAL) {
		err = unix.Mount("tmpfs", p.Secrets, "tmpfs", flags, options)
	}
	if err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	dir := p.SecretFiles()
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask
		return err
	}
	for _, s := range have {
		if err := writeSecret(filepath.Join(dir, s.Name), s.Data, uid, gid); err != nil {
			return err
		}
	}
	return errors.Join(os.Chown(dir, root, root), os.Chown(p.Secrets, root, root))
}

func writeSecret(path string, data []byte, uid, gid int) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Chown(uid, gid)
}

// DropSecrets takes the secrets away, if there are any.
func (p Place) DropSecrets() error {
	if err := kernel.UnmountBelow(p.Secrets); err != nil {
		return err
	}
	for _, dir := range []string{p.SecretFiles(), p.Secrets} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// secretsMount binds them into the sandbox.
func (p Place) secretsMount() specs.Mount {
	return specs.Mount{
		Destination: runtime.SecretsDir, Type: "bind", Source: p.SecretFiles(),
		Options: []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"},
	}
}
