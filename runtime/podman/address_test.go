package podman

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/runtime"
)

// A restore asks for the address of its checkpoint, though the container has had
// another since, and however old the files are that it restores from.
func TestFixedAddress(t *testing.T) {
	b := newBox(t, "bt", "sh", "-c", forever)
	first := b.inspect()
	taken := time.Now()
	podman(t, "restart", "-t", "0", b.id)
	if second := b.inspect(); second.Address == first.Address || second.Address == "" {
		t.Fatalf("its address was %s and is %s", first.Address, second.Address)
	}
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	images := t.TempDir()
	must(t, os.WriteFile(filepath.Join(images, "inventory.img"), nil, 0o600))
	c, err := b.look(b.ctx, b.id)
	must(t, err)
	_, err = b.fixAddresses(b.ctx, c, stage.Restore{Images: images, Work: images, Taken: taken})
	must(t, err)
	if m := b.remember(b.id); len(m.Fixed) != 1 || len(m.Apart) > 0 {
		t.Errorf("fixed: %+v", m)
	}
	_, err = b.Start(b.ctx, b.id, runtime.StartOptions{})
	must(t, err)
	if now := b.inspect().Address; now != first.Address {
		t.Errorf("at the checkpoint its address was %s, and after it was fixed %s", first.Address, now)
	}
}

// After a restore that failed for its address the container starts with another.
func TestAddressTaken(t *testing.T) {
	const mac = "92:d0:c6:0a:29:33"
	b := newBox(t, "--mac-address", mac, "bt", "sh", "-c", forever)
	first := b.inspect()
	taken := time.Now()
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	newBox(t, "--ip", first.Address, "bt", "sh", "-c", forever)
	images := t.TempDir()
	must(t, first.Stage.Put(stage.Restore{Images: images, Work: images, Taken: taken}))
	if _, err := b.Start(b.ctx, b.id, runtime.StartOptions{}); err == nil {
		t.Error("it was restored with an address that is taken")
	}
	must(t, first.Stage.Clear())
	if m := b.remember(b.id); len(m.Fixed) > 0 {
		t.Errorf("fixed: %+v", m.Fixed)
	}
	_, err := b.Start(b.ctx, b.id, runtime.StartOptions{})
	must(t, err)
	if now := b.inspect(); now.Status != runtime.Running || now.Address == first.Address {
		t.Errorf("it is %s at %s", now.Status, now.Address)
	}
	// The MAC address chosen at its creation stays.
	c, err := b.look(b.ctx, b.id)
	must(t, err)
	if got := c.NetworkSettings.Networks["podman"].MacAddress; got != mac {
		t.Errorf("its MAC address is %s", got)
	}
}

// A fixed address is given up if another container has it by a later start, be that a
// restore or not.
func TestFixedAddressTaken(t *testing.T) {
	for _, restores := range []bool{true, false} {
		b := newBox(t, "--network-alias", "nick", "bt", "sh", "-c", forever)
		first := b.inspect()
		taken := time.Now()
		must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
		images := t.TempDir()
		restore := stage.Restore{Images: images, Work: images, Taken: taken}
		c, err := b.look(b.ctx, b.id)
		must(t, err)
		_, err = b.fixAddresses(b.ctx, c, restore)
		must(t, err)
		_, err = b.Start(b.ctx, b.id, runtime.StartOptions{})
		must(t, err)
		must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))

		newBox(t, "--ip", first.Address, "bt", "sh", "-c", forever)
		if restores {
			must(t, first.Stage.Put(restore))
		}
		if _, err := b.Start(b.ctx, b.id, runtime.StartOptions{}); err == nil ||
			!strings.Contains(err.Error(), first.Address) {
			t.Errorf("it was started with an address that is taken: %v", err)
		}
		must(t, first.Stage.Clear())
		_, err = b.Start(b.ctx, b.id, runtime.StartOptions{})
		must(t, err)
		if now := b.inspect(); now.Status != runtime.Running || now.Address == first.Address || now.Address == "" {
			t.Errorf("it is %s at %s", now.Status, now.Address)
		}
		if m := b.remember(b.id); len(m.Fixed) > 0 {
			t.Errorf("fixed: %+v", m.Fixed)
		}
	}
}

