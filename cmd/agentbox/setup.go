package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/setup"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
)

// setupOptions are common to all engines.
type setupOptions struct {
	setup.Options
	Format string
}

func (o *setupOptions) addFlags(fl *pflag.FlagSet, config string) {
	fl.BoolVar(&o.DryRun, "dry-run", false, "only show what would change")
	fl.BoolVar(&o.Remove, "remove", false, "take out what setup put in")
	fl.BoolVar(&o.Force, "force", false,
		"with --remove: even if containers use the runtime, or another program registered it")
	fl.StringVar(&o.Name, "name", setup.DefaultName, "register the runtime as `NAME`")
	fl.StringVar(&o.Runtime, "runtime", "", "register this `FILE` (default: the agentbox-runtime beside agentbox)")
	fl.StringVar(&o.Config, "config", "", "change this `FILE` (default "+config+")")
	addFormat(fl, &o.Format, "text", formatJSON)
}

// resolve fills in what depends on where this program stands.
func (o setupOptions) resolve() (setupOptions, error) {
	if o.Force && !o.Remove {
		return o, usageErrorf("--force goes with --remove")
	}
	if !o.DryRun && os.Geteuid() != 0 {
		return o, &runtime.Error{
			Op:   "setup",
			Err:  fmt.Errorf("only root can configure engines: %w", runtime.ErrDenied),
			Hint: "Run agentbox as root, for example with sudo; --dry-run shows what would change.",
		}
	}
	var err error
	if o.Runtime == "" {
		o.Runtime, err = wrapperPath()
	} else {
		o.Runtime, err = filepath.Abs(o.Runtime)
	}
	return o, err
}

// selfPath is this program with symlinks resolved: what engines and links are
// told must not hang on a link that may go, the plugin's own least of all.
func selfPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(self)
}

func wrapperPath() (string, error) {
	self, err := selfPath()
	return filepath.Join(filepath.Dir(self), "agentbox-runtime"), err
}

func newSetupCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "setup ENGINE",
		Short: "Register agentbox with Docker, containerd, Podman or systemd",
		Long: `Setup systemd has systemd run the service (agentbox serve).

For the others setup registers agentbox-runtime with an engine on this host. Containers that
the engine starts with it can then be checkpointed, and restored by the engine's ordinary
start, without any checkpoint support of the engine's own. All else about them is as with runc.

The engine's configuration is changed as a text: what is not agentbox's keeps its place
and form. The change is shown as a diff, checked before it is written, and the old file is
backed up beside the new one. --dry-run only shows it, --remove takes it out again.`,
		Example: `  agentbox setup docker --dry-run
  agentbox setup docker
  agentbox setup podman --remove`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newSetupDockerCommand(a), newSetupContainerdCommand(a), newSetupPodmanCommand(a),
		newSetupSystemdCommand(a))
	return cmd
}

type setupDockerOptions struct {
	setupOptions
	Default, NoPlugin   bool
	Pidfile, Host, Dirs string
}

func newSetupDockerCommand(a *app) *cobra.Command {
	var opts setupDockerOptions
	cmd := &cobra.Command{
		Use:   "docker [flags]",
		Short: "Register the runtime with Docker and install 'docker agentbox'",
		Long: `Docker adds the runtime to dockerd's daemon.json, makes a running dockerd read it, which
stops no container, and asks dockerd whether it has it. If dockerd does not take it, the
file is put back. It also links 'docker-agentbox' into the directory of the docker
command's plugins, so that 'docker agentbox' works.

Then 'docker run --runtime agentbox' starts containers that can be checkpointed and
restored. With --default it is the runtime of all new containers.

--remove takes out the runtime and the link. It refuses while containers, stopped ones
included, were made with the runtime, unless --force is given. A running dockerd notices
that its last own runtime went only when it is restarted.`,
		Example: `  agentbox setup docker --dry-run
  agentbox setup docker
  docker run -d --runtime agentbox --name web busybox sleep 1000
  docker agentbox checkpoint web
  agentbox setup docker --remove`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			common, err := opts.resolve()
			if err != nil {
				return err
			}
			if opts.Remove && opts.Default {
				return usageErrorf("--default and --remove exclude each other: --remove also takes the default back")
			}
			if opts.NoPlugin && opts.Dirs != "" {
				return usageErrorf("--cli-plugins and --no-cli-plugin exclude each other")
			}
			self, err := selfPath()
			if err != nil {
				return err
			}
			return a.setUp("docker", opts.setupOptions, func() (setup.Result, error) {
				return setup.Docker(cmd.Context(), setup.DockerOptions{
					Options: common.Options, Default: opts.Default,
					Pidfile: opts.Pidfile, Host: opts.Host,
					Self: self, Plugins: opts.Dirs, NoPlugin: opts.NoPlugin,
				})
			})
		},
	}
	fl := cmd.Flags()
	opts.addFlags(fl, setup.DockerConfig)
	fl.BoolVar(&opts.Default, "default", false, "make it the default runtime as well")
	fl.StringVar(&opts.Pidfile, "pidfile", "",
		"dockerd's pid `FILE` (default: as configured, else /var/run/docker.pid)")
	fl.StringVarP(&opts.Host, "host", "H", "",
		"dockerd's `SOCKET`, as unix://PATH (environment DOCKER_HOST; default: where dockerd listens)")
	fl.StringVar(&opts.Dirs, "cli-plugins", "",
		"link the plugin into `DIR` (default: the first of the docker command's directories for all users that exists)")
	fl.BoolVar(&opts.NoPlugin, "no-cli-plugin", false, "leave the docker command's plugins alone")
	completeFlags(cmd)
	return cmd
}

