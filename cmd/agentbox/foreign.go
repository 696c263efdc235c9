package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

// grantOptions say what the spec of a checkpoint from elsewhere is given.
type grantOptions struct {
	Foreign    bool
	TrustSpec  bool
	Yes        bool
	Mounts     []string
	Workspaces []string
	Publish    []string
	Policy     string
}

func (o *grantOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVar(&o.Foreign, "foreign", false, "without CHECKPOINT: the newest, even if it comes from elsewhere")
	fl.Var(list(&o.Mounts), "mount", "of a checkpoint from elsewhere: mount host directory or file, `SRC:DST[:ro]`")
	fl.Var(list(&o.Workspaces), "workspace",
		"of a checkpoint from elsewhere: show its workspace at PATH over the host directory `DIR:PATH`, which may be empty")
	fl.Var(list(&o.Publish), "publish", "of a checkpoint from elsewhere: publish a port, `[IP:]HOST:SANDBOX[/udp]`")
	fl.StringVar(&o.Policy, "policy", "",
		"of a checkpoint from elsewhere: the policy `NAME` decides what it may do (default \"default\")")
	fl.BoolVar(&o.TrustSpec, "trust-spec", false,
		"of a checkpoint from elsewhere: show all that its spec asks for, and give it that")
	fl.BoolVarP(&o.Yes, "yes", "y", false, "with --trust-spec: do not ask")
}

func (o *grantOptions) parse() (g runtime.Grants, err error) {
	g = runtime.Grants{TrustSpec: o.TrustSpec, Policy: o.Policy}
	if o.Yes && !o.TrustSpec {
		return g, usageErrorf("--yes is for --trust-spec")
	}
	for _, v := range o.Mounts {
		m, err := parseVolume("--mount", v)
		if err != nil {
			return g, err
		}
		g.Mounts = append(g.Mounts, m)
	}
	for _, v := range o.Workspaces {
		m, err := parseWorkspace(v)
		if err != nil {
			return g, err
		}
		g.Mounts = append(g.Mounts, m)
	}
	for _, v := range o.Publish {
		p, err := parsePort(v)
		if err != nil {
			return g, err
		}
		g.Ports = append(g.Ports, p)
	}
	return g, nil
}

// admitForeign shows what a checkpoint from elsewhere would run and, with --trust-spec, all
// that it asks for, before anything of it runs.
func (a *app) admitForeign(ctx context.Context, c runtime.Checkpoint, o grantOptions) error {
	return admitForeign(ctx, c, o, a.stdin, a.stderr)
}

func admitForeign(ctx context.Context, c runtime.Checkpoint, o grantOptions, stdin *os.File, stderr io.Writer) error {
	if !c.Foreign {
		return nil
	}
	fmt.Fprintf(stderr, "checkpoint %s comes from elsewhere; its command: %s\n", shortID(c.ID),
		oneLine(strings.Join(c.Command, " ")))
	if !o.TrustSpec {
		return nil
	}
	fmt.Fprintln(stderr, "its spec asks for:")
	for _, what := range c.Asks {
		fmt.Fprintf(stderr, "  %s\n", oneLine(what))
	}
	if len(c.Asks) == 0 {
		fmt.Fprintln(stderr, "  nothing of the host")
	}
	if o.Yes {
		return nil
	}
	if !isTerminal(stdin) {
		return usageErrorf("--trust-spec gives it all of that: give --yes too")
	}
	fmt.Fprint(stderr, "Give it all of that? [y/N] ")
	return confirmed(ctx, stdin, stderr, "nothing was given, and nothing made")
}

// chosen returns the checkpoint that a restore or a fork would use, as far as it could be one
// from elsewhere; without one its id is empty. The verb then uses the one that was shown: with
// --trust-spec one that cannot be shown is an error.
func chosen(
	ctx context.Context, svc runtime.Service, sandbox, checkpoint string, o grantOptions,
	filter runtime.CheckpointFilter,
) (c runtime.Checkpoint, err error) {
	switch {
	case checkpoint != "":
		if c, err = svc.CheckpointInfo(ctx, sandbox+"@"+checkpoint); errors.Is(err, runtime.ErrNotFound) {
			c, err = svc.CheckpointInfo(ctx, checkpoint)
		}
	case o.Foreign:
		filter.Sandbox = sandbox
		var all []runtime.Checkpoint
		if all, err = svc.Checkpoints(ctx, filter); len(all) > 0 {
			c = all[0]
		} else if err == nil {
			err = fmt.Errorf("checkpoint of %s: %w", sandbox, runtime.ErrNotFound)
		}
	}
	if err != nil && ctx.Err() == nil && !o.TrustSpec {
		return runtime.Checkpoint{}, nil // the verb itself says what is wrong
	}
	return c, err
}
