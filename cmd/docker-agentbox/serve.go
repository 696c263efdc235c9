package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/dockerplugin"
	"github.com/agentbox/agentbox/runtime/dockerplugin/authz"
)

type serveOptions struct {
	Root      string
	LogLevel  string
	Socket    string
	Policy    string
	NoAuthz   bool
	NoVolumes bool
}

func (o *serveOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Root, "root", "",
		"the `DIR` of agentbox's state (environment AGENTBOX_ROOT; default /var/lib/agentbox and /run/agentbox)")
	fl.StringVar(&o.LogLevel, "log-level", "warn", "log to stderr from this `LEVEL` on: debug, info, warn, error")
	fl.StringVar(&o.Socket, "socket", dockerplugin.DefaultSocket, "serve on the socket `PATH`")
	fl.StringVar(&o.Policy, "authz-policy", "",
		"judge Docker's API calls by the policy in `FILE` (default: the safe one, which opens nothing of the host)")
	fl.BoolVar(&o.NoAuthz, "no-authz", false, "be no authorization plugin")
	fl.BoolVar(&o.NoVolumes, "no-volumes", false, "be no volume driver")
}

func newServeCommand() *cobra.Command {
	var opts serveOptions
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Serve dockerd until stopped",
		Long: `Serve answers dockerd until it gets SIGTERM, and logs one line for each call that it
refuses. The socket of a plugin that was killed is replaced, that of a running one is not.

dockerd uses it as an authorization plugin when it is told to:
  dockerd --authorization-plugin agentbox
While the plugin is not running it then refuses every call, after 15 seconds of trying, and
does not start; it works again as soon as the plugin is back. Let the plugin start before
dockerd and be restarted at once when it ends. A changed policy is read at a restart.`,
		Example: "  docker-agentbox serve --authz-policy /etc/agentbox/docker.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runServe(cmd.Context(), opts)
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runServe(ctx context.Context, opts serveOptions) error {
	if opts.NoAuthz && opts.Policy != "" {
		return usagef("--no-authz and --authz-policy exclude each other")
	}
	if err := logTo(opts.LogLevel); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errNotRoot
	}
	root, err := absolute(cmp.Or(opts.Root, os.Getenv("AGENTBOX_ROOT")))
	if err != nil {
		return err
	}
	socket, err := filepath.Abs(opts.Socket)
	if err != nil {
		return err
	}
	var parts dockerplugin.Options
	if !opts.NoAuthz {
		if parts.Authz, err = authzHandler(opts.Policy, socket, root); err != nil {
			return err
		}
	}
	if !opts.NoVolumes {
		if parts.Volumes, err = volumeHandler(ctx, root); err != nil {
			return err
		}
	}
	if parts.Authz == nil && parts.Volumes == nil {
		return usagef("nothing to serve: neither volumes nor authorization")
	}
	l, err := dockerplugin.Listen(socket)
	if err != nil {
		return err
	}
	slog.Info("plugin listening", "socket", socket, "authz", parts.Authz != nil, "volumes",
		parts.Volumes != nil, "policy", opts.Policy)
	return dockerplugin.Serve(ctx, l, parts)
}

// authzHandler judges by the policy in file, "" for the default one.
func authzHandler(file, socket, root string) (http.Handler, error) {
	policy := &authz.Policy{}
	if file != "" {
		var err error
		if policy, err = authz.Load(file); err != nil {
			return nil, err
		}
		if err := authz.Trusted(file); err != nil {
			return nil, err
		}
	}
	opts := authz.Options{Driver: strings.TrimSuffix(filepath.Base(socket), ".sock"), Sockets: []string{socket}}
	if root != "" {
		opts.State = []string{root}
	}
	return authz.Handler(authz.NewJudge(policy, opts)), nil
}

func newCheckCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "check --authz-policy FILE",
		Short: "Check the policy of the authorization plugin",
		Long: `Check reads a policy as 'serve' does and says, with line and column, what is wrong in it.
An empty file is a policy: the safe default. The keys, with their defaults:

  privileged: false         docker run and exec --privileged
  host_namespaces: []       of network, pid, ipc, uts, user, cgroup
  join_containers: false    namespaces of other containers (--network container:NAME)
  volumes_from: false       --volumes-from
  mounts:
    allow: []               host paths; * is any name, a last /** the path and all below
    read_only: []           the same, for :ro only
    volumes: true           volumes of the local driver and of this plugin
    volume_drivers: []      further drivers
    volume_types: []        file systems that local volumes may mount: nfs, cifs, ...
    docker_socket: false    the sockets of engines
    engine_state: false     the directories of engines and of agentbox
    guard: []               further paths that need engine_state
    shared: false           mounts that propagate to the host
    exchangeable: false     paths that others than root can lead elsewhere after the check
  devices: []               host paths, as in mounts.allow
  device_cgroup_rules: []
  device_requests: []       drivers, or capabilities such as gpu
  capabilities: {allow: []} besides Docker's default ones; ALL
  security_opt: []          KEY=VALUE or KEY=*, for example apparmor=unconfined
  runtimes: []              besides the default, runc and agentbox
  sysctls: []               names; net.ipv4.* for all that begin so
  cgroup_parents: []
  annotations: []           keys, as sysctls
  log_drivers: []           besides none, json-file, local, journald
  network_drivers: []       besides bridge
  networks:
    subnets: []             that may be chosen, besides private ones that the host has no route for
    ipam_drivers: []        besides default
    options: []             KEY=VALUE or KEY=*, of networks and endpoints, besides harmless ones
    config_from: false      the configuration of another network
  priority: false           OomScoreAdj below 0, no OOM killer, real-time scheduling, ulimits nice and rtprio
  image_urls: false         'docker import URL', which dockerd fetches from the host's network
  build: false              builds; they can use the host's network
  plugins: false            changes to engine plugins
  swarm: false              changes to swarm, services, nodes, secrets, configs
  unknown_calls: refuse     or allow
  unknown_fields: refuse    or allow`,
		Example: "  docker-agentbox check --authz-policy /etc/agentbox/docker.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if file == "" {
				return usagef("--authz-policy FILE is missing")
			}
			return runCheck(file, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&file, "authz-policy", "", "the policy `FILE`")
	return cmd
}

func runCheck(file string, out io.Writer) error {
	if _, err := authz.Load(file); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "%s: ok\n", fault.Printable(file))
	return err
}
