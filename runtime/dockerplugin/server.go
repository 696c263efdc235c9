// Package dockerplugin is the process behind agentbox's Docker plugin: one
// unix socket in Docker's plugin directory, on which dockerd finds a volume
// driver and an authorization plugin by the socket's name.
//
// The package owns the socket and the handshake; what the plugin does comes as
// handlers (packages volume and authz beside it). dockerd sends every call as
// a POST: /Plugin.Activate once, then /VolumeDriver.* and /AuthZPlugin.*. The
// process keeps no state of its own, so that one killed with SIGKILL is
// replaced by simply starting another.
package dockerplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
)

// DefaultSocket is where dockerd looks for a plugin of the name agentbox.
const DefaultSocket = "/run/docker/plugins/agentbox.sock"

// contentType is what Docker's plugin protocol prescribes.
const contentType = "application/vnd.docker.plugins.v1.2+json"

// shutdownTime is what calls under way are given to end.
const shutdownTime = 5 * time.Second

// Options are the parts of the plugin. A nil part is not announced.
type Options struct {
	Volumes http.Handler // answers /VolumeDriver.*
	Authz   http.Handler // answers /AuthZPlugin.*
}

// implements lists what dockerd may use the plugin for.
func (o Options) implements() []string {
	list := []string{}
	if o.Volumes != nil {
		list = append(list, "VolumeDriver")
	}
	if o.Authz != nil {
		list = append(list, "authz")
	}
	return list
}

// Handler is the whole plugin without its socket.
func Handler(opts Options) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Path
		switch {
		case r.Method != http.MethodPost:
			http.Error(w, "the plugin protocol has only POST", http.StatusMethodNotAllowed)
		case name == "/Plugin.Activate":
			w.Header().Set("Content-Type", contentType)
			_ = json.NewEncoder(w).Encode(map[string][]string{"Implements": opts.implements()})
		case strings.HasPrefix(name, "/VolumeDriver.") && opts.Volumes != nil:
			opts.Volumes.ServeHTTP(w, r)
		case strings.HasPrefix(name, "/AuthZPlugin.") && opts.Authz != nil:
			opts.Authz.ServeHTTP(w, r)
		default:
			http.NotFound(w, r)
		}
	})
}

// Serve answers on the listener until ctx is done, then lets the calls under
// way end, and closes the listener in any case. It returns nil after a clean
// end.
func Serve(ctx context.Context, l net.Listener, opts Options) error {
	srv := &http.Server{
		Handler:           Handler(opts),
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	endUnused(ctx, srv)
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve the Docker plugin: %w", err)
	case <-ctx.Done():
	}
	slow, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
	defer cancel()
	err := srv.Shutdown(slow)
	if err != nil {
		err = errors.Join(fmt.Errorf("end the calls of dockerd under way: %w", err), srv.Close())
	}
	<-ended
	return err
}

// endUnused closes, once ctx is done, the connections that have brought no
// request: dockerd keeps some to spare, and Shutdown would wait for them.
func endUnused(ctx context.Context, srv *http.Server) {
	var unused sync.Map // of net.Conn
	srv.ConnState = func(c net.Conn, s http.ConnState) {
		if s != http.StateNew {
			unused.Delete(c)
			return
		}
		unused.Store(c, nil)
		if ctx.Err() != nil {
			c.Close()
		}
	}
	srv.RegisterOnShutdown(func() {
		unused.Range(func(c, _ any) bool {
			c.(net.Conn).Close()
			return true
		})
	})
}

// Listen makes the plugin's socket, mode 0600. The socket of a process that was killed is
// replaced; for one with a live listener it returns ErrBusy. The returned listener removes
// the socket when it is closed.
//
// A lock file beside the socket tells the two apart, since its lock goes with the process.
// The socket appears by a rename, complete: dockerd never sees one that refuses.
func Listen(socket string) (net.Listener, error) {
	dir := filepath.Dir(socket)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the plugin directory: %w", err)
	}
	lock, err := flock.Try(socket+".lock", 0)
	if errors.Is(err, flock.ErrHeld) {
		return nil, alive(socket)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the plugin's socket: %w", err)
	}
	l, err := listen(socket, lock)
	if err != nil {
		lock.Unlock()
		return nil, err
	}
	return l, nil
}

func listen(socket string, lock *flock.Handle) (*listener, error) {
	if info, err := os.Lstat(socket); err == nil {
		if info.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("%w: %s is there and is no socket", fault.ErrExists, socket)
		}
		if c, err := net.Dial("unix", socket); err == nil {
			c.Close()
			return nil, alive(socket) // another program's, which takes no lock
		}
	}
	// dockerd takes any socket in its directory for a plugin, but looks into
	// subdirectories only for one of their own name.
	temp := socket + ".d"
	if err := os.RemoveAll(temp); err != nil {
		return nil, fmt.Errorf("clear what a killed plugin left: %w", err)
	}
	if err := os.Mkdir(temp, 0o700); err != nil {
		return nil, fmt.Errorf("make the plugin's socket: %w", err)
	}
	defer os.RemoveAll(temp)
	first := filepath.Join(temp, "s")
	l, err := net.Listen("unix", first)
	if errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("%w: the path of the socket, %s, is too long for the kernel", fault.ErrInvalid, socket)
	}
	if err != nil {
		return nil, fmt.Errorf("make the plugin's socket: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	made, err := os.Lstat(first)
	if err == nil {
		err = os.Chmod(first, 0o600)
	}
	if err == nil {
		err = os.Rename(first, socket)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the plugin's socket: %w", err), l.Close())
	}
	return &listener{Listener: l, socket: socket, made: made, lock: lock}, nil
}

func alive(socket string) error {
	return &fault.Error{
		Err:  fmt.Errorf("%w: a plugin is running on %s already", fault.ErrBusy, socket),
		Hint: "Stop it first, or choose another --socket: its name is the name of the plugin.",
	}
}

// listener removes its socket when it is closed, unless another has taken the
// place.
type listener struct {
	net.Listener
	socket string
	made   os.FileInfo
	lock   *flock.Handle
}

func (l *listener) Close() error {
	err := l.Listener.Close()
	if info, serr := os.Lstat(l.socket); serr == nil && os.SameFile(info, l.made) {
		if rerr := os.Remove(l.socket); rerr != nil {
			err = errors.Join(err, rerr)
		}
	}
	l.lock.Unlock()
	return err
}
