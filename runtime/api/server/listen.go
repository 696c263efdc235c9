package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// SocketGroup is the group whose members may use the service, if there is such.
const SocketGroup = "agentbox"

// maxConns bounds the connections that are served at a time; more wait.
const maxConns = 512

// Listen makes the socket: what a service that is gone has left there is
// replaced, one that answers is an error.
func Listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, err
	}
	// Without the lock, two services that start at once might both find the socket unused.
	lock, err := flock.Lock(context.Background(), path+".lock", 0)
	if err != nil {
		return nil, err
	}
	defer lock.Unlock()
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		return nil, errors.Join(fmt.Errorf("%w: a service listens on %s", runtime.ErrExists, path), c.Close())
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("%w: %s is there and is no socket", runtime.ErrExists, path)
	} else if err == nil {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	// Only root may connect before the socket has its group.
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	unix.Umask(old)
	if err != nil {
		return nil, err
	}
	if g, e := user.LookupGroup(SocketGroup); e == nil {
		gid, _ := strconv.Atoi(g.Gid) // it is a number here
		err = os.Lchown(path, 0, gid)
	}
	if err == nil {
		err = os.Chmod(path, 0o660)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// peer identifies the other end of a connection.
type peer struct {
	UID, GID uint32
	Groups   []uint32 // unless it is root
	Pid      int32
	Subject  string // of its certificate: it came by TLS, and the rest is not known
	Address  string
	denied   bool
}

// attrs are what the log says of a peer.
func (p peer) attrs() []any {
	if p.Address != "" {
		return []any{"client", p.Subject, "client_address", p.Address}
	}
	return []any{"client_uid", p.UID, "client_gid", p.GID, "client_pid", p.Pid}
}

// caller returns p as the Caller of a verb.
func (p peer) caller() runtime.Caller {
	return runtime.Caller{
		UID: p.UID, GID: p.GID, Groups: p.Groups, Pid: int(p.Pid), Client: p.Subject, Address: p.Address,
	}
}

// identity distinguishes callers: no two share requests and keys.
func (p peer) identity() string { return identity(p.caller()) }

func identity(c runtime.Caller) string {
	if c.Address != "" {
		return "tls " + strconv.Quote(c.Client)
	}
	return strconv.FormatUint(uint64(c.UID), 10)
}

func (p peer) String() string {
	switch {
	case p.Address == "":
		return fmt.Sprintf("user %d is neither root nor in the group of the socket", p.UID)
	case p.Subject == "":
		return "the certificate has no subject"
	}
	return p.Subject
}

type peerKey struct{}

// peerOf returns the peer of a request, or the zero peer if the request came by no socket.
func peerOf(r *http.Request) peer {
	if r.TLS != nil { // with a certificate, or there would be no request
		p := peer{Address: r.RemoteAddr, denied: true}
		if certs := r.TLS.PeerCertificates; len(certs) > 0 {
			p.Subject = certs[0].Subject.String()
			p.denied = p.Subject == ""
		}
		return p
	}
	p, _ := r.Context().Value(peerKey{}).(peer)
	return p
}

// Serve answers on l until ctx ends, and then drains. It admits root and the members of
// the socket's group and, on listeners made by ListenTLS, clients with a certificate.
func Serve(ctx context.Context, l *net.UnixListener, h *Handler, more ...net.Listener) error {
	gid, err := groupOf(l)
	if err != nil {
		for _, l := range more {
			err = errors.Join(err, l.Close())
		}
		return errors.Join(err, l.Close())
	}
	quiet := &quiet{since: map[net.Conn]time.Time{}}
	srv := &http.Server{
		ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelWarn), ConnState: quiet.note,
		Handler: h, ReadHeaderTimeout: min(10*time.Second, h.opts.Body), IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: maxHeader,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			own, ok := c.(*conn)
			if !ok { // TLS: the certificate identifies the peer later
				return ctx
			}
			p, err := peerAt(own.Conn.(*net.UnixConn), gid)
			if err != nil {
				h.log.Error("client credentials not readable", "err", err)
				p.denied = true
			}
			return context.WithValue(ctx, peerKey{}, p)
		},
	}
	served := make(chan error, 1+len(more))
	listeners := []net.Listener{newLimited(l, maxConns, quiet)}
	for _, m := range more {
		if t, ok := m.(*secured); ok {
			t.limit(quiet)
		}
		listeners = append(listeners, m)
	}
	for _, l := range listeners {
		guard.Go(func() { served <- guard.Do(func() error { return srv.Serve(l) }) })
	}
	select {
	case err := <-served:
		h.stop()
		err = errors.Join(err, srv.Close())
		for range more {
			<-served
		}
		return err
	case <-ctx.Done():
	}
	h.log.Info("service draining")
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.opts.Drain)
	defer cancel()
	// The listener goes first, then connections as they become idle.
	down := guard.Start(func() error { return srv.Shutdown(context.WithoutCancel(ctx)) })
	h.Drain(bound)
	// The remaining connections have no request.
	select {
	case err = <-down:
	case <-time.After(time.Second):
		err = errors.Join(srv.Close(), <-down)
	}
	for range 1 + len(more) {
		<-served
	}
	return err
}

// groupOf is the group of a listening socket.
func groupOf(l *net.UnixListener) (uint32, error) {
	info, err := os.Stat(l.Addr().String())
	if err != nil {
		return 0, err
	}
	return info.Sys().(*syscall.Stat_t).Gid, nil
}

// peerAt asks the kernel for the credentials of the peer.
func peerAt(c *net.UnixConn, group uint32) (p peer, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, err
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); inner != nil {
			return
		}
		p.UID, p.GID, p.Pid = cred.Uid, cred.Gid, cred.Pid
		if p.UID != 0 {
			p.Groups, inner = peerGroups(fd)
		}
	})
	if err = errors.Join(err, inner); err != nil {
		return p, err
	}
	// Without a group of its own the socket belongs to root's group; membership of that
	// group does not grant root's rights.
	p.denied = p.UID != 0 && (group == 0 || p.GID != group && !slices.Contains(p.Groups, group))
	return p, nil
}

// peerGroups are the further groups that a peer had when it connected.
func peerGroups(fd uintptr) ([]uint32, error) {
	const soPeerGroups = 59 // linux 4.13
	groups := make([]uint32, 64)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, soPeerGroups,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			return groups[:size/4], nil
		case errno == unix.ERANGE && int(size/4) > len(groups) && size/4 <= 65536:
			groups = make([]uint32, size/4)
		default:
			return nil, errno
		}
	}
}
