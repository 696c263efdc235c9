package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
)

type diffOptions struct {
	Format    string
	NameOnly  bool
	Null      bool
	Stat      bool
	Quiet     bool
	ExitCode  bool
	Paranoid  bool
	NoRenames bool
	Patch     bool
	Color     string
	All       bool
	top       string // a path in the sandbox that the shown ones are relative to; empty: none
}

func (o *diffOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatTable, formatJSON)
	fl.BoolVar(&o.NameOnly, "name-only", false, "paths only")
	fl.BoolVarP(&o.Null, "null", "z", false, "end each line with a NUL instead, and quote no path")
	fl.BoolVar(&o.Stat, "stat", false, "show sizes and what changed, and sum up")
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "print nothing; implies --exit-code")
	fl.BoolVar(&o.ExitCode, "exit-code", false, "end with 1 if there are changes, and never with 1 otherwise")
	fl.BoolVar(&o.Paranoid, "paranoid", false, "read every file again instead of trusting unchanged times")
	fl.BoolVarP(&o.Patch, "patch", "p", false, "show what changed in the text of files, as git does")
	o.Color = "auto"
	fl.Var(choice(&o.Color, "auto", "always", "never"), "color",
		"colour patches: auto (on a terminal), always or never")
	fl.BoolVarP(&o.All, "all", "a", false, "in a sandbox with workspaces: the rest of its files, too")
	fl.BoolVar(&o.NoRenames, "no-renames", false, "show a renamed file as one deleted and one added")
}

func (o *diffOptions) check() error {
	forms := 0
	for _, set := range []bool{o.NameOnly, o.Stat, o.Quiet, o.Format == formatJSON, o.Patch && o.Format != formatJSON} {
		if set {
			forms++
		}
	}
	if forms > 1 {
		return usageErrorf("--name-only, --stat, --quiet, --patch and --format json exclude each other, except --patch with json")
	}
	if o.Null && (o.Stat || o.Quiet || o.Patch || o.Format == formatJSON) {
		return usageErrorf("--null is for the plain list and --name-only")
	}
	return nil
}

