package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

type updateOptions struct {
	Egress    runtime.EgressChange
	TTL, Idle string
	Storage   string
	Restart   restartOptions
}

// restartOptions are --restart and --restart-from.
type restartOptions struct{ Policy, From string }

func (o *restartOptions) addFlags(fl *pflag.FlagSet, what string) {
	fl.StringVar(&o.Policy, "restart", "", what+", `POLICY`: no, on-failure[:N], always or unless-stopped")
	fl.Var(choice(&o.From, runtime.RestartFromCommand, runtime.RestartFromHead), "restart-from",
		"with --restart, from its command, or from the checkpoint it was last at: `WHAT`, command or head")
}

// parse returns nil when nothing was said.
func (o restartOptions) parse() (*runtime.Restart, error) {
	if o.Policy == "" {
		if o.From != "" {
			return nil, usageErrorf("--restart-from needs --restart")
		}
		return nil, nil
	}
	name, times, counted := strings.Cut(o.Policy, ":")
	r := &runtime.Restart{Policy: name, From: o.From}
	switch name {
	case runtime.RestartNo, runtime.RestartOnFailure, runtime.RestartAlways, runtime.RestartUnlessStopped:
	default:
		return nil, usageErrorf("--restart %q: must be no, on-failure[:N], always or unless-stopped", o.Policy)
	}
	if counted {
		n, err := strconv.Atoi(times)
		if err != nil || n < 1 || name != runtime.RestartOnFailure {
			return nil, usageErrorf("--restart %q: a number from 1 on may follow on-failure, as in on-failure:3",
				o.Policy)
		}
		r.Retries = n
	}
	return r, nil
}

func (o *updateOptions) addFlags(fl *pflag.FlagSet) {
	fl.Var(list(&o.Egress.Add), "egress-add", "let it out to `RULE`, as 'agentbox run --egress' takes it")
	fl.Var(list(&o.Egress.Remove), "egress-rm", "take `RULE` away")
	fl.StringVar(&o.TTL, "ttl", "", "let it live for `DURATION` from now on, e.g. 2h; none: without end")
	fl.StringVar(&o.Storage, "storage-size", "", "let its files take `SIZE`, e.g. 10g; none: without limit")
	fl.StringVar(&o.Idle, "idle", "", "stop it when nothing goes on in it for `DURATION`, e.g. 10m; none: never")
	o.Restart.addFlags(fl, "from now on, start it again when it has ended by itself")
}

func (o *updateOptions) lifetime() (change runtime.LifetimeChange, err error) {
	for _, f := range []struct {
		flag, text string
		to         **time.Duration
	}{{"--ttl", o.TTL, &change.TTL}, {"--idle", o.Idle, &change.Idle}} {
		var d time.Duration
		switch f.text {
		case "":
			continue
		case "none":
		default:
			if d, err = parseLifetime(f.flag, f.text); err != nil {
				return change, err
			}
		}
		*f.to = &d
	}
	change.Restart, err = o.Restart.parse()
	return change, err
}

// storage is nil if nothing is to change about it.
func (o *updateOptions) storage() (*runtime.StorageChange, error) {
	switch o.Storage {
	case "":
		return nil, nil
	case "none":
		return &runtime.StorageChange{}, nil
	}
	size, err := parseSize("--storage-size", o.Storage)
	return &runtime.StorageChange{Size: size}, err
}

// parseLifetime reads how long a sandbox is to live or be idle.
func parseLifetime(flag, s string) (time.Duration, error) {
	d, err := policy.ParseDuration(s)
	if err != nil || d < policy.MinLifetime {
		return 0, usageErrorf("%s %q: write a duration from %v on, for example 10m, 12h or 2d",
			flag, s, policy.MinLifetime)
	}
	return d, nil
}

func newUpdateCommand(a *app) *cobra.Command {
	var opts updateOptions
	cmd := &cobra.Command{
		Use:   "update [flags] SANDBOX",
		Short: "Change how long a sandbox lives, whether it comes back, what it may store or reach",
		Long: `Update gives a sandbox more time, or less, from now on, and prints when it then expires.
One that has expired can be started again with that.

With --restart it is started again, or not any more, when it has ended by itself; what was
stopped stays so until it is started.

It gives its files more room, or less, at once if it runs. What they take already they
keep; over the limit nothing is added, or, where the kernel does not hold it, it is killed.

It changes the egress rules of a sandbox with --network filtered, at once if it runs, and
prints those it then has. Connections that no rule allows any more end.

What was changed stays over stops, restores and upgrades; a fork has it from its checkpoint.
Nothing can be had that the policy of the sandbox does not cover.`,
		Example: `  agentbox update c --ttl 2h
  agentbox update c --restart on-failure:3 --restart-from head
  agentbox update c --storage-size 20g
  agentbox update c --egress-add 'pypi.org 443' --egress-add 'files.pythonhosted.org 443'
  agentbox update c --egress-rm 'pypi.org 443'`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			change, err := opts.lifetime()
			if err != nil {
				return err
			}
			storage, err := opts.storage()
			if err != nil {
				return err
			}
			if len(opts.Egress.Add)+len(opts.Egress.Remove) == 0 &&
				change == (runtime.LifetimeChange{}) && storage == nil {
				return usageErrorf("nothing to change: say --ttl, --idle, --storage-size, --restart, --egress-add or --egress-rm")
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				if storage != nil {
					if _, err := svc.UpdateStorage(cmd.Context(), args[0], *storage); err != nil {
						return err
					}
				}
				return runUpdate(cmd.Context(), opts.Egress, change, args[0], svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runUpdate(
	ctx context.Context, egress runtime.EgressChange, lifetime runtime.LifetimeChange, sandbox string,
	svc runtime.Service, out io.Writer,
) error {
	if len(egress.Add)+len(egress.Remove) > 0 {
		rules, err := svc.UpdateEgress(ctx, sandbox, egress)
		if err != nil {
			return err
		}
		for _, r := range rules {
			if _, err := fmt.Fprintln(out, r); err != nil {
				return err
			}
		}
	}
	if lifetime == (runtime.LifetimeChange{}) {
		return nil
	}
	sb, err := svc.UpdateLifetime(ctx, sandbox, lifetime)
	if err == nil && !sb.Expires.IsZero() {
		_, err = fmt.Fprintln(out, "expires", sb.Expires.Local().Format(time.RFC3339))
	}
	return err
}
