// Package bundle makes what an OCI runtime is given for a sandbox, whichever
// engine hands it over: the config.json with Docker's confinement, the user a
// command runs as, what is mounted over the root filesystem, and the files of
// /etc that tell a sandbox its name and its resolver.
package bundle

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apparmor"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/network"
)

// InitPath is where the small init of a sandbox with Spec.Init is mounted. It
// lies in /dev, a tmpfs, so that it leaves no mount point in the upperdir.
const InitPath = "/dev/agentbox-init"

// ConfigKey is the annotation by which runc finds the CRIU configuration file
// of a container.
const ConfigKey = "org.criu.config"

// Place says where one sandbox's bundle finds what it is made of.
type Place struct {
	Dir     string // of the sandbox, for as long as it exists: holds etc and init
	Rootfs  string // where its root filesystem is mounted
	Upper   string // its upperdir
	Config  string // CRIU's configuration file, for the annotation
	Cgroup  string // its path
	Init    string // the program to copy for the init
	Secrets string // where the secrets are while it runs
	Cgroups kernel.Cgroups
}

// Prepare writes the files that a start wants to find and makes the sandbox's
// config.json.
func (p Place) Prepare(
	s runtime.Spec, env []string, end network.Endpoint, size *runtime.Size, restores bool, secrets []runtime.SecretFile,
) (*specs.Spec, error) {
	if err := p.writeEtc(s, end, restores); err != nil {
		return nil, err
	}
	spec, err := p.spec(s, env, end.Path, size, restores, secrets)
	if err != nil {
		return nil, err
	}
	// The annotation names it, so CRIU wants it to exist.
	f, err := os.OpenFile(p.Config, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return spec, f.Close()
}

// spec makes a sandbox's config.json. Its root filesystem is mounted, and read to find the
// user; restored processes keep their ids, so then a missing user does not matter.
func (p Place) spec(
	s runtime.Spec, env []string, netns string, size *runtime.Size, restores bool, secrets []runtime.SecretFile,
) (*specs.Spec, error) {
	root, err := kernel.OpenRoot(p.Rootfs)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	first := runtime.Process{Args: s.Args, Workdir: s.Workdir, User: s.User, Terminal: s.Terminal}
	if !restores {
		if err := s.IDs.AsRoot(func() error { return makeVolumes(root, s) }); err != nil {
			return nil, err
		}
	}
	accounts := root
	if restores {
		if _, err := lookUser(root, s.User); err != nil {
			first.User, accounts = numericUser(s.User), nil
		}
		if checkWorkdir(root, s.Workdir) != nil {
			first.Workdir = "/"
		}
	}
	proc, err := process(accounts, s, env, first, size)
	if err != nil {
		return nil, err
	}
	if s.Init {
		proc.Args = append([]string{InitPath, "--"}, proc.Args...)
	}
	if err := p.PutSecrets(s, secrets, proc.User); err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	mounts, err := p.mounts(s)
	if err != nil {
		return nil, err
	}
	limits, err := p.resources(s.Resources)
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{
		Version:     specs.Version,
		Process:     proc,
		Root:        &specs.Root{Path: p.Rootfs, Readonly: s.ReadOnly},
		Hostname:    s.Hostname,
		Mounts:      mounts,
		Annotations: map[string]string{ConfigKey: p.Config},
		Linux: &specs.Linux{
			CgroupsPath:   p.Cgroup,
			Namespaces:    p.namespaces(s, netns),
			Resources:     limits,
			MaskedPaths:   policy.MaskedPaths,
			ReadonlyPaths: policy.ReadonlyPaths,
		},
	}
	if s.IDs != nil {
		ids := []specs.LinuxIDMapping{{HostID: s.IDs.Base, Size: s.IDs.Size}}
		spec.Linux.UIDMappings, spec.Linux.GIDMappings = ids, ids
	}
	if spec.Linux.Seccomp, err = SyscallFilter(spec, s.Security); err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	return spec, nil
}

// grantable returns the capabilities of a sandbox that we can grant; runc fails on others.
// One that was requested explicitly must be grantable.
func grantable(want []string) ([]string, error) {
	asked := want != nil
	if !asked {
		want = policy.DefaultCapabilities
	}
	names := []string{}
	for _, name := range want {
		number := slices.Index(policy.AllCapabilities, name)
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0)
		switch {
		case number >= 0 && err == nil && has == 1:
			names = append(names, "CAP_"+name)
		case asked && !slices.Contains(policy.DefaultCapabilities, name):
			return nil, &fault.Error{Err: fmt.Errorf("%w: the capability %s is not ours to give", fault.ErrUnsupported,
				name), Hint: "Do without it: --cap-drop " + name + "."}
		}
	}
	return names, nil
}

