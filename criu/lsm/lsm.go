// Package lsm confines restored processes to the AppArmor profile of their container. CRIU gives
// each thread the profile that its image names. That profile may be another engine's, or missing
// on this host. A thread that was dumped unconfined, or on a host without AppArmor, has none, and
// CRIU leaves it so even if told a profile (--lsm-profile). The images would decide what
// processes may do.
//
// So Set writes the profile into the images, and Check verifies after the restore that all
// threads have it. SELinux labels are left to CRIU.
//
// The wrapper imports this package and starts for every call of an engine, so the package does
// without those that decode images.
package lsm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/internal/fault"
)

// Unconfined is how some engines write that there is no profile.
const Unconfined = "unconfined"

// sys is where the kernel describes itself, proc where it describes processes.
var sys, proc = "/sys", "/proc"

// AppArmor reports whether CRIU takes this for a host with AppArmor.
func AppArmor() bool {
	_, err := os.Stat(filepath.Join(sys, "kernel/security/apparmor"))
	return err == nil
}

// Loaded reports whether the kernel has an AppArmor profile, by what sysfs, which is
// usually /sys, lists.
func Loaded(sysfs, profile string) (bool, error) {
	data, err := os.ReadFile(filepath.Join(sysfs, "kernel/security/apparmor/profiles"))
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(data)) {
		if name(line) == profile {
			return true, nil
		}
	}
	return false, nil
}

// name is the one in what the kernel says: NAME (MODE).
func name(text string) string {
	text = strings.Trim(text, "\x00\n")
	if i := strings.LastIndex(text, " ("); i >= 0 { // a name may have spaces in it
		return text[:i]
	}
	return text
}

func selinux() bool {
	_, err := os.Stat(filepath.Join(sys, "fs/selinux/enforce"))
	return err == nil
}

