package portable

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"filippo.io/age"
	"filippo.io/age/agessh"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	ageMagic   = "age-encryption.org/v1\n"
	armorMagic = "-----BEGIN AGE ENCRYPTED FILE-----"

	maxIdentities = 1 << 20
)

// recipients reads public keys of age and of SSH.
func recipients(list []string) ([]age.Recipient, error) {
	var out []age.Recipient
	for _, s := range list {
		s = strings.TrimSpace(s)
		if strings.HasPrefix(s, "ssh-") {
			r, err := agessh.ParseRecipient(s)
			if err != nil {
				return nil, fmt.Errorf("recipient %.80q: %w: %w", s, fault.ErrInvalid, err)
			}
			out = append(out, r)
			continue
		}
		rs, err := age.ParseRecipients(strings.NewReader(s))
		if err != nil {
			return nil, fmt.Errorf("recipient %.80q: %w: %w", s, fault.ErrInvalid, err)
		}
		out = append(out, rs...)
	}
	return out, nil
}

// identities reads the file that `age-keygen` writes, or an SSH private key.
func identities(path string) ([]age.Identity, error) {
	if path == "" {
		return nil, &fault.Error{
			Err:  fmt.Errorf("the archive is encrypted: %w", fault.ErrDenied),
			Hint: "Name a file of age identities that may read it.",
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("identities: %w", err)
	}
	defer f.Close()
	// No core of this process is written while it has the keys in its memory.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(f, maxIdentities+1))
	if err != nil {
		return nil, fmt.Errorf("identities: %w", err)
	}
	if len(data) > maxIdentities {
		return nil, fmt.Errorf("identities: %s is longer than %d bytes: %w", path, maxIdentities, fault.ErrInvalid)
	}
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("-----BEGIN")) {
		id, err := agessh.ParseIdentity(data)
		if err != nil {
			return nil, fmt.Errorf("identities: %s: %w: %w", path, fault.ErrInvalid, err)
		}
		return []age.Identity{id}, nil
	}
	ids, err := age.ParseIdentities(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("identities: %s: %w: %w", path, fault.ErrInvalid, err)
	}
	return ids, nil
}

// unseal decrypts. The reader it returns fails where the archive was changed.
func unseal(r io.Reader, path string) (io.Reader, error) {
	ids, err := identities(path)
	if err != nil {
		return nil, err
	}
	plain, err := age.Decrypt(r, ids...)
	var none *age.NoIdentityMatchError
	switch {
	case errors.As(err, &none):
		return nil, &fault.Error{Err: fmt.Errorf("none of the identities in %s can read the archive: %w", path,
			fault.ErrDenied), Hint: "Name the file of an identity that it was encrypted to."}
	case err != nil:
		return nil, corrupt("decrypt: %v", err)
	}
	return plain, nil
}
