package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// createOptions are the flags of create and run.
type createOptions struct {
	Interactive  bool
	TTY          bool
	Remove       bool
	Name         string
	Env          []string
	EnvFiles     []string
	Workdir      string
	User         string
	Volumes      []string
	Workspaces   []string
	MaxFiles     int64
	Tmpfs        []string
	Secrets      secretOptions
	Labels       []string
	Hostname     string
	Memory       string
	MemorySwap   string
	IO           string
	Storage      string
	CPUs         string
	Pids         int64
	Network      string
	NetworkGroup string
	Publish      []string
	Egress       []string
	ReadOnly     bool
	Init         bool
	Entrypoint   string
	StopSignal   string
	Every        string
	Steps        string
	TTL          string
	Restart      restartOptions
	Idle         string
	Policy       string
	Lease        string
	Group        string
	Privileged   bool
	UserNS       string
	CapAdd       []string
	CapDrop      []string
	SecurityOpts []string
	pull         pullPolicyOptions

	entrypointSet bool
}

func (o *createOptions) addMaxFiles(fl *pflag.FlagSet) {
	fl.Int64Var(&o.MaxFiles, "workspace-files", 0,
		"refuse workspaces with more than `N` files in all (default 1000000); -1: no limit")
}

func (o *createOptions) addFlags(fl *pflag.FlagSet) {
	// Docker's -h is the hostname, so help has only its long name here.
	fl.Bool("help", false, "print this help")
	fl.BoolVarP(&o.Interactive, "interactive", "i", false, "keep stdin open and connect it")
	fl.BoolVarP(&o.TTY, "tty", "t", false, "give the command a terminal")
	fl.BoolVar(&o.Remove, "rm", false, "remove the sandbox when it exits")
	fl.StringVar(&o.Name, "name", "", "`NAME` of the sandbox; default: one is made up")
	fl.VarP(list(&o.Env), "env", "e", "set `NAME=VALUE`; NAME alone takes the caller's value")
	fl.Var(list(&o.EnvFiles), "env-file", "read variables from `FILE`, one per line")
	fl.StringVarP(&o.Workdir, "workdir", "w", "", "`DIR` the command starts in")
	fl.StringVarP(&o.User, "user", "u", "", "`USER[:GROUP]` the command runs as, by name or number")
	fl.VarP(list(&o.Volumes), "volume", "v", "mount host directory or file, `SRC:DST[:ro]`; not part of checkpoints")
	fl.Var(list(&o.Workspaces), "workspace",
		"show the host directory `DIR[:PATH][:ro]`, at the same path by default; the sandbox changes it for itself alone, and checkpoints have all that it shows")
	o.addMaxFiles(fl)
	fl.Var(list(&o.Tmpfs), "tmpfs", "mount a tmpfs at `DST[:OPTIONS]`; not part of checkpoints' files")
	o.Secrets.addFlags(fl)
	fl.VarP(list(&o.Labels), "label", "l", "set a label `KEY=VALUE`")
	fl.StringVarP(&o.Hostname, "hostname", "h", "", "host `NAME` inside the sandbox")
	fl.StringVarP(&o.Memory, "memory", "m", "", "memory limit `SIZE`, e.g. 512m")
	fl.StringVar(&o.MemorySwap, "memory-swap", "",
		"limit of memory and swap together, `SIZE`; -1: no limit of swap; default: no swap with --memory")
	fl.StringVar(&o.IO, "io-bps", "", "limit of bytes a second, `SIZE`, read from and written to the disk of its files")
	fl.StringVar(&o.Storage, "storage-size", "",
		"limit of what it may change and add of files, `SIZE`; over it, it is killed")
	fl.StringVar(&o.CPUs, "cpus", "", "limit to this `NUMBER` of cores, e.g. 1.5")
	fl.Int64Var(&o.Pids, "pids-limit", 0, "limit to this `NUMBER` of processes; -1: none")
	fl.Var(choice(&o.Network, runtime.NetworkNone, runtime.NetworkHost, runtime.NetworkBridge, runtime.NetworkFiltered),
		"network", "`MODE`: none (only lo), host, bridge, or filtered (out only by --egress); default: the policy's, bridge")
	fl.Var(list(&o.Egress), "egress",
		"with --network filtered, which it implies: let out to `RULE`, e.g. 'pypi.org 443', '*.debian.org 80,443', '10.0.0.0/8 5432,53/udp'; default: the policy's, none")
	fl.StringVar(&o.NetworkGroup, "network-group", "",
		"let sandboxes of the same group `NAME` reach each other (bridge)")
	fl.VarP(list(&o.Publish), "publish", "p", "publish a port, `[IP:]HOST:SANDBOX[/udp]` (bridge, filtered)")
	fl.BoolVar(&o.ReadOnly, "read-only", false, "mount the root filesystem read-only")
	fl.BoolVar(&o.Init, "init", false, "run a small init that reaps zombies and passes signals on")
	fl.StringVar(&o.Entrypoint, "entrypoint", "", "`COMMAND` in place of the image's entrypoint; empty: none")
	fl.StringVar(&o.Every, everyFlag, "",
		"take a checkpoint before each exec (exec), at each duration (5m), or both (exec,5m): `exec|DURATION`; the policy says how many are kept (default: the last 100, 24 hourly, 7 daily)")
	fl.Var(choice(&o.Steps, runtime.StepsOn, runtime.StepsOff), "steps",
		"take a checkpoint after each exec that has changed a file: `on|off` (default: on with a workspace)")
	fl.StringVar(&o.TTL, "ttl", "", "stop it `DURATION` after it was made, for good; with --rm remove it; default: the policy's, none")
	fl.StringVar(&o.Idle, "idle", "", "stop it when nothing goes on in it for `DURATION`; default: the policy's, none")
	fl.StringVar(&o.Lease, "lease", "", "remove it when the `LEASE` ends; see 'agentbox lease'")
	fl.StringVar(&o.Group, "group", "", "make it one of the group `NAME`; see 'agentbox ps --filter group=NAME'")
	o.Restart.addFlags(fl, "start it again when it has ended by itself")
	fl.StringVar(&o.Policy, "policy", "",
		"what it may do: `NAME|FILE` of a policy (environment AGENTBOX_POLICY; default \"default\")")
	fl.Var(list(&o.CapAdd), "cap-add", "give it the capability `NAME`, or ALL")
	fl.Var(list(&o.CapDrop), "cap-drop", "take the capability `NAME` from it, or ALL")
	fl.Var(list(&o.SecurityOpts), "security-opt",
		"`OPTION`: no-new-privileges=false, seccomp=unconfined|FILE, apparmor=PROFILE|unconfined, or io_uring")
	fl.Var(choice(&o.UserNS, runtime.UserNSHost, runtime.UserNSAuto), "userns",
		"`MODE` of the user namespace: auto (one with a range of ids of its own), or host (none); default: auto where it can have one, see inspect")
	fl.BoolVar(&o.Privileged, "privileged", false, "ask for all of the host; no policy can allow it")
	o.pull.addFlags(fl)
	fl.StringVar(&o.StopSignal, "stop-signal", "", "`SIGNAL` that stop sends; default: the image's or SIGTERM")
}