// Set has every thread of the images in dir restored into the profile; empty:
// into none. A part of the profile (PROFILE//CHILD) that a thread was in stays. A
// profile where there is no AppArmor is ErrUnsupported, one that is not loaded
// ErrNotFound; images that bring policy of their own are ErrDenied, those that make no sense ErrCorrupt.
// Done twice it is done once.
func Set(dir, profile string) error {
	if profile == Unconfined {
		profile = ""
	}
	switch {
	case AppArmor() && profile != "":
		// CRIU does not end when the kernel refuses a profile that it has not.
		if has, err := Loaded(sys, profile); err == nil && !has {
			return fmt.Errorf("the AppArmor profile %s is not loaded: %w", profile, fault.ErrNotFound)
		}
	case AppArmor():
	case profile != "":
		return fmt.Errorf("%w: the container is to have the AppArmor profile %s, and this kernel has no AppArmor",
			fault.ErrUnsupported, profile)
	case selinux():
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		if name == policyImage {
			return fmt.Errorf("image %s: it would load AppArmor policy into this host's kernel: %w", name,
				fault.ErrDenied)
		}
		core, _ := path.Match("core-*.img", name)
		switch {
		case core:
			err = change(filepath.Join(dir, name), coreMagic, func(data []byte) ([]byte, error) {
				return relabel(data, profile)
			})
		case name == "inventory.img" && profile != "":
			err = change(filepath.Join(dir, name), inventoryMagic, ours)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// policyImage has the policy of AppArmor's namespaces that processes were in,
// which CRIU loads. No container of an engine's has such a namespace.
const policyImage = "apparmor.img"

// Fields of CRIU's images.
const (
	coreTask, coreThread  = 3, 5 // of core_entry
	taskState             = 1    // of task_core_entry
	threadCreds           = 10   // of thread_core_entry
	credsLabel, credsSock = 15, 16
	inventoryLSM          = 6 // of inventory_entry
)

// States of a process that is not restored to run.
const taskDead, taskZombie = 2, 6

// Security modules, as an inventory numbers them.
const moduleSELinux, moduleAppArmor = 1, 2

// relabel changes a core_entry.
func relabel(core []byte, profile string) ([]byte, error) {
	creds, ended := 0, false
	out, err := within(core, coreThread, func(thread []byte) ([]byte, error) {
		return within(thread, threadCreds, func(data []byte) ([]byte, error) {
			creds++
			return labelled(data, profile)
		})
	})
	if err == nil {
		_, err = within(core, coreTask, func(task []byte) ([]byte, error) {
			return task, each(task, func(f field) error {
				if f.num == taskState && f.typ == protowire.VarintType {
					state, _ := protowire.ConsumeVarint(f.value)
					ended = state == taskDead || state == taskZombie
				}
				return nil
			})
		})
	}
	if err == nil && creds == 0 && !ended && profile != "" {
		// The images are from a CRIU before 2.0; it would take credentials from elsewhere, or
		// none.
		err = fmt.Errorf("it has no credentials: %w", fault.ErrUnsupported)
	}
	return out, err
}

// labelled returns a creds_entry with a profile for its label.
func labelled(creds []byte, profile string) (out []byte, err error) {
	set := profile == ""
	err = each(creds, func(f field) error {
		switch f.num {
		case credsSock:
			return nil
		case credsLabel:
			if set {
				return nil
			}
			set = true
			if f.typ == protowire.BytesType {
				if is, n := protowire.ConsumeBytes(f.value); n >= 0 && Within(string(is), profile) {
					break
				}
			}
			out = protowire.AppendString(protowire.AppendTag(out, credsLabel, protowire.BytesType), profile)
			return nil
		}
		out = append(out, f.raw...)
		return nil
	})
	if !set {
		out = protowire.AppendString(protowire.AppendTag(out, credsLabel, protowire.BytesType), profile)
	}
	return out, err
}

// ours changes an inventory_entry of a host with SELinux: CRIU refuses labels of
// another module than the inventory's.
func ours(inventory []byte) (out []byte, err error) {
	err = each(inventory, func(f field) error {
		if f.num == inventoryLSM && f.typ == protowire.VarintType {
			if module, _ := protowire.ConsumeVarint(f.value); module == moduleSELinux {
				out = protowire.AppendVarint(
					protowire.AppendTag(out, inventoryLSM, protowire.VarintType),
					moduleAppArmor)
				return nil
			}
		}
		out = append(out, f.raw...)
		return nil
	})
	return out, err
}

// Within reports whether a label is a profile, or a part of it that its author has
// written: a child or a hat, which its name precedes.
func Within(label, profile string) bool {
	child, ok := strings.CutPrefix(label, profile+"//")
	return label == profile || ok && child != "" && !strings.ContainsAny(child, "&:")
}

// Check returns an error if the profile does not confine a thread of the processes. Threads that
// have ended, or end meanwhile, do not count.
func Check(pids []int, profile string) error {
	if profile == "" || profile == Unconfined {
		return nil
	}
	for _, pid := range pids {
		dir := filepath.Join(proc, strconv.Itoa(pid), "task")
		threads, err := os.ReadDir(dir)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return err
		}
		for _, t := range threads {
			if err := check(filepath.Join(dir, t.Name()), profile); err != nil {
				return fmt.Errorf("process %d, thread %s: %w", pid, t.Name(), err)
			}
		}
	}
	return nil
}

func check(thread, profile string) error {
	// The second one is whichever module's is the first.
	data, err := os.ReadFile(filepath.Join(thread, "attr/apparmor/current"))
	if errors.Is(err, fs.ErrNotExist) {
		data, err = os.ReadFile(filepath.Join(thread, "attr/current"))
	}
	if err == nil && Within(name(string(data)), profile) {
		return nil
	}
	if ended(thread) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("its AppArmor profile is %q, not %s: %w", strings.Trim(string(data), "\x00\n"),
		profile, fault.ErrDenied)
}

// ended reports whether a thread runs no more; what it was restored as is no matter then.
func ended(thread string) bool {
	data, err := os.ReadFile(filepath.Join(thread, "stat"))
	if err != nil {
		return true
	}
	text := string(data)
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	return len(f) > 0 && (f[0] == "Z" || f[0] == "X")
}
