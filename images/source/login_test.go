package source

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
)

// certificate makes one for this host that vouches for itself, as ca.crt,
// client.cert and client.key of a directory.
func certificate(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, b := range map[string][]byte{
		"ca.crt": cert, "client.cert": cert,
		"client.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// dockerRegistry starts Debian's, with TLS and the user ann.
func dockerRegistry(t *testing.T, certs string) (host string) {
	t.Helper()
	bin, err := exec.LookPath("docker-registry")
	if err != nil {
		t.Fatalf("%v: scripts/install-deps.sh --test installs it", err)
	}
	dir := t.TempDir()
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf("version: 0.1\nlog: {level: info, accesslog: {disabled: true}}\nstorage: {filesystem: {rootdirectory: %s/data}, delete: {enabled: true}}\n"+
		"http:\n  addr: 127.0.0.1:0\n  tls: {certificate: %s/client.cert, key: %[2]s/client.key}\nauth: {htpasswd: {realm: x, path: %[1]s/htpasswd}}\n", dir, certs)
	if err := errors.Join(os.WriteFile(dir+"/config.yml", []byte(config), 0o600),
		os.WriteFile(dir+"/htpasswd", []byte("ann:"+string(hash)+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "serve", dir+"/config.yml")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	at, done := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(done)
		listening := regexp.MustCompile(`listening on ([0-9.]+:[0-9]+), tls`)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if m := listening.FindStringSubmatch(lines.Text()); m != nil {
				at <- m[1]
			}
		}
		close(at)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		_ = cmd.Wait()
	})
	host, ok := <-at
	if !ok {
		t.Fatal("docker-registry did not start")
	}
	return host
}

// The whole way with a registry as many have it: TLS of an own authority, a password.
func TestDockerRegistry(t *testing.T) {
	certs := certificate(t)
	host := dockerRegistry(t, certs)
	o := fast(t)
	img := sample(t, "linux/amd64", 3)
	ref := host + "/team/web:1"
	write := func(want error, hint string) {
		t.Helper()
		_, err := Write(t.Context(), mustParse(t, ref), img, o)
		if h := strings.Join(fault.Hint(err), " "); !errors.Is(err, want) || !strings.Contains(h, hint) {
			t.Fatalf("%v (hint %q), want %v", err, h, want)
		}
	}
	write(fault.ErrDenied, "/etc/agentbox/certs.d/"+host+"/ca.crt")
	o.CertDir = certs
	write(fault.ErrDenied, "image login "+host)
	if _, err := Login(t.Context(), host, "ann", "wrong", o); !errors.Is(err, fault.ErrDenied) ||
		len(fault.Hint(err)) == 0 || strings.Contains(err.Error(), "wrong") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(o.AuthFile); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a wrong password was kept: %v", err)
	}
	where, err := Login(t.Context(), host, "ann", "secret", o)
	if err != nil || where != o.AuthFile {
		t.Fatalf("%q, %v", where, err)
	}
	write(nil, "")
	got, layers, err := pull(t, ref, o)
	if err != nil {
		t.Fatal(err)
	}
	sameImage(t, got, layers, img, true)
	if _, _, err := pull(t, host+"/team/web:2", o); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}

	// Skopeo is let in by what Login wrote, sees the same, and what it copies is read.
	var seen struct{ Digest string }
	if err := json.Unmarshal([]byte(skopeo(t, "inspect", "--cert-dir="+certs, "--authfile="+o.AuthFile,
		"docker://"+ref)), &seen); err != nil {
		t.Fatal(err)
	}
	if d, _ := img.Digest(); seen.Digest != d.String() {
		t.Errorf("skopeo sees %s, want %s", seen.Digest, d)
	}
	skopeo(t, "copy", "--src-cert-dir="+certs, "--dest-cert-dir="+certs, "--authfile="+o.AuthFile, "--format=oci",
		"--dest-compress-format=zstd", "docker://"+ref, "docker://"+host+"/team/web:zstd")
	got, layers, err = pull(t, host+"/team/web:zstd", o)
	if err != nil || len(layers) != 3 || string(got.Config()) == "" {
		t.Errorf("%v", err)
	}

	// Untrusted certificates are accepted when configured so.
	o.CertDir = ""
	o.Insecure = true
	if _, _, err := pull(t, ref, o); err != nil {
		t.Error(err)
	}
	o.Insecure, o.Config = false, &image.SourceConfig{Registries: []image.Registry{{Name: host, Insecure: true}}}
	if _, _, err := pull(t, ref, o); err != nil {
		t.Error(err)
	}
	o.Config = &image.SourceConfig{Registries: []image.Registry{{Name: host, CertDir: certs}}}
	if err := Logout(t.Context(), host, o); err != nil {
		t.Error(err)
	}
	if _, _, err := pull(t, ref, o); !errors.Is(err, fault.ErrDenied) {
		t.Errorf("%v", err)
	}
	if err := Logout(t.Context(), host, o); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// A registry that requires a client certificate.
