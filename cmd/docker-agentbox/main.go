// Command docker-agentbox is agentbox for Docker: the plugin of the docker command
// (`docker agentbox`), and the plugin of dockerd, a volume driver and an authorization plugin
// (`docker-agentbox serve`).
//
// It works on no sandbox itself. plugin.go turns what the docker command says into a command
// line of agentbox; serve.go and volumes.go answer dockerd.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/exitcode"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/setup"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version = "dev"

func main() {
	args := os.Args[1:]
	switch {
	case len(args) == 1 && args[0] == pluginMetadata:
		os.Exit(report("agentbox", describe(os.Stdout)))
	case len(args) > 0 && ownCommand(args[0]):
		os.Exit(report(setup.PluginName, serveCommand(args)))
	}
	os.Exit(report("agentbox", plugin(args)))
}

// ownCommand reports whether the first word of a command line is of this program, not of the
// docker command.
func ownCommand(word string) bool {
	switch word {
	case "serve", "check", "--help", "-h", "--version":
		return true
	}
	return false
}

// serveCommand runs a command of this program. SIGINT and SIGTERM end it in order.
func serveCommand(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := newRootCommand()
	root.SetArgs(args)
	_, err := root.ExecuteContextC(ctx)
	return err
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   setup.PluginName + " COMMAND",
		Short: "Agentbox for Docker: volumes, authorization, and 'docker agentbox'",
		Long: `Docker-agentbox serves dockerd as a volume driver and as an authorization plugin, on a socket in
Docker's plugin directory; the socket's name is the plugin's name.

It is also the plugin of the docker command by which 'docker agentbox' runs agentbox:
'agentbox setup docker' installs it.`,
		Example: `  docker-agentbox check --authz-policy /etc/agentbox/docker.yaml
  docker-agentbox serve --authz-policy /etc/agentbox/docker.yaml`,
		Version:           version,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usagef("%w", err) })
	root.SetHelpCommand(&cobra.Command{Hidden: true}) // help is docker's word
	root.AddCommand(newServeCommand(), newCheckCommand())
	return root
}

// A usageError is a wrong command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }
func (usageError) ExitStatus() int { return exitcode.Usage }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// report prints an error of program, and returns the exit code.
func report(program string, err error) int {
	if err == nil {
		return exitcode.OK
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", program, fault.Printable(err.Error()))
	for _, hint := range fault.Hint(err) {
		fmt.Fprintf(os.Stderr, "hint: %s\n", fault.Printable(hint))
	}
	return exitcode.Of(err)
}

// agentbox returns the path of the agentbox that belongs to this program.
func agentbox() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	return setup.Beside(self, "agentbox")
}

// logTo has messages of level and above go to stderr.
func logTo(level string) error {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return usagef("--log-level %s: choose debug, info, warn or error", level)
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l})))
	return nil
}

// absolute returns a directory that is absolute; empty stays empty.
func absolute(dir string) (string, error) {
	if dir == "" {
		return "", nil
	}
	return filepath.Abs(dir)
}

var errNotRoot = &fault.Error{
	Err:  fmt.Errorf("only root can serve dockerd: %w", fault.ErrDenied),
	Hint: "Run it as root, for example with sudo.",
}
