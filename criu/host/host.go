// Package host finds the programs that a dump or restore needs (Find), and clears up what a
// killed restore leaves on the host: its mounts (SweepRestore), its processes (EndOrphans) and
// its directories in /tmp (SweepTemp).
//
// It is separate from package criu because the OCI runtime wrapper needs it too, and must start
// in a few milliseconds.
package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// SearchPath extends a PATH by the directories that hold criu and the OCI
// runtimes, which engines and cron jobs often leave out. A directory that is
// in it keeps its place; /usr/local/sbin otherwise comes first, because there
// a CRIU built for this kernel is installed beside a distribution's.
func SearchPath(path string) string {
	dirs := filepath.SplitList(path)
	if !slices.Contains(dirs, "/usr/local/sbin") {
		dirs = append([]string{"/usr/local/sbin"}, dirs...)
	}
	for _, d := range []string{"/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		if !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
	}
	// An empty entry means the current directory, which no program run by
	// root should be taken from.
	dirs = slices.DeleteFunc(dirs, func(d string) bool { return !filepath.IsAbs(d) })
	return strings.Join(dirs, string(filepath.ListSeparator))
}

// Environ returns this process's environment with its PATH extended by SearchPath, and
// with this process as the owner of the CRIUs that run in it: see EndOrphans.
func Environ() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PATH=") || strings.HasPrefix(kv, ownerEnv+"=")
	})
	return append(env, "PATH="+SearchPath(os.Getenv("PATH")), ownerEnv+"="+self())
}

// Find returns the path of a program, looked for along SearchPath. Files for
// which skip returns true are passed over.
func Find(name string, skip func(os.FileInfo) bool) (string, error) {
	for _, dir := range filepath.SplitList(SearchPath(os.Getenv("PATH"))) {
		path := filepath.Join(dir, name)
		st, err := os.Stat(path)
		if err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			continue
		}
		if skip == nil || !skip(st) {
			return path, nil
		}
	}
	return "", fmt.Errorf("program %s: %w", name, fault.ErrNotFound)
}

// StateRoot is the directory where an OCI runtime keeps its state by default.
func StateRoot(binary string) string {
	if filepath.Base(binary) == "crun" {
		return "/run/crun"
	}
	return "/run/runc"
}

// SweepRestore unmounts what a killed restore of the container id leaves: the
// root filesystem, bound by runc at ROOT/ID/criu-root, and CRIU's view of the
// cgroups below work. It must run before `runc delete`, which removes ROOT/ID
// recursively and would otherwise delete every file of the container through
// that mount. work may be empty. Idempotent.
func SweepRestore(root, id, work string) error {
	var errs []error
	if root != "" && id != "" {
		errs = append(errs, detach(filepath.Join(root, id, "criu-root")))
	}
	if work != "" {
		yards, err := filepath.Glob(filepath.Join(escapeGlob(work), ".criu.cgyard.*"))
		errs = append(errs, err)
		for _, yard := range yards {
			errs = append(errs, removeYard(yard))
		}
	}
	return errors.Join(errs...)
}

// removeYard removes CRIU's view of the cgroups. A mount there takes all below with it; a yard
// that was taken apart during a restore may have mounts of its own left, and plain files.
func removeYard(yard string) error {
	if err := detach(yard); err != nil {
		return err
	}
	below, err := mountsBelow(yard)
	if err != nil {
		return err
	}
	for _, path := range slices.Backward(below) {
		if err := detach(path); err != nil {
			return err
		}
	}
	if below, err = mountsBelow(yard); err != nil {
		return err
	}
	if len(below) > 0 { // never delete through a mount
		return fmt.Errorf("remove %s: %s is mounted: %w", yard, below[0], fault.ErrBusy)
	}
	return os.RemoveAll(yard)
}

// mountsBelow lists what is mounted below dir, in the order in which it was.
func mountsBelow(dir string) ([]string, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var found []string
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		if path := unescapeMount(f[4]); path == dir || strings.HasPrefix(path, dir+"/") {
			found = append(found, path)
		}
	}
	return found, nil
}

// unescapeMount undoes the kernel's octal escapes of blanks and backslashes.
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

func detach(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch err {
		case nil: // there may be another one below
		case unix.EINVAL, unix.ENOENT, unix.ENOTDIR: // not a mount point, or not there
			return nil
		default:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}