func TestClientCertificate(t *testing.T) {
	dir := certificate(t)
	pair, err := tls.LoadX509KeyPair(dir+"/client.cert", dir+"/client.key")
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	b, _ := os.ReadFile(dir + "/ca.crt")
	pool.AppendCertsFromPEM(b)
	s := newServed()
	s.TLS = &tls.Config{
		Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}
	s.StartTLS()
	defer s.Close()
	host := strings.TrimPrefix(s.URL, "https://")
	old := certsRoots
	defer func() { certsRoots = old }()
	certsRoots = []string{t.TempDir(), t.TempDir()}
	if err := os.Rename(dir, filepath.Join(certsRoots[1], host)); err != nil {
		t.Fatal(err)
	}
	o := fast(t)
	img := sample(t, "linux/amd64", 1)
	if _, err := Write(t.Context(), mustParse(t, host+"/web"), img, o); err != nil {
		t.Fatal(err)
	}
	if _, _, err := pull(t, host+"/web", o); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(certsRoots[1], host, "client.cert")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := pull(t, host+"/web", o); err == nil {
		t.Error("let in without a certificate")
	}
}

// Nothing leaves this host in the clear unless configured so.
func TestPlainHTTP(t *testing.T) {
	ip := ""
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			ip = n.IP.String()
		}
	}
	if ip == "" {
		t.Skip("this host has no address but its own")
	}
	s := newServed()
	s.Listener.Close()
	if s.Listener, err = net.Listen("tcp4", net.JoinHostPort(ip, "0")); err != nil {
		t.Skip(err)
	}
	s.Start()
	defer s.Close()
	host := strings.TrimPrefix(s.URL, "http://")
	o := fast(t)
	img := sample(t, "linux/amd64", 1)
	asked := false
	s.breaks(func(w http.ResponseWriter, r *http.Request) bool { asked = true; return false })
	_, err = Write(t.Context(), mustParse(t, host+"/web"), img, o)
	if h := strings.Join(fault.Hint(err), " "); err == nil || !strings.Contains(h, "--insecure") || asked {
		t.Errorf("%v (hint %q), asked: %v", err, h, asked)
	}
	o.Insecure = true
	if _, err := Write(t.Context(), mustParse(t, host+"/web"), img, o); err != nil {
		t.Error(err)
	}
	o.Insecure, o.Config = false, &image.SourceConfig{Registries: []image.Registry{{Name: host, Insecure: true}}}
	if _, _, err := pull(t, host+"/web", o); err != nil {
		t.Error(err)
	}
}

// guarded lets ann in, with the given password.
func guarded(s *served, password string) (tried func() []string) {
	var mu sync.Mutex
	var list []string
	s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		u, p, ok := r.BasicAuth()
		mu.Lock()
		list = append(list, u+":"+p)
		mu.Unlock()
		if ok && u == "ann" && p == password {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return list
	}
}

