package lsm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/creds"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/inventory"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/fault"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, []byte(text), 0o640))
}

// core is the image of a thread; a label of "-" is none.
func core(label string) *criucore.CoreEntry {
	zero := proto.Uint32(0)
	c := &creds.CredsEntry{
		Uid: zero, Gid: zero, Euid: zero, Egid: zero, Suid: zero, Sgid: zero, Fsuid: zero, Fsgid: zero, Secbits: zero,
		CapEff: []uint32{7, 0}, Groups: []uint32{1, 2},
	}
	c.ProtoReflect().SetUnknown([]byte{18<<3&0x7f | 0x80, 1, 1}) // no_new_privs, which this type does not have
	if label != "-" {
		c.LsmProfile, c.LsmSockcreate = proto.String(label), proto.String(label)
	}
	return &criucore.CoreEntry{
		Mtype: criucore.CoreEntry_X86_64.Enum(),
		ThreadCore: &criucore.ThreadCoreEntry{
			FutexRla: proto.Uint64(5), FutexRlaLen: zero, Creds: c, Comm: proto.String("x"),
		},
	}
}

// zombie is the image of a process that was not reaped yet.
func zombie() *criucore.CoreEntry {
	return &criucore.CoreEntry{
		Mtype: criucore.CoreEntry_X86_64.Enum(),
		Tc: &criucore.TaskCoreEntry{TaskState: proto.Uint32(taskZombie), ExitCode: proto.Uint32(0),
			Personality: proto.Uint32(0),
			Flags:       proto.Uint32(0), BlkSigset: proto.Uint64(0), Comm: proto.String("z")},
	}
}

func image(t testing.TB, m proto.Message, magic ...uint32) string {
	data, err := proto.Marshal(m)
	must(t, err)
	var out []byte
	for _, w := range append(magic, uint32(len(data))) {
		out = binary.LittleEndian.AppendUint32(out, w)
	}
	return string(append(out, data...))
}

func coreImage(t testing.TB, c *criucore.CoreEntry) string {
	return image(t, c, commonMagic, coreMagic)
}

func inventoryImage(t testing.TB, module int32) string {
	e := &inventory.InventoryEntry{ImgVersion: proto.Uint32(2), DumpUptime: proto.Uint64(9)}
	if module >= 0 {
		e.Lsmtype = inventory.Lsmtype(module).Enum()
	}
	return image(t, e, inventoryMagic)
}

// on has the rest of a test see another host.
func on(t testing.TB, modules ...string) {
	was := sys
	sys = t.TempDir()
	t.Cleanup(func() { sys = was })
	for _, m := range modules {
		write(t, filepath.Join(sys, map[string]string{
			"apparmor": "kernel/security/apparmor/profiles", "selinux": "fs/selinux/enforce",
		}[m]), "box (enforce)\na b (complain)\n")
	}
}