// Process makes the process section of an exec in a sandbox whose first process
// that is.
func Process(
	first *kernel.Process, s runtime.Spec, env []string, p runtime.Process, size *runtime.Size,
) (*specs.Process, error) {
	root, err := first.Root()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	p.User = cmp.Or(p.User, s.User)
	p.Workdir = cmp.Or(p.Workdir, s.Workdir)
	return process(root, s, env, p, size)
}

// process makes the process section, for the first process and for execs.
func process(
	root *os.File, s runtime.Spec, env []string, p runtime.Process, size *runtime.Size,
) (*specs.Process, error) {
	if len(p.Args) == 0 {
		return nil, fmt.Errorf("%w: no command", fault.ErrInvalid)
	}
	who, err := lookUser(root, p.User)
	if err != nil {
		return nil, err
	}
	if root != nil {
		if err := s.IDs.AsRoot(func() error { return checkWorkdir(root, p.Workdir) }); err != nil {
			return nil, err
		}
	}
	caps, err := grantable(s.Security.Capabilities)
	if err != nil {
		return nil, err
	}
	profile, err := apparmor.Profile(s.Security.AppArmor)
	if err != nil {
		return nil, err
	}
	set := &specs.LinuxCapabilities{Bounding: caps}
	if who.uid == 0 {
		set.Effective, set.Permitted = caps, caps
	}
	defaults := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOSTNAME=" + s.Hostname,
		"HOME=" + who.home,
	}
	if p.Terminal {
		defaults = append(defaults, "TERM=xterm")
	}
	proc := &specs.Process{
		Terminal:     p.Terminal,
		User:         specs.User{UID: who.uid, GID: who.gid, AdditionalGids: who.groups},
		Args:         p.Args,
		Env:          runtime.JoinEnv(defaults, s.Env, p.Env, env),
		Cwd:          p.Workdir,
		Capabilities: set,
		Rlimits:      rlimits(),

		NoNewPrivileges: s.Security.NoNewPrivileges,
		ApparmorProfile: profile,
	}
	if proc.Cwd == "" {
		proc.Cwd = "/"
	}
	if p.Terminal && size != nil {
		proc.ConsoleSize = &specs.Box{Height: uint(size.Height), Width: uint(size.Width)}
	}
	return proc, nil
}

// rlimits sets the number of open files only: the soft limit to what programs
// expect that scan all of their descriptors, the hard limit to ours, since
// raising it takes CAP_SYS_RESOURCE. Everything else is inherited.
func rlimits() []specs.POSIXRlimit {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return nil
	}
	hard := min(lim.Max, 1<<20)
	return []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Soft: min(1024, hard), Hard: hard}}
}

// namespaces leaves the network namespace out for the host's; with a user namespace the OCI runtime
// makes both. A cgroup namespace is for v2 only, as under Docker: under v1 each hierarchy is mounted
// from the container's own cgroup on, and there is nothing else to see.
func (p Place) namespaces(s runtime.Spec, netns string) []specs.LinuxNamespace {
	list := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
		{Type: specs.MountNamespace},
	}
	switch {
	case s.IDs != nil:
		list = append(list, specs.LinuxNamespace{Type: specs.UserNamespace},
			specs.LinuxNamespace{Type: specs.NetworkNamespace})
	case netns != "":
		list = append(list, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: netns})
	}
	if p.Cgroups.Unified() {
		list = append(list, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return list
}

// period is the time over which a CPU quota counts, in microseconds.
const period = uint64(100_000)

func (p Place) resources(r runtime.Resources) (*specs.LinuxResources, error) {
	out := &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}
	if r.Memory > 0 {
		out.Memory = &specs.LinuxMemory{Limit: &r.Memory}
		if SwapAccounting(p.Cgroups) {
			swap := TotalSwap(r)
			out.Memory.Swap = &swap
		}
	}
	if r.CPUs > 0 {
		// The kernel takes no quota below a millisecond.
		quota, over := max(int64(r.CPUs*float64(period)), 1000), period
		out.CPU = &specs.LinuxCPU{Quota: &quota, Period: &over}
	}
	if r.Pids > 0 {
		out.Pids = &specs.LinuxPids{Limit: r.Pids}
	}
	if r.IO > 0 {
		disk, err := DiskOf(p.Upper)
		if err != nil {
			return nil, err
		}
		limit := specs.LinuxThrottleDevice{Rate: uint64(r.IO)}
		limit.Major, limit.Minor = int64(disk.Major), int64(disk.Minor)
		out.BlockIO = &specs.LinuxBlockIO{
			ThrottleReadBpsDevice:  []specs.LinuxThrottleDevice{limit},
			ThrottleWriteBpsDevice: []specs.LinuxThrottleDevice{limit},
		}
	}
	return out, nil
}

