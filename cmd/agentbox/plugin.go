package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/setup"
	"github.com/agentbox/agentbox/runtime"
)

// Under the name docker-agentbox this program is a plugin of the docker
// command: `docker [GLOBAL FLAGS] agentbox ARGS` starts it as
// `docker-agentbox [GLOBAL FLAGS] agentbox ARGS`, and `docker --help` asks it
// for its metadata. The global flags say which daemon is meant; all behind the
// word agentbox is a command line of ours.

const (
	pluginWord     = "agentbox"
	pluginPath     = "docker agentbox" // what users type
	pluginMetadata = "docker-cli-plugin-metadata"
	pluginURL      = "https://github.com/agentbox/agentbox"

	// pluginSocket names a socket that the docker command closes when it is
	// told to end, and that breaks when it dies.
	pluginSocket = "DOCKER_CLI_PLUGIN_SOCKET"

	maxDockerFile = 1 << 20
)

func isPlugin(argv0 string) bool { return filepath.Base(argv0) == setup.PluginName }

// plugin is main when the docker command started this program.
func (a *app) plugin(args []string) int {
	if len(args) == 1 && args[0] == pluginMetadata {
		err := printJSON(a.stdout, map[string]string{
			"SchemaVersion":    "0.1.0",
			"Vendor":           "agentbox",
			"Version":          version,
			"ShortDescription": "Checkpoint and restore containers exactly",
			"URL":              pluginURL,
		})
		return report(a.stderr, nil, err, nil)
	}
	line, err := parsePlugin(args)
	if err == nil {
		err = line.settle()
	}
	if err != nil {
		return report(a.stderr, nil, err, nil)
	}
	a.asPlugin = true
	return a.main(line.args)
}

// pluginLine is a command line of the docker command.
type pluginLine struct {
	args     []string // for us
	host     string
	context  string
	config   string
	logLevel string
}

// parsePlugin takes the docker command's global flags off.
func parsePlugin(args []string) (p pluginLine, err error) {
	var request []string // help, or shell completion
	for i := 0; i < len(args); i++ {
		arg := args[i]
		switch {
		case arg == pluginWord:
			if p.logLevel == "fatal" {
				p.logLevel = "error"
			}
			if p.logLevel != "" {
				request = append(request, "--log-level="+p.logLevel)
			}
			p.args = append(request, args[i+1:]...)
			return p, nil
		case len(request) == 0 && (arg == "help" || arg == cobra.ShellCompRequestCmd || arg == cobra.ShellCompNoDescRequestCmd):
			request = []string{arg}
			continue
		case !strings.HasPrefix(arg, "-") || arg == "-" || arg == "--":
			return p, errNotPlugin()
		}
		name, value, given := strings.Cut(arg, "=")
		if len(arg) > 2 && arg[1] != '-' { // -Hvalue, -H=value
			name, value, given = arg[:2], strings.TrimPrefix(arg[2:], "="), true
		}
		var to *string
		switch name {
		case "-H", "--host":
			to = &p.host
		case "-c", "--context":
			to = &p.context
		case "--config":
			to = &p.config
		case "-l", "--log-level":
			to = &p.logLevel
		case "-D", "--debug":
			if value != "false" {
				p.logLevel = "debug"
			}
			continue
		case "--tls", "--tlsverify":
			continue // of daemons on other machines, which are refused by their address
		case "--tlscacert", "--tlscert", "--tlskey":
			to = new(string)
		default:
			return p, usageErrorf("unknown flag of docker: %s", name)
		}
		if !given {
			if i++; i == len(args) {
				return p, usageErrorf("flag needs an argument: %s", name)
			}
			value = args[i]
		}
		if to == &p.host && p.host != "" {
			return p, usageErrorf("specify only one --host")
		}
		*to = value
	}
	return p, errNotPlugin()
}

func errNotPlugin() error {
	return &runtime.Error{
		Hint: "Run 'docker agentbox', or 'agentbox' itself.",
		Err:  &usageError{err: fmt.Errorf("%s is a plugin that the docker command starts", setup.PluginName)},
	}
}

// settle makes what the docker command was told hold for us: which daemon,
// and that the containers are Docker's.
func (p pluginLine) settle() error {
	if p.config != "" {
		if err := os.Setenv("DOCKER_CONFIG", p.config); err != nil {
			return err
		}
	}
	host, err := p.daemon()
	if err != nil {
		return err
	}
	if host != "" {
		if path, unix := strings.CutPrefix(host, "unix://"); !unix || path == "" {
			return &runtime.Error{
				Hint: "Run it on the daemon's machine, or choose a local daemon with --context default or --host unix:///var/run/docker.sock.",
				Err:  fmt.Errorf("the daemon at %s cannot be used: agentbox checkpoints containers of the machine it runs on, through a unix:// socket: %w", host, runtime.ErrUnsupported),
			}
		}
		if err := os.Setenv("DOCKER_HOST", host); err != nil {
			return err
		}
		for _, tls := range []string{"DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT"} {
			if err := os.Unsetenv(tls); err != nil {
				return err
			}
		}
	}
	if os.Getenv("AGENTBOX_BACKEND") == "" {
		return os.Setenv("AGENTBOX_BACKEND", "docker")
	}
	return nil
}

// daemon finds the daemon's address in the order of the docker command; empty
// is its default.
func (p pluginLine) daemon() (string, error) {
	switch {
	case p.host != "" && p.context != "":
		return "", usageErrorf("--host and --context exclude each other")
	case p.host != "":
		if filepath.IsAbs(p.host) {
			return "unix://" + p.host, nil
		}
		return p.host, nil
	case p.context != "":
		return contextHost(p.context)
	case os.Getenv("DOCKER_HOST") != "":
		return os.Getenv("DOCKER_HOST"), nil
	case os.Getenv("DOCKER_CONTEXT") != "":
		return contextHost(os.Getenv("DOCKER_CONTEXT"))
	}
	var config struct {
		CurrentContext string `json:"currentContext"`
	}
	err := readDockerFile(&config, "config.json")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	return contextHost(config.CurrentContext)
}

// contextHost reads a context's address from the docker command's store.
func contextHost(name string) (string, error) {
	if name == "" || name == "default" {
		return "", nil
	}
	var meta struct {
		Endpoints map[string]struct{ Host string }
	}
	id := sha256.Sum256([]byte(name))
	err := readDockerFile(&meta, "contexts", "meta", hex.EncodeToString(id[:]), "meta.json")
	if errors.Is(err, os.ErrNotExist) {
		return "", &runtime.Error{
			Hint: "'docker context ls' lists them.",
			Err:  fmt.Errorf("docker context %q: %w", name, runtime.ErrNotFound),
		}
	}
	if err != nil {
		return "", err
	}
	return meta.Endpoints["docker"].Host, nil
}

// readDockerFile reads a file of the user's Docker configuration.
func readDockerFile(v any, parts ...string) error {
	dir := os.Getenv("DOCKER_CONFIG")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return os.ErrNotExist
		}
		dir = filepath.Join(home, ".docker")
	}
	path := filepath.Join(append([]string{dir}, parts...)...)
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxDockerFile))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%s: %v: %w", path, err, runtime.ErrInvalid)
	}
	return nil
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
