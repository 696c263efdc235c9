package store

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// A manifest's file carries in an extended attribute where its checkpoint was
// made, so that a record that is made again knows it. The attribute is durable
// before the record is. Where it is missing the checkpoint is foreign.
const (
	originAttr = "trusted.agentbox.origin"
	originHere = "here"
)

// origin returns the mark of the draft's manifest that says where it was made.
func (d *Draft) origin() string {
	if d.row.Foreign {
		return d.row.Origin
	}
	return originHere
}

// madeElsewhere reports whether the manifest of a foreign checkpoint, of this digest, is as
// its author made it. That of an imported archive was made here.
func madeElsewhere(origin, digest string) bool { return origin == "" || origin == digest }

// setOrigin marks a manifest. A filesystem without such attributes costs no
// more than that the checkpoint is foreign when its record is lost.
func setOrigin(f *os.File, origin string) error {
	if origin == "" {
		return nil
	}
	err := unix.Fsetxattr(int(f.Fd()), originAttr, []byte(origin), 0)
	if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}

// Origin returns, of a foreign checkpoint, the digest of the manifest that it came with.
// It is empty if that is not known, and "here" if the checkpoint was made on this root.
func (d *dirs) Origin(id string) (string, error) {
	if err := checkID("checkpoint", id); err != nil {
		return "", err
	}
	path := filepath.Join(d.published(id), ManifestName)
	value := make([]byte, 128)
	n, err := unix.Lgetxattr(path, originAttr, value)
	switch {
	case errors.Is(err, unix.ENODATA), errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ERANGE):
		return "", nil
	case errors.Is(err, unix.ENOENT):
		return "", fault.ErrNotFound
	case err != nil:
		return "", &os.PathError{Op: "getxattr", Path: path, Err: err}
	}
	return string(value[:n]), nil
}

// Digest is that of the manifest as it is published.
func (m Manifest) Digest() (string, error) {
	data, err := m.Encode()
	if err != nil {
		return "", err
	}
	return digestOf(data), nil
}
