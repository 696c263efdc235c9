package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

// newLeaseCommand holds the verbs on leases.
func newLeaseCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lease COMMAND",
		Short: "Hold sandboxes for as long as their owner lives",
		Long: `A lease holds sandboxes for somebody. When its owner ends, or its deadline comes, its
sandboxes are removed, and with them the checkpoints that were made with --temporary or
--lease, or by --checkpoint-every; those that are pinned stay.

The owner is a process of this host (--pid), which no other is taken for even when it gets
the same number; or whoever renews the lease in time (--heartbeat); or nobody, and then the
deadline alone counts (--for). Setting the clock ends no lease early.`,
		Example: `  L=$(agentbox lease create --pid $$ --for 1h)
  agentbox run -d --lease $L --name c busybox sleep 1000
  agentbox checkpoint --temporary c
  agentbox lease transfer $L --for 30m     # keep it for scoring
  agentbox lease release $L`,
		Annotations: exits(exitUsage),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newLeaseCreateCommand(a), newLeaseLsCommand(a), newLeaseInspectCommand(a), newLeaseRenewCommand(a),
		newLeaseTransferCommand(a), newLeaseReleaseCommand(a))
	return cmd
}

// termsOptions say for how long a lease is held.
type termsOptions struct {
	Pid       int
	Heartbeat string
	For       string
}

func (o *termsOptions) addFlags(fl *pflag.FlagSet) {
	fl.IntVar(&o.Pid, "pid", 0, "hold it as long as the process `PID` lives")
	fl.StringVar(&o.Heartbeat, "heartbeat", "", "hold it as long as it is renewed within each `DURATION`, e.g. 30s")
	fl.StringVar(&o.For, "for", "", "hold it for `DURATION` at most, e.g. 1h")
}

func (o *termsOptions) parse(cmd *cobra.Command) (t runtime.LeaseTerms, err error) {
	pid := cmd.Flags().Changed("pid")
	switch {
	case pid && o.Heartbeat != "":
		return t, usageErrorf("--pid and --heartbeat exclude each other: a lease has one owner")
	case pid && o.Pid < 1:
		return t, usageErrorf("--pid %d: no process has that number", o.Pid)
	case pid:
		t.Owner, t.Pid = runtime.OwnerPid, o.Pid
	case o.Heartbeat != "":
		t.Owner = runtime.OwnerHeartbeat
		if t.Interval, err = parseLifetime("--heartbeat", o.Heartbeat); err != nil {
			return t, err
		}
	case o.For == "":
		return t, usageErrorf("who holds it? Say --pid, --heartbeat or --for")
	}
	if o.For != "" {
		t.For, err = parseLifetime("--for", o.For)
	}
	return t, err
}

func newLeaseCreateCommand(a *app) *cobra.Command {
	var terms termsOptions
	var name, format string
	cmd := &cobra.Command{
		Use:   "create [flags]",
		Short: "Make a lease and print its id",
		Example: `  agentbox lease create --pid $$ --name session
  agentbox lease create --heartbeat 30s --for 2h`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, err := terms.parse(cmd)
			if err == nil && name != "" {
				err = checkName("--name", name)
			}
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				l, err := svc.CreateLease(cmd.Context(), runtime.LeaseRequest{Name: name, LeaseTerms: t})
				if err == nil && format == formatJSON {
					return printJSON(a.stdout, l)
				}
				if err == nil {
					_, err = fmt.Fprintln(a.stdout, l.ID)
				}
				return err
			})
		},
	}
	terms.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&name, "name", "", "`NAME` to call it by")
	addIDFormat(cmd.Flags(), &format)
	completeFlags(cmd)
	return cmd
}

