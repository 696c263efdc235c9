package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// answerTime is how long a service may take to say that it is there. One that
// systemd is starting has the time that systemd gives it.
const answerTime = 3 * time.Second

// errSilent is of a service that is there and does not answer.
var errSilent = fmt.Errorf("it does not answer within %s", answerTime)

// ask asks a service for its Info. The request is one and the same however long that takes: it
// waits in the socket that systemd holds, and is answered as soon as the service runs.
func ask(
	ctx context.Context, info func(context.Context) (api.Info, error), starting func(context.Context) bool,
) (api.Info, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		for was, told := false, false; ; {
			select {
			case <-ctx.Done():
				return
			case <-time.After(answerTime):
			}
			// One that has just been started has as long as any other.
			is := starting(ctx)
			if !is && !was {
				cancel(errSilent)
				return
			}
			if !told {
				slog.Warn("waiting for the service to be started by systemd")
				told = true
			}
			was = is
		}
	}()
	i, err := info(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errSilent) {
		err = errSilent
	}
	return i, err
}

// starting reports whether systemd is about to start the service of a socket, which
// may first have much to finish or to undo, or stand behind other units of a boot.
func starting(ctx context.Context, socket string) bool {
	if booted, err := os.Stat("/run/systemd/system"); socket != filepath.Join(runtime.DefaultRun, api.SocketName) ||
		err != nil || !booted.IsDir() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", "show", "--property=ActiveState,Job,InvocationID",
		"agentbox.service").Output()
	return err == nil && comesUp(string(out), os.Getenv("INVOCATION_ID"))
}

// comesUp reports, from what systemctl shows, whether the service is coming up. A unit with a job
// waits for others. A process that the service itself has started, such as an effect's undo
// command, has the same invocation and must not wait for it: the service waits for that process.
func comesUp(shown, invocation string) bool {
	property := map[string]string{}
	for line := range strings.Lines(shown) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		property[name] = value
	}
	switch property["ActiveState"] {
	case "activating":
		return invocation == "" || property["InvocationID"] != invocation
	case "inactive", "failed":
		return property["Job"] != "" && property["Job"] != "0"
	}
	return false
}
