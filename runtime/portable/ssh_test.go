package portable

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"
)

// sshKey makes one as ssh-keygen does.
func sshKey(t testing.TB, dir string) (path, public string) {
	t.Helper()
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	must(t, err)
	block, err := ssh.MarshalPrivateKey(key, "test")
	must(t, err)
	path = filepath.Join(dir, "id_ed25519")
	must(t, os.WriteFile(path, pem.EncodeToMemory(block), 0o600))
	p, err := ssh.NewPublicKey(pub)
	must(t, err)
	return path, strings.TrimSpace(string(ssh.MarshalAuthorizedKey(p)))
}
