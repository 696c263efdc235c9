// Command agentbox is undo for AI agents: it runs sandboxes, checkpoints them
// and puts them back exactly.
//
// A verb lives in the file of its name and does three things: it turns flags
// into the arguments of one or two methods of runtime.Service, prints the
// result, and leaves errors to main, which turns them into a message, hints
// and an exit code (exit.go). service.go alone knows which backend is behind
// the Service; spec.go parses what Docker's users write; terminal.go connects
// the caller's terminal; signals.go routes Ctrl-C; plugin.go has what is different for
// `docker agentbox`.
package main

import (
	"context"
	"os"
	"path/filepath"
	"time"

	_ "github.com/agentbox/agentbox/internal/gclater" // from the start on
	"github.com/agentbox/agentbox/internal/setup"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version = "dev"

func main() {
	a := newApp()
	a.asPlugin = startedByDocker()
	if filepath.Base(os.Args[0]) == setup.PluginName {
		os.Exit(report(a.stderr, nil, becomeDockerAgentbox(os.Args[1:]), nil))
	}
	os.Exit(a.main(os.Args[1:]))
}

// app is what every command shares: the caller's streams, the global flags
// and the way to a Service. Tests replace its fields.
type app struct {
	stdin          *os.File
	stdout, stderr *os.File
	globals        globals
	signals        *signals
	open           opener
	connect        func(context.Context, globals) (svc *api.Client, insist bool, err error) // nil: to no service
	examine        func(context.Context, globals) doctor.Report
	now            func() time.Time
	asPlugin       bool // docker-agentbox started this program (plugin.go)
	asked          bool // a Service was asked for something
	endTrace       func(exit int, err error)
}

func newApp() *app {
	return &app{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		open: openService, connect: connect, examine: examine, now: time.Now,
	}
}

// main runs one command line and returns its exit code.
func (a *app) main(args []string) int {
	ctx, s := catchSignals(context.Background())
	defer s.stop()
	a.signals = s

	root := newRootCommand(a)
	if a.asPlugin {
		dress(root)
		a.watchDocker(s)
	}
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	code := report(a.stderr, cmd, err, s.caught())
	if a.endTrace != nil {
		a.endTrace(code, err)
	}
	return code
}
