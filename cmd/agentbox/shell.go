package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/rights"
	"github.com/agentbox/agentbox/runtime"
)

// labelShell is the label of the sandboxes that shell makes. Its value, NAME:DIR, tells them from
// their forks, which have it, too.
const labelShell = "agentbox.shell"

// withoutShell are the flags of run that shell does not have: it decides these itself.
var withoutShell = []string{
	"interactive", "tty", "workdir", "user", "entrypoint", "privileged", "restart", "restart-from",
	"stop-signal", "group",
}

type shellOptions struct {
	createOptions
	attach attachOptions
	Image  string
	New    bool
	Trust  bool

	given []string // flags of createOptions that were given
}

func (o *shellOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Image, "image", "",
		"`IMAGE` of the sandbox, or 'host': this host's own programs (environment AGENTBOX_IMAGE; "+
			"default: the directory's, Debian with git and common tools)")
	fl.BoolVar(&o.New, "new", false, "make another sandbox, even if the directory has one")
	fl.BoolVarP(&o.Trust, "trust", "y", false, "accept the directory's .agentbox.yaml without a question")
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.createOptions.addFlags(all)
	all.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(withoutShell, f.Name) {
			fl.AddFlag(f)
		}
	})
	o.attach.addFlags(fl)
	o.attach.addSigProxy(fl)
}

func newShellCommand(a *app) *cobra.Command {
	var opts shellOptions
	cmd := &cobra.Command{
		Use:   "shell [flags] [DIR] [-- COMMAND [ARG...]]",
		Short: "Work on a directory in a sandbox, without changing the directory",
		Long: `Shell runs your shell, or COMMAND, in a sandbox over the directory DIR (default: the
current one). The sandbox sees DIR at its own path and changes it for itself alone: DIR
stays as it is until 'agentbox apply'. You are the same user inside, with your name for
commits, your terminal and your locale; of your home directory only DIR is there.

A second shell for the same DIR joins its sandbox while that runs, or starts it again with all
that was done in it; --new makes another one. Most flags are those of 'agentbox run', and
are refused for a sandbox that is there.

At each prompt of bash, zsh or fish at which files have changed, a step is taken, to which
'agentbox undo' leads back. --steps off takes none, nor does --rm.

The image is --image, or AGENTBOX_IMAGE, or that of the file .agentbox.yaml in DIR, or a
Debian with git and common tools, which is made once. With --image host the sandbox has
the programs of this host: its /usr and /opt, which it cannot change.

.agentbox.yaml says what sandboxes over DIR need. What it asks for is shown and has to be
accepted once, and again when it has changed; flags win over it. Its keys are image, memory,
cpus, network, egress, env and secrets, and apply, which 'agentbox apply' reads
(docs/agentbox-yaml.md).`,
		Example: `  cd ~/project && agentbox shell
  agentbox shell ~/project -- make test
  agentbox shell --image host
  agentbox shell --new --name try2 --network none
  agentbox shell --rm --egress 'pypi.org 443' --memory 4g -- pip install -r requirements.txt`,
		Annotations: passes(),
		Args: func(cmd *cobra.Command, got []string) error {
			dirs := got
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				dirs = got[:n]
			}
			switch {
			case len(dirs) > 1:
				return fmt.Errorf("unexpected argument %q; write the command after --", dirs[1])
			case len(dirs) == 1 && dirs[0] == "":
				return errors.New("DIR is empty")
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, command := ".", args
			if n := cmd.ArgsLenAtDash(); n >= 0 {
				args, command = args[:n], args[n:]
			} else {
				command = nil
			}
			if len(args) > 0 {
				dir = args[0]
			}
			cmd.Flags().Visit(func(f *pflag.Flag) { opts.given = append(opts.given, f.Name) })
			return a.shell(cmd.Context(), &opts, dir, command)
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	a.completeLeaseFlag(cmd)
	a.completePolicyFlag(cmd)
	// It fails only for a flag registered twice.
	_ = cmd.RegisterFlagCompletionFunc("image", a.completeImages)
	return cmd
}

// A shell is one call of the command shell.
type shell struct {
	app     *app
	opts    *shellOptions
	user    shellUser
	dir     string // where it really is
	cwd     string // in it
	command []string
	tty     bool
	sess    *session
}

func (a *app) shell(ctx context.Context, opts *shellOptions, dir string, command []string) error {
	user, err := callingUser(ctx)
	if err != nil {
		return err
	}
	sh := &shell{app: a, opts: opts, user: user, command: command, tty: isTerminal(a.stdin)}
	if err := sh.find(dir); err != nil {
		return err
	}
	opts.attach.Interactive, opts.attach.TTY = true, sh.tty
	if sh.sess, err = a.newSession(opts.attach); err != nil {
		return err
	}
	return a.service(ctx, func(svc runtime.Service) error { return sh.run(ctx, svc) })
}

// find sets where the directory really is, and where in it the caller is.
func (sh *shell) find(dir string) (err error) {
	if sh.dir, err = filepath.Abs(dir); err == nil {
		sh.dir, err = filepath.EvalSymlinks(sh.dir)
	}
	if err == nil {
		err = rights.Lists(sh.user.User, sh.dir)
	}
	if err != nil {
		return notListed(dir, err)
	}
	sh.cwd = sh.dir
	here, err := os.Getwd()
	if err == nil {
		here, err = filepath.EvalSymlinks(here)
	}
	if err == nil && fsx.Within(sh.dir, here) {
		sh.cwd = here
	}
	return nil
}

// notListed is the error of a directory that the caller could not list.
func notListed(dir string, err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	out := &runtime.Error{Op: "workspace", ID: dir, Err: err}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		out.Err = runtime.ErrNotFound
	case errors.Is(err, fs.ErrPermission):
		out.Err = fmt.Errorf("%w: you cannot list it", runtime.ErrDenied)
		out.Hint = "Name a directory that you can list yourself."
	}
	return out
}

// bySudo refuses a directory that the user who became root by sudo could not list. What else may
// be wrong with it is the service's to say.
func bySudo(dir string) error {
	u, err := callingUser(context.Background())
	if err != nil || !u.sudo {
		return err
	}
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil
	}
	if err := rights.Lists(u.User, real); errors.Is(err, fs.ErrPermission) {
		return notListed(dir, err)
	}
	return nil
}

