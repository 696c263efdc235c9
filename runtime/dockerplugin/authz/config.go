package authz

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/docker/docker/api/types/container"

	"github.com/agentbox/agentbox/policy"
)

var (
	plainRuntimes   = []string{"", "runc", "io.containerd.runc.v2", "agentbox"}
	plainLogDrivers = []string{"", "none", "json-file", "local", "journald"}
)

// The paths of /proc and /sys that engines hide: all those of the newest engine, since a
// list in a call replaces the engine's own, and has to hold these at least.
var (
	maskedPaths = []string{"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore",
		"/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// throttles are the masks that engines have for each processor of this host.
var throttles = sync.OnceValue(func() []string {
	found, _ := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*/thermal_throttle") // fails for bad patterns alone
	return found
})

// greedyUlimits give a process the processor before all others of the host.
var greedyUlimits = []string{"nice", "rtprio"}

func (j *Judge) hostConfig(hc *container.HostConfig, f *findings) {
	p := &j.policy
	if hc.Privileged && !p.Privileged {
		f.add("privileged", "privileged", "a privileged container has the host's devices and every capability")
	}
	j.namespace("network", string(hc.NetworkMode), f)
	j.namespace("pid", string(hc.PidMode), f)
	j.namespace("ipc", string(hc.IpcMode), f)
	j.namespace("uts", string(hc.UTSMode), f)
	j.namespace("user", string(hc.UsernsMode), f)
	j.namespace("cgroup", string(hc.CgroupnsMode), f)
	j.namespace("cgroup", string(hc.Cgroup), f)
	if len(hc.VolumesFrom) > 0 && !p.VolumesFrom {
		f.add("volumes from", "volumes_from", "the mounts of %s may be of the host", quote(hc.VolumesFrom[0]))
	}
	j.capabilities(hc.CapAdd, f)
	j.securityOpt(hc, f)
	if !slices.Contains(plainRuntimes, hc.Runtime) && !slices.Contains(p.Runtimes, hc.Runtime) {
		f.add("runtime", "runtimes", "the runtime %s is not allowed", quote(hc.Runtime))
	}
	if !slices.Contains(plainLogDrivers, hc.LogConfig.Type) && !slices.Contains(p.LogDrivers, hc.LogConfig.Type) {
		f.add("log driver", "log_drivers", "the log driver %s, which runs in dockerd on the host, is not allowed",
			quote(hc.LogConfig.Type))
	}
	for _, key := range sorted(hc.Sysctls) {
		if !matchesAny(p.Sysctls, key) {
			f.add("sysctl", "sysctls", "%s is not allowed", quote(key))
		}
	}
	for _, key := range sorted(hc.Annotations) {
		if !matchesAny(p.Annotations, key) {
			f.add("annotation", "annotations",
				"%s is not allowed: annotations command the runtime on the host", quote(key))
		}
	}
	if hc.OomScoreAdj < 0 && !p.Priority {
		f.add("priority", "priority", "OomScoreAdj below 0 has the kernel kill the host's processes first")
	}
	j.resources(&hc.Resources, f)
	j.mounts(hc, f)
}

// namespace judges the mode of a namespace. A daemon compares exactly; other
// spellings of host are errors there and may as well be refused here.
func (j *Judge) namespace(kind, mode string, f *findings) {
	before, _, _ := strings.Cut(mode, ":")
	switch strings.ToLower(strings.TrimSpace(before)) {
	case "host":
		j.hostNamespace(kind, f)
	case "container":
		if !j.policy.JoinContainers && strings.Contains(mode, ":") {
			f.add("other container's namespace", "join_containers",
				"%s: the %s namespace of another container may be the host's", quote(mode), kind)
		}
	}
}

func (j *Judge) hostNamespace(kind string, f *findings) {
	if !slices.Contains(j.policy.HostNamespaces, kind) {
		f.add("host namespace", "host_namespaces", "the host's %s namespace is not allowed", kind)
	}
}

func (j *Judge) capabilities(added []string, f *findings) {
	may := make(map[string]bool)
	// Docker gives its own unasked, so that dropping all and adding some of these
	// back is no gain.
	for _, c := range slices.Concat(policy.DockerCapabilities, j.policy.Capabilities.Allow) {
		may[capability(c)] = true
	}
	for _, c := range added {
		if !may["ALL"] && !may[capability(c)] {
			f.add("capability", "capabilities.allow", "%s is not allowed", quote(c))
		}
	}
}

func capability(name string) string {
	return strings.TrimPrefix(strings.ToUpper(strings.TrimSpace(name)), "CAP_")
}

func isCapability(name string) bool {
	name = capability(name)
	return name != "" && strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_") == ""
}

func (j *Judge) securityOpt(hc *container.HostConfig, f *findings) {
	for _, opt := range hc.SecurityOpt {
		key, value, ok := strings.Cut(opt, "=")
		if !ok {
			key, value, ok = strings.Cut(opt, ":") // what clients wrote before 17.04
		}
		if opt == "disable" {
			key, value = "label", "disable"
		}
		switch {
		case key == "no-new-privileges" && (!ok || isTrue(value)),
			key == "seccomp" && value == "builtin",
			key == "apparmor" && value == "docker-default":
			continue
		}
		if !j.allowsOption(key, value) {
			f.add("security option", "security_opt", "%s is not allowed", quote(opt))
		}
	}
	unmasked := hc.MaskedPaths != nil && missesOne(hc.MaskedPaths, slices.Concat(maskedPaths, throttles())) ||
		hc.ReadonlyPaths != nil && missesOne(hc.ReadonlyPaths, readonlyPaths)
	if unmasked && !j.allowsOption("systempaths", "unconfined") {
		f.add("security option", "security_opt",
			"systempaths=unconfined, or less of /proc and /sys hidden than usual, is not allowed")
	}
}

func (j *Judge) allowsOption(key, value string) bool {
	return slices.Contains(j.policy.SecurityOpt, key+"="+value) || slices.Contains(j.policy.SecurityOpt, key+"=*")
}

func isTrue(s string) bool {
	b, err := strconv.ParseBool(s)
	return err == nil && b
}

func missesOne(have, want []string) bool {
	return slices.ContainsFunc(want, func(p string) bool { return !slices.Contains(have, p) })
}

// resources is what create and update share.
func (j *Judge) resources(r *container.Resources, f *findings) {
	p := &j.policy
	if len(r.Devices) > maxPaths {
		f.add("device", "", "%d devices in one container; %d are the most that the judge looks at",
			len(r.Devices), maxPaths)
		return
	}
	for _, d := range r.Devices {
		if f.full() {
			return
		}
		j.device(d.PathOnHost, f)
	}
	for _, rule := range r.DeviceCgroupRules {
		if !slices.Contains(p.DeviceCgroupRules, rule) {
			f.add("device", "device_cgroup_rules", "the device rule %s is not allowed", quote(rule))
		}
	}
	for _, req := range r.DeviceRequests {
		if !j.allowsRequest(req) {
			f.add("device", "device_requests", "the request for devices of %s is not allowed", quote(requested(req)))
		}
	}
	if r.CgroupParent != "" && !slices.Contains(p.CgroupParents, r.CgroupParent) {
		f.add("cgroup parent", "cgroup_parents", "%s is not allowed", quote(r.CgroupParent))
	}
	if p.Priority {
		return
	}
	if r.CPURealtimePeriod != 0 || r.CPURealtimeRuntime != 0 {
		f.add("priority", "priority", "real-time scheduling can take the processors from the host")
	}
	if r.OomKillDisable != nil && *r.OomKillDisable {
		f.add("priority", "priority",
			"a container that the kernel does not kill when memory runs out can stop the host")
	}
	for _, u := range r.Ulimits {
		if u != nil && slices.Contains(greedyUlimits, strings.ToLower(u.Name)) {
			f.add("priority", "priority", "the ulimit %s is not allowed", quote(u.Name))
		}
	}
}

func requested(r container.DeviceRequest) string {
	if r.Driver != "" {
		return r.Driver
	}
	var all []string
	for _, set := range r.Capabilities {
		all = append(all, strings.Join(set, "+"))
	}
	return strings.Join(all, ",")
}

// allowsRequest: a request that names no driver goes to the one that has one
// of the sets of capabilities, so every set needs one that the policy names.
func (j *Judge) allowsRequest(r container.DeviceRequest) bool {
	if r.Driver != "" {
		return slices.Contains(j.policy.DeviceRequests, r.Driver)
	}
	for _, set := range r.Capabilities {
		if !slices.ContainsFunc(set, func(c string) bool { return slices.Contains(j.policy.DeviceRequests, c) }) {
			return false
		}
	}
	return len(r.Capabilities) > 0
}

// matchesAny compares with patterns that may end in a star.
func matchesAny(patterns []string, s string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		head, star := strings.CutSuffix(p, "*")
		return p == s || star && strings.HasPrefix(s, head)
	})
}

func sorted(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
