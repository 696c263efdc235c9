package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type checkpointOptions struct {
	Name        string
	FilesOnly   bool
	Stop        bool
	Strict      bool
	WithVolumes bool
	Labels      []string
	Trigger     string
	TCP         string
	Timeout     time.Duration
	Paranoid    bool
	Message     string
	IfChanged   bool
	Lease       string
	Temporary   bool
	Attach      []string
	Format      string
}

func (o *checkpointOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Name, "name", "", "`NAME` to restore it by")
	fl.BoolVar(&o.FilesOnly, "files-only", false, "leave the processes out")
	fl.BoolVar(&o.Stop, "stop", false, "stop the sandbox once the checkpoint is safe")
	fl.BoolVar(&o.Strict, "strict", false, "refuse when a process would be left out")
	fl.BoolVar(&o.WithVolumes, "with-volumes", false,
		"take the engine's local volumes along; a restore then puts them back, too")
	fl.Var(list(&o.Attach), "attach",
		"a `FILE` of the host that belongs to it, there or not; a restore then puts it back, or removes it, too (can be given up to 32 times)")
	fl.VarP(list(&o.Labels), "label", "l", "set a label `KEY=VALUE`")
	fl.StringVar(&o.Trigger, "trigger", "", "`NAME` of what asked for it (default manual)")
	o.TCP = runtime.TCPEstablished
	fl.Var(choice(&o.TCP, runtime.TCPEstablished, runtime.TCPClose, runtime.TCPRefuse), "tcp",
		"`MODE` for established connections: established (they live on), close, or refuse (fail)")
	fl.DurationVar(&o.Timeout, "timeout", 0, "give up after this `DURATION`, e.g. 30s; the sandbox then runs on")
	fl.BoolVar(&o.Paranoid, "paranoid", false, "read every file again instead of trusting unchanged times")
	fl.StringVarP(&o.Message, "message", "m", "", "what it is: a `TEXT` that log and inspect show")
	fl.BoolVar(&o.IfChanged, "if-changed", false,
		"take none if no file has changed since the checkpoint that the sandbox is at")
	fl.BoolVar(&o.Temporary, "temporary", false,
		"remove it when the lease ends that the sandbox belongs to, unless it is pinned")
	fl.StringVar(&o.Lease, "lease", "", "remove it when the `LEASE` ends, unless it is pinned")
	addIDFormat(fl, &o.Format)
}

func (o *checkpointOptions) parse() (runtime.CheckpointOptions, error) {
	opts := runtime.CheckpointOptions{
		Name: o.Name, FilesOnly: o.FilesOnly, Stop: o.Stop, Strict: o.Strict, WithVolumes: o.WithVolumes,
		Trigger: o.Trigger, TCP: o.TCP, Timeout: o.Timeout, Paranoid: o.Paranoid,
		Lease: o.Lease, Temporary: o.Temporary, Message: o.Message, IfChanged: o.IfChanged,
	}
	if o.IfChanged && (o.Name != "" || o.Stop || len(o.Attach) > 0) {
		return opts, usageErrorf("--if-changed may take no checkpoint: not with --name, --stop or --attach")
	}
	if o.Name != "" {
		if err := checkName("--name", o.Name); err != nil {
			return opts, err
		}
	}
	if o.Temporary && o.Lease != "" {
		return opts, usageErrorf("--temporary names the sandbox's lease, --lease another: give one of them")
	}
	if o.Timeout < 0 {
		return opts, usageErrorf("--timeout %v: must not be negative", o.Timeout)
	}
	for _, file := range o.Attach {
		if file == "" {
			return opts, usageErrorf("--attach is empty: give it a file of the host")
		}
		path, err := hostPath(file)
		if err != nil {
			return opts, usageErrorf("--attach %s: %v", oneLine(file), err)
		}
		opts.Attach = append(opts.Attach, path)
	}
	var err error
	opts.Labels, err = parseLabels("--label", o.Labels)
	return opts, err
}

// hostPath is where a path leads from here, as the kernel goes: what stands before a
// "..", the working directory too, may be a symlink.
func hostPath(path string) (string, error) {
	if !slices.Contains(strings.Split(path, "/"), "..") {
		return filepath.Abs(path)
	}
	dir, name := filepath.Split(path)
	if name == "" || name == "." || name == ".." {
		return "", errors.New("it names no file")
	}
	if !filepath.IsAbs(dir) {
		here, err := os.Getwd()
		if err != nil {
			return "", err
		}
		dir = here + "/" + dir
	}
	dir, err := filepath.EvalSymlinks(dir)
	return filepath.Join(dir, name), err
}

