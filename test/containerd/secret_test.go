package containerd

import (
	"os"
	"path/filepath"
	"strings"
)

// Secrets are in a sandbox of containerd while it runs, and nothing of them is
// with containerd.
func secrets(b *box) {
	const value = "s3cret-of-containerd-"
	file := filepath.Join(b.T.TempDir(), "token")
	write := func(n string) {
		b.Helper()
		if err := os.WriteFile(file, []byte(value+n), 0o600); err != nil {
			b.Fatal(err)
		}
	}
	has := func(n string) {
		b.Helper()
		if got := b.ok("exec", "s", "cat", "/run/secrets/tok"); got != value+n {
			b.Errorf("the secret is %q, want %s", got, n)
		}
		if info := b.Ctr(b.T, "-n", "agentbox", "containers", "info",
			b.inspect("s").ID); strings.Contains(info, value) {
			b.Errorf("containerd knows it: %s", info)
		}
	}
	mounted := func() bool {
		b.Helper()
		text, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			b.Fatal(err)
		}
		return strings.Contains(string(text), b.root+"/run/containerd/"+b.inspect("s").ID+"/secrets")
	}
	write("1")
	b.ok("run", "-d", "--name", "s", "--network", "none", "--secret", "tok=file:"+file, "bt", "sh", "-c",
		"exec 3</run/secrets/tok; "+counting)
	b.counts("s")
	has("1")
	if !mounted() {
		b.Error("its secrets are not where they are looked for")
	}
	b.ok("checkpoint", "s")
	write("2")
	b.ok("restore", "s")
	b.counts("s")
	has("2")
	b.ok("stop", "-t", "0", "s")
	if mounted() {
		b.Error("stopped, it still has its secrets")
	}
	write("3")
	b.ok("start", "s")
	has("3")
	b.ok("rm", "-f", "s")
}