func TestSet(t *testing.T) {
	for _, c := range []struct {
		host, dumped, profile, want string
		module, after               int32
	}{
		// Another engine's, none, and what another name only begins with.
		{"apparmor", "containers-default-0.62", "box", "box", 2, 2},
		{"apparmor", "-", "box", "box", 2, 2},
		{"apparmor", "-", "box", "box", 0, 0},
		{"apparmor", "-", "box", "box", -1, -1},
		{"apparmor", "", "box", "box", 2, 2},
		{"apparmor", "boxes", "box", "box", 2, 2},
		{"apparmor", "box", "box", "box", 2, 2},
		// A part of it, and stacks and namespaces, which none is.
		{"apparmor", "box//worker", "box", "box//worker", 2, 2},
		{"apparmor", "box//&:ns:mine", "box", "box", 2, 2},
		{"apparmor", "box//worker//&unconfined", "box", "box", 2, 2},
		{"apparmor", "box//", "box", "box", 2, 2},
		{"apparmor", "box", "", "-", 2, 2},
		{"apparmor", "box", "unconfined", "-", 2, 2},
		{"apparmor", "system_u:system_r:container_t:s0:c1,c2", "a b", "a b", 1, 2},
		// A host that has none, which CRIU would refuse labels for.
		{"", "box", "", "-", 2, 2},
		{"", "-", "", "-", 0, 0},
		{"selinux", "system_u:system_r:container_t:s0:c1,c2", "", "system_u:system_r:container_t:s0:c1,c2", 1, 1},
	} {
		t.Run(fmt.Sprintf("%s %s to %s", c.host, c.dumped, c.profile), func(t *testing.T) {
			dir := t.TempDir()
			if c.host == "" {
				on(t)
			} else {
				on(t, c.host)
			}
			write(t, dir+"/core-1.img", coreImage(t, core(c.dumped)))
			write(t, dir+"/core-27.img", coreImage(t, core(c.dumped)))
			write(t, dir+"/core-3.img", coreImage(t, zombie()))
			write(t, dir+"/inventory.img", inventoryImage(t, c.module))
			write(t, dir+"/pages-1.img", "core")
			must(t, os.Chown(dir+"/core-1.img", 1234, 0))
			must(t, Set(dir, c.profile))
			for _, name := range []string{"core-1.img", "core-27.img"} {
				want := core(c.want)
				if c.host != "selinux" {
					want.ThreadCore.Creds.LsmSockcreate = nil
				}
				got := &criucore.CoreEntry{}
				data, err := os.ReadFile(filepath.Join(dir, name))
				must(t, err)
				must(t, proto.Unmarshal(data[12:], got))
				if !proto.Equal(got, want) || int(binary.LittleEndian.Uint32(data[8:])) != len(data)-12 {
					t.Errorf("%s: %v", name, got.ThreadCore.Creds)
				}
			}
			for name, want := range map[string]string{
				"core-3.img": coreImage(t, zombie()), "inventory.img": inventoryImage(t,
					c.after), "pages-1.img": "core",
			} {
				if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
					t.Errorf("%s: %q, %v", name, got, err)
				}
			}
			st, err := os.Stat(dir + "/core-1.img")
			must(t, err)
			if st.Mode().Perm() != 0o640 || st.Sys().(*syscall.Stat_t).Uid != 1234 {
				t.Errorf("%v of %d", st.Mode(), st.Sys().(*syscall.Stat_t).Uid)
			}
			// Once more changes nothing, and writes nothing.
			must(t, Set(dir, c.profile))
			if again, err := os.Stat(dir + "/core-1.img"); err != nil || !os.SameFile(st, again) {
				t.Errorf("it was written again: %v", err)
			}
			if list, _ := os.ReadDir(dir); len(list) != 5 {
				t.Errorf("left behind: %v", list)
			}
		})
	}
}

// A message may be cut in two, which together are one: none of it keeps a label.
func TestSetInPieces(t *testing.T) {
	on(t, "apparmor")
	thread := func(label string) string {
		data, err := proto.MarshalOptions{AllowPartial: true}.Marshal(&criucore.CoreEntry{ThreadCore: &criucore.ThreadCoreEntry{Creds: &creds.CredsEntry{LsmProfile: &label}}})
		must(t, err)
		return string(data)
	}
	whole, err := proto.Marshal(core("theirs"))
	must(t, err)
	data := thread("box//&x") + string(whole) + thread("unconfined")
	out, err := relabel([]byte(data), "box")
	must(t, err)
	got := &criucore.CoreEntry{}
	must(t, proto.Unmarshal(out, got))
	if l := got.ThreadCore.Creds.GetLsmProfile(); l != "box" || strings.Count(string(out), "box") != 3 ||
		strings.Contains(string(out), "unconfined") {
		t.Errorf("%q: %q", l, out)
	}
}

func TestSetRefuses(t *testing.T) {
	whole := coreImage(t, core("-"))
	bare := core("-")
	bare.ThreadCore.Creds = nil
	for what, c := range map[string]struct {
		name, data, profile string
		want                error
	}{
		"policy for the kernel": {"apparmor.img", "", "", fault.ErrDenied},
		"no credentials":        {"core-9.img", coreImage(t, bare), "box", fault.ErrUnsupported},
		"an image that is cut":  {"core-9.img", whole[:len(whole)-1], "", fault.ErrCorrupt},
		"cut in a length":       {"core-9.img", whole + "\x01", "", fault.ErrCorrupt},
		"another kind":          {"core-9.img", inventoryImage(t, 0), "", fault.ErrCorrupt},
		"credentials of no kind": {"core-9.img", string(binary.LittleEndian.AppendUint32([]byte(whole[:8]), 2)) +
			"\x28\x01", "", fault.ErrCorrupt},
		"an inventory of none": {"inventory.img", whole, "box", fault.ErrCorrupt},
	} {
		on(t, "apparmor")
		dir := t.TempDir()
		write(t, filepath.Join(dir, c.name), c.data)
		if err := Set(dir, c.profile); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.name) {
			t.Errorf("%s: %v", what, err)
		}
	}
	dir := t.TempDir()
	on(t, "apparmor")
	write(t, dir+"/elsewhere", whole)
	must(t, os.Symlink("elsewhere", dir+"/core-1.img"))
	if err := Set(dir, ""); err == nil {
		t.Error("it followed a link")
	}
	for _, other := range []string{"boxes", "a", "a b (complain)", "box//part"} {
		if err := Set(t.TempDir(), other); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%s, which is not loaded: %v", other, err)
		}
	}
	for _, host := range [][]string{nil, {"selinux"}} {
		on(t, host...)
		if err := Set(t.TempDir(), "box"); !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("a profile on a host with %v: %v", host, err)
		}
	}
	if err := Set(t.TempDir()+"/none", ""); err == nil && !selinux() {
		t.Error("images that are not there")
	}
}