func newLeaseLsCommand(a *app) *cobra.Command {
	var all, quiet bool
	var format string
	cmd := &cobra.Command{
		Use:   "ls [flags]",
		Short: "List leases",
		Long: `Ls lists the leases that are held, newest first, and with --all the last 100 that have
ended, too. With --format json it prints an array of what 'agentbox lease inspect' prints.`,
		Example:     "  agentbox lease ls -a",
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := oneForm(quiet, format); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				list, err := svc.Leases(cmd.Context(), all)
				if err != nil {
					return err
				}
				return printLeases(list, quiet, format, a.now(), a.stdout)
			})
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "those that have ended too")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	addFormat(cmd.Flags(), &format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func printLeases(list []runtime.Lease, quiet bool, format string, now time.Time, out io.Writer) error {
	return listing[runtime.Lease]{
		format: format,
		quiet:  quiet,
		name:   func(l runtime.Lease) string { return shortID(l.ID) },
		header: []string{"ID", "NAME", "OWNER", "EXPIRES", "SANDBOXES", "CHECKPOINTS", "CREATED", "STATE"},
		row: func(l runtime.Lease) []string {
			return []string{
				shortID(l.ID), l.Name, ownerText(l), leaseExpiry(now, l), fmt.Sprint(len(l.Sandboxes)),
				fmt.Sprint(len(l.Checkpoints)),
				ago(now, l.Created), stateText(l),
			}
		},
	}.print(out, list)
}

func ownerText(l runtime.Lease) string {
	switch o := l.Owner; o.Kind {
	case runtime.OwnerPid:
		return fmt.Sprintf("pid %d", o.Pid)
	case runtime.OwnerHeartbeat:
		return fmt.Sprintf("heartbeat %v", o.Interval)
	case runtime.OwnerNone:
		return "-"
	default:
		return o.Kind
	}
}

func leaseExpiry(now time.Time, l runtime.Lease) string {
	if l.Expires.IsZero() {
		return "-"
	}
	return "in " + strings.ToLower(units.HumanDuration(max(0, l.Expires.Sub(now))))
}

func stateText(l runtime.Lease) string {
	if l.Reason == "" {
		return l.State
	}
	return l.State + ": " + l.Reason
}

func newLeaseInspectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "inspect LEASE...",
		Short: "Print leases as JSON",
		Long: `Inspect prints an array of what is known of each lease: its owner, its deadline, the names
of the sandboxes and the ids of the checkpoints that belong to it, and, of one that has ended,
why, and what it took with it.`,
		Example:           "  agentbox lease inspect session",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeLeases,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return inspectEach(cmd.Context(), args, a.stdout, func(ref string) (runtime.Lease, error) {
					return svc.Lease(cmd.Context(), ref)
				})
			})
		},
	}
}

func newLeaseRenewCommand(a *app) *cobra.Command {
	var deadline string
	cmd := &cobra.Command{
		Use:   "renew [flags] LEASE",
		Short: "Tell that the owner of a lease is alive, or give it more time",
		Example: `  while sleep 10; do agentbox lease renew session || break; done
  agentbox lease renew --for 1h session`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitDenied),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeLeases,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var d time.Duration
			if deadline != "" {
				if d, err = parseLifetime("--for", deadline); err != nil {
					return err
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				_, err := svc.RenewLease(cmd.Context(), args[0], d)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&deadline, "for", "", "set the deadline, `DURATION` from now on")
	return cmd
}

func newLeaseTransferCommand(a *app) *cobra.Command {
	var terms termsOptions
	cmd := &cobra.Command{
		Use:   "transfer [flags] LEASE",
		Short: "Give a lease another owner and another deadline",
		Long: `Transfer hands a lease over, with all that belongs to it: to a process, to whoever renews
it, or, with --for alone, to nobody, until that time is over. What is not said, the deadline
too, the lease does not have afterwards.`,
		Example: `  agentbox lease transfer --for 30m session
  agentbox lease transfer --pid 4711 --for 2h session`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitDenied),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeLeases,
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := terms.parse(cmd)
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				_, err := svc.TransferLease(cmd.Context(), args[0], t)
				return err
			})
		},
	}
	terms.addFlags(cmd.Flags())
	return cmd
}

func newLeaseReleaseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "release LEASE...",
		Short:             "End leases and remove what belongs to them",
		Long:              "Release ends leases, and returns when their sandboxes and temporary checkpoints are gone.",
		Example:           "  agentbox lease release session",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeLeases,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return each(cmd.Context(), args, func(ref string) error {
					_, err := svc.ReleaseLease(cmd.Context(), ref)
					return err
				})
			})
		},
	}
}

func (a *app) completeLeases(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		list, err := svc.Leases(ctx, false)
		for _, l := range list {
			if name := cmp.Or(l.Name, shortID(l.ID)); !slices.Contains(args, name) {
				names = append(names, cobra.CompletionWithDesc(name, ownerText(l)))
			}
		}
		return err
	})
	return names, noFiles
}

// completeLeaseFlag completes --lease.
func (a *app) completeLeaseFlag(cmd *cobra.Command) {
	_ = cmd.RegisterFlagCompletionFunc("lease", func(cmd *cobra.Command, _ []string, s string) ([]string,
		cobra.ShellCompDirective) {
		return a.completeLeases(cmd, nil, s)
	})
}
