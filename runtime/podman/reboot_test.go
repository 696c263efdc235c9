package podman

import (
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// After a reboot Podman does not know where the managed files were, and makes them
// there again all the same: what a restore puts there is what the container has.
func TestManagedAfterReboot(t *testing.T) {
	b := newBox(t, "bt", "sh", "-c", forever)
	podman(t, "create", "--name", "new", "bt", "true")
	t.Cleanup(func() { podman(t, "rm", "new") })
	before := b.inspect()
	if got := slices.Sorted(maps.Keys(before.Managed)); !slices.Equal(got,
		[]string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf"}) {
		t.Fatalf("managed: %v", before.Managed)
	}
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	reboot(t)
	after := b.inspect()
	if c, err := b.look(b.ctx, b.id); err != nil || c.HostsPath != "" {
		t.Fatalf("Podman tells of %q, %v", c.HostsPath, err)
	}
	if after.Status != runtime.Exited || !maps.Equal(after.Managed, before.Managed) {
		t.Fatalf("after a reboot it is %s, managed: %v, were %v", after.Status, after.Managed, before.Managed)
	}
	for path, host := range after.Managed {
		must(t, os.WriteFile(host, []byte("put "+path+"\n"), 0o640))
	}
	_, err := b.Start(b.ctx, b.id, runtime.StartOptions{})
	must(t, err)
	got := podman(t, "exec", b.id, "sh", "-c", "cat /etc/hostname /etc/hosts /etc/resolv.conf; stat -c %a /etc/hosts")
	if want := "put /etc/hostname\nput /etc/hosts\nput /etc/resolv.conf\n640"; got != want {
		t.Errorf("in the container:\n%s\nwant:\n%s", got, want)
	}
	if now := b.inspect(); !maps.Equal(now.Managed, before.Managed) {
		t.Errorf("managed: %v, were %v", now.Managed, before.Managed)
	}

	// Nothing is known of a container that was never started, nor where a directory is gone.
	s, err := b.Adopt(b.ctx, "new")
	must(t, err)
	c, err := b.Inspect(b.ctx, s.ID)
	must(t, err)
	if len(c.Managed) > 0 {
		t.Errorf("managed of one that was never started: %v", c.Managed)
	}
	gone := container{ID: strings.Repeat("ab", 32)}
	must(t, b.note(gone.id(), func(m *memory) bool {
		m.Managed = map[string]string{"/etc/hosts": t.TempDir() + "/gone/hosts"}
		return true
	}))
	if files := b.managed(gone); len(files) > 0 {
		t.Errorf("managed where there is no directory: %v", files)
	}
}