func TestCheck(t *testing.T) {
	was := proc
	proc = t.TempDir()
	defer func() { proc = was }()
	thread := func(pid, tid, attr, label, state string) {
		dir := filepath.Join(proc, pid, "task", tid)
		write(t, filepath.Join(dir, "stat"), tid+" (a (b) ) "+state+" 1 1")
		if attr != "" {
			write(t, filepath.Join(dir, attr), label)
		}
	}
	const current, own = "attr/current", "attr/apparmor/current"
	thread("10", "10", current, "box (enforce)\n", "S")
	thread("10", "11", own, "box//worker (complain)\n", "S")
	thread("10", "12", current, "unconfined\n", "Z")
	thread("20", "20", own, "a (b) c (enforce)\n", "t")
	thread("20", "20", current, "another module's", "t")
	for _, c := range []struct {
		label, profile, says string
	}{
		{"box (enforce)\n", "box", ""}, {"box (enforce)\n\x00", "box", ""}, {"box", "box", ""},
		{"unconfined\n", "box", `"unconfined", not box`}, {"boxes (enforce)\n", "box", "boxes (enforce)"},
		{"box//&unconfined (enforce)\n", "box", "box//&unconfined"},
		{"", "box", `""`}, {"unconfined\n", "unconfined", ""}, {"unconfined\n", "", ""}, {"box (enforce)\n", "", ""},
	} {
		thread("30", "31", current, c.label, "S")
		err := Check([]int{30, 99}, c.profile)
		if (err == nil) != (c.says == "") || err != nil &&
			(!errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), c.says) ||
				!strings.Contains(err.Error(), "process 30, thread 31")) {
			t.Errorf("%q in %s: %v", c.label, c.profile, err)
		}
	}
	must(t, Check([]int{10}, "box"))
	must(t, Check([]int{20}, "a (b) c"))
	if err := Check([]int{10, 20}, "box"); !errors.Is(err, fault.ErrDenied) {
		t.Error(err)
	}
	thread("40", "40", "", "", "S")
	if err := Check([]int{40}, "box"); err == nil {
		t.Error("one that tells nothing")
	}
	thread("50", "50", "", "", "Z")
	must(t, Check([]int{50}, "box"))
}

// Anything that CRIU takes for an image has the profile, whatever else is in it.
func FuzzRelabel(f *testing.F) {
	for _, c := range []*criucore.CoreEntry{core("theirs"), core("-"), core("box//part"), zombie()} {
		data, err := proto.Marshal(c)
		must(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		out, err := relabel(data, "box")
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrUnsupported) {
				t.Error(err)
			}
			return
		}
		got, before := &criucore.CoreEntry{}, &criucore.CoreEntry{}
		if proto.Unmarshal(data, before) != nil {
			return
		}
		must(t, proto.Unmarshal(out, got))
		if c := got.GetThreadCore().GetCreds(); c != nil &&
			(!Within(c.GetLsmProfile(), "box") || c.LsmSockcreate != nil) {
			t.Errorf("%q", c.GetLsmProfile())
		}
		for _, m := range []*criucore.CoreEntry{got, before} {
			if c := m.GetThreadCore().GetCreds(); c != nil {
				c.LsmProfile, c.LsmSockcreate = nil, nil
				c.ProtoReflect().SetUnknown(nil) // a label that is no string, for one
			}
		}
		if !proto.Equal(got, before) {
			t.Errorf("%v, was %v", got, before)
		}
	})
}
