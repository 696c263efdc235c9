package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type runOptions struct {
	createOptions
	attach attachOptions
	Detach bool
}

func (o *runOptions) addFlags(fl *pflag.FlagSet) {
	o.createOptions.addFlags(fl)
	o.attach.addFlags(fl)
	o.attach.addSigProxy(fl)
	fl.BoolVarP(&o.Detach, "detach", "d", false, "start in the background and print the id")
}

func newRunCommand(a *app) *cobra.Command {
	var opts runOptions
	cmd := &cobra.Command{
		Use:   "run [flags] IMAGE [COMMAND] [ARG...]",
		Short: "Make a sandbox and run a command in it",
		Long: `Run makes a sandbox from IMAGE and starts COMMAND in it. In the foreground it ends with
the command's own exit code. IMAGE is pulled when it is not here; it is a name or any
other reference that 'agentbox image pull' takes.

Without a terminal, signals such as Ctrl-C are passed on to the sandbox (--sig-proxy);
the third of a kind ends agentbox and leaves the sandbox running. With -it the terminal
is the sandbox's: Ctrl-C is a key like any other, and Ctrl-P Ctrl-Q detaches.

Every process has AGENTBOX_SANDBOX, AGENTBOX_SANDBOX_NAME, AGENTBOX_WORKDIR and
AGENTBOX_ATTEMPT in its environment.`,
		Example: `  agentbox run --rm busybox echo hello
  agentbox run -it --name work -v ./project:/src -w /src debian bash
  agentbox run -d --name web -p 8080:80 --memory 512m busybox httpd -f
  agentbox run --rm 'bootstrap:debian/bookworm?include=python3' python3 -c 'print(1)'
  agentbox run -it --checkpoint-every 5m --name work debian bash
  agentbox run --policy strict --rm busybox id
  agentbox run -d --ttl 2h --idle 15m debian agent
  agentbox run -d --secret token=file:/etc/agent/token --secret key=env:API_KEY debian agent
  agentbox run -d --network none --read-only --tmpfs /tmp:size=64m busybox sleep 1000`,
		Annotations:       passes(),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			opts.entrypointSet = cmd.Flags().Changed("entrypoint")
			req, err := opts.admitted(cmd.Context(), a, args)
			if err != nil {
				return err
			}
			if opts.Detach {
				return a.service(cmd.Context(), func(svc runtime.Service) error {
					return runDetached(cmd.Context(), req, svc, a)
				})
			}
			opts.attach.Interactive, opts.attach.TTY = opts.Interactive, opts.TTY
			sess, err := a.newSession(opts.attach)
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runForeground(cmd.Context(), req, svc, sess)
			})
		},
	}
	cmd.Flags().SetInterspersed(false)
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	a.completeLeaseFlag(cmd)
	a.completePolicyFlag(cmd)
	return cmd
}

func runDetached(ctx context.Context, req runtime.CreateRequest, svc runtime.Service, a *app) error {
	req.ToStart = true
	sb, err := createShown(ctx, req, svc, a.stderr)
	if err != nil {
		return reword(err, "run", req.Spec.Name)
	}
	if _, err := svc.Start(ctx, sb.ID, nil); err != nil {
		return both(reword(err, "run", sb.Name), removeUnstarted(ctx, sb, svc))
	}
	_, err = fmt.Fprintln(a.stdout, sb.ID)
	return err
}

func runForeground(ctx context.Context, req runtime.CreateRequest, svc runtime.Service, sess *session) error {
	req.ToStart = true
	sb, err := createShown(ctx, req, svc, sess.app.stderr)
	if err != nil {
		return reword(err, "run", req.Spec.Name)
	}
	return startNew(ctx, sb, svc, sess)
}

// startNew starts a new sandbox in the foreground.
func startNew(ctx context.Context, sb runtime.Sandbox, svc runtime.Service, sess *session) error {
	end, err := sess.follow(ctx, svc, "run", sb, func(streams runtime.Streams) (func() error, error) {
		return svc.Start(ctx, sb.ID, &streams)
	})
	if !end.started {
		return both(err, removeUnstarted(ctx, sb, svc))
	}
	var code exitStatus
	if sb.Spec.AutoRemove && !end.detached && (err == nil || errors.As(err, &code)) {
		gone := removeExited(ctx, sb.ID, svc)
		if errors.Is(gone, runtime.ErrState) {
			// No command starts a sandbox that is about to be removed, so this was a restore, and
			// with it the end of our connection.
			fmt.Fprintf(sess.app.stderr, "%[1]s was restored and goes on; back with: agentbox attach %[1]s\n", sb.Name)
			gone = nil
		}
		return both(err, reword(gone, "run", sb.Name))
	}
	return err
}

// removeUnstarted keeps the promise of --rm for a sandbox that could not be
// started; without --rm it stays, created, to be looked at and started again.
func removeUnstarted(ctx context.Context, sb runtime.Sandbox, svc runtime.Service) error {
	if !sb.Spec.AutoRemove {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	return removed(svc.Remove(ctx, sb.ID, runtime.RemoveOptions{Force: true}))
}

// removeExited makes sure that an exited --rm sandbox is gone when run ends.
func removeExited(ctx context.Context, id string, svc runtime.Service) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	for {
		err := svc.Remove(ctx, id, runtime.RemoveOptions{AtExit: true})
		if !errors.Is(err, runtime.ErrBusy) {
			return removed(err)
		}
		select {
		case <-time.After(busyPoll):
		case <-ctx.Done():
			return err
		}
	}
}

// removed ignores the error if another command removed the sandbox first.
func removed(err error) error {
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	return err
}

const (
	removeTimeout = time.Minute
	busyPoll      = 50 * time.Millisecond // another process's lock does not signal its release
)
