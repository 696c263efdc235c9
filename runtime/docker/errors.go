package docker

import (
	"context"
	"errors"
	"fmt"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/client"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// explain turns an error of the client into one of ours.
func (b *Backend) explain(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case client.IsErrConnectionFailed(err):
		return hint(fmt.Errorf("%w: the Docker daemon does not answer at %s", fault.ErrUnsupported,
			strings.TrimPrefix(b.host, "unix://")),
			"Start it (systemctl start docker), or name the socket of another one in DOCKER_HOST.")
	}
	msg := strings.TrimPrefix(err.Error(), "Error response from daemon: ")
	sentinel := error(nil)
	switch {
	case cerrdefs.IsNotFound(err):
		sentinel = fault.ErrNotFound
	case cerrdefs.IsConflict(err), strings.Contains(msg, "is not running"), strings.Contains(msg, "is paused"):
		sentinel = fault.ErrState
	case cerrdefs.IsInvalidArgument(err):
		sentinel = fault.ErrInvalid
	case cerrdefs.IsPermissionDenied(err), cerrdefs.IsUnauthorized(err):
		sentinel = fault.ErrDenied
	case cerrdefs.IsNotImplemented(err):
		sentinel = fault.ErrUnsupported
	default:
		return fmt.Errorf("docker: %s", msg)
	}
	return fmt.Errorf("%w: docker: %s", sentinel, msg)
}

// lost reports whether an error is that of a connection that broke, so that what
// was asked for may have been done or not.
func lost(err error) bool {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	return client.IsErrConnectionFailed(err) || strings.Contains(err.Error(), "EOF") ||
		strings.Contains(err.Error(), "connection reset") ||
		strings.Contains(err.Error(), "broken pipe")
}

var (
	// An OCI runtime's error for a command that it cannot execute. The name of the command
	// stands before the reason, which distinguishes missing commands from missing mount
	// sources.
	execRefused = lazy.Regexp(`exec(?:: |[^:]*: )"?[^"]*"?: (?:stat [^:]*: )?(executable file not found in \$PATH|no such file or directory|permission denied|is a directory|not a directory|exec format error|input/output error|text file busy|argument list too long|invalid argument)`)
	notThere    = lazy.Regexp(`executable file not found|no such file or directory|not a directory`)
)

// commandError makes an ExecError of what the daemon says of a command that
// did not start, if it was for the command's sake. Else it is nil.
func commandError(args []string, msg string) error {
	msg = strings.TrimSpace(msg)
	command := ""
	if len(args) > 0 {
		command = args[0]
	}
	if strings.Contains(msg, "chdir to cwd") {
		return &runtime.ExecError{
			Command: command, Code: 126, Err: fmt.Errorf("%s: working directory: %s", command, last(msg)),
		}
	}
	m := execRefused().FindStringSubmatch(msg)
	switch {
	case m == nil:
		return nil
	case notThere().MatchString(m[1]):
		return &runtime.ExecError{Command: command, Code: 127, Err: fmt.Errorf("%s: not found in the sandbox", command)}
	}
	return &runtime.ExecError{Command: command, Code: 126, Err: fmt.Errorf("%s: cannot be executed: %s", command, m[1])}
}

// last is the reason at the end of a chain of wrapped messages.
func last(msg string) string {
	msg = strings.TrimSuffix(msg, ": unknown")
	if i := strings.LastIndex(msg, ": "); i >= 0 {
		return msg[i+2:]
	}
	return msg
}
