package main

import (
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/setup"
)

// As a plugin of the docker command, agentbox is started by docker-agentbox, which has taken
// docker's global flags off the command line and into the environment.

const (
	pluginPath = "docker agentbox" // what users type

	// pluginSocket names a socket that the docker command closes when it is
	// told to end, and that breaks when it dies.
	pluginSocket = "DOCKER_CLI_PLUGIN_SOCKET"
)

// startedByDocker reports whether docker-agentbox has started this program, and takes the
// variable that says so out of the environment.
func startedByDocker() bool {
	_, is := os.LookupEnv(setup.PluginVariable)
	_ = os.Unsetenv(setup.PluginVariable)
	return is
}

// becomeDockerAgentbox runs docker-agentbox instead of this program: for links and commands of
// a time when they were one.
func becomeDockerAgentbox(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	path, err := setup.Beside(self, setup.PluginName)
	if err != nil {
		return err
	}
	err = unix.Exec(path, append([]string{path}, args...), os.Environ())
	return &os.PathError{Op: "execute", Path: path, Err: err}
}

// newDockerPluginCommand is the former name of docker-agentbox's own commands.
func newDockerPluginCommand(*app) *cobra.Command {
	return &cobra.Command{
		Use:                "docker-plugin COMMAND",
		Short:              "The former name of docker-agentbox",
		Hidden:             true,
		Annotations:        exits(exitUsage, exitNotFound),
		Args:               cobra.ArbitraryArgs,
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			// agentbox's own flags come before its command.
			if i := slices.IndexFunc(args, func(arg string) bool { return arg == "serve" || arg == "check" }); i > 0 {
				args = slices.Concat(args[i:i+1], args[:i], args[i+1:])
			}
			return becomeDockerAgentbox(args)
		},
	}
}

// watchDocker interrupts this process when the docker command ends first: it
// hands a signal that only it got on by closing its socket.
func (a *app) watchDocker(s *signals) {
	name := os.Getenv(pluginSocket)
	if name == "" {
		return
	}
	c, err := net.Dial("unix", name)
	if err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(io.Discard, c)
		// The terminal may have told us as well; a second signal would end
		// the verb before it has undone what it began.
		if s.caught() == nil {
			_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
		}
	}()
}

// dress makes help and hints name the command as it was typed.
func dress(root *cobra.Command) {
	if root.Annotations == nil {
		root.Annotations = map[string]string{}
	}
	root.Annotations[cobra.CommandDisplayNameAnnotation] = pluginPath
	own := strings.NewReplacer("  agentbox ", "  "+pluginPath+" ", "'agentbox ", "'"+pluginPath+" ")
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		c.Example = own.Replace(c.Example)
		c.Long = own.Replace(c.Long)
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	// The docker command's own completion asks us.
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			c.Hidden = true
		}
	}
}