// request turns the flags and IMAGE [COMMAND [ARG...]] into what the service
// is asked for.
func (o *createOptions) request(args []string) (runtime.CreateRequest, error) {
	var none runtime.CreateRequest
	spec := runtime.Spec{
		Name: o.Name, Image: args[0], Args: args[1:],
		Workdir: o.Workdir, User: o.User, Hostname: o.Hostname,
		Terminal: o.TTY, OpenStdin: o.Interactive, Init: o.Init, ReadOnly: o.ReadOnly,
		AutoRemove: o.Remove,
		Network:    runtime.Network{Mode: o.Network, Group: o.NetworkGroup, Egress: o.Egress},
	}
	if o.Name != "" {
		if err := checkName("--name", o.Name); err != nil {
			return none, err
		}
	}
	if o.Group != "" {
		if err := checkName("--group", o.Group); err != nil {
			return none, err
		}
	}
	if o.Workdir != "" && !path.IsAbs(o.Workdir) {
		return none, usageErrorf("--workdir %q: must be an absolute path inside the sandbox", o.Workdir)
	}
	var err error
	if spec.Env, err = parseEnv(o.EnvFiles, o.Env, os.LookupEnv); err != nil {
		return none, err
	}
	if spec.Labels, err = parseLabels("--label", o.Labels); err != nil {
		return none, err
	}
	if spec.Mounts, err = o.mounts(); err != nil {
		return none, err
	}
	if spec.Secrets, err = o.Secrets.parse(); err != nil {
		return none, err
	}
	if spec.Network.Ports, err = o.ports(); err != nil {
		return none, err
	}
	if spec.Resources, err = o.resources(); err != nil {
		return none, err
	}
	if spec.Security, err = parseSecurity(o.SecurityOpts); err != nil {
		return none, err
	}
	for _, names := range [][]string{o.CapAdd, o.CapDrop} {
		if _, err := policy.ExpandCapabilities(names); err != nil {
			return none, usageErrorf("capabilities: %v", err)
		}
	}
	if o.StopSignal != "" {
		if spec.StopSignal, err = parseSignal("--stop-signal", o.StopSignal); err != nil {
			return none, err
		}
	}
	spec.Steps = o.Steps
	if o.Every != "" {
		if spec.CheckpointEvery, err = parseEvery(o.Every); err != nil {
			return none, err
		}
	}
	if o.TTL != "" {
		if spec.Lifetime.TTL, err = parseLifetime("--ttl", o.TTL); err != nil {
			return none, err
		}
	}
	if o.Idle != "" {
		if spec.Lifetime.Idle, err = parseLifetime("--idle", o.Idle); err != nil {
			return none, err
		}
	}
	if r, err := o.Restart.parse(); err != nil {
		return none, err
	} else if r != nil {
		spec.Restart = *r
	}
	if o.Remove && spec.Restart.Policy != "" && spec.Restart.Policy != runtime.RestartNo {
		return none, usageErrorf("--rm and --restart contradict each other: what is removed when it exits cannot come back")
	}
	if len(o.Egress) > 0 && o.Network == "" {
		spec.Network.Mode = runtime.NetworkFiltered
	} else if len(o.Egress) > 0 && o.Network != runtime.NetworkFiltered {
		return none, usageErrorf("--egress needs --network filtered, not %s", o.Network)
	}
	if spec.Network.Mode == runtime.NetworkFiltered && o.NetworkGroup != "" {
		return none, usageErrorf("--network-group needs --network bridge: sandboxes of a group reach each other past the filter")
	}
	req := runtime.CreateRequest{
		Spec: spec, Pull: o.pull.options(), CapAdd: o.CapAdd, CapDrop: o.CapDrop, Privileged: o.Privileged,
		UserNS: o.UserNS, Lease: o.Lease, Group: o.Group, WorkspaceFiles: o.MaxFiles,
	}
	if o.entrypointSet {
		req.Entrypoint = []string{}
		if o.Entrypoint != "" {
			req.Entrypoint = []string{o.Entrypoint}
		}
	}
	return req, nil
}

