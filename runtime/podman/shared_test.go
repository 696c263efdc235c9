package podman

import (
	"fmt"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// A pod's network is not one container's to cut: after an end that no peer is to
// learn of the others have theirs, and its processes are not promised back.
func TestSharedNetwork(t *testing.T) {
	image(t)
	for kind, mode := range map[string]func(t *testing.T, mate *box) string{
		"container": func(_ *testing.T, mate *box) string { return "container:" + mate.id },
		"ns": func(t *testing.T, mate *box) string {
			return fmt.Sprintf("ns:/proc/%d/ns/net", mate.inspect().Pid)
		},
	} {
		t.Run(kind, func(t *testing.T) {
			mate := newBox(t, "bt", "sh", "-c", forever)
			b := newBox(t, "--network", mode(t, mate), "bt", "sh", "-c", forever)
			c := b.inspect()
			if !strings.Contains(c.NoRestore, "network") || c.Remedy == "" {
				t.Errorf("NoRestore %q, %q", c.NoRestore, c.Remedy)
			}
			if m := b.remember(b.id); len(m.Addresses) > 0 {
				t.Errorf("noted: %+v", m)
			}
			// "tentative" goes by itself, a second after the address came.
			network := func() string {
				return strings.ReplaceAll(podman(t, "exec", mate.id, "ip", "-o", "addr"), " tentative", "")
			}
			before := network()
			must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{Silent: true}))
			if got := network(); got != before {
				t.Errorf("the other's network is\n%s\nand was\n%s", got, before)
			}
			_, err := b.Start(b.ctx, b.id, runtime.StartOptions{})
			must(t, err)
		})
	}
}

// CRIU has no right to the images as the root of another user namespace.
func TestOwnUsers(t *testing.T) {
	image(t)
	b := newBackend(t)
	podman(t, "create", "--name", "mapped", "--uidmap", "0:100000:65536", "bt", "true")
	t.Cleanup(func() { podman(t, "rm", "-f", "mapped") })
	s, err := b.Adopt(t.Context(), "mapped")
	must(t, err)
	c, err := b.Inspect(t.Context(), s.ID)
	must(t, err)
	if !strings.Contains(c.NoRestore, "user namespace") || !strings.Contains(c.Remedy, "--userns") {
		t.Errorf("NoRestore %q, %q", c.NoRestore, c.Remedy)
	}
	for mode, restores := range map[string]bool{
		"": true, "host": true, "private": false, "container:x": false, "ns:/x": false,
	} {
		c := container{Name: "x"}
		c.HostConfig.UsernsMode = mode
		if why, _ := c.obstacle("/x/agentbox-runtime"); (why == "") != restores {
			t.Errorf("%q: %q", mode, why)
		}
	}
}