// run runs the shell in the directory's sandbox.
func (sh *shell) run(ctx context.Context, svc runtime.Service) error {
	all, err := svc.Sandboxes(ctx)
	if err != nil {
		return err
	}
	if !sh.opts.New {
		for _, sb := range all {
			if sb.Labels[labelShell] == sb.Name+":"+sh.dir && sb.Spec.User == sh.user.spec() &&
				(sh.opts.Name == "" || sh.opts.Name == sb.Name) {
				return sh.again(ctx, svc, sb)
			}
		}
	}
	return sh.make(ctx, svc, all)
}

// again runs the shell in a sandbox that was made before.
func (sh *shell) again(ctx context.Context, svc runtime.Service, sb runtime.Sandbox) error {
	for _, name := range sh.opts.given {
		if sh.opts.ofNew(name) {
			return &runtime.Error{
				Op: "shell", ID: sb.Name,
				Err:  fmt.Errorf("%w: it is there already, and --%s is for a new one", runtime.ErrExists, name),
				Hint: "Make another one with --new, or do without --" + name + ".",
			}
		}
	}
	sh.opts.Remove = sb.Spec.AutoRemove
	switch {
	case sb.Status == runtime.Running, sb.Status == runtime.Paused: // by a step, for a moment, or by request
		return sh.exec(ctx, svc, sb)
	case sb.Spec.Terminal == sh.tty:
		if err := sh.writeCommand(ctx, svc, sb, sh.command); err != nil {
			return err
		}
		return sh.startOld(ctx, svc, sb)
	}
	// Its own command has a terminal and this caller has none, or the other way round.
	if err := sh.writeCommand(ctx, svc, sb, waiting); err != nil {
		return err
	}
	if _, err := svc.Start(ctx, sb.ID, nil); err != nil {
		return reword(err, "shell", sb.Name)
	}
	err := sh.exec(ctx, svc, sb)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
	defer cancel()
	return both(err, svc.Stop(ctx, sb.ID, -1))
}

// ofNew reports whether a flag counts only when a sandbox is made.
func (o *shellOptions) ofNew(flag string) bool {
	return !slices.Contains([]string{
		"new", "trust", "steps", "name", "detach-keys", "sig-proxy", "help", "root", "backend", "log-level",
	}, flag)
}

// env is what each start of a shell is told by its environment.
func (sh *shell) env() []string {
	env := sh.user.terminalEnv(sh.tty)
	if !sh.steps() {
		env = append(env, stepsVariable+"="+runtime.StepsOff)
	}
	return env
}

func (sh *shell) exec(ctx context.Context, svc runtime.Service, sb runtime.Sandbox) error {
	p := runtime.Process{
		Args: append([]string{shellProgram}, sh.command...), Workdir: sh.cwd, Terminal: sh.tty, Env: sh.env(),
		Message: cmp.Or(stepLine(strings.Join(sh.command, " ")), "shell"), NoStep: sh.opts.Steps == runtime.StepsOff || sb.Spec.AutoRemove,
	}
	return sh.stepping(ctx, svc, sb, func() error {
		return reword(runExec(ctx, sb.ID, p, svc, sh.sess), "shell", sb.Name)
	})
}

func (sh *shell) startOld(ctx context.Context, svc runtime.Service, sb runtime.Sandbox) error {
	return sh.stepping(ctx, svc, sb, func() error {
		_, err := sh.sess.follow(ctx, svc, "shell", sb, func(streams runtime.Streams) (func() error, error) {
			return svc.Start(ctx, sb.ID, &streams)
		})
		return err
	})
}

// writeCommand has the next start of a sandbox run a command; none: the shell.
func (sh *shell) writeCommand(ctx context.Context, svc runtime.Service, sb runtime.Sandbox, args []string) error {
	file := commandFile(sh.cwd, sh.env(), args)
	return reword(writeFile(ctx, svc, sb.ID, file, sh.app.now()), "shell", sb.Name)
}

