package engine

import (
	"bytes"
	"os/exec"
	"regexp"
	"testing"

	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

func TestStartAside(t *testing.T) {
	var out bytes.Buffer
	cmd := exec.Command("cat", "/proc/self/cgroup")
	cmd.Stdout = &out
	if err := StartAside(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	groups, err := kernel.Hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range groups {
		if m.V2 && !regexp.MustCompile(`(?m)^0::.*/agentbox/monitor$`).Match(out.Bytes()) {
			t.Errorf("it is in\n%s", out.Bytes())
		}
	}
}
