package checks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/doctor"
	"github.com/agentbox/agentbox/runtime/internal/apparmor"
	"github.com/agentbox/agentbox/runtime/internal/userns"
)

func user() doctor.Check {
	if os.Geteuid() != 0 {
		return fail("root", "Run agentbox as root (sudo).", "user id %d is not root", os.Geteuid())
	}
	return ok("root", "running as root")
}

func kernel() doctor.Check {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fail("kernel", "", "uname: %v", err)
	}
	release := unix.ByteSliceToString(uts.Release[:])
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n == 2 && (major < 5 || major == 5 && minor < 10) {
		return warn("kernel", "Use Linux 5.10 or newer.", "Linux %s is older than any that is tested", release)
	}
	return ok("kernel", "Linux %s %s", release, unix.ByteSliceToString(uts.Machine[:]))
}

// existing returns the deepest existing directory of path.
func existing(path string) string {
	for {
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			return path
		}
		parent := filepath.Dir(path)
		if parent == path {
			return path
		}
		path = parent
	}
}

// overlayfs mounts one as a sandbox's, on the filesystem that will hold them,
// and proves that it takes a whiteout.
func overlayfs(root string) doctor.Check {
	const name = "overlayfs"
	dir, err := os.MkdirTemp(existing(root), ".doctor-")
	if err != nil {
		return fail(name, "Give a root that can be written (--root).", "%v", err)
	}
	defer os.RemoveAll(dir)
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			return fail(name, "", "%v", err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "lower", "file"), nil, 0o600); err != nil {
		return fail(name, "", "%v", err)
	}
	merged := filepath.Join(dir, "merged")
	opts := fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work,redirect_dir=off,metacopy=off,index=off",
		dir, dir, dir)
	if err := unix.Mount("overlay", merged, "overlay", 0, opts); err != nil {
		remedy := "Load the module (modprobe overlay), or use a root on ext4, xfs or btrfs (--root)."
		if errors.Is(err, unix.EPERM) {
			remedy = "Run agentbox as root with CAP_SYS_ADMIN."
		}
		return fail(name, remedy, "an overlay cannot be mounted in %s: %v", existing(root), err)
	}
	defer func() { _ = unix.Unmount(merged, unix.MNT_DETACH) }()
	if err := os.Remove(filepath.Join(merged, "file")); err != nil {
		return fail(name, "Use a root on ext4, xfs or btrfs (--root).", "deleting through an overlay: %v", err)
	}
	st, err := os.Lstat(filepath.Join(dir, "upper", "file"))
	if err != nil || st.Mode()&fs.ModeCharDevice == 0 {
		return fail(name, "Use a root on ext4, xfs or btrfs (--root).",
			"the overlay in %s made no whiteout", existing(root))
	}
	if err := unix.Setxattr(filepath.Join(dir, "upper"), "trusted.agentbox", []byte("x"), 0); err != nil {
		return fail(name, "Use a root on ext4, xfs or btrfs (--root).",
			"trusted extended attributes cannot be set in %s: %v", existing(root), err)
	}
	return ok(name, "mounted and used in %s", existing(root))
}

func cgroups() doctor.Check {
	const name = "cgroups"
	need := []string{"cpu", "memory", "pids"}
	if data, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		have := strings.Fields(string(data))
		if missing := lacking(have, need); len(missing) > 0 {
			return warn(name, "Boot with these controllers enabled.",
				"cgroup v2 without %s: those limits have no effect", strings.Join(missing, ", "))
		}
		return ok(name, "cgroup v2 with %s", strings.Join(have, " "))
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return fail(name, "Mount /proc.", "%v", err)
	}
	var have []string
	for _, line := range strings.Split(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 3 && f[2] == "cgroup" {
			have = append(have, strings.Split(f[3], ",")...)
		}
	}
	if !slices.Contains(have, "freezer") {
		return fail(name, "Mount the cgroup filesystem (install systemd or cgroupfs-mount).",
			"no cgroup v2 and no freezer of cgroup v1: sandboxes cannot be paused")
	}
	if missing := lacking(have, need); len(missing) > 0 {
		return warn(name, "Mount these controllers.", "cgroup v1 without %s: those limits have no effect",
			strings.Join(missing, ", "))
	}
	return ok(name, "cgroup v1 with freezer, %s", strings.Join(need, ", "))
}