// An address is told from a longer one, however it is written.
func TestErrorNames(t *testing.T) {
	for text, want := range map[string]bool{
		"IPAM error: requested ip address 10.0.0.1 is already allocated": true,
		"address 10.0.0.1: taken":  true,
		"10.0.0.1.":                true,
		"address 10.0.0.12 is":     false,
		"address 110.0.0.1 is":     false,
		"requested fd00:0:0::0001": true,
		"requested fd00::12":       false,
		"no address":               false,
	} {
		if got := names(errors.New(text), "10.0.0.1") || names(errors.New(text), "fd00::1"); got != want {
			t.Errorf("%q: %v", text, got)
		}
		if names(errors.New(text), "") {
			t.Errorf("%q names nothing", text)
		}
	}
}

func TestAskedAddress(t *testing.T) {
	have := address{IP: "10.0.0.1", IP6: "fd00::1", MAC: "92:d0:c6:0a:29:33"}
	ip, ip6, mac := address{IP: have.IP}, address{IP6: have.IP6}, address{MAC: have.MAC}
	for command, want := range map[string]address{
		"":                                     {},
		"--ip 10.0.0.1":                        ip,
		"--ip=10.0.0.1":                        ip,
		"--ip 10.0.0.12":                       {},
		"--ip=110.0.0.1":                       {},
		"-e PEER=10.0.0.1 --label x=fd00::1":   {},
		"--publish 10.0.0.1:80:80":             {},
		"--dns 10.0.0.1 --add-host a:10.0.0.1": {},
		"--ip6 fd00::1":                        ip6,
		"--ip6=fd00:0:0::0001":                 ip6,
		"--ip6 fd00::12":                       {},
		"--ip fd00::1":                         {},
		"--mac-address 92:D0:C6:0A:29:33":      mac,
		"--network net:ip=10.0.0.1":            ip,
		"--network=net:ip=10.0.0.12,ip=10.0.0.1,mac=92:d0:c6:0a:29:33": {IP: have.IP, MAC: have.MAC},
		"--net net:alias=x,ip6=fd00::1,ip=10.0.0.1":                    {IP: have.IP, IP6: have.IP6},
		"--network net:ip=10.0.0.12":                                   {},
		"--network other --ip":                                         {},
	} {
		c := container{}
		c.Config.CreateCommand = append([]string{"podman", "run"}, strings.Fields(command)...)
		if got := c.asked(have); got != want {
			t.Errorf("%s: %+v, want %+v", command, got, want)
		}
	}
	c := container{}
	c.Config.CreateCommand = []string{"podman", "run", "--ip=", "--ip6", "", "--mac-address="}
	if got := c.asked(address{}); got != (address{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

// A container that a killed verb took off its network is reconnected at its next start,
// under the names that it had, with an address that is its own.
func TestApart(t *testing.T) {
	podman(t, "network", "create", "apart")
	t.Cleanup(func() { podman(t, "network", "rm", "-f", "apart") })
	for _, restored := range []bool{false, true} { // once it had been fixed, and is to be given up
		b := newBox(t, "--network", "apart", "--network-alias", "nick", "--network-alias", "name",
			"bt", "sh", "-c", forever)
		first := b.inspect()
		restore := stage.Restore{Taken: time.Now()}
		aliases := func() []string {
			t.Helper()
			c, err := b.look(b.ctx, b.id)
			must(t, err)
			return slices.Sorted(slices.Values(c.NetworkSettings.Networks["apart"].Aliases))
		}
		before := aliases()
		must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
		c, err := b.look(b.ctx, b.id)
		must(t, err)
		fixed, err := []string{"apart"}, error(nil)
		if restored {
			fixed, err = b.fixAddresses(b.ctx, c, restore)
			must(t, err)
		}
		t.Setenv("AGENTBOX_FAILPOINT", "podman.connect.after-disconnect=error")
		if restored {
			err = b.unfix(b.ctx, b.id, fixed)
		} else {
			_, err = b.fixAddresses(b.ctx, c, restore)
		}
		t.Setenv("AGENTBOX_FAILPOINT", "")
		if err == nil {
			t.Fatal("it was not broken off (tests need the tag failpoint)")
		}
		c, err = b.look(b.ctx, b.id)
		must(t, err)
		// A container on no network is on its mode's, bridge, to Podman 5.
		if _, on := c.NetworkSettings.Networks["apart"]; on {
			t.Fatal("it is on its network")
		}
		_, err = b.Start(b.ctx, b.id, runtime.StartOptions{})
		must(t, err)
		if now := b.inspect().Address; now == "" || !restored && now != first.Address {
			t.Errorf("it was at %s and is at %s", first.Address, now)
		}
		if now := aliases(); !slices.Equal(now, before) {
			t.Errorf("its names were %q and are %q", before, now)
		}
		if m := b.remember(b.id); len(m.Apart) > 0 || restored == (len(m.Fixed) > 0) {
			t.Errorf("noted: %+v", m)
		}
	}
}

// Whatever is wrong with a network, no verb takes a container off it for good.
func TestApartFails(t *testing.T) {
	podman(t, "network", "create", "gone")
	b := newBox(t, "--network", "gone", "bt", "sh", "-c", forever)
	b.inspect() // which notes its address
	restore := stage.Restore{Taken: time.Now()}
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	look := func() container {
		t.Helper()
		c, err := b.look(b.ctx, b.id)
		must(t, err)
		return c
	}
	// A disconnect that fails, and has done nothing.
	real := b.Backend.podman
	b.Backend.podman = script(t, `case "$*" in "network disconnect"*) echo "Error: no" >&2; exit 1;; esac; exec podman "$@"`)
	if _, err := b.fixAddresses(b.ctx, look(), restore); err == nil {
		t.Error("nobody was told that the disconnect failed")
	}
	if m := b.remember(b.id); len(m.Apart) > 0 || len(m.Fixed) > 0 || len(look().NetworkSettings.Networks) != 1 {
		t.Errorf("noted: %+v", m)
	}
	// A call that fails, and was done.
	b.Backend.podman = script(t, `case "$*" in "network disconnect"*) podman "$@"; echo "Error: no" >&2; exit 1;; esac; exec podman "$@"`)
	if _, err := b.fixAddresses(b.ctx, look(), restore); err != nil {
		t.Error(err)
	}
	if m := b.remember(b.id); len(m.Apart) > 0 || len(m.Fixed) != 1 || len(look().NetworkSettings.Networks) != 1 {
		t.Errorf("noted: %+v", m)
	}
	// A network that is gone by the time of the next start, and comes back with other addresses.
	b.Backend.podman = real
	t.Setenv("AGENTBOX_FAILPOINT", "podman.connect.after-disconnect=error")
	if err := b.unfix(b.ctx, b.id, []string{"gone"}); err == nil {
		t.Fatal("it was not broken off (tests need the tag failpoint)")
	}
	t.Setenv("AGENTBOX_FAILPOINT", "")
	must(t, b.note(b.id, func(m *memory) bool {
		l := m.Apart["gone"]
		l.Address, l.Fixed = m.Fixed["gone"], true
		return m.part("gone", l)
	}))
	podman(t, "network", "rm", "gone")
	if _, err := b.Start(b.ctx, b.id, runtime.StartOptions{}); err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("it was started without its network: %v", err)
	}
	podman(t, "network", "create", "--subnet", "10.123.45.0/24", "gone")
	t.Cleanup(func() { podman(t, "network", "rm", "-f", "gone") })
	// Podman sees only at the start that the address is none of that network's.
	if _, err := b.Start(b.ctx, b.id, runtime.StartOptions{}); err == nil {
		t.Error("it was started with an address of another network")
	}
	_, err := b.Start(b.ctx, b.id, runtime.StartOptions{})
	must(t, err)
	if now := b.inspect().Address; !strings.HasPrefix(now, "10.123.45.") {
		t.Errorf("it is at %q", now)
	}
	if m := b.remember(b.id); len(m.Apart) > 0 || len(m.Fixed) > 0 {
		t.Errorf("noted: %+v", m)
	}
}

// script is a podman of ours.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "podman")
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700))
	return path
}
