package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type lsOptions struct {
	Format    string
	Long      bool
	Recursive bool
}

func (o *lsOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatTable, formatJSON)
	fl.BoolVarP(&o.Long, "long", "l", false, "show type and mode, owner, size, time and a symlink's target")
	fl.BoolVarP(&o.Recursive, "recursive", "R", false, "list all that is below PATH")
}

func newLsCommand(a *app) *cobra.Command {
	var opts lsOptions
	cmd := &cobra.Command{
		Use:   "ls [flags] SANDBOX[@CHECKPOINT] [PATH]",
		Short: "List files of a sandbox or of a checkpoint",
		Long: `Ls lists what is in the directory PATH, by default /, of a sandbox as it is now, running or
stopped, or as a checkpoint has it. Nothing is restored for that. SANDBOX@image are the
files of the image. A PATH that is no directory is listed itself. Symlinks on the way are
followed as in the sandbox, and so is a PATH that is a symlink to a directory.

With --recursive each line is a path below PATH, a directory before what is in it. A name
with unusual characters is in quotes.

What a sandbox mounts is in no checkpoint: bind mounts, tmpfs, /proc, /sys and /dev, and
volumes that were not taken along. Such a directory has no contents here.

With --format json it prints an array of objects: path, type, mode, uid, gid, size, mtime,
target, device as 'agentbox diff' has them, path_b64 where a name is not UTF-8, and mount
(bind, volume, tmpfs, proc, sysfs, devices or secrets) where the content is not part of
the checkpoint.`,
		Example: `  agentbox ls c@before /etc
  agentbox ls -l c@before /work
  agentbox ls --recursive c@image /usr/local
  agentbox ls c /tmp
  agentbox ls @before src                   # in the directory of a workspace`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args: func(cmd *cobra.Command, got []string) error {
			err := args(1, 2)(cmd, got)
			if len(got) == 0 {
				return fmt.Errorf("%w; 'agentbox ps' lists sandboxes", err)
			}
			return err
		},
		ValidArgsFunction: a.completeStates,
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.Long && opts.Format == formatJSON {
				return usageErrorf("--long and --format json exclude each other")
			}
			return a.onListed(cmd.Context(), args, func(svc runtime.Service, ref, at string) error {
				return runLs(cmd.Context(), opts, ref, at, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// onListed reads [SANDBOX][@CHECKPOINT] [PATH] and calls fn with them. In the directory of a workspace PATH is
// that directory unless given.
func (a *app) onListed(ctx context.Context, args []string, fn func(svc runtime.Service, ref, at string) error) error {
	if len(args) > 1 && args[1] == "" {
		return usageErrorf("the path is empty")
	}
	if err := checkState(args[0]); err != nil {
		return err
	}
	return a.service(ctx, func(svc runtime.Service) error {
		ref, in, err := stateHere(ctx, args[0], svc)
		switch {
		case err != nil:
			return err
		case len(args) > 1:
			return fn(svc, ref, in(args[1]))
		}
		return fn(svc, ref, in(""))
	})
}

// checkState refuses a reference to a checkpoint that lacks a part.
func checkState(ref string) error {
	switch sandbox, state := splitState(ref); {
	case sandbox == "" && !strings.HasPrefix(ref, "@"):
		return usageErrorf("%q names no sandbox; write SANDBOX@CHECKPOINT", ref)
	case state == "" && strings.Contains(ref, "@"):
		return usageErrorf("%q names no checkpoint after the @", ref)
	}
	return nil
}

func runLs(
	ctx context.Context, opts lsOptions, ref, at string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	out := bufio.NewWriter(stdout)
	list := jsonList{w: out}
	top, mounted := "", mountNotes{}
	n := 0
	err := svc.List(ctx, ref, at, runtime.ListOptions{Recursive: opts.Recursive}, func(f runtime.FileEntry) error {
		name := pathOf(f.Path, f.PathB64)
		switch n++; {
		case n == 1 && f.Type == "dir":
			top = name
			mounted.add(f, true)
			return nil
		case n == 1:
			name = at
		default:
			name = strings.TrimPrefix(strings.TrimPrefix(name, top), "/")
		}
		if opts.Recursive {
			mounted.add(f, n == 1)
		}
		switch {
		case opts.Format == formatJSON:
			return list.add(f)
		case opts.Long:
			_, err := fmt.Fprintln(out, longLine(f, name))
			return err
		}
		_, err := fmt.Fprintln(out, quotePath(name))
		return err
	})
	if err == nil && opts.Format == formatJSON {
		err = list.end()
	}
	if ferr := out.Flush(); err == nil {
		err = ferr
	}
	mounted.print(stderr)
	return reword(err, "ls", ref)
}

// longLine describes one file.
func longLine(f runtime.FileEntry, name string) string {
	size := strconv.FormatInt(f.Size, 10)
	if f.Device != "" {
		size = f.Device
	}
	line := fmt.Sprintf("%s %11s %12s %s %s", modeText(f.FileState), fmt.Sprintf("%d:%d", f.UID, f.GID), size,
		timeText(f.Mtime), quotePath(name))
	if f.Type == "symlink" {
		line += " -> " + quotePath(f.Target)
	}
	return line
}

// timeText is a time of the API to the second, in the zone of the user.
func timeText(s string) string {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return fmt.Sprintf("%19s", printable(s))
	}
	return t.Local().Format(time.DateTime)
}

// modeText is a type and a mode as `ls -l` has it.
func modeText(f runtime.FileState) string {
	letters := map[string]byte{"dir": 'd', "symlink": 'l', "fifo": 'p', "socket": 's', "char": 'c', "block": 'b'}
	out := []byte("-rwxrwxrwx")
	if l, ok := letters[f.Type]; ok {
		out[0] = l
	}
	mode, err := strconv.ParseUint(f.Mode, 8, 32)
	if err != nil {
		return "??????????"
	}
	for i := range 9 {
		if mode&(0o400>>i) == 0 {
			out[1+i] = '-'
		}
	}
	for i, l := range "sst" { // set-user-id, set-group-id, sticky
		if mode&(0o4000>>i) == 0 {
			continue
		}
		at := 3 + 3*i
		if out[at] == '-' {
			out[at] = byte(l) - 'a' + 'A'
		} else {
			out[at] = byte(l)
		}
	}
	return string(out)
}

// mountNotes collects what a checkpoint does not have.
type mountNotes []string

// maxNotes bounds how many mounts are named.
const maxNotes = 20

// add notes a mount. Those that every sandbox has count only if one was asked for.
func (m *mountNotes) add(f runtime.FileEntry, asked bool) {
	usual := f.Mount == "proc" || f.Mount == "sysfs" || f.Mount == "devices"
	if f.Mount == "" || usual && !asked || len(*m) == maxNotes {
		return
	}
	*m = append(*m, fmt.Sprintf("%s is a mount (%s), whose content is not part of the checkpoint",
		quotePath(pathOf(f.Path, f.PathB64)), f.Mount))
}

func (m mountNotes) print(w io.Writer) { warn(w, m) }

// jsonList prints an array as printJSON does, item by item.
type jsonList struct {
	w io.Writer
	n int
}

func (l *jsonList) add(v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("  ", "  ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	open := ",\n  "
	if l.n == 0 {
		open = "[\n  "
	}
	l.n++
	_, err := fmt.Fprintf(l.w, "%s%s", open, bytes.TrimSuffix(b.Bytes(), []byte("\n")))
	return err
}

func (l *jsonList) end() error {
	if l.n == 0 {
		_, err := io.WriteString(l.w, "[]\n")
		return err
	}
	_, err := io.WriteString(l.w, "\n]\n")
	return err
}

type findOptions struct {
	Name string
	Type string
	Null bool
}

func (o *findOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Name, "name", "",
		"only what has a name like `PATTERN`: * is any text, ? a character, [a-z] one of some")
	o.Type = "any"
	fl.Var(choice(&o.Type, "any", "f", "d", "l", "p", "s", "b", "c"), "type",
		"only files (f), directories (d), symlinks (l), FIFOs (p), sockets (s) or devices (b, c)")
	fl.BoolVarP(&o.Null, "null", "0", false, "end each path with a NUL instead, and quote none")
}

// fileTypes are the types of the API by the letters of find.
var fileTypes = map[string]string{
	"any": "", "f": "file", "d": "dir", "l": "symlink", "p": "fifo", "s": "socket", "b": "block", "c": "char",
}

func newFindCommand(a *app) *cobra.Command {
	var opts findOptions
	cmd := &cobra.Command{
		Use:   "find [flags] SANDBOX[@CHECKPOINT] [PATH]",
		Short: "Find files of a sandbox or of a checkpoint",
		Long: `Find prints the path of PATH, by default /, and of all below it, in a sandbox as it is now
or as a checkpoint has it; see 'agentbox ls'. Symlinks below PATH are not followed. A path
with unusual characters is in quotes.`,
		Example: `  agentbox find c@before /work --name '*.go'
  agentbox find c@before --type l
  agentbox find -0 c@before /work --type f | xargs -0 -n 1 echo`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:              args(1, 2),
		ValidArgsFunction: a.completeStates,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := path.Match(opts.Name, ""); err != nil {
				return usageErrorf("--name %q is not a pattern of names", opts.Name)
			}
			return a.onListed(cmd.Context(), args, func(svc runtime.Service, ref, at string) error {
				return runFind(cmd.Context(), opts, ref, at, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runFind(
	ctx context.Context, opts findOptions, ref, at string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	out := bufio.NewWriter(stdout)
	list := runtime.ListOptions{Recursive: true, Name: opts.Name, Type: fileTypes[opts.Type]}
	mounted, n := mountNotes{}, 0
	err := svc.List(ctx, ref, at, list, func(f runtime.FileEntry) error {
		name := pathOf(f.Path, f.PathB64)
		n++
		mounted.add(f, n == 1)
		// Some come whatever the options say.
		if list.Type != "" && list.Type != f.Type {
			return nil
		}
		if list.Name != "" {
			if matches, err := path.Match(list.Name, path.Base(name)); err != nil || !matches {
				return err
			}
		}
		if opts.Null {
			_, err := out.WriteString(name + "\x00")
			return err
		}
		_, err := out.WriteString(quotePath(name) + "\n")
		return err
	})
	if ferr := out.Flush(); err == nil {
		err = ferr
	}
	mounted.print(stderr)
	return reword(err, "find", ref)
}
