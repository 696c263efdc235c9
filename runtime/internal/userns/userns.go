// Package userns reports whether sandboxes can have user namespaces here, each
// with a range of ids of its own: what that takes of the kernel, of the OCI
// runtime and CRIU, and of the place where sandboxes have their files. It looks,
// and tries in a directory of its own; it changes nothing.
package userns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/overlay"
)

// The oldest versions that are known to checkpoint and restore a sandbox with a
// user namespace.
const (
	oldestRunc = "1.1"
	oldestCRIU = "4.0"
)

// Unavailable returns the reason why sandboxes cannot have user namespaces with the OCI runtime
// binary, or "" if they can. Their files are on the filesystem of dir, an empty directory to
// try in. The caller removes what is made there.
func Unavailable(ctx context.Context, dir, binary string) (string, error) {
	for _, look := range []func() (string, error){
		func() (string, error) { return versions(ctx, binary) },
		func() (string, error) { return covered("proc", "/proc") },
		func() (string, error) { return covered("sysfs", "/sys") },
		func() (string, error) { return mount(dir) },
	} {
		if why, err := look(); why != "" || err != nil {
			return why, err
		}
	}
	return "", nil
}

// PrivateParent returns the directory above one of paths that keeps others than root from passing, or
// "". The paths themselves do not count. The OCI runtime and CRIU mount as the namespace's
// root, which has no privileges on the host.
func PrivateParent(paths ...string) (string, error) {
	for _, path := range paths {
		for up := filepath.Dir(path); up != "/"; up = filepath.Dir(up) {
			st, err := os.Stat(up)
			if err != nil {
				return "", err
			}
			if st.Mode()&0o001 == 0 && !slices.Contains(paths, up) {
				return up, nil
			}
		}
	}
	return "", nil
}

// mount mounts an overlay with mapped ids, as that of a sandbox is.
func mount(dir string) (why string, err error) {
	ids := idmap.Map{Base: 1 << 19, Size: 1 << 16}
	ns, err := ids.Namespace()
	if err != nil {
		return fmt.Sprintf("this kernel makes no user namespace: %v", err), nil
	}
	ns.Close()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(at(d), 0o700); err != nil {
			return "", err
		}
	}
	m := overlay.Mount{
		Lower: []string{at("lower")}, Upper: at("upper"), Work: at("work"), Target: at("merged"), IDs: &ids,
	}
	if err := m.Mount(); err != nil {
		return fmt.Sprintf("an overlay in %s cannot have mapped ids, which takes Linux 5.19, and ext4, xfs or btrfs: %v", filepath.Dir(dir), err), nil
	}
	defer func() {
		err = errors.Join(overlay.Unmount(at("merged"), overlay.UnmountOptions{Lazy: true}), err)
	}()
	if err := ids.AsRoot(func() error { return os.WriteFile(at("merged/file"), nil, 0o600) }); err != nil {
		return fmt.Sprintf("nothing can be made in an overlay with mapped ids in %s: %v", filepath.Dir(dir), err), nil
	}
	return "", nil
}

// Mount points that procfs and sysfs keep empty for these; they hide nothing.
var pseudo = map[string]bool{
	"autofs": true, "binfmt_misc": true, "bpf": true, "cgroup": true, "cgroup2": true, "configfs": true,
	"debugfs": true, "efivarfs": true,
	"fusectl": true, "nfsd": true, "pstore": true, "resctrl": true, "securityfs": true, "selinuxfs": true,
	"smackfs": true, "tracefs": true,
}

// covered reports whether part of a filesystem is hidden here, as it is in most containers:
// the kernel then refuses to mount one anew in a user namespace, where the hidden part would
// show.
func covered(fstype, where string) (string, error) {
	all, err := mountinfo.GetMounts(nil)
	if err != nil {
		return "", err
	}
	over := ""
	for _, m := range all {
		if m.FSType != fstype || m.Root != "/" {
			continue
		}
		clear := true
		for _, child := range all {
			if child.Parent == m.ID && !pseudo[child.FSType] && child.Mountpoint != "/sys/fs/cgroup" {
				clear, over = false, child.Mountpoint
			}
		}
		if clear {
			return "", nil
		}
	}
	if over == "" {
		return where + " is not mounted", nil
	}
	return fmt.Sprintf("%s is mounted over, and the kernel then lets no user namespace have a %s of its own", over,
		where), nil
}

// versions returns which of the two programs that restore is too old, or unknown. A missing
// CRIU is no reason: then nothing but files is restored.
func versions(ctx context.Context, binary string) (string, error) {
	said, err := version(ctx, binary)
	if err != nil {
		return "", err
	}
	if !strings.HasPrefix(said, "runc ") {
		return fmt.Sprintf("the OCI runtime is %s, and only runc is known to restore user namespaces",
			filepath.Base(binary)), nil
	}
	if !atLeast(said, oldestRunc) {
		return fmt.Sprintf("%s is older than %s, which is known to restore user namespaces", said, oldestRunc), nil
	}
	criu, err := host.Find("criu", nil)
	if errors.Is(err, fault.ErrNotFound) {
		return "", nil
	}
	if err == nil {
		said, err = version(ctx, criu)
	}
	if err == nil && !atLeast(said, oldestCRIU) {
		return fmt.Sprintf("CRIU (%s) is older than %s, which is known to restore user namespaces", said, oldestCRIU),
			nil
	}
	return "", err
}

func version(ctx context.Context, program string) (string, error) {
	cmd := exec.CommandContext(ctx, program, "--version")
	cmd.Env = host.Environ()
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", program, err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line), nil
}

var versionRE = lazy.Regexp(`(\d+)\.(\d+)`)

// atLeast compares the first version in a text; none in it is not.
func atLeast(said, want string) bool {
	a, b := parse(versionRE(), said), parse(versionRE(), want)
	return a[0] > b[0] || a[0] == b[0] && a[1] >= b[1]
}

func parse(re *regexp.Regexp, text string) (v [2]int) {
	if m := re.FindStringSubmatch(text); m != nil {
		for i := range v {
			v[i], _ = strconv.Atoi(m[i+1]) // digits; too many are 0, and too old
		}
	}
	return v
}