func newSetupContainerdCommand(a *app) *cobra.Command {
	var opts setupOptions
	var restart bool
	cmd := &cobra.Command{
		Use:   "containerd [flags]",
		Short: "Register the runtime with containerd's CRI plugin, for Kubernetes",
		Long: `Containerd adds a CRI runtime handler to containerd's config.toml, for a Kubernetes
RuntimeClass to name. containerd reads its configuration only when it starts; its
containers outlive a restart, which --restart does through systemd.

Without Kubernetes nothing needs to be set up: 'ctr run --runc-binary' and agentbox's own
containerd backend name the runtime themselves.`,
		Example: `  agentbox setup containerd --dry-run
  agentbox setup containerd --restart
  ctr run --runc-binary /usr/local/bin/agentbox-runtime IMAGE ID`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			common, err := opts.resolve()
			if err != nil {
				return err
			}
			return a.setUp("containerd", opts, func() (setup.Result, error) {
				return setup.Containerd(cmd.Context(),
					setup.ContainerdOptions{Options: common.Options, Restart: restart})
			})
		},
	}
	opts.addFlags(cmd.Flags(), setup.ContainerdConfig)
	cmd.Flags().BoolVar(&restart, "restart", false, "restart containerd afterwards (systemd)")
	completeFlags(cmd)
	return cmd
}

func newSetupPodmanCommand(a *app) *cobra.Command {
	var opts setupOptions
	cmd := &cobra.Command{
		Use:   "podman [flags]",
		Short: "Register the runtime with Podman",
		Long: `Podman writes a drop-in for containers.conf that names the runtime, and asks podman
whether it finds it. 'podman --runtime agentbox run' then starts containers that can be
checkpointed and restored.`,
		Example: `  agentbox setup podman
  podman --runtime agentbox run -d --name web busybox sleep 1000`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			common, err := opts.resolve()
			if err != nil {
				return err
			}
			return a.setUp("podman", opts, func() (setup.Result, error) {
				return setup.Podman(cmd.Context(), common.Options)
			})
		},
	}
	opts.addFlags(cmd.Flags(), setup.PodmanConfig)
	completeFlags(cmd)
	return cmd
}

// setUp prints what was done, or turns the error into one that says which
// engine was being set up.
func (a *app) setUp(engine string, opts setupOptions, do func() (setup.Result, error)) error {
	var r setup.Result
	err := a.setupOnRecord(engine, opts.DryRun, func() (did string, err error) {
		if r, err = do(); err != nil || !r.Changed {
			return "", err
		}
		file, err := filepath.Abs(r.Config)
		if r.Removed {
			return "took runtime " + r.Name + " out of " + file, err
		}
		return "registered runtime " + r.Name + " in " + file, err
	})
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w: %w", err, runtime.ErrDenied)
		}
		for _, note := range r.Notes {
			fmt.Fprintf(a.stderr, "note: %s\n", printable(note))
		}
		return &runtime.Error{Op: "setup", ID: engine, Err: err}
	}
	if opts.Format == formatJSON {
		return printJSON(a.stdout, r)
	}
	return printSetup(a.stdout, r)
}

// setupOnRecord puts on record what do changes of this host, in a sentence.
func (a *app) setupOnRecord(what string, dry bool, do func() (did string, err error)) error {
	if dry {
		_, err := do()
		return err
	}
	return a.onRecord(audit.Record{Verb: "setup " + what}, func(r *audit.Record) error {
		did, err := do()
		if did != "" {
			r.Text = []string{audit.Clip(did)}
		}
		return err
	})
}

func printSetup(out io.Writer, r setup.Result) error {
	if r.Diff != "" {
		fmt.Fprint(out, printable(r.Diff))
		if !strings.HasSuffix(r.Diff, "\n") {
			fmt.Fprintln(out)
		}
	}
	done := func(add, remove string) string {
		word := add
		if r.Removed {
			word = remove
		}
		if r.DryRun {
			return "would be " + word
		}
		return word
	}
	switch {
	case r.Changed:
		fmt.Fprintf(out, "%s: runtime %s %s\n", r.Config, r.Name, done("registered", "removed"))
	case r.Removed:
		fmt.Fprintf(out, "%s: runtime %s is not registered\n", r.Config, r.Name)
	default:
		fmt.Fprintf(out, "%s: runtime %s is already registered\n", r.Config, r.Name)
	}
	if r.Backup != "" {
		fmt.Fprintf(out, "backup: %s\n", r.Backup)
	}
	if p := r.Plugin; p != nil {
		switch {
		case !p.Changed:
			fmt.Fprintf(out, "%s: already installed\n", p.Path)
		default:
			fmt.Fprintf(out, "%s: %s\n", p.Path, done("installed", "removed"))
		}
	}
	switch {
	case r.Verified && r.Reloaded:
		fmt.Fprintf(out, "%s was told and confirms it; no container was stopped\n", r.Engine)
	case r.Verified:
		fmt.Fprintf(out, "%s confirms it\n", r.Engine)
	case r.Reloaded:
		fmt.Fprintf(out, "%s was told\n", r.Engine)
	}
	for _, note := range r.Notes {
		if _, err := fmt.Fprintf(out, "note: %s\n", printable(note)); err != nil {
			return err
		}
	}
	return nil
}