// A config.json keeps what is not ours to change.
func TestLoginFile(t *testing.T) {
	s, o := serve(t), fast(t)
	guarded(s, "secret")
	const before = `{"auths":{"other:1":{"auth":"eDp5","email":"x@y"}},"psFormat":"table","proxies":{"default":{"httpProxy":"http://p"}},"big":12345678901234567890}`
	real := filepath.Join(t.TempDir(), "kept-elsewhere.json")
	if err := os.WriteFile(real, []byte(before), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, o.AuthFile); err != nil {
		t.Fatal(err)
	}
	if _, err := Login(t.Context(), s.Host(), "ann", "secret", o); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(real)
	for _, keep := range []string{
		`"eDp5"`, `"x@y"`, `"psFormat": "table"`, `"http://p"`, `12345678901234567890`, s.Host(), `"YW5uOnNlY3JldA=="`,
	} {
		if !strings.Contains(string(b), keep) {
			t.Errorf("%s is not in %s", keep, b)
		}
	}
	if fi, err := os.Stat(real); err != nil || fi.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if err := Logout(t.Context(), s.Host(), o); err != nil {
		t.Fatal(err)
	}
	var is, was any
	b, _ = os.ReadFile(real)
	if json.Unmarshal(b, &is) != nil || json.Unmarshal([]byte(before), &was) != nil ||
		fmt.Sprint(is) != fmt.Sprint(was) {
		t.Errorf("%s", b)
	}
	for what, data := range map[string]string{
		"no JSON": "{", "null": "null", "a list": "[]", "auths are a list": `{"auths":[]}`,
	} {
		if err := os.WriteFile(real, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Login(t.Context(), s.Host(), "ann", "secret", o)
		if b, _ := os.ReadFile(real); !errors.Is(err, fault.ErrInvalid) || string(b) != data {
			t.Errorf("%s: %v, %s", what, err, b)
		}
	}
	for _, registry := range []string{"https://x", "x/y", "a b"} {
		if _, err := Login(t.Context(), registry, "a", "b", o); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", registry, err)
		}
	}
}

