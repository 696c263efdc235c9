package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/lsm"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
)

// loadProfile gives the kernel a profile that allows all, for the test.
func loadProfile(t *testing.T, name string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	text := fmt.Sprintf("profile %s flags=(attach_disconnected) {\n  file,\n  network,\n  capability,\n  signal,\n  ptrace,\n  mount,\n  umount,\n  unix,\n}\n", name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	parser := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("apparmor_parser", append(args, path)...).CombinedOutput(); err != nil {
			t.Fatalf("apparmor_parser: %v: %s", err, out)
		}
	}
	parser("-K", "-r")
	t.Cleanup(func() { parser("-R") })
}

// confined fails the test unless all processes of the container have a label.
func (b *box) confined(t *testing.T, label string) {
	t.Helper()
	c, err := freezer.Open(b.State, b.ID)
	if err != nil {
		t.Fatal(err)
	}
	pids, err := c.Processes()
	if err != nil || len(pids) < 2 {
		t.Fatalf("its processes: %v, %v", pids, err)
	}
	for _, pid := range pids {
		if got, err := os.ReadFile(fmt.Sprintf("/proc/%d/attr/current", pid)); err != nil ||
			strings.TrimSpace(string(got)) != label {
			t.Errorf("process %d is in %q, not in %q (%v)", pid, got, label, err)
		}
	}
}

// restore brings the container back, or says why not.
func (b *box) restore(t *testing.T) error {
	t.Helper()
	if err := stage.At(b.run, b.ID).Put(stage.Restore{
		Images: b.Images, Work: b.Work, Flags: []string{"--file-locks"}, Config: b.Config,
	}); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(b.Work, "log")
	if err := b.Cmd(nil, "--log", log, "create", "--bundle", b.Bundle, b.ID).Run(); err != nil {
		text, _ := os.ReadFile(log)
		return fmt.Errorf("%w: %s", err, text)
	}
	return b.Cmd(nil, "--log", log, "start", b.ID).Run()
}

// setProfile changes the profile that the bundle names.
func (b *box) setProfile(t *testing.T, profile string) {
	t.Helper()
	path := filepath.Join(b.Bundle, "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	spec.Process.ApparmorProfile = profile
	if data, err = json.Marshal(spec); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Restored processes have the profile of the container's configuration, whatever
// they were dumped in, and there is no container where they have not.
func TestRestoreConfined(t *testing.T) {
	// Two processes, so that not only the first is looked at. A dump interrupts their calls,
	// which nothing here continues: the second, too, has to live on after EINTR, as sleep of
	// busybox 1.37 does not.
	b := newBox(t, []string{
		"sh", "-c", "while :; do sleep 1; done & i=0; while :; do i=$((i+1)); printf %08d $i 1<>/count; sleep 0.05; done",
	}, nil)
	again := func() {
		t.Helper()
		at := b.Count()
		b.Until("it counts on", func() bool { return b.Count() > at+2 })
	}
	b.Start(nil)
	b.Until("it counts", func() bool { return b.Count() >= 2 })
	b.dump(t)
	putBack := b.Keep()
	b.End()
	const name = "agentbox-test-confined"
	if !lsm.AppArmor() {
		b.setProfile(t, name)
		if err := b.restore(t); err == nil || !strings.Contains(err.Error(), "no AppArmor") || b.Status() != "gone" {
			t.Fatalf("where there is no AppArmor: %v; the container is %s", err, b.Status())
		}
		// As it would be dumped where there is: CRIU itself refuses that here.
		b.setProfile(t, "")
		b.mark(t, name)
		putBack()
		if err := b.restore(t); err != nil {
			t.Fatalf("dumped where there is AppArmor: %v", err)
		}
		again()
		return
	}

	loadProfile(t, name)
	b.setProfile(t, name)
	putBack()
	saved := t.TempDir()
	if err := os.CopyFS(saved+"/images", os.DirFS(b.Images)); err != nil {
		t.Fatal(err)
	}
	if err := b.restore(t); err != nil {
		t.Fatalf("dumped in none: %v", err)
	}
	b.confined(t, name+" (enforce)")
	again()
	b.End()

	// A runtime, or a CRIU, that leaves them in none.
	careless := filepath.Join(saved, "careless")
	script := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *' restore '*) cp %s/images/core-*.img %s/;; esac\nexec %s \"$@\"\n", saved, b.Images, os.Getenv("AGENTBOX_RUNTIME"))
	if err := os.WriteFile(careless, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	real := os.Getenv("AGENTBOX_RUNTIME")
	t.Setenv("AGENTBOX_RUNTIME", careless)
	putBack()
	if err := b.restore(t); err == nil || !strings.Contains(err.Error(),
		"its AppArmor profile is") || b.Status() != "gone" {
		t.Errorf("processes that are in none: %v; the container is %s", err, b.Status())
	}
	t.Setenv("AGENTBOX_RUNTIME", real)

	// And out of it, and in one that is not there.
	b.setProfile(t, "agentbox-test-none")
	putBack()
	if err := b.restore(t); err == nil || !strings.Contains(err.Error(),
		"the AppArmor profile agentbox-test-none is not loaded") || b.Status() != "gone" {
		t.Errorf("a profile that is not loaded: %v; the container is %s", err, b.Status())
	}
	b.setProfile(t, lsm.Unconfined)
	putBack()
	if err := b.restore(t); err != nil {
		t.Fatalf("in none: %v", err)
	}
	b.confined(t, lsm.Unconfined)
	again()
}

// mark has images say that their processes were in an AppArmor profile.
func (b *box) mark(t *testing.T, profile string) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(b.Images, "core-*.img"))
	if err != nil || len(names) < 2 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		e := &criucore.CoreEntry{}
		rewrite(t, name, 8, e, func() { e.ThreadCore.Creds.LsmProfile = &profile })
	}
	e := &inventory.InventoryEntry{}
	rewrite(t, filepath.Join(b.Images, "inventory.img"), 4, e, func() { e.Lsmtype = inventory.Lsmtype_APPARMOR.Enum() })
}

// rewrite changes the entry of an image, which head bytes of magic precede.
func rewrite(t *testing.T, name string, head int, m proto.Message, change func()) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err == nil {
		err = proto.Unmarshal(data[head+4:], m)
	}
	if err != nil {
		t.Fatal(err)
	}
	change()
	entry, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	data = binary.LittleEndian.AppendUint32(data[:head], uint32(len(entry)))
	if err := os.WriteFile(name, append(data, entry...), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The user gets the same error, whichever code reads a damaged image first.
func TestConfineDamaged(t *testing.T) {
	err := damaged(fmt.Errorf("image inventory.img: %w", fault.ErrCorrupt))
	if err == nil || !strings.Contains(err.Error(), "the images are damaged") ||
		!strings.Contains(err.Error(), "Verify the checkpoint") || !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("%v", err)
	}
	if err := errors.New("other"); damaged(err) != err || damaged(nil) != nil {
		t.Error("it changes other errors")
	}
}