func newDiffCommand(a *app) *cobra.Command {
	var opts diffOptions
	cmd := &cobra.Command{
		Use:   "diff [flags] [SANDBOX][@A] [[SANDBOX]@B|B] [-- PATH...]",
		Short: "Show what changed in a sandbox's files",
		Long: `Diff lists the paths at which a user of the sandbox finds something else in state B than in
state A, a directory before what is in it:

  A  added
  D  deleted
  M  modified: content, mode, owner, extended attributes, time, or a symlink's target
  T  type changed, for example from a file to a symlink
  R  renamed: a file with the same content as one that is gone (old -> new)

A and B are checkpoints of the sandbox, as 'agentbox --help' says, or "image" for the files before
it changed any.
Without A it is the checkpoint that the sandbox was last at (see below for workspaces), and the
image if there is
none; without B it is what is there now, in a running sandbox as it is found. Directories
are listed when they came, went, or have another mode, owner or attributes. Volumes and bind
mounts are not looked into. With PATHs, absolute ones in the sandbox, only what lies at and
below them is listed. A path with unusual characters is in quotes.

Of a sandbox with workspaces only these are compared, unless PATHs or --all are given. Without A
they are compared with their directories as they are now, and the rest of its files with the
image. 'agentbox apply' may bring less than diff shows: see
'agentbox apply --dry-run'. The paths of a single workspace are relative to it. Where SANDBOX
is left out, PATHs may be relative to the current directory.

With --patch it prints what 'git apply' and 'patch -p1' make the new files of: unified diffs,
with all permission bits in the mode lines. Files over 1 MiB or with a NUL byte in them only
"differ". A line that begins with # tells of what a patch has no form for: directories,
devices, times, owners, attributes.

With --format json it prints one object: sandbox, sandbox_name, from, to, truncated, and
changes with path, change (a letter as above), type, what (in which respects: content,
target, device, mode, owner, xattrs, mtime, type), old and new (type, mode, uid, gid, size,
mtime, target, device), from for R. path_b64 and from_b64 are there where a name is not
UTF-8; with --patch there is patch, too. At most a million changes are listed; truncated tells when there are more.

The exit code is 0 with and without changes. With --exit-code it is 0 without, 1 with
changes, and 125 instead of 1 when diff itself fails.`,
		Example: `  agentbox diff c
  agentbox diff c@before-upgrade
  agentbox diff c@before-upgrade @after-upgrade
  agentbox diff c@HEAD~1 @HEAD
  agentbox diff --stat c@image
  agentbox diff --patch c@before-upgrade | git apply --directory=src
  agentbox diff --stat -- src               # in the directory of a workspace
  agentbox diff --patch | git apply
  agentbox diff --stat c -- /work
  agentbox diff --all --quiet c@HEAD || agentbox checkpoint c
  agentbox diff docker://web`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args: func(cmd *cobra.Command, list []string) error {
			states, _ := splitPaths(cmd, list)
			return args(0, 2)(cmd, states)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			switch len(args) {
			case 0:
				return a.completeStates(cmd, nil, "")
			case 1:
				name, _ := splitState(args[0])
				return a.checkpointNames(cmd, nil, runtime.CheckpointFilter{Sandbox: name}), noFiles
			}
			return nil, noFiles
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := opts.check(); err != nil {
				return err
			}
			states, paths := splitPaths(cmd, args)
			req, err := diffRequest(states)
			if err != nil {
				return err
			}
			if opts.All && len(paths) > 0 {
				return usageErrorf("--all and PATH exclude each other")
			}
			req.Paranoid, req.NoRenames, req.Patch = opts.Paranoid, opts.NoRenames, opts.Patch
			if opts.Quiet {
				req.Limit, req.NoRenames = 1, true
			}
			err = a.service(cmd.Context(), func(svc runtime.Service) error {
				if err := opts.limit(cmd.Context(), &req, paths, svc); err != nil {
					return err
				}
				return runDiff(cmd.Context(), opts, req, svc, a.stdout, a.stderr)
			})
			if (opts.ExitCode || opts.Quiet) && err != nil && cmd.Context().Err() == nil &&
				exitCode(err, false) == exitFailure {
				if _, changed := err.(exitStatus); !changed {
					err = errorList{err, exitStatus(exitAgentbox)}
				}
			}
			return err
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// splitPaths parts the states to compare from the paths after --.
func splitPaths(cmd *cobra.Command, args []string) (states, paths []string) {
	if n := cmd.ArgsLenAtDash(); n >= 0 {
		return args[:n], args[n:]
	}
	return args, nil
}

// splitState parts SANDBOX@STATE; names have no @, nor have those of engines.
func splitState(arg string) (sandbox, state string) {
	if i := strings.LastIndexByte(arg, '@'); i >= 0 {
		return arg[:i], arg[i+1:]
	}
	return arg, ""
}

// limit sets what req is about: the sandbox, if it is left out, and the paths.
func (o *diffOptions) limit(
	ctx context.Context, req *runtime.DiffRequest, paths []string, svc runtime.Service,
) error {
	var sb runtime.Sandbox
	var p place
	var err error
	elided := req.Sandbox == ""
	if elided {
		if p, err = here(ctx, svc); err != nil {
			return err
		}
		sb, req.Sandbox = p.sandbox, p.sandbox.Name
	} else if len(paths) == 0 && !o.All {
		sb, err = svc.Sandbox(ctx, req.Sandbox)
		if errors.Is(err, runtime.ErrNotFound) {
			return nil // removed, perhaps; or it is an error of Diff, too
		}
		if err != nil {
			return err
		}
	}
	for _, name := range paths {
		if elided {
			name = p.in(name)
		} else if !path.IsAbs(name) {
			return usageErrorf("the path %q is not absolute; it is one in the sandbox", name)
		}
		req.Paths = append(req.Paths, name)
	}
	workspaces := sb.Spec.Workspaces()
	if o.All {
		return nil
	}
	if len(paths) == 0 {
		for _, m := range workspaces {
			req.Paths = append(req.Paths, path.Clean(m.Target))
		}
	}
	if len(workspaces) == 1 {
		top := path.Clean(workspaces[0].Target)
		if !slices.ContainsFunc(req.Paths, func(name string) bool { return !fsx.Within(top, name) }) {
			o.top, req.Relative = top, top
		}
	}
	return nil
}

// shown is a path of a Diff as it is printed.
func (o *diffOptions) shown(name, b64 string) string {
	name = pathOf(name, b64)
	if o.top == "" || !fsx.Within(o.top, name) {
		return name
	}
	return cmp.Or(strings.TrimPrefix(strings.TrimPrefix(name, o.top), "/"), ".")
}

func diffRequest(args []string) (req runtime.DiffRequest, err error) {
	if len(args) == 0 {
		return req, nil
	}
	req.Sandbox, req.From = splitState(args[0])
	if headPattern().MatchString(args[0]) {
		req.Sandbox, req.From = "", args[0]
	}
	if req.From == "" && strings.HasSuffix(args[0], "@") {
		return req, usageErrorf("%q names no checkpoint after the @", args[0])
	}
	if len(args) < 2 {
		return req, nil
	}
	req.To = args[1]
	if sandbox, state := splitState(args[1]); strings.Contains(args[1], "@") {
		if state == "" {
			return req, usageErrorf("%q names no checkpoint after the @", args[1])
		}
		if sandbox == "" || sandbox == req.Sandbox {
			req.To = state
		}
	}
	if req.To == "" {
		return req, usageErrorf("B is empty; leave it out for what is there now")
	}
	return req, nil
}

func runDiff(
	ctx context.Context, opts diffOptions, req runtime.DiffRequest, svc runtime.Service, stdout, stderr io.Writer,
) error {
	d, err := svc.Diff(ctx, req)
	if err != nil {
		return err
	}
	if d.Changes == nil {
		d.Changes = []runtime.Change{}
	}
	out := bufio.NewWriter(stdout)
	switch {
	case opts.Quiet:
	case opts.Format == formatJSON:
		err = printJSON(out, d)
	case opts.Patch:
		color := opts.Color == "always" || opts.Color == "auto" && isTerminalWriter(stdout) &&
			os.Getenv("NO_COLOR") == ""
		printPatches(out, opts, d.Changes, color, color || isTerminalWriter(stdout))
	case opts.Stat:
		err = printStat(out, opts, d.Changes)
	default:
		printChanges(out, opts, d.Changes)
	}
	if e := out.Flush(); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	if d.Truncated && !opts.Quiet {
		warn(stderr, []string{fmt.Sprintf("only the first %d changes are listed", len(d.Changes))})
	}
	if (opts.ExitCode || opts.Quiet) && len(d.Changes) > 0 {
		return exitStatus(exitFailure)
	}
	return nil
}

func printChanges(out *bufio.Writer, opts diffOptions, changes []runtime.Change) {
	path, end, to := quotePath, "\n", " -> "
	if opts.Null {
		path, end, to = func(s string) string { return s }, "\x00", "\x00"
	}
	for _, c := range changes {
		if !opts.NameOnly {
			out.WriteString(c.Change + " ")
			if c.Change == "R" {
				out.WriteString(path(opts.shown(c.From, c.FromB64)) + to)
			}
		}
		out.WriteString(path(opts.shown(c.Path, c.PathB64)) + end)
	}
}

// pathOf returns a path's own bytes.
func pathOf(text, b64 string) string {
	if raw, err := base64.StdEncoding.DecodeString(b64); err == nil && b64 != "" {
		return string(raw)
	}
	return text
}

// quotePath shows a path on one line without driving the terminal; where it
// must quote it does so as Go and C do.
func quotePath(s string) string {
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool {
		return !unicode.IsPrint(r) || r == '"' || r == '\\'
	}) {
		return strconv.Quote(s)
	}
	return s
}

func printStat(out io.Writer, opts diffOptions, changes []runtime.Change) error {
	t := newTable(out, "CHANGE", "PATH", "SIZE", "WHAT")
	count := map[string]int64{}
	var more, less int64
	for _, c := range changes {
		count[c.Change]++
		was, is := sizeOf(c.Old), sizeOf(c.New)
		more, less = more+max(0, is-was), less+max(0, was-is)
		path := quotePath(opts.shown(c.Path, c.PathB64))
		if c.Change == "R" {
			path = quotePath(opts.shown(c.From, c.FromB64)) + " -> " + path
		}
		t.row(c.Change, path, sizes(c), statWhat(c))
	}
	if len(changes) > 0 {
		if err := t.flush(); err != nil {
			return err
		}
	}
	sum := []string{countText(int64(len(changes)), "path") + " changed"}
	for _, k := range []struct{ letter, text string }{
		{"A", "added"}, {"M", "modified"}, {"D", "deleted"}, {"T", "of another type"}, {"R", "renamed"},
	} {
		if n := count[k.letter]; n > 0 {
			sum = append(sum, fmt.Sprintf("%d %s", n, k.text))
		}
	}
	if more > 0 {
		sum = append(sum, "+"+sizeText(more))
	}
	if less > 0 {
		sum = append(sum, "-"+sizeText(less))
	}
	_, err := fmt.Fprintln(out, strings.Join(sum, ", "))
	return err
}

func sizeOf(f *runtime.FileState) int64 {
	if f == nil {
		return 0
	}
	return f.Size
}

func sizes(c runtime.Change) string {
	text := func(f *runtime.FileState) string {
		if f == nil || f.Type != "file" {
			return "-"
		}
		return sizeText(f.Size)
	}
	was, is := text(c.Old), text(c.New)
	if was == is {
		return is
	}
	return was + " -> " + is
}

// statWhat is in which respects, for what the letter does not say.
func statWhat(c runtime.Change) string {
	if c.Change == "T" && c.Old != nil && c.New != nil {
		return c.Old.Type + " -> " + c.New.Type
	}
	if len(c.What) == 0 {
		if c.Type == "file" {
			return ""
		}
		return c.Type
	}
	return strings.Join(c.What, " ")
}
