package containerd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/defaults"
	"github.com/containerd/containerd/errdefs"
	"github.com/containerd/containerd/namespaces"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/agentbox/agentbox/internal/fault"
)

// client is a connection to containerd that is made when it is first needed,
// and again when the daemon was restarted.
type client struct {
	*containerd.Client
	conn    *grpc.ClientConn
	address string
}

// callTimeout bounds calls that the daemon answers from what it knows; what
// starts or ends processes, or moves images, has its caller's deadline only.
const callTimeout = 30 * time.Second

func newClient(address string) (*client, error) {
	c := &client{address: address}
	var err error
	c.conn, err = grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", address)
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(defaults.DefaultMaxRecvMsgSize),
			grpc.MaxCallSendMsgSize(defaults.DefaultMaxSendMsgSize)),
		grpc.WithUnaryInterceptor(c.unary), grpc.WithStreamInterceptor(c.stream))
	if err != nil {
		return nil, fmt.Errorf("containerd at %s: %w", address, err)
	}
	c.Client, err = containerd.NewWithConn(c.conn)
	return c, err
}

// alive returns an error if no process listens on the socket. The error is gRPC's, as
// containerd's client would return it.
func (c *client) alive() error {
	conn, err := net.DialTimeout("unix", c.address, time.Second)
	if err == nil {
		return conn.Close()
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	return status.Errorf(codes.Unavailable, "containerd does not answer at %s: %v", c.address, err)
}

// errDown is that the daemon does not answer.
var errDown = errors.New("containerd does not answer")

// down is errDown in full.
type down string

func (d down) Error() string        { return string(d) }
func (d down) Is(target error) bool { return target == errDown }

// unary lets a call wait until the connection is there. The socket shows whether that can
// be: gRPC itself, after a failure, pauses before it tries again, and calls made meanwhile
// would fail although the daemon is back.
func (c *client) unary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker,
	opts ...grpc.CallOption,
) error {
	if err := c.alive(); err != nil {
		return err
	}
	cc.ResetConnectBackoff()
	caller := ctx
	if !lengthy(method) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	err := invoke(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(true))...)
	if status.Code(err) == codes.Unavailable && readOnly(method) && ctx.Err() == nil {
		// The connection was to a daemon that is gone; nothing was changed.
		if down := c.alive(); down != nil {
			return down
		}
		err = invoke(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(true))...)
	}
	if status.Code(err) == codes.DeadlineExceeded && caller.Err() == nil {
		// It may have died between our look and the call, which then waited for
		// another one.
		if down := c.alive(); down != nil {
			return down
		}
	}
	return err
}

func (c *client) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
	opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	if err := c.alive(); err != nil {
		return nil, err
	}
	cc.ResetConnectBackoff()
	return streamer(ctx, desc, cc, method, append(opts, grpc.WaitForReady(true))...)
}

func lengthy(method string) bool {
	for _, m := range []string{
		"Tasks/Create", "Tasks/Start", "Tasks/Delete", "Tasks/Wait", "Diff/Apply", "Leases/Delete",
		"Images/Delete", "Content/",
	} {
		if strings.Contains(method, m) {
			return true
		}
	}
	return false
}

func readOnly(method string) bool {
	for _, m := range []string{"/Get", "/List", "/Stat", "/Mounts", "/Info"} {
		if strings.HasSuffix(method, m) {
			return true
		}
	}
	return false
}

// plain turns an error of containerd's into ours. The text that gRPC wraps around the
// daemon's means nothing to a user.
func plain(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, errDown) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	text := err.Error()
	if s, ok := status.FromError(err); ok {
		text = s.Message()
		switch s.Code() {
		case codes.Canceled:
			return fmt.Errorf("containerd: %s: %w", text, context.Canceled)
		case codes.DeadlineExceeded:
			return fmt.Errorf("containerd: %s: %w", text, context.DeadlineExceeded)
		}
		err = errdefs.FromGRPC(err)
	}
	text = strings.TrimSuffix(text, ": unknown")
	switch {
	case text == context.DeadlineExceeded.Error():
		// The caller's; the daemon saw it first, and has no code for it.
		return fmt.Errorf("containerd: %w", context.DeadlineExceeded)
	case errdefs.IsNotFound(err):
		return fmt.Errorf("containerd: %s: %w", text, fault.ErrNotFound)
	case errdefs.IsAlreadyExists(err):
		return fmt.Errorf("containerd: %s: %w", text, fault.ErrExists)
	case errdefs.IsUnavailable(err):
		return &fault.Error{Err: down(strings.TrimSuffix(text, ": "+errdefs.ErrUnavailable.Error())),
			Hint: "Start it (systemctl start containerd), or name the socket of the one that runs: CONTAINERD_ADDRESS=/path/to/containerd.sock"}
	case errdefs.IsFailedPrecondition(err):
		return fmt.Errorf("containerd: %s: %w", text, fault.ErrState)
	}
	return errors.New("containerd: " + text)
}

// isDown reports whether an error is that the daemon does not answer, which says
// nothing about what was asked for.
func isDown(err error) bool { return errors.Is(err, errDown) }

// in names the namespace that calls work in.
func in(ctx context.Context, namespace string) context.Context {
	return namespaces.WithNamespace(ctx, namespace)
}

// daemonEnv reads a variable of the environment that containerd, and with it
// every shim and OCI runtime that it starts, has.
func (c *client) daemonEnv(key string) string {
	pid, err := c.daemonPid()
	if err != nil {
		return ""
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return ""
	}
	for kv := range strings.SplitSeq(string(data), "\x00") {
		if v, ok := strings.CutPrefix(kv, key+"="); ok {
			return v
		}
	}
	return ""
}

// daemonPid is the process that listens on the socket.
func (c *client) daemonPid() (int, error) {
	conn, err := net.DialTimeout("unix", c.address, time.Second)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var cerr error
	err = raw.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, cerr); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
