package bundle

import (
	"errors"
	"fmt"
	"strings"

	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// Messages of runc and crun when the command itself is at fault.
var (
	notFound      = lazy.Regexp(`executable file .*not found in \$PATH|exec: "[^\n]*": (?:stat [^\n]*: )?no such file or directory`)
	notExecutable = lazy.Regexp(`exec: "[^\n]*": (?:permission denied|is a directory|exec format error)|open executable: |chdir to cwd`)
)

// CommandError turns a runtime's complaint into an *ExecError, with the code
// that a shell would give, when it is that the command cannot be executed; nil
// when it is anything else.
func CommandError(args []string, msg string) error {
	msg = strings.TrimSpace(msg)
	command := ""
	if len(args) > 0 {
		command = args[0]
	}
	code, why := 0, ""
	switch {
	case notFound().MatchString(msg):
		code, why = 127, "not found in the sandbox"
	case strings.Contains(msg, "chdir to cwd"):
		return &runtime.ExecError{Command: command, Code: 126, Err: errors.New("working directory: " + tail(msg))}
	case notExecutable().MatchString(msg):
		code, why = 126, "cannot be executed: "+tail(msg)
	default:
		return nil
	}
	return &runtime.ExecError{Command: command, Code: code, Err: fmt.Errorf("%s: %s", command, why)}
}

// tail is the reason at the end of a chain of wrapped messages.
func tail(msg string) string {
	if i := strings.LastIndex(msg, ": "); i >= 0 {
		return msg[i+2:]
	}
	return msg
}

// Check refuses a sandbox whose mounts or whose stop signal make no sense.
func Check(spec runtime.Spec) error {
	if _, err := (Place{}).userMounts(spec); err != nil {
		return err
	}
	_, err := StopSignal(spec, "")
	return err
}

// StopSignal returns the signal that asks a container to end.
func StopSignal(spec runtime.Spec, override string) (unix.Signal, error) {
	for _, name := range []string{override, spec.StopSignal} {
		if name == "" {
			continue
		}
		sig, err := signal.ParseSignal(name)
		if err != nil {
			return 0, fmt.Errorf("%w: stop signal: %w", fault.ErrInvalid, err)
		}
		return sig, nil
	}
	return unix.SIGTERM, nil
}
