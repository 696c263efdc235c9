package test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// certificate makes a certificate that is its own authority, for both sides.
func (b *box) certificate() (cert, key string) {
	b.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "somebody"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		b.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		b.Fatal(err)
	}
	cert, key = filepath.Join(b.root, "cert.pem"), filepath.Join(b.root, "key.pem")
	err = errors.Join(
		os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw}), 0o600))
	if err != nil {
		b.Fatal(err)
	}
	return cert, key
}

// The command line and the client for Python use a service over TCP, whose socket
// is there as well.
func TestServiceTCP(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	cert, key := b.certificate()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host := "tcp://" + free.Addr().String()
	free.Close()
	b.serveArgs = []string{"--listen", host, "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert}
	_, socket := b.serve()
	b.start("c", "--network", "none", "busybox", "sleep", "1000")

	env := []string{
		"AGENTBOX_HOST=" + host, "AGENTBOX_TLS_CERT=" + cert, "AGENTBOX_TLS_KEY=" + key, "AGENTBOX_TLS_CA=" + cert,
	}
	// Without --root, which goes before AGENTBOX_HOST.
	far := func(env []string, args ...string) (string, int) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "agentbox"), args...)
		cmd.Env = append(os.Environ(), env...)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	if out, code := far(env, "exec", "c", "sh", "-c", "echo over there; exit 4"); code != 4 || out != "over there\n" {
		t.Errorf("%d: %s", code, out)
	}
	if out, code := far(env[:3], "ps"); code != 2 || !strings.Contains(out, "AGENTBOX_TLS_CA") {
		t.Errorf("%d: %s", code, out)
	}
	py := b.python(socket, "-c", `import agentbox; c = agentbox.Client(); print(c.sandbox("c").exec("cat", input=b"x" * 300000).stdout.count(b"x"), c.info()["backend"])`)
	py.Env = append(py.Env, env...)
	if out, err := py.CombinedOutput(); err != nil || string(out) != "300000 oci\n" {
		t.Errorf("%v: %s", err, out)
	}
	if out, code := far(env, "group", "run", "-n", "2", "--name", "g", "--keep-for", "1h", "--image", "busybox", "--",
		"true"); code != 0 || !strings.Contains(out, "2 passed, 0 failed") {
		t.Errorf("%d: %s", code, out)
	}
	if out, code := far(env, "group", "rm", "g"); code != 0 {
		t.Errorf("%d: %s", code, out)
	}
	for _, args := range [][]string{
		{"--listen", host}, {"--tls-cert", cert}, {"--listen", host, "--tls-cert", cert, "--tls-key", key},
		{"--listen", "tcp://:1", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", cert},
		{"--listen", "http://x"},
	} {
		b.fails(2, append([]string{"serve"}, args...)...)
	}
}
