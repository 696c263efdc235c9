package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// authority signs certificates.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.sign("ca", &x509.Certificate{
		Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	})
	return a
}

// sign makes NAME.pem and NAME.key.
func (a *authority) sign(name string, c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c.SerialNumber = big.NewInt(time.Now().UnixNano())
	if c.NotAfter.IsZero() {
		c.NotAfter = time.Now().Add(time.Hour)
	}
	c.NotBefore = time.Now().Add(-2 * time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	err = errors.Join(
		os.WriteFile(a.path(name, "pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(a.path(name, "key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), 0o600))
	if err != nil {
		a.t.Fatal(err)
	}
	made, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return made, key
}

func (a *authority) path(name, ext string) string { return filepath.Join(a.dir, name+"."+ext) }

func (a *authority) caller(name string, until time.Time) wire.TLSFiles {
	a.sign(name, &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return a.files(name)
}

func (a *authority) files(name string) wire.TLSFiles {
	return wire.TLSFiles{Cert: a.path(name, "pem"), Key: a.path(name, "key"), CA: a.path("ca", "pem")}
}

// secure serves at a TCP address, and returns what was logged.
func secure(t *testing.T, svc runtime.Service, ca *authority) (address, socket string, logged func() string) {
	ca.sign("host", &x509.Certificate{
		Subject: pkix.Name{CommonName: "host"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	tcp, err := ListenTLS("127.0.0.1:0", ca.files("host"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	socket = filepath.Join(dir, "s")
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var log bytes.Buffer
	h, err := New(svc, Options{Requests: filepath.Join(dir, "requests"),
		Log: slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return log.Write(p)
		}), nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, l, h, tcp) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return tcp.Addr().String(), socket, func() string {
		mu.Lock()
		defer mu.Unlock()
		return log.String()
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// TCP admits only clients whose certificate the authority has signed, under its subject.
func TestTLS(t *testing.T) {
	taken := 0
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return []runtime.Sandbox{{ID: "one"}}, nil },
		checkpoint: func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			taken++
			return runtime.Checkpoint{ID: fmt.Sprint("c", taken)}, nil
		},
	}
	ca, other := newAuthority(t), newAuthority(t)
	address, socket, logged := secure(t, svc, ca)
	dial := func(files wire.TLSFiles) *api.Client {
		t.Helper()
		c, err := api.DialTLS(address, files)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	alice, bob := dial(ca.caller("alice", time.Time{})), dial(ca.caller("bob", time.Time{}))
	if list, err := alice.Sandboxes(t.Context()); err != nil || len(list) != 1 || list[0].ID != "one" {
		t.Error(list, err)
	}
	if !strings.Contains(logged(), "client=CN=alice") && !strings.Contains(logged(), `client="CN=alice"`) {
		t.Errorf("the log does not say who it was: %s", logged())
	}
	// The same key is each caller's own.
	ctx := api.WithKey(t.Context(), "turn 1")
	for _, c := range []struct {
		*api.Client
		want string
	}{{alice, "c1"}, {bob, "c2"}, {alice, "c1"}, {bob, "c2"}, {client(t, socket).Client, "c3"}} {
		if got, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{}); err != nil || got.ID != c.want {
			t.Errorf("%s: %+v, %v", c.want, got, err)
		}
	}

	strangers := other.caller("alice", time.Time{})
	strangers.CA = ca.files("host").CA
	nameless := func() wire.TLSFiles {
		ca.sign("nameless", &x509.Certificate{
			DNSNames: []string{"x"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		})
		return ca.files("nameless")
	}()
	for name, files := range map[string]wire.TLSFiles{
		"of another authority": strangers,
		"expired":              ca.caller("late", time.Now().Add(-time.Minute)),
		"a service's":          ca.files("host"),
		"nameless":             nameless,
	} {
		if list, err := dial(files).Sandboxes(t.Context()); err == nil {
			t.Errorf("a certificate that is %s gets %v", name, list)
		} else if name == "nameless" && !errors.Is(err, fault.ErrDenied) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A service that the caller's authority has not signed is told nothing.
	wary := ca.files("alice")
	wary.CA = other.files("ca").CA
	if _, err := dial(wary).Sandboxes(t.Context()); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Error(err)
	}

	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	pair, err := tls.LoadX509KeyPair(ca.files("alice").Cert, ca.files("alice").Key)
	if err != nil {
		t.Fatal(err)
	}
	for name, config := range map[string]*tls.Config{
		"no certificate": {RootCAs: pool},
		"TLS 1.2":        {RootCAs: pool, Certificates: []tls.Certificate{pair}, MaxVersion: tls.VersionTLS12},
	} {
		if got := ask(t, func() (net.Conn, error) {
			return tls.Dial("tcp", address, config)
		}); strings.Contains(got, "200 OK") {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := ask(t, func() (net.Conn, error) { return net.Dial("tcp", address) }); !strings.Contains(got, " 400 ") {
		t.Errorf("plain HTTP: %q", got)
	}
	if _, err := ListenTLS("127.0.0.1:0", wire.TLSFiles{Cert: "x", Key: "y"}); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	if _, err := ListenTLS("127.0.0.1:0", wire.TLSFiles{
		Cert: ca.path("host", "pem"), Key: ca.path("host", "key"), CA: ca.path("host", "key"),
	}); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	if n := strings.Count(logged(), "CN=late") + strings.Count(logged(), "status=200"); n != 6 {
		t.Errorf("%d requests were answered, want 6: %s", n, logged())
	}
}

// ask sends a request and returns whatever comes back.
func ask(t *testing.T, dial func() (net.Conn, error)) string {
	t.Helper()
	conn, err := dial()
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	data, _ := io.ReadAll(bufio.NewReader(conn)) // cut off, as a rule
	return string(data)
}

// Thousands of connections that say nothing, or begin a handshake and do not go on, take no
// place for long from active clients, and none from a connection with a request under way.
func TestIdleConnections(t *testing.T) {
	working, finish := make(chan struct{}), make(chan struct{})
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return nil, nil },
		checkpoint: func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			close(working)
			<-finish
			return runtime.Checkpoint{ID: "done"}, nil
		},
	}
	ca := newAuthority(t)
	address, socket, _ := secure(t, svc, ca)
	done := make(chan error, 1)
	go func() {
		got, err := client(t, socket).Checkpoint(t.Context(), "c", runtime.CheckpointOptions{})
		if err == nil && got.ID != "done" {
			err = fmt.Errorf("%+v", got)
		}
		done <- err
	}()
	<-working
	var idle []net.Conn
	defer func() {
		for _, c := range idle {
			c.Close()
		}
	}()
	for n := range 2000 {
		network, at := "unix", socket
		if n%4 == 0 {
			network, at = "tcp", address
		}
		c, err := net.Dial(network, at)
		if err != nil {
			t.Fatal(n, err)
		}
		idle = append(idle, c)
	}
	secured, err := api.DialTLS(address, ca.caller("alice", time.Time{}))
	if err != nil {
		t.Fatal(err)
	}
	defer secured.Close()
	for _, c := range []*api.Client{client(t, socket).Client, secured} {
		began := time.Now()
		if _, err := c.Sandboxes(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("a request has to wait %s", took)
		}
	}
	close(finish)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
