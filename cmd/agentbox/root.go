package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/traces"
)

// globals are the flags that every command has.
type globals struct {
	Root     string // empty: /var/lib/agentbox and /run/agentbox
	LogLevel string
	Backend  string

	rootFlag     bool // the root came by the flag
	backendGiven bool // by the flag or the environment

	// reaping is set for the command that a monitor runs after an exit, which
	// must not go about other sandboxes' business.
	reaping bool

	// supervising is set for the supervisor: what is left half-done it sees to itself, and
	// it must not make its root again.
	supervising bool

	// by names the agentbox process that this is, for the audit log; empty: a command that a user
	// gave.
	by string

	traces *traces.Traces // nil: traces were not requested
}

func (g *globals) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&g.Root, "root", "",
		"keep all state in `DIR` (environment AGENTBOX_ROOT; default /var/lib/agentbox and /run/agentbox)")
	g.LogLevel = "warn"
	fl.Var(choice(&g.LogLevel, "debug", "info", "warn", "error"), "log-level",
		"log to stderr from this `LEVEL` on: debug, info, warn, error")
	fl.StringVar(&g.Backend, "backend", "",
		"what runs new sandboxes' containers: oci, docker, containerd (environment AGENTBOX_BACKEND; default oci)")
}

// resolve fills what the flags left empty from the environment, late, so that the help shows the
// same text to all users.
func (g globals) resolve() (globals, error) {
	g.rootFlag = g.Root != ""
	if g.Root == "" {
		g.Root = os.Getenv("AGENTBOX_ROOT")
	}
	if g.Root != "" {
		// The sandboxes' monitors are told it, too, and stand elsewhere.
		root, err := filepath.Abs(g.Root)
		if err != nil {
			return g, err
		}
		g.Root = root
	}
	if g.Backend == "" {
		g.Backend = os.Getenv("AGENTBOX_BACKEND")
	}
	g.backendGiven = g.Backend != ""
	if g.Backend == "" {
		g.Backend = "oci"
	}
	return g, g.checkBackend()
}

// opener makes the Service behind the commands.
type opener func(context.Context, globals) (runtime.Service, error)

// service runs fn with the service of this host when there is one, else with
// the embedded engine.
func (a *app) service(ctx context.Context, fn func(runtime.Service) error) error {
	a.asked = true
	if a.connect == nil {
		return a.engine(ctx, fn)
	}
	g, err := a.globals.resolve()
	if err != nil {
		return err
	}
	svc, insist, err := a.connect(ctx, g)
	if err != nil {
		return err
	}
	if svc == nil {
		return a.engine(ctx, fn)
	}
	err = fn(svc)
	if cerr := svc.Close(); err == nil {
		err = cerr
	}
	if errors.Is(err, api.ErrHere) && !insist && os.Geteuid() == 0 {
		return a.engine(ctx, fn)
	}
	return err
}

// engine opens the embedded engine, runs fn with it and closes it.
func (a *app) engine(ctx context.Context, fn func(runtime.Service) error) (err error) {
	g, err := a.globals.resolve()
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errNotRoot()
	}
	svc, err := a.open(ctx, g)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := svc.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("close: %w", cerr)
		}
	}()
	return fn(svc)
}

// Groups of verbs in the help.
const (
	groupSandbox = "sandbox"
	groupUndo    = "undo"
	groupImage   = "image"
	groupHost    = "host"
)

func newRootCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "agentbox [flags] COMMAND",
		Short: "Undo for AI agents: sandboxes that checkpoint and restore exactly",
		Long: `Agentbox runs each agent in a sandbox of its own, takes checkpoints of its files and
processes, and puts it back to any of them exactly.

A SANDBOX is named by its name, its id or a unique prefix of its id, four digits or more.
A CHECKPOINT is named by its id, a unique prefix of it, or by what it is to its sandbox:
  SANDBOX@NAME    the name it was given, or a tag
  SANDBOX@HEAD    the one that the sandbox was last at
  SANDBOX@{5m}    the newest that is at least 5 minutes old, or 90s, 1d12h; or an instant,
                  {2026-01-02T15:04:05Z}
~N after any of them goes N steps back in the history ('agentbox log'): SANDBOX@HEAD~2, NAME~1;
~ is ~1. Beside its SANDBOX a CHECKPOINT needs no SANDBOX@, as in 'agentbox restore c HEAD~2'.
Where a command's usage has [SANDBOX], it may be left out in a directory that one sandbox has a
workspace over; a CHECKPOINT is then @NAME, HEAD~2 or @{5m}, as in 'agentbox restore HEAD~2'.

Ctrl-C makes a verb stop and undo what it began; a second Ctrl-C ends it at once, and
'agentbox recover' (which every later command also does) puts things in order.`,
		Example: `  agentbox run -d --name c busybox sleep 1000
  agentbox checkpoint c
  agentbox exec c sh -c 'rm -rf /etc'
  agentbox restore c`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt, exitDenied, exitUnsupported,
			exitCommand, exitSignal),
		Args: cobra.ArbitraryArgs,
		RunE: helpOrUnknown,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			var level slog.Level
			if err := level.UnmarshalText([]byte(a.globals.LogLevel)); err != nil {
				return usageErrorf("--log-level: %v", err)
			}
			slog.SetDefault(slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: level})))
			a.beginTrace(cmd)
			return nil
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	cmd.SetIn(a.stdin)
	cmd.SetOut(a.stdout)
	cmd.SetErr(a.stderr)
	a.globals.addFlags(cmd.PersistentFlags())
	cmd.SetUsageTemplate(usageTemplate)
	cmd.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return &usageError{err: plainFlagError(err), cmd: c.CommandPath()}
	})
	help := newHelpCommand()
	cmd.SetHelpCommand(help)
	help.GroupID = groupHost
	cmd.AddGroup(
		&cobra.Group{ID: groupSandbox, Title: "Sandboxes:"},
		&cobra.Group{ID: groupUndo, Title: "Checkpoints:"},
		&cobra.Group{ID: groupImage, Title: "Images:"},
		&cobra.Group{ID: groupHost, Title: "This host:"},
	)
	add := func(group string, subs ...*cobra.Command) {
		for _, c := range subs {
			c.GroupID = group
			cmd.AddCommand(c)
		}
	}
	add(groupSandbox,
		newShellCommand(a), newRunCommand(a), newCreateCommand(a), newExecCommand(a), newPsCommand(a),
		newTopCommand(a), newInspectCommand(a),
		newLogsCommand(a), newAttachCommand(a), newStopCommand(a), newStartCommand(a), newRestartCommand(a),
		newKillCommand(a), newPauseCommand(a), newUnpauseCommand(a), newWaitCommand(a), newRmCommand(a),
		newCpCommand(a), newCatCommand(a), newLsCommand(a), newFindCommand(a), newMountCommand(a), newMCPCommand(a),
		newUpdateCommand(a), newEventsCommand(a), newReleaseCommand(a), newLeaseCommand(a), newGroupCommand(a))
	add(groupUndo, newCheckpointCommand(a), newRestoreCommand(a), newUndoCommand(a), newRedoCommand(a), newForkCommand(a), newLogCommand(a),
		newDiffCommand(a), newApplyCommand(a), newApproveCommand(a), newEffectCommand(a),
		newVerifyCommand(a), newPruneCommand(a), newDfCommand(a), newStoreCommand(a))
	add(groupImage, newImageCommand(a), newCommitCommand(a))
	add(groupHost, newDoctorCommand(a), newSetupCommand(a), newRecoverCommand(a), newVersionCommand(a),
		newCompletionCommand(a), newServeCommand(a), newAuditCommand(a))
	add(groupHost, newPolicyCommand(a), newDockerPluginCommand(a), newVolumeCommand(a))
	cmd.AddCommand(newReapCommand(a), newMonitorCommand(), newEgressCommand(a), newSuperviseCommand(a),
		newLeaveHostCommand(a), newManCommand())
	wrapArgs(cmd)
	return cmd
}

// plainFlagError keeps the names of Go's functions out of what users read.
func plainFlagError(err error) error {
	var number *strconv.NumError
	if !errors.As(err, &number) {
		return err
	}
	why := "not a number"
	switch {
	case number.Func == "ParseBool":
		why = "neither true nor false"
	case errors.Is(number.Err, strconv.ErrRange):
		why = "out of range"
	}
	return errors.New(strings.Replace(err.Error(), number.Error(), why, 1))
}

// helpOrUnknown is what a command does that only holds others.
func helpOrUnknown(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	msg := fmt.Sprintf("unknown command %q", args[0])
	cmd.SuggestionsMinimumDistance = 2
	if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
		msg += fmt.Sprintf(" (did you mean %s?)", strings.Join(s, " or "))
	}
	return &usageError{err: fmt.Errorf("%s", msg), cmd: cmd.CommandPath()}
}

// wrapArgs makes a wrong number of arguments a usage error everywhere, so
// that no command can forget to.
func wrapArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return &usageError{err: err, cmd: c.CommandPath()}
			}
			return nil
		}
	}
	for _, c := range cmd.Commands() {
		wrapArgs(c)
	}
}

// args is cobra's RangeArgs with words; max < 0 means any number.
func args(min, max int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		switch {
		case len(got) < min:
			return fmt.Errorf("%s is missing", argName(cmd, len(got)))
		case max == 0 && len(got) > 0:
			return fmt.Errorf("takes no argument, but was given %q", got[0])
		case max >= 0 && len(got) > max:
			return fmt.Errorf("unexpected argument %q", got[max])
		}
		for i, arg := range got {
			if arg == "" && i < min {
				return fmt.Errorf("%s is empty", argName(cmd, i))
			}
		}
		return nil
	}
}

// argName is the i-th argument's name in the Use line.
func argName(cmd *cobra.Command, i int) string {
	n := 0
	for _, w := range strings.Fields(cmd.Use)[1:] {
		if w == "[flags]" {
			continue
		}
		if n == i {
			w = strings.TrimSuffix(w, "...")
			if strings.HasPrefix(w, "[") {
				w = strings.Trim(w, "[].")
			}
			return w
		}
		n++
	}
	return "an argument"
}

const usageTemplate = `Usage:
  {{.UseLine}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}{{$cmds := .Commands}}{{if eq (len .Groups) 0}}

Commands:{{range $cmds}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{else}}{{range $group := .Groups}}

{{.Title}}{{range $cmds}}{{if (and (eq .GroupID $group.ID) (or .IsAvailableCommand (eq .Name "help")))}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{end}}{{end}}{{if .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableInheritedFlags}}

Global flags:
{{.InheritedFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{with index .Annotations "exit"}}

Exit codes:
{{.}}{{end}}
`