// make makes the directory's sandbox and runs the shell in it.
func (sh *shell) make(ctx context.Context, svc runtime.Service, all []runtime.Sandbox) error {
	if err := sh.readProject(ctx); err != nil {
		return err
	}
	req, err := sh.request(ctx, svc)
	if err != nil {
		return err
	}
	if err := announceImage(ctx, req.Spec.Image, req.Pull, svc, sh.app.stderr); err != nil {
		return err
	}
	sb, err := sh.create(ctx, req, svc, all)
	if err != nil {
		return reword(err, "shell", req.Spec.Name)
	}
	if isTerminalWriter(sh.app.stderr) {
		fmt.Fprintf(sh.app.stderr, "%s: %s stays as it is until 'agentbox apply'; see agentbox diff, undo\n",
			sb.Name, printable(sh.user.short(sh.dir)))
		sh.warnGit()
	}
	return sh.stepping(ctx, svc, sb, func() error { return startNew(ctx, sb, svc, sh.sess) })
}

// request is what the new sandbox is asked for.
func (sh *shell) request(ctx context.Context, svc runtime.Service) (runtime.CreateRequest, error) {
	o := sh.opts
	o.Interactive, o.TTY, o.Workdir, o.User, o.StopSignal = true, sh.tty, sh.cwd, sh.user.spec(), "SIGHUP"
	if sh.user.GID >= 1<<16 && o.UserNS == "" {
		o.UserNS = runtime.UserNSHost // no user namespace of a sandbox has the group
	}
	chosen := cmp.Or(o.Image, os.Getenv("AGENTBOX_IMAGE"), shellImage)
	ref, more := chosen, []runtime.Mount{{Type: runtime.MountWorkspace, Source: sh.dir, Target: sh.dir}}
	if chosen == imageHost {
		mounts, links, err := hostMounts()
		if err == nil {
			err = importHostImage(ctx, links, mounts, svc)
		}
		if err != nil {
			return runtime.CreateRequest{}, err
		}
		ref, more, o.pull.Policy = hostImage, append(more, mounts...), string(image.PullNever)
	}
	req, err := o.admitted(ctx, sh.app, []string{ref, shellCommand})
	if err != nil {
		return req, err
	}
	for _, m := range more {
		if slices.ContainsFunc(req.Spec.Mounts, func(own runtime.Mount) bool { return own.Target == m.Target }) {
			return req, usageErrorf("two mounts at %s", m.Target)
		}
	}
	req.Spec.Mounts = append(req.Spec.Mounts, more...)
	req.Entrypoint, req.ToStart = []string{}, true
	req.Setup = sh.user.setup(commandFile(sh.cwd, sh.env(), sh.command))
	own := []string{"HOME=" + sh.user.Home, "USER=" + sh.user.Name, "LOGNAME=" + sh.user.Name}
	if sh.user.Shell != "" {
		own = append(own, "SHELL="+sh.user.Shell)
	}
	req.Spec.Env = runtime.JoinEnv(own, sh.user.terminalEnv(sh.tty), sh.user.gitEnv(ctx), req.Spec.Env)
	return req, nil
}

// create makes the sandbox under the first name that is free, unless one was given.
func (sh *shell) create(
	ctx context.Context, req runtime.CreateRequest, svc runtime.Service, all []runtime.Sandbox,
) (runtime.Sandbox, error) {
	if req.Spec.Labels == nil {
		req.Spec.Labels = map[string]string{}
	}
	host := req.Spec.Hostname
	try := func(name string) (runtime.Sandbox, error) {
		req.Spec.Name, req.Spec.Hostname = name, cmp.Or(host, hostName(name))
		req.Spec.Labels[labelShell] = name + ":" + sh.dir
		return createShown(ctx, req, svc, sh.app.stderr)
	}
	if req.Spec.Name != "" {
		return try(req.Spec.Name)
	}
	taken := func(name string) bool {
		return slices.ContainsFunc(all, func(sb runtime.Sandbox) bool { return sb.Name == name })
	}
	base := shellName(sh.dir)
	for n := 1; ; n++ {
		name := base
		if n > 1 {
			name += "-" + strconv.Itoa(n)
		}
		if taken(name) {
			continue
		}
		sb, err := try(name)
		if !errors.Is(err, runtime.ErrExists) || n > len(all)+maxNames {
			return sb, err
		}
	}
}

// maxNames is how many names are tried that others have taken meanwhile.
const maxNames = 16

// shellName is the name of a sandbox over a directory.
func shellName(dir string) string {
	name := strings.Map(func(r rune) rune {
		if nameRE().MatchString("a" + string(r)) {
			return r
		}
		return '-'
	}, filepath.Base(dir))
	name = strings.Trim(name, "-._")
	if len(name) > 48 {
		name = strings.TrimRight(name[:48], "-._")
	}
	return cmp.Or(name, "shell")
}

// hostName is the name of a sandbox as that of a host.
func hostName(name string) string {
	name = strings.Trim(strings.Map(func(r rune) rune {
		if r == '_' || r == '.' {
			return '-'
		}
		return r
	}, name), "-")
	return name[:min(len(name), 63)]
}