func lacking(have, need []string) (missing []string) {
	for _, n := range need {
		if !slices.Contains(have, n) {
			missing = append(missing, n)
		}
	}
	return missing
}

// capCosts lists the cost of lacking a capability. No cost is known for the others.
var capCosts = []struct {
	number int
	name   string
	fatal  bool
	cost   string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", true, "no mounts, namespaces or CRIU"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE", true, "CRIU cannot look into processes"},
	{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE", true, "files of other users cannot be captured"},
	{unix.CAP_CHOWN, "CAP_CHOWN", true, "owners cannot be restored"},
	{unix.CAP_FOWNER, "CAP_FOWNER", true, "modes and times of other users' files cannot be restored"},
	{unix.CAP_SETUID, "CAP_SETUID", true, "no process can change its user"},
	{unix.CAP_SETGID, "CAP_SETGID", true, "no process can change its group"},
	{unix.CAP_MKNOD, "CAP_MKNOD", true, "whiteouts and devices cannot be restored"},
	{unix.CAP_KILL, "CAP_KILL", true, "processes of other users cannot be ended"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", true, "no sandbox networks, no TCP connections in checkpoints"},
	{
		unix.CAP_SYS_RESOURCE, "CAP_SYS_RESOURCE", false,
		"a sandbox with processes of another user than root cannot be checkpointed with its processes, and hard limits cannot be raised",
	},
	{unix.CAP_SETFCAP, "CAP_SETFCAP", false, "files with capabilities cannot be restored"},
	{unix.CAP_FSETID, "CAP_FSETID", false, "set-group-id bits may be lost"},
	{unix.CAP_SYS_CHROOT, "CAP_SYS_CHROOT", false, "CRIU cannot restore a process's root"},
	{unix.CAP_NET_RAW, "CAP_NET_RAW", false, "no sandbox can be given raw sockets"},
	{unix.CAP_NET_BIND_SERVICE, "CAP_NET_BIND_SERVICE", false, "ports below 1024 cannot be published"},
	{unix.CAP_AUDIT_WRITE, "CAP_AUDIT_WRITE", false, "no sandbox can be given it"},
	{unix.CAP_CHECKPOINT_RESTORE, "CAP_CHECKPOINT_RESTORE", false, ""}, // CAP_SYS_ADMIN covers it
}

// protections are the kernel's beyond namespaces, cgroups and capabilities, for
// sandboxes of the backends oci and containerd.
func protections() doctor.Check {
	const name = "protections"
	if mode, err := unix.PrctlRetInt(unix.PR_GET_SECCOMP, 0, 0, 0, 0); err != nil || mode < 0 {
		return fail(name, "Use a kernel with CONFIG_SECCOMP_FILTER.",
			"the kernel has no seccomp: any system call can be made from a sandbox")
	}
	// For the proxy of filtered sandboxes.
	landlock := "no Landlock in this kernel"
	if abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0,
		unix.LANDLOCK_CREATE_RULESET_VERSION); errno == 0 {
		landlock = fmt.Sprintf("Landlock %d", abi)
	}
	switch {
	case !apparmor.Enabled():
		return ok(name, "no new privileges, seccomp; no AppArmor in this kernel; %s", landlock)
	case !apparmor.Loadable():
		return warn(name, "Install apparmor_parser (package apparmor).",
			"no new privileges, seccomp; the kernel has AppArmor, but nothing here loads profiles; %s", landlock)
	}
	return ok(name, "no new privileges, seccomp, AppArmor (%s); %s", apparmor.Default, landlock)
}

func capabilities() doctor.Check {
	const name = "capabilities"
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return fail(name, "", "capget: %v", err)
	}
	return judge(name, func(n int) bool { return data[n/32].Effective&(1<<(n%32)) != 0 })
}

func judge(name string, has func(int) bool) doctor.Check {
	status, missing := doctor.OK, []string{}
	for _, c := range capCosts {
		if c.cost == "" || has(c.number) {
			continue
		}
		missing = append(missing, c.name+": "+c.cost)
		if c.fatal {
			status = doctor.Fail
		} else if status == doctor.OK {
			status = doctor.Warn
		}
	}
	if status == doctor.OK {
		return ok(name, "all that are needed")
	}
	return doctor.Check{
		Name: name, Status: status, Detail: "missing " + strings.Join(missing, "; "),
		Remedy: "Run agentbox where root has them (not inside a restricted container or service). Sandboxes with user ids of their own (see userns) can be checkpointed without CAP_SYS_RESOURCE.",
	}
}