// TotalSwap is the limit of memory and swap together, as runtimes and engines
// take it; -1: none.
func TotalSwap(r runtime.Resources) int64 {
	if r.Swap < 0 {
		return -1
	}
	return r.Memory + r.Swap
}

// SwapAccounting reports whether swap can be limited: it is an option of v1 kernels; v2 ones have
// it, or need none.
func SwapAccounting(c kernel.Cgroups) bool {
	if c.Unified() {
		return true
	}
	return slices.ContainsFunc(c, func(m kernel.Hierarchy) bool {
		_, err := os.Stat(filepath.Join(m.Path, "memory.memsw.limit_in_bytes"))
		return err == nil
	})
}

// SyscallFilter returns Docker's default profile except for RingRule and SecretRule, or the
// sandbox's own except for RingRule. An unconfined sandbox has only that much of it.
func SyscallFilter(spec *specs.Spec, sec runtime.Security) (*specs.LinuxSeccomp, error) {
	if sec.SeccompProfile != "" {
		return ownFilter(spec, sec)
	}
	filter, err := seccomp.GetDefaultProfile(spec)
	if err != nil || filter == nil {
		return nil, errors.Join(err, errors.New("no profile for this architecture"))
	}
	if sec.Seccomp == policy.SeccompUnconfined {
		if sec.IOUring {
			return nil, nil
		}
		filter.DefaultAction, filter.DefaultErrnoRet, filter.Syscalls = specs.ActAllow, nil, nil
	} else {
		replaceRules(filter, WithoutSecrets, SecretRule())
	}
	ruleRings(filter, sec)
	return filter, nil
}

func ownFilter(spec *specs.Spec, sec runtime.Security) (*specs.LinuxSeccomp, error) {
	if _, err := policy.ParseSeccomp(sec.SeccompProfile); err != nil {
		return nil, err
	}
	filter, err := seccomp.LoadProfile(sec.SeccompProfile, spec)
	if err == nil && !sec.IOUring { // else it decides itself
		ruleRings(filter, sec)
	}
	return filter, err
}

// ruleRings puts RingRule in the place of what a filter says of io_uring.
func ruleRings(filter *specs.LinuxSeccomp, sec runtime.Security) {
	replaceRules(filter, WithoutRings, RingRule(sec))
}

// replaceRules puts a rule in the place of what a filter says of the names that without
// leaves out.
func replaceRules(filter *specs.LinuxSeccomp, without func([]string) []string, rule specs.LinuxSyscall) {
	for i := range filter.Syscalls {
		filter.Syscalls[i].Names = without(filter.Syscalls[i].Names)
	}
	filter.Syscalls = slices.DeleteFunc(filter.Syscalls, func(call specs.LinuxSyscall) bool {
		return len(call.Names) == 0
	})
	filter.Syscalls = append(filter.Syscalls, rule)
}

// rings are the calls of io_uring.
var rings = []string{"io_uring_setup", "io_uring_enter", "io_uring_register"}

// WithoutRings is names without the calls of io_uring.
func WithoutRings(names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(rings, name) })
}

// RingRule returns a filter's rule for io_uring: as if the kernel had none, unless it is asked for.
// CRIU cannot dump its rings, and programs that get ENOSYS fall back, while EPERM surprises them.
func RingRule(sec runtime.Security) specs.LinuxSyscall {
	if sec.IOUring {
		return specs.LinuxSyscall{Names: rings, Action: specs.ActAllow}
	}
	enosys := uint(unix.ENOSYS)
	return specs.LinuxSyscall{Names: rings, Action: specs.ActErrno, ErrnoRet: &enosys}
}

// secrets is the call by which a process gets memory that nothing else can read, CRIU included.
const secrets = "memfd_secret"

// WithoutSecrets is names without memfd_secret.
func WithoutSecrets(names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == secrets })
}

// SecretRule returns the rule for memfd_secret in Docker's profile: as if the kernel had none, as
// many kernels do not. A process that uses it makes every checkpoint of its sandbox fail.
func SecretRule() specs.LinuxSyscall {
	enosys := uint(unix.ENOSYS)
	return specs.LinuxSyscall{Names: []string{secrets}, Action: specs.ActErrno, ErrnoRet: &enosys}
}