// newCheckpointCommand is the verb itself and holds those on checkpoints. The
// verb has the name create, too, for sandboxes called ls or rm.
func newCheckpointCommand(a *app) *cobra.Command {
	cmd := checkpointCommand(a, "checkpoint [flags] [SANDBOX]")
	cmd.Aliases = []string{"checkpoints"}
	create := checkpointCommand(a, "create [flags] [SANDBOX]")
	cmd.AddCommand(create, newCheckpointLsCommand(a), newCheckpointInspectCommand(a), newCheckpointRmCommand(a),
		newCheckpointVerifyCommand(a),
		newCheckpointPinCommand(a), newCheckpointUnpinCommand(a), newCheckpointTagCommand(a),
		newCheckpointUntagCommand(a),
		newCheckpointExportCommand(a), newCheckpointImportCommand(a), newCheckpointPushCommand(a),
		newCheckpointPullCommand(a))
	return cmd
}

func checkpointCommand(a *app, use string) *cobra.Command {
	var opts checkpointOptions
	cmd := &cobra.Command{
		Use:   use,
		Short: "Take a checkpoint of a sandbox, or work with checkpoints",
		Long: `Checkpoint freezes a sandbox, reads its files and, when it runs, its processes, and lets it
go on. The checkpoint is safe on disk when the command ends; the sandbox may have moved on
by then. With --stop it stands still until the checkpoint is safe on disk, and is stopped. When
anything fails the sandbox goes on as before and no checkpoint is listed. Only what the store
does not have yet is added to it; a checkpoint that adds nothing says unchanged.

With --if-changed none is taken when no file has changed since the checkpoint that the
sandbox is at (HEAD), whatever its processes have done: the command says so, and prints the id of
that one.

It prints the checkpoint's id. A stopped sandbox gets a files-only checkpoint. Bind
mounts are not part of it, and volumes only with --with-volumes.

--attach takes files of the host along that belong to this state, such as a Terraform state or a
compose file: regular files of up to 64 MiB, with owner, mode, times and attributes, read while the sandbox
stands still. A restore puts them back; see 'agentbox restore'. The sandbox's policy has to allow
their paths as writable bind mounts.`,
		Example: `  agentbox checkpoint c
  agentbox checkpoint --name before-upgrade --label turn=12 --trigger tool:apt c
  agentbox checkpoint -m 'before the database is migrated' --if-changed c
  agentbox checkpoint --stop --timeout 30s c
  agentbox checkpoint --attach infra/terraform.tfstate --attach infra/plan.out c
  id=$(agentbox checkpoint c) && agentbox restore c $id
  agentbox checkpoint ls c`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:              args(0, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			co, err := opts.parse()
			if err != nil {
				return err
			}
			return a.onSandbox(cmd.Context(), args, func(svc runtime.Service, sandbox string, _ []string) error {
				return runCheckpoint(cmd.Context(), co, opts.Format, sandbox, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	a.completeLeaseFlag(cmd)
	return cmd
}

func runCheckpoint(
	ctx context.Context, opts runtime.CheckpointOptions, format, sandbox string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	update, end := watchSteps(stderr, "checkpoint")
	defer end()
	opts.Progress = update
	c, err := svc.Checkpoint(ctx, sandbox, opts)
	end()
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		if own, ok := err.(*runtime.Error); ok {
			err = own.Err
		}
		return &runtime.Error{Op: "checkpoint", ID: sandbox,
			Err:  fmt.Errorf("not done within %v (%w)", opts.Timeout, err),
			Hint: "The sandbox goes on as before. Give it longer with --timeout."}
	}
	if err != nil {
		return err
	}
	warn(stderr, c.Warnings)
	if c.Reused {
		fmt.Fprintf(stderr, "no file of %s has changed since checkpoint %s; none taken\n", printable(c.SandboxName), shorten(c.ID, 13))
	} else if isTerminalWriter(stderr) {
		fmt.Fprintln(stderr, printable(checkpointSummary(c)))
	}
	if format == formatJSON {
		return printJSON(stdout, documentedCheckpoint(c))
	}
	_, err = fmt.Fprintln(stdout, c.ID)
	return err
}

func checkpointSummary(c runtime.Checkpoint) string {
	s := fmt.Sprintf("checkpoint %s of %s: %s, %s", shorten(c.ID, 13), c.SandboxName, c.Kind,
		countText(c.Files, "file"))
	if c.Kind == runtime.KindFull {
		s += ", " + countText(int64(c.Processes), "process")
	}
	if n := len(c.Attached); n > 0 {
		s += ", " + countText(int64(n), "host file")
	}
	s += ", " + sizeText(c.Bytes)
	if c.Unchanged {
		s += ", unchanged"
	} else {
		s += ", " + sizeText(c.Added) + " added"
	}
	if c.Frozen > 0 {
		s += ", frozen " + durationText(c.Frozen)
	}
	return s
}