// nat sets what bridge mode sets, in a network namespace that ends with this
// thread.
func nat() doctor.Check {
	const name, remedy = "nat", "Use a kernel with nf_tables and NAT (modprobe nf_tables nft_masq nft_chain_nat); sandboxes without --network bridge do without."
	err := <-guard.Start(func() error {
		goruntime.LockOSThread() // and never unlocked: the thread is spent
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("network namespace: %w", err)
		}
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "doctor"})
		chain := conn.AddChain(&nftables.Chain{
			Name: "post", Table: table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Masq{}}})
		return conn.Flush()
	})
	if err != nil {
		return warn(name, remedy, "a NAT rule cannot be set: %v", err)
	}
	return ok(name, "nftables takes a masquerading rule")
}

func forwarding() doctor.Check {
	const name = "ip_forward"
	data, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		return warn(name, "", "%v", err)
	}
	if !bytes.HasPrefix(data, []byte("1")) {
		return warn(name, "sysctl -w net.ipv4.ip_forward=1",
			"packets are not forwarded: sandboxes in bridge mode reach the host only")
	}
	return ok(name, "packets are forwarded")
}

// Below these a checkpoint is likely to fail.
const (
	lowBytes   = 1 << 30
	lowPercent = 5
)

func disk(root string) doctor.Check {
	const name = "disk"
	dir := existing(root)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fail(name, "Give a root that can be used (--root).", "%s: %v", dir, err)
	}
	free, total := st.Bavail*uint64(st.Bsize), st.Blocks*uint64(st.Bsize)
	return space(name, dir, free, total, st.Ffree, st.Files)
}

func space(name, dir string, free, total, inodes, allInodes uint64) doctor.Check {
	const remedy = "Free space, remove old checkpoints, or move the root (--root)."
	percent := uint64(100)
	if total > 0 {
		percent = free * 100 / total
	}
	text := fmt.Sprintf("%.1f GiB (%d%%) free at %s", float64(free)/(1<<30), percent, dir)
	switch {
	case free < lowBytes || percent < lowPercent:
		return warn(name, remedy, "only %s", text)
	case allInodes > 0 && inodes*100/allInodes < lowPercent: // some filesystems count none
		return warn(name, remedy, "only %d inodes free at %s", inodes, dir)
	}
	return ok(name, "%s", text)
}

// quota checks how --storage-size is enforced.
func quota(root string) doctor.Check {
	const name = "quota"
	dir := existing(root)
	err := overlay.ProjectQuota(dir)
	if err == nil {
		return ok(name, "project quotas at %s: the kernel holds sandboxes to --storage-size", dir)
	}
	return ok(name, "none at %s: the supervisor holds sandboxes to --storage-size (%v)", dir, err)
}

// userNamespaces reports whether new sandboxes of the backend oci have user ids of
// their own.
func userNamespaces(ctx context.Context, root string) doctor.Check {
	const name, remedy = "userns", "Sandboxes work without; their root is the host's then. docs/security.md says what it takes."
	no := "new sandboxes have the host's user ids: %s"
	binary, err := host.Find("runc", nil)
	if err != nil {
		return warn(name, install("runc"), no, "runc is not installed")
	}
	at := existing(root)
	dir, err := os.MkdirTemp(at, ".doctor-")
	if err != nil {
		return warn(name, "Give a root that can be written (--root).", "%v", err)
	}
	defer os.RemoveAll(dir)
	why, err := userns.Unavailable(ctx, dir, binary)
	if err != nil {
		return warn(name, remedy, no, err)
	}
	if why != "" {
		return warn(name, remedy, no, why)
	}
	if at != filepath.Clean(root) {
		at = filepath.Join(at, "root") // yet to be made
	}
	shut, err := userns.PrivateParent(at)
	if err != nil {
		return warn(name, remedy, no, err)
	}
	if shut != "" {
		return warn(name, "Let others pass (chmod o+x "+shut+").", no, "only root passes "+shut)
	}
	return ok(name, "new sandboxes have user ids of their own (run --userns auto, the default)")
}