// admitted is request with the policy that is to decide over it.
func (o *createOptions) admitted(ctx context.Context, a *app, args []string) (runtime.CreateRequest, error) {
	req, err := o.request(args)
	if err != nil {
		return req, err
	}
	name := cmp.Or(o.Policy, os.Getenv("AGENTBOX_POLICY"))
	if name == "" {
		return req, nil // the service knows
	}
	req.Policy, err = a.policy(ctx, name)
	return req, err
}

func (o *createOptions) mounts() ([]runtime.Mount, error) {
	var mounts []runtime.Mount
	at := map[string]bool{}
	add := func(m runtime.Mount, err error) error {
		if err != nil {
			return err
		}
		if at[m.Target] {
			return usageErrorf("two mounts at %s", m.Target)
		}
		at[m.Target] = true
		mounts = append(mounts, m)
		return nil
	}
	for _, v := range o.Volumes {
		if err := add(parseVolume("--volume", v)); err != nil {
			return nil, err
		}
	}
	for _, w := range o.Workspaces {
		if err := add(parseWorkspace(w)); err != nil {
			return nil, err
		}
	}
	for _, t := range o.Tmpfs {
		if err := add(parseTmpfs(t)); err != nil {
			return nil, err
		}
	}
	return mounts, nil
}

func (o *createOptions) ports() ([]runtime.Port, error) {
	if o.Network != "" && o.Network != runtime.NetworkBridge && o.Network != runtime.NetworkFiltered {
		if len(o.Publish) > 0 {
			return nil, usageErrorf("--publish needs --network bridge, not %s", o.Network)
		}
		if o.NetworkGroup != "" {
			return nil, usageErrorf("--network-group needs --network bridge, not %s", o.Network)
		}
	}
	var ports []runtime.Port
	for _, s := range o.Publish {
		p, err := parsePort(s)
		if err != nil {
			return nil, err
		}
		ports = append(ports, p)
	}
	return ports, nil
}

