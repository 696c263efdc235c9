package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestParsePlugin(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want pluginLine
		err  string
	}{
		{in: "agentbox checkpoint c", want: pluginLine{args: []string{"checkpoint", "c"}}},
		{in: "agentbox", want: pluginLine{}},
		{
			in:   "-H unix:///s agentbox exec agentbox -H x",
			want: pluginLine{host: "unix:///s", args: []string{"exec", "agentbox", "-H", "x"}},
		},
		{in: "-Hunix:///s -c=ctx -l=info agentbox ps", want: pluginLine{
			host: "unix:///s", context: "ctx", logLevel: "info", args: []string{"--log-level=info", "ps"},
		}},
		{
			in:   "--config /d --context=agentbox --tlscacert agentbox agentbox ps",
			want: pluginLine{config: "/d", context: "agentbox", args: []string{"ps"}},
		},
		{
			in:   "-D --tls --tlsverify=false help agentbox ps",
			want: pluginLine{logLevel: "debug", args: []string{"help", "--log-level=debug", "ps"}},
		},
		{in: "__complete agentbox checkpoint c", want: pluginLine{args: []string{"__complete", "checkpoint", "c"}}},
		{in: "ps", err: "plugin"},
		{in: "", err: "plugin"},
		{in: "help", err: "plugin"},
		{in: "-- agentbox", err: "plugin"},
		{in: "-H unix:///a -H unix:///b agentbox", err: "only one"},
		{in: "-x agentbox", err: "unknown flag"},
		{in: "-H", err: "needs an argument"},
	} {
		got, err := parsePlugin(strings.Fields(tt.in))
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want %q", tt.in, err, tt.err)
			}
			continue
		}
		if err != nil || !slices.Equal(got.args, tt.want.args) ||
			got.host != tt.want.host || got.context != tt.want.context || got.config != tt.want.config ||
			got.logLevel != tt.want.logLevel {
			t.Errorf("%s: %+v, %v", tt.in, got, err)
		}
	}
}

func TestSettlePlugin(t *testing.T) {
	for _, name := range []string{
		"DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "AGENTBOX_BACKEND",
	} {
		t.Setenv(name, "") // restored at the end
	}
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("DOCKER_CERT_PATH", "/certs")
	if err := (pluginLine{host: "/run/d.sock"}).settle(); err != nil {
		t.Fatal(err)
	}
	if host, _ := os.LookupEnv("DOCKER_HOST"); host != "unix:///run/d.sock" {
		t.Errorf("DOCKER_HOST %q", host)
	}
	if _, there := os.LookupEnv("DOCKER_CERT_PATH"); there {
		t.Error("a unix socket with certificates")
	}
	if b := os.Getenv("AGENTBOX_BACKEND"); b != "docker" {
		t.Errorf("backend %q", b)
	}
	t.Setenv("AGENTBOX_BACKEND", "oci")
	if err := (pluginLine{}).settle(); err != nil || os.Getenv("AGENTBOX_BACKEND") != "oci" {
		t.Errorf("backend %q, %v", os.Getenv("AGENTBOX_BACKEND"), err)
	}
}

// TestDockerCommand has the docker commands that are installed find and start
// the plugin; no daemon is asked.
func TestDockerCommand(t *testing.T) {
	config := t.TempDir()
	bin := filepath.Join(programs(t), "docker-agentbox")
	plugins := filepath.Join(config, "cli-plugins")
	if err := os.Mkdir(plugins, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(bin, filepath.Join(plugins, "docker-agentbox")); err != nil {
		t.Fatal(err)
	}
	// A machine may have an older and a newer one.
	var commands []string
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if program, err := exec.LookPath(filepath.Join(dir, "docker")); err == nil {
			commands = append(commands, program)
		}
	}
	if len(commands) == 0 {
		t.Fatal("this test needs the docker command")
	}
	for _, program := range commands {
		if real, err := filepath.EvalSymlinks(filepath.Dir(program)); err != nil || real != filepath.Dir(program) {
			continue // /bin is /usr/bin
		}
		run := func(want int, args ...string) string {
			t.Helper()
			cmd := exec.Command(program, args...)
			// A completion looks for sandboxes: not among this host's.
			cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+config, "DOCKER_HOST=unix://"+config+"/none",
				"AGENTBOX_ROOT="+filepath.Join(config, "root"))
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != want {
				t.Errorf("%s %q: %v, want exit code %d\n%s", program, args, err, want, out)
			}
			return string(out)
		}
		for _, tt := range []struct {
			code int
			want string
			args []string
		}{
			{0, "agentbox*", []string{"--help"}},
			{0, "docker agentbox [flags] COMMAND", []string{"agentbox", "--help"}},
			{0, "docker agentbox checkpoint [flags] [SANDBOX]", []string{"help", "agentbox", "checkpoint"}},
			{0, "docker agentbox restore", []string{"agentbox", "restore", "--help"}},
			{0, "verify", []string{"__complete", "agentbox", "checkpoint", ""}},
			{2, "See 'docker agentbox ps --help'.", []string{"agentbox", "ps", "--bogus"}},
			{125, "IMAGE is missing", []string{"agentbox", "run"}},
			{8, "cannot be used", []string{"-H", "tcp://10.1.2.3:2376", "agentbox", "ps"}},
		} {
			if tt.args[0] == "__complete" && strings.Contains(run(0, "--version"), "version 20.") {
				continue // it does not ask plugins
			}
			if out := run(tt.code, tt.args...); !strings.Contains(out, tt.want) {
				t.Errorf("%s %q does not say %q:\n%s", program, tt.args, tt.want, out)
			}
		}
	}
}
