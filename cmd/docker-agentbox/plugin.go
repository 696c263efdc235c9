package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/setup"
)

// The docker command starts a plugin as `docker-agentbox [GLOBAL FLAGS] agentbox ARGS` when a
// user types `docker [GLOBAL FLAGS] agentbox ARGS`, and asks it for its metadata for
// `docker --help`. The global flags say which daemon is meant; all behind the word agentbox is
// a command line of agentbox.

const (
	pluginWord     = "agentbox"
	pluginMetadata = "docker-cli-plugin-metadata"
	pluginURL      = "https://github.com/agentbox/agentbox"

	maxDockerFile = 1 << 20
)

// plugin runs agentbox as the docker command has asked; it returns only on failure.
func plugin(args []string) error {
	line, err := parsePlugin(args)
	if err == nil {
		err = line.settle()
	}
	if err != nil {
		return err
	}
	program, err := agentbox()
	if err != nil {
		return err
	}
	env := append(os.Environ(), setup.PluginVariable+"=docker")
	err = unix.Exec(program, append([]string{program}, line.args...), env)
	return &os.PathError{Op: "execute", Path: program, Err: err}
}

// describe prints what the docker command asks of its plugins.
func describe(out io.Writer) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(map[string]string{
		"SchemaVersion":    "0.1.0",
		"Vendor":           "agentbox",
		"Version":          version,
		"ShortDescription": "Checkpoint and restore containers exactly",
		"URL":              pluginURL,
	})
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
		case len(request) == 0 && (arg == "help" || arg == cobra.ShellCompRequestCmd ||
			arg == cobra.ShellCompNoDescRequestCmd):
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
			return p, usagef("unknown flag of docker: %s", name)
		}
		if !given {
			if i++; i == len(args) {
				return p, usagef("flag needs an argument: %s", name)
			}
			value = args[i]
		}
		if to == &p.host && p.host != "" {
			return p, usagef("specify only one --host")
		}
		*to = value
	}
	return p, errNotPlugin()
}

func errNotPlugin() error {
	return &fault.Error{
		Hint: "Run 'docker agentbox', or 'agentbox' itself; see 'docker-agentbox --help' for dockerd's plugin.",
		Err:  usagef("%s is a plugin that the docker command starts", setup.PluginName),
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
			return &fault.Error{
				Hint: "Run it on the daemon's machine, or choose a local daemon with --context default or --host unix:///var/run/docker.sock.",
				Err:  fmt.Errorf("the daemon at %s cannot be used: agentbox checkpoints containers of the machine it runs on, through a unix:// socket: %w", host, fault.ErrUnsupported),
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
		return "", usagef("--host and --context exclude each other")
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
		return "", &fault.Error{
			Hint: "'docker context ls' lists them.",
			Err:  fmt.Errorf("docker context %q: %w", name, fault.ErrNotFound),
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
		return fmt.Errorf("%s: %v: %w", path, err, fault.ErrInvalid)
	}
	return nil
}