func (o *createOptions) resources() (r runtime.Resources, err error) {
	if o.Memory != "" {
		if r.Memory, err = parseSize("--memory", o.Memory); err != nil {
			return r, err
		}
	}
	if r.Swap, err = parseSwap(o.MemorySwap, r.Memory); err != nil {
		return r, err
	}
	if o.IO != "" {
		if r.IO, err = parseSize("--io-bps", o.IO); err != nil {
			return r, err
		}
	}
	if o.Storage != "" {
		if r.Storage, err = parseSize("--storage-size", o.Storage); err != nil {
			return r, err
		}
	}
	if o.CPUs != "" {
		if r.CPUs, err = parseCPUs(o.CPUs); err != nil {
			return r, err
		}
	}
	r.Pids, err = parsePids(o.Pids)
	return r, err
}

func newCreateCommand(a *app) *cobra.Command {
	var opts createOptions
	cmd := &cobra.Command{
		Use:   "create [flags] IMAGE [COMMAND] [ARG...]",
		Short: "Make a sandbox without starting it",
		Long:  "Create makes a sandbox as 'agentbox run' does, does not start it, and prints its id.",
		Example: `  agentbox create --name c busybox sleep 1000
  agentbox start c`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitDenied, exitUnsupported),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			opts.entrypointSet = cmd.Flags().Changed("entrypoint")
			req, err := opts.admitted(cmd.Context(), a, args)
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCreate(cmd.Context(), req, svc, a.stdout, a.stderr)
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

func runCreate(ctx context.Context, req runtime.CreateRequest, svc runtime.Service, out, stderr io.Writer) error {
	sb, err := createShown(ctx, req, svc, stderr)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, sb.ID)
	return err
}

// createShown is Create, which shows how far it is with the image.
func createShown(
	ctx context.Context, req runtime.CreateRequest, svc runtime.Service, stderr io.Writer,
) (runtime.Sandbox, error) {
	bars, end := watchLayers(stderr)
	defer end()
	if bars != nil {
		told := tellReading(req.Spec.Workspaces(), stderr)
		defer told.Stop()
		req.Pull.Progress = func(p image.Progress) {
			told.Stop()
			bars.pull(p)
		}
	}
	sb, err := svc.Create(ctx, req)
	if err == nil {
		warn(stderr, outside(req.Spec.Mounts))
	}
	return sb, err
}

// readingWait is how long a create takes, at least, that says why.
const readingWait = 2 * time.Second

// tellReading says, unless it is stopped before, why it takes long to make a sandbox with workspaces.
func tellReading(workspaces []runtime.Mount, stderr io.Writer) *time.Timer {
	return time.AfterFunc(readingWait, func() {
		if len(workspaces) > 0 {
			fmt.Fprintln(stderr, printable("reading "+workspaces[0].Source+" for the checkpoint that the sandbox begins with"))
		}
	})
}

// outside says of which directories that a sandbox can change no checkpoint has anything.
func outside(mounts []runtime.Mount) (list []string) {
	for _, m := range mounts {
		info, err := os.Stat(m.Source)
		if m.Type == "bind" && !m.ReadOnly && err == nil && info.IsDir() {
			list = append(list, fmt.Sprintf("%s is outside of checkpoints; with --workspace %s:%s it is part of them",
				m.Target, m.Source, m.Target))
		}
	}
	return list
}
