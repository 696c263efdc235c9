package main

import (
	"context"
	"errors"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type logsOptions struct {
	Follow     bool
	Tail       string
	Since      string
	Timestamps bool
}

func (o *logsOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Follow, "follow", "f", false, "go on until the sandbox exits")
	fl.StringVarP(&o.Tail, "tail", "n", "all", "only the last `LINES`, or all")
	fl.StringVar(&o.Since, "since", "",
		"only what was printed since `TIME`: RFC 3339, Unix seconds, or a duration such as 10m")
	fl.BoolVarP(&o.Timestamps, "timestamps", "t", false, "begin each line with its time")
}

func (o *logsOptions) parse(now time.Time) (runtime.LogOptions, error) {
	opts := runtime.LogOptions{Follow: o.Follow, Tail: -1, Timestamps: o.Timestamps}
	if o.Tail != "all" {
		n, err := strconv.Atoi(o.Tail)
		if err != nil {
			return opts, usageErrorf("--tail %q: must be a number of lines or all", o.Tail)
		}
		opts.Tail = max(n, -1)
	}
	var err error
	opts.Since, err = parseSince(o.Since, now)
	return opts, err
}

func parseSince(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil {
		return now.Add(-d), nil
	}
	if f, err := strconv.ParseFloat(s, 64); err == nil && f > -1e11 && f < 1e11 {
		return time.Unix(0, int64(f*1e9)), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02"} {
		if t, err := time.ParseInLocation(layout, s, time.Local); err == nil {
			return t, nil
		}
	}
	return time.Time{}, usageErrorf("--since %q: not a time; write for example 10m, 2006-01-02T15:04:05Z or Unix seconds", s)
}

func newLogsCommand(a *app) *cobra.Command {
	var opts logsOptions
	cmd := &cobra.Command{
		Use:   "logs [flags] SANDBOX",
		Short: "Print what a sandbox's command printed",
		Long: `Logs prints the output of a sandbox's command, stdout on stdout and stderr on stderr, in
the order it was made. Output of 'agentbox exec' is not in it.`,
		Example: `  agentbox logs --tail 20 c
  agentbox logs -f --since 10m c`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied, exitSignal),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			lo, err := opts.parse(a.now())
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runLogs(cmd.Context(), lo, args[0], svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runLogs(
	ctx context.Context, opts runtime.LogOptions, sandbox string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	err := svc.Logs(ctx, sandbox, opts, stdout, stderr)
	var stop signalError
	if opts.Follow && errors.As(context.Cause(ctx), &stop) {
		return stop.status() // Ctrl-C is how one stops to follow: nothing to tell
	}
	return err
}
