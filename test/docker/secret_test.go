package docker

import (
	"os"
	"path/filepath"
	"strings"
)

// Secrets are in a sandbox of Docker while it runs, and nothing of them is
// with the daemon.
func secrets(b *box) {
	const value = "s3cret-of-docker-"
	file := filepath.Join(b.T.TempDir(), "token")
	write := func(n string) {
		b.Helper()
		if err := os.WriteFile(file, []byte(value+n), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	has := func(n string) {
		b.Helper()
		if got := b.ok("exec", "sec", "cat", "/run/secrets/tok"); got != value+n {
			b.Errorf("the secret is %q, want %s", got, n)
		}
		if info := b.Docker(b.T, "inspect", "sec"); strings.Contains(info, value) {
			b.Errorf("the daemon knows it: %s", info)
		}
	}
	mounted := func() bool {
		b.Helper()
		text, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			b.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, b.root+"/run/") && strings.Contains(line, "/secrets ") {
				return true
			}
		}
		return false
	}
	write("1")
	b.ok("run", "-d", "--name", "sec", "--network", "none", "--secret", "tok=file:"+file, "bt", "sh", "-c",
		"exec 3</run/secrets/tok; "+counting)
	b.counts("sec")
	has("1")
	if !mounted() {
		b.Error("its secrets are not where they are looked for")
	}
	b.ok("checkpoint", "sec")
	write("2")
	b.ok("restore", "sec")
	b.counts("sec")
	has("2")
	b.ok("stop", "-t", "0", "sec")
	if mounted() {
		b.Error("stopped, it still has its secrets")
	}
	write("3")
	b.ok("start", "sec")
	has("3")
	// Started by others it has what it had, or does not start: never nothing.
	b.ok("stop", "-t", "0", "sec")
	if out, err := b.Try("start", "sec"); err == nil {
		b.Errorf("docker start without its secrets: %s", out)
	}
	b.ok("start", "sec")
	has("3")
	b.ok("rm", "-f", "sec")
}
