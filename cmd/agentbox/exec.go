package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

// exitKilled is the exit code of a process that SIGKILL has ended.
const exitKilled = 128 + 9

type execOptions struct {
	attachOptions
	Detach   bool
	Env      []string
	EnvFiles []string
	Workdir  string
	User     string
	Message  string
}

func (o *execOptions) addFlags(fl *pflag.FlagSet) {
	o.attachOptions.addFlags(fl)
	fl.BoolVarP(&o.Interactive, "interactive", "i", false, "connect stdin")
	fl.BoolVarP(&o.TTY, "tty", "t", false, "give the command a terminal")
	fl.BoolVarP(&o.Detach, "detach", "d", false, "return once the command runs; its output is dropped")
	fl.StringVar(&o.Message, "message", "",
		"`TEXT` that describes the step taken afterwards; default: the program")
	fl.VarP(list(&o.Env), "env", "e", "set `NAME=VALUE`; NAME alone takes the caller's value")
	fl.Var(list(&o.EnvFiles), "env-file", "read variables from `FILE`, one per line")
	fl.StringVarP(&o.Workdir, "workdir", "w", "", "`DIR` the command starts in; default: the sandbox's")
	fl.StringVarP(&o.User, "user", "u", "", "`USER[:GROUP]` the command runs as; default: the sandbox's")
}

func newExecCommand(a *app) *cobra.Command {
	var opts execOptions
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX COMMAND [ARG...]",
		Short: "Run one more command in a running sandbox",
		Long: `Exec runs COMMAND in a running sandbox and ends with its exit code.

COMMAND itself is in no checkpoint's processes as long as it runs, with --detach neither;
what it left in the background is. A restore ends COMMAND, and exec says so.

In a sandbox with a workspace (or --steps=on) a checkpoint is taken when COMMAND has ended and has
changed a file, so that 'agentbox undo' takes it back (not with --detach). Its message is the
program alone, as arguments may be secrets, or --message. A failure to take it is a warning in the
log, and changes no exit code.`,
		Example: `  agentbox exec c ls -l /
  agentbox exec c sh -c 'agent >/agent.log 2>&1 &'    # to be restored with the sandbox
  agentbox exec -it c sh
  agentbox exec --message 'pip install flask' c pip install flask
  agentbox exec -w /src -e CI=1 -u nobody c make test
  tar c . | agentbox exec -i c tar x -C /src`,
		Annotations:       passes(),
		Args:              args(2, -1),
		ValidArgsFunction: a.completeOneSandbox(isRunning),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := opts.process(args[1:])
			if err != nil {
				return err
			}
			var sess *session
			if !opts.Detach {
				if sess, err = a.newSession(opts.attachOptions); err != nil {
					return err
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runExec(cmd.Context(), args[0], p, svc, sess)
			})
		},
	}
	cmd.Flags().SetInterspersed(false)
	opts.addFlags(cmd.Flags())
	return cmd
}

func (o *execOptions) process(args []string) (runtime.Process, error) {
	p := runtime.Process{Args: args, Workdir: o.Workdir, User: o.User, Terminal: o.TTY, Detach: o.Detach, Message: o.Message}
	if o.Workdir != "" && !path.IsAbs(o.Workdir) {
		return p, usageErrorf("--workdir %q: must be an absolute path inside the sandbox", o.Workdir)
	}
	var err error
	p.Env, err = parseEnv(o.EnvFiles, o.Env, os.LookupEnv)
	return p, err
}

// runExec runs p; without a session it is detached.
func runExec(ctx context.Context, sandbox string, p runtime.Process, svc runtime.Service, sess *session) error {
	if sess == nil {
		_, err := svc.Exec(ctx, sandbox, p, runtime.Streams{})
		return err
	}
	var code int
	since := time.Now()
	err := sess.run(ctx, func(streams runtime.Streams) (err error) {
		code, err = svc.Exec(ctx, sandbox, p, streams)
		return err
	})
	switch {
	case errors.Is(err, runtime.ErrDetached):
		fmt.Fprintln(sess.app.stderr, "\ndetached; the command goes on")
		return nil
	case err != nil:
		return err
	case code == exitKilled:
		// Not an error: it was killed, by that or by something else.
		if sb, err := svc.Sandbox(ctx, sandbox); err == nil {
			if sb, found, err := whyEnded(ctx, svc, sb.ID, since); err == nil && found == restored {
				fmt.Fprintln(sess.app.stderr, printable(restoredText(ctx, svc, sb)+", which ended this command"))
			}
		}
	}
	return status(code)
}
