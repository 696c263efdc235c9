// Package apparmor finds the AppArmor profile of a sandbox: Profile returns the one that was
// requested, or else agentbox's default profile, which it loads if the kernel has AppArmor.
package apparmor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/moby/profiles/apparmor"

	"github.com/agentbox/agentbox/criu/lsm"
	"github.com/agentbox/agentbox/internal/fault"
)

// Default is the profile of sandboxes that ask for none.
const Default = "agentbox-default"

// Unconfined asks for no profile.
const Unconfined = "unconfined"

// sys is the mount point of sysfs.
var sys = "/sys"

// Enabled reports whether the kernel confines by AppArmor, and lets us see it.
func Enabled() bool {
	data, err := os.ReadFile(filepath.Join(sys, "module/apparmor/parameters/enabled"))
	if err != nil || !strings.HasPrefix(string(data), "Y") {
		return false
	}
	_, err = os.Stat(filepath.Join(sys, "kernel/security/apparmor/profiles"))
	return err == nil
}

// Loadable reports whether profiles can be given to the kernel.
func Loadable() bool {
	_, err := exec.LookPath("apparmor_parser")
	return err == nil
}

// Profile returns what a runtime's spec has to name for a sandbox that asks for
// a profile; empty: none. The default one is loaded first, unless the kernel has
// it. Without AppArmor, or without the program that loads profiles, there is no
// default one, as for other engines.
func Profile(asked string) (string, error) {
	if asked == Unconfined {
		return "", nil
	}
	if !Enabled() {
		if asked != "" {
			return "", &fault.Error{Err: fmt.Errorf("%w: the AppArmor profile %s: this kernel has no AppArmor",
				fault.ErrUnsupported, asked),
				Hint: "Leave it out: --security-opt apparmor=" + Unconfined + "."}
		}
		return "", nil
	}
	name := asked
	if name == "" {
		name = Default
	}
	has, err := lsm.Loaded(sys, name)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	switch {
	case err != nil || has:
		return name, err
	case asked != "" && asked != Default:
		return "", &fault.Error{Err: fmt.Errorf("the AppArmor profile %s is not loaded: %w", asked, fault.ErrNotFound),
			Hint: "Load it first: apparmor_parser -r FILE."}
	case !Loadable():
		return "", nil
	}
	// Loading it twice at once replaces it by itself.
	if err := apparmor.InstallDefault(Default); err != nil {
		return "", fmt.Errorf("load the AppArmor profile %s: %w", Default, err)
	}
	return Default, nil
}