// Credential helpers keep, give and forget; one that does not work is no
// reason not to ask, and named when the registry refuses.
func TestHelpers(t *testing.T) {
	s, o := serve(t), fast(t)
	img := sample(t, "linux/amd64", 1)
	s.put(t, "web:1", img)
	guarded(s, "secret")
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	script := "#!/bin/sh\ncd " + bin + "\ncase $1 in\nstore) cat >kept;;\nerase) cat >erased; rm kept;;\n" +
		"get) read -r u; [ -e kept ] || { echo credentials not found in native keychain; exit 1; }; echo '{\"ServerURL\":\"x\",\"Username\":\"ann\",\"Secret\":\"secret\"}';;\nesac\n"
	if err := os.WriteFile(bin+"/docker-credential-test", []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	conf := func(text string) {
		t.Helper()
		if err := os.WriteFile(o.AuthFile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	conf(`{"credsStore":"test"}`)
	if _, _, err := pull(t, s.Host()+"/web:1", o); !errors.Is(err, fault.ErrDenied) {
		t.Errorf("%v", err)
	}
	where, err := Login(t.Context(), s.Host(), "ann", "secret", o)
	if err != nil || where != "docker-credential-test" {
		t.Fatalf("%q, %v", where, err)
	}
	kept, _ := os.ReadFile(bin + "/kept")
	file, _ := os.ReadFile(o.AuthFile)
	if !strings.Contains(string(kept), `"ServerURL":"`+s.Host()+`"`) || strings.Contains(string(file), "auth\"") ||
		!strings.Contains(string(file), s.Host()) {
		t.Errorf("kept %s, file %s", kept, file)
	}
	if _, _, err := pull(t, s.Host()+"/web:1", o); err != nil {
		t.Error(err)
	}
	if err := Logout(t.Context(), s.Host(), o); err != nil {
		t.Error(err)
	}
	if erased, _ := os.ReadFile(bin + "/erased"); string(erased) != s.Host() {
		t.Errorf("erased %q", erased)
	}
	conf(`{"credHelpers":{"` + s.Host() + `":"gone"}}`)
	_, _, err = pull(t, s.Host()+"/web:1", o)
	if h := strings.Join(fault.Hint(err), " "); !errors.Is(err, fault.ErrDenied) ||
		!strings.Contains(h, "docker-credential-gone") {
		t.Errorf("%v (hint %q)", err, h)
	}
	s.breaks(nil)
	if _, _, err := pull(t, s.Host()+"/web:1", o); err != nil {
		t.Errorf("a registry that needs none: %v", err)
	}
}

// Mirrors come first and get no credentials of others; what they lack, the
// registry has.
func TestMirrors(t *testing.T) {
	origin, mirror, o := serve(t), serve(t), fast(t)
	img := sample(t, "linux/amd64", 2)
	origin.put(t, "team/web:1", img)
	mirror.put(t, "hub/team/web:1", img)
	ann := guarded(origin, "secret")
	if err := os.WriteFile(o.AuthFile, []byte(`{"auths":{"`+origin.Host()+
		`":{"auth":"YW5uOnNlY3JldA=="}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	conf := image.SourceConfig{Registries: []image.Registry{{
		Name: origin.Host(), Mirrors: []string{"127.0.0.1:1", "http://" + mirror.Host() + "/hub/"},
	}}}
	if err := checkConfig(conf); err != nil {
		t.Fatal(err)
	}
	o.Config = &conf
	all := func() {
		t.Helper()
		got, layers, err := pull(t, origin.Host()+"/team/web:1", o)
		if err != nil {
			t.Fatal(err)
		}
		sameImage(t, got, layers, img, true)
	}
	leaked := ""
	mirror.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		leaked += r.Header.Get("Authorization")
		return false
	})
	all()
	if len(ann()) > 0 || leaked != "" {
		t.Errorf("asked the registry %q, told the mirror %q", ann(), leaked)
	}
	list, _ := img.Layers()
	lost, _ := list[1].Digest()
	mirror.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, lost.String()) {
			return false
		}
		w.Header().Set("Content-Length", "10000000")
		_, _ = io.WriteString(w, "half of it")
		return true
	})
	all()
	if len(ann()) == 0 {
		t.Error("the registry was not asked")
	}
	mirror.breaks(func(w http.ResponseWriter, r *http.Request) bool { w.WriteHeader(404); return true })
	all()
	if _, _, err := pull(t, origin.Host()+"/team/none:1", o); !errors.Is(err, fault.ErrNotFound) ||
		!strings.Contains(err.Error(), "mirrors") {
		t.Error(err)
	}
	// A push goes to the registry.
	if _, err := Write(t.Context(), mustParse(t, origin.Host()+"/team/new:1"), img, o); err != nil {
		t.Error(err)
	}
}

func TestConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "registries.toml")
	t.Setenv("AGENTBOX_REGISTRIES_CONF", path)
	if _, err := LoadConfig(""); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	for text, ok := range map[string]bool{
		"": true, "default = \"ghcr.io/team\"\n": true,
		"[[registry]]\nname = \"docker.io\"\nmirrors = [\"m:5000/hub\", \"http://localhost:1\"]\ninsecure = true\ncert-dir = \"/x\"\n": true,
		"defualt = \"x\"": false, "default = 1": false, "default = \"a b\"": false,
		"[[registry]]\nname = \"a/b\"\n": false, "[[registry]]\n": false,
		"[[registry]]\nname = \"a\"\n[[registry]]\nname = \"a\"\n": false,
		"[[registry]]\nname = \"a\"\nmirrors = [\"ftp://x\"]\n":    false,
		"[[registry]]\nname = \"a\"\nmirrors = [\"\"]\n":           false,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := LoadConfig("")
		if (err == nil) != ok || !ok && (!errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), path)) {
			t.Errorf("%q: %+v, %v", text, c, err)
		}
	}
}

// --insecure does not hold for where a registry has tokens asked for.
func TestLoginElsewhere(t *testing.T) {
	tokens := newServed()
	tokens.StartTLS()
	t.Cleanup(tokens.Close)
	_, port, err := net.SplitHostPort(tokens.Host())
	if err != nil {
		t.Fatal(err)
	}
	s, o := newServed(), fast(t)
	s.StartTLS()
	t.Cleanup(s.Close)
	s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("WWW-Authenticate", `Bearer realm="https://localhost:`+port+`/token",service="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	o.Insecure = true
	_, err = Login(t.Context(), s.Host(), "ann", "secret", o)
	if !errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), "certificate") ||
		len(tokens.Requests("")) > 0 {
		t.Errorf("%v, %q", err, tokens.Requests(""))
	}
}
