package dockerplugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestMain is also the plugin that tests kill.
func TestMain(m *testing.M) {
	if socket := os.Getenv("DOCKERPLUGIN_TEST_SOCKET"); socket != "" {
		l, err := Listen(socket)
		if err == nil {
			fmt.Println("ready")
			err = Serve(context.Background(), l, Options{Authz: echo("authz")})
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func echo(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, name, " ", r.URL.Path) })
}

func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "plugins", "agentbox.sock")
}

func call(socket, method, path string) (int, string, error) {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequest(method, "http://plugin"+path, strings.NewReader("{}"))
	if err != nil {
		return 0, "", err
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, strings.TrimSpace(string(body)), err
}

// start serves in the test's own process; stop ends it and returns its error.
func start(t *testing.T, socket string, opts Options) (stop func() error) {
	t.Helper()
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, opts) }()
	return func() error { cancel(); return <-done }
}

func TestServe(t *testing.T) {
	socket := socketPath(t)
	for _, c := range []struct {
		opts       Options
		implements string
	}{
		{Options{Volumes: echo("volumes"), Authz: echo("authz")}, `{"Implements":["VolumeDriver","authz"]}`},
		{Options{Authz: echo("authz")}, `{"Implements":["authz"]}`},
		{Options{Volumes: echo("volumes")}, `{"Implements":["VolumeDriver"]}`},
		{Options{}, `{"Implements":[]}`},
	} {
		stop := start(t, socket, c.opts)
		for _, probe := range []struct {
			method, path, want string
			code               int
			on                 bool
		}{
			{"POST", "/Plugin.Activate", c.implements, 200, true},
			{"POST", "/AuthZPlugin.AuthZReq", "authz /AuthZPlugin.AuthZReq", 200, c.opts.Authz != nil},
			{"POST", "/VolumeDriver.Create", "volumes /VolumeDriver.Create", 200, c.opts.Volumes != nil},
			{"GET", "/Plugin.Activate", "", 405, true},
			{"POST", "/NetworkDriver.Join", "", 404, true},
		} {
			if !probe.on {
				probe.code, probe.want = 404, ""
			}
			code, body, err := call(socket, probe.method, probe.path)
			if err != nil || code != probe.code || code == 200 && body != probe.want {
				t.Errorf("%s %s: %d %s %v", probe.method, probe.path, code, body, err)
			}
		}
		if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v %v", info, err)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
	}
}

// A call under way when the plugin is stopped gets its answer.
func TestStopLetsCallsEnd(t *testing.T) {
	socket := socketPath(t)
	entered, leave := make(chan bool), make(chan bool)
	stop := start(t, socket, Options{Authz: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-leave
		fmt.Fprint(w, "done")
	})})
	answered := make(chan string, 1)
	go func() {
		_, body, err := call(socket, "POST", "/AuthZPlugin.AuthZReq")
		answered <- fmt.Sprint(body, err)
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	select {
	case err := <-stopped:
		t.Fatalf("stopped with a call under way: %v", err)
	default:
	}
	close(leave)
	if got := <-answered; got != "done<nil>" {
		t.Error(got)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func TestListenRefuses(t *testing.T) {
	socket := socketPath(t)
	defer start(t, socket, Options{Authz: echo("first")})()
	if _, err := Listen(socket); !errors.Is(err, fault.ErrBusy) || len(fault.Hint(err)) == 0 {
		t.Errorf("beside a live plugin: %v", err)
	}
	if _, body, err := call(socket, "POST", "/AuthZPlugin.X"); err != nil || body != "first /AuthZPlugin.X" {
		t.Errorf("the first one: %s %v", body, err)
	}

	foreign := socketPath(t)
	if err := os.MkdirAll(filepath.Dir(foreign), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", foreign)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := Listen(foreign); !errors.Is(err, fault.ErrBusy) {
		t.Errorf("beside another's live socket: %v", err)
	}

	file := socketPath(t)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(file); !errors.Is(err, fault.ErrExists) {
		t.Errorf("over a file: %v", err)
	}

	if _, err := Listen(socket + strings.Repeat("x", 100)); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("a long path: %v", err)
	}
}

// A connection that never brought a request keeps no plugin from its end.
func TestUnusedConnectionEnds(t *testing.T) {
	socket := socketPath(t)
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, l, Options{Authz: echo("authz")}) }()
	var open []net.Conn
	for range 2 {
		c, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
	}
	// Connections are accepted in turn: an answered one comes after them.
	if _, body, err := call(socket, "POST", "/AuthZPlugin.X"); err != nil || body != "authz /AuthZPlugin.X" {
		t.Fatalf("%s %v", body, err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	for _, c := range open {
		if n, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("read %d, %v", n, err)
		}
	}
}

// The leftovers of a killed plugin (its socket, its lock file, a half-made socket) do not block
// the next one.
func TestKilledPluginIsReplaced(t *testing.T) {
	socket := socketPath(t)
	for range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "DOCKERPLUGIN_TEST_SOCKET="+socket)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
			t.Fatal(err)
		}
		if _, body, err := call(socket, "POST", "/AuthZPlugin.X"); err != nil || body != "authz /AuthZPlugin.X" {
			t.Errorf("%s %v", body, err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		if _, err := os.Lstat(socket); err != nil {
			t.Fatalf("the test shows nothing: %v", err)
		}
		if err := os.MkdirAll(socket+".d/s", 0o700); err != nil {
			t.Fatal(err)
		}
	}
	stop := start(t, socket, Options{Authz: echo("new")})
	if _, body, err := call(socket, "POST", "/AuthZPlugin.X"); err != nil || body != "new /AuthZPlugin.X" {
		t.Errorf("%s %v", body, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A plugin that ends does not take away the socket of the one after it.
func TestCloseLeavesOthersSocket(t *testing.T) {
	socket := socketPath(t)
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(socket); err != nil {
		t.Error(err)
	}
}
