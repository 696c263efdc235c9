package bundle

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/network"
)

// A start rewrites or keeps the existing resolv.conf.
func TestResolvConf(t *testing.T) {
	p := Place{Dir: t.TempDir()}
	path := filepath.Join(p.Dir, "etc", "resolv.conf")
	start := func(restores bool, want string, nameservers ...string) {
		t.Helper()
		if err := p.writeEtc(runtime.Spec{Hostname: "box"}, network.Endpoint{Nameservers: nameservers},
			restores); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("with %v: %q, %v, want %q", nameservers, got, err, want)
		}
	}
	start(false, "")
	start(false, "nameserver 10.0.0.1\n", "10.0.0.1")
	start(false, "nameserver 10.0.0.1\n") // the host has just booted, and is not online
	start(false, "nameserver 10.0.0.2\n", "10.0.0.2")
	start(true, "nameserver 10.0.0.2\n", "10.0.0.3")
	start(false, "nameserver 10.0.0.3\n", "10.0.0.3")
	if err := os.WriteFile(path, []byte("# mine\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	start(false, "# mine\n", "10.0.0.4")
}
