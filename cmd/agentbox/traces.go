package main

import (
	"errors"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	"github.com/agentbox/agentbox/runtime/traces"
)

// background has the commands that agentbox starts by itself. Each of their actions is a trace of its own.
var background = map[string]bool{"reap": true, "supervise": true}

// beginTrace begins the span of a command line, as part of the trace that the environment names,
// where the environment asks for traces. A mistake in those variables must not keep a verb from
// running.
func (a *app) beginTrace(cmd *cobra.Command) {
	does := background[cmd.Name()]
	if cmd.Hidden && !does { // the shell's completion
		return
	}
	serves := cmd.Name() == "serve"
	if !serves && !does { // whose callers have traces of their own, and which has none
		cmd.SetContext(traces.Parent(cmd.Context()))
	}
	lasting := serves || does && cmd.Name() != "reap" || cmd.Name() == "mcp"
	t, err := traces.Open(traces.Options{Version: version, Lasting: lasting})
	if err != nil {
		slog.Warn("traces disabled", "err", err, "hint", strings.Join(fault.Hint(err), " "))
	}
	if t == nil {
		return
	}
	a.globals.traces = t
	a.endTrace = func(int, error) { t.Close() }
	if lasting {
		return
	}
	ctx, end := t.Command(cmd.Context(), cmd.CommandPath())
	cmd.SetContext(ctx)
	a.endTrace = func(exit int, err error) {
		if a.asked { // else it was nothing to measure
			end(exit, traceCode(err))
		}
		t.Close()
	}
}

// traceCode is the code of a command's error; a command of a sandbox that ended with
// one of its own is no error.
func traceCode(err error) string {
	var status exitStatus
	var usage *usageError
	switch {
	case err == nil, errors.As(err, &status):
		return ""
	case errors.As(err, &usage):
		return audit.Outcome(runtime.ErrInvalid)
	}
	return audit.Outcome(err)
}
