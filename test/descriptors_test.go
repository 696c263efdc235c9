package test

import (
	"bytes"
	"fmt"
	"testing"
)

// A command that runs out of descriptors says so, or tells the truth: it does not take
// a sandbox that it cannot look at for one that has ended, least of all for good.
func TestFewDescriptors(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("a", "busybox", "sh", "-c", counter)
	pid := b.inspect("a").Pid
	told := 0
	for n := 8; n <= 30; n++ {
		cmd := b.command(t.Context(), "inspect", "a")
		cmd.Args = append([]string{
			"sh", "-c", fmt.Sprintf(`ulimit -n %d; exec "$@"`, n), "sh", cmd.Path,
		}, cmd.Args[1:]...)
		cmd.Path = "/bin/sh"
		var says bytes.Buffer
		cmd.Stderr = &says
		out, err := cmd.Output()
		if err != nil {
			if says.Len() == 0 {
				t.Errorf("with %d descriptors it fails and does not say of what: %v", n, err)
			}
			continue
		}
		told++
		if list := decode[[]sandbox](b, string(out)); len(list) != 1 || list[0].Status != "running" {
			t.Errorf("with %d descriptors: %s", n, out)
		}
	}
	if told == 0 || told == 23 {
		t.Errorf("of 23 looks %d succeeded: the limits tell nothing", told)
	}
	b.untouched("a", pid)
}
