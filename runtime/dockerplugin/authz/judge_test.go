package authz

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// tree is a directory, owned by root as everything above it, for policies to
// allow parts of.
func tree(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it makes directories of several owners")
	}
	top := t.TempDir()
	for p := top; p != "/"; p = filepath.Dir(p) {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode()&0o022 != 0 && info.Mode()&os.ModeSticky == 0 || info.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Fatalf("this test needs a TMPDIR that only root can change: %s is %v", p, info.Mode())
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"work/a/sub", "ro/data", "user/home", "open/dir", "deep/x/y", "state", "box"} {
		must(os.MkdirAll(filepath.Join(top, d), 0o755))
	}
	must(os.Chown(filepath.Join(top, "user"), 1000, 1000))
	must(os.Chmod(filepath.Join(top, "open"), 0o777))
	for link, to := range map[string]string{
		"work/root": "/", "work/up": "../../001/ro", "work/rel": "a", "work/loop": "loop", "work/etc": "/etc",
		"work/proc": "/proc/self/root", "work/sock": "/var/run/docker.sock", "alias": "work",
		"work/dangling": "/nonexistent/x",
	} {
		must(os.Symlink(to, filepath.Join(top, link)))
	}
	must(os.WriteFile(filepath.Join(top, "state/secret"), nil, 0o600))
	must(os.Link(filepath.Join(top, "state/secret"), filepath.Join(top, "work/hard")))
	return top
}

const allowing = `
mounts:
  allow: [TOP/work/*, TOP/user/*, TOP/open/*, TOP/deep/**, TOP/box]
  read_only: [TOP/ro/**]
  guard: [TOP/state/secret]
devices: [/dev/null]
`

const everything = `
privileged: true
host_namespaces: [network, pid, ipc, uts, user, cgroup]
join_containers: true
volumes_from: true
mounts: {allow: [/**], volume_drivers: [other], volume_types: [nfs, overlay, ext4], docker_socket: true, engine_state: true, shared: true, exchangeable: true}
devices: [/dev/**]
device_cgroup_rules: ["c 1:1 rwm"]
device_requests: [gpu, cdi]
capabilities: {allow: [ALL]}
security_opt: ["apparmor=unconfined", "seccomp=*", "label=*", "no-new-privileges=false", "systempaths=unconfined"]
runtimes: [kata]
sysctls: [net.*]
cgroup_parents: [/x]
annotations: [a.*]
log_drivers: [syslog]
network_drivers: [macvlan]
networks: {subnets: [0.0.0.0/0, "::/0"], ipam_drivers: [dhcp], options: [com.docker.network.bridge.name=*, com.docker.network.bridge.gateway_mode_ipv4=routed, com.docker.network.host_ipv4=*, com.docker.network.endpoint.x=*], config_from: true}
priority: true
image_urls: true
build: true
plugins: true
swarm: true
unknown_calls: allow
unknown_fields: allow
`

func judge(t *testing.T, yaml, top string) *Judge {
	t.Helper()
	p, err := Parse([]byte(strings.ReplaceAll(yaml, "TOP", top)))
	if err != nil {
		t.Fatal(err)
	}
	j := NewJudge(p, Options{})
	j.routes = func() ([]netip.Prefix, error) { return []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16")}, nil }
	return j
}

// text fills in what a case depends on the machine for.
func text(s, top string) []byte {
	var masks []string
	for _, m := range slices.Concat(maskedPaths, throttles()) {
		masks = append(masks, strconv.Quote(m))
	}
	return []byte(strings.NewReplacer("TOP", top, "MASKS", strings.Join(masks, ",")).Replace(s))
}

// Each case is one call. key is what the refusal has to name, "ok" if the call
// passes, "-" if no key of the policy opens it.
var cases = []struct{ name, method, uri, body, key string }{
	// what passes
	{
		"plain run", "POST", "/v1.41/containers/create",
		`{"Image":"x","Cmd":["true"],"HostConfig":{"NetworkMode":"default","IpcMode":"","LogConfig":{"Type":"","Config":{}},"MaskedPaths":null}}`, "ok",
	},
	{"no HostConfig", "POST", "/containers/create", `{"Image":"x"}`, "ok"},
	{"named volume", "POST", "/containers/create", `{"HostConfig":{"Binds":["vol:/x:ro"]}}`, "ok"},
	{"anonymous volume", "POST", "/containers/create", `{"Volumes":{"/x":{}},"HostConfig":{"Binds":["/x"]}}`, "ok"},
	{
		"volume mount", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"volume","Source":"v","Target":"/x"}]}}`, "ok",
	},
	{
		"tmpfs", "POST", "/containers/create",
		`{"HostConfig":{"Tmpfs":{"/run":"rw,size=1m"},"Mounts":[{"Type":"tmpfs","Target":"/x"}]}}`, "ok",
	},
	{
		"default capability", "POST", "/containers/create",
		`{"HostConfig":{"CapDrop":["ALL"],"CapAdd":["CHOWN","cap_setuid"]}}`, "ok",
	},
	{
		"tightened", "POST", "/containers/create",
		`{"HostConfig":{"SecurityOpt":["no-new-privileges","no-new-privileges:true","seccomp=builtin"]}}`, "ok",
	},
	{"our runtime", "POST", "/containers/create", `{"HostConfig":{"Runtime":"agentbox"}}`, "ok"},
	{
		"full masks", "POST", "/containers/create",
		`{"HostConfig":{"ReadonlyPaths":["/proc/bus","/proc/fs","/proc/irq","/proc/sys","/proc/sysrq-trigger"],"MaskedPaths":[MASKS]}}`, "ok",
	},
	{"labels in two cases", "POST", "/containers/create", `{"Labels":{"a":"1","A":"2"}}`, "ok"},
	{"allowed dir", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/a:/x"]}}`, "ok"},
	{
		"allowed dir that does not exist", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/new:/x"]}}`, "ok",
	},
	{
		"allowed through an alias", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/alias/a:/x:rw,z"]}}`, "ok",
	},
	{"allowed with slashes", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP//work/./a///:/x"]}}`, "ok"},
	{"allowed, dots", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/a/../a:/x"]}}`, "ok"},
	{
		"allowed by Mounts", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"bind","Source":"TOP/work/rel","Target":"/x"}]}}`, "ok",
	},
	{"read-only", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/ro/data:/x:ro"]}}`, "ok"},
	{"exact entry", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/box:/x"]}}`, "ok"},
	{"top of a deep entry", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/deep:/x"]}}`, "ok"},
	{
		"allowed device", "POST", "/containers/create",
		`{"HostConfig":{"Devices":[{"PathOnHost":"/dev/null","PathInContainer":"/dev/n","CgroupPermissions":"rwm"}]}}`,
		"ok",
	},
	{"start", "POST", "/v1.41/containers/x/start", ``, "ok"},
	{"old start without a body", "POST", "/v1.20/containers/x/start", ``, "ok"},
	{"stop, kill, wait", "POST", "/v1.41/containers/x/wait?condition=removed", ``, "ok"},
	{"exec", "POST", "/containers/x/exec", `{"Cmd":["sh"],"Privileged":false}`, "ok"},
	{"exec start", "POST", "/exec/x/start", `{"Detach":false}`, "ok"},
	{"update", "POST", "/containers/x/update", `{"Memory":1000000,"RestartPolicy":{"Name":"no"}}`, "ok"},
	{"cp into", "PUT", "/containers/x/archive?path=/", ``, "ok"},
	{"rm", "DELETE", "/v1.41/containers/x?force=1", ``, "ok"},
	{"reading", "GET", "/v1.41/anything/new", ``, "ok"},
	{"load", "POST", "/images/load", ``, "ok"},
	{"pull", "POST", "/images/create?fromImage=x", ``, "ok"},
	{"commit", "POST", "/commit?container=x", ``, "ok"},
	{"plain volume", "POST", "/volumes/create", `{"Name":"v","Driver":"local","DriverOpts":{}}`, "ok"},
	{
		"tmpfs volume", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"tmpfs","device":"tmpfs","o":"size=1m,uid=1000"}}`, "ok",
	},
	{
		"bound volume of an allowed dir", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"none","device":"TOP/work/a","o":"bind"}}`, "ok",
	},
	{
		"our volume of an allowed dir", "POST", "/volumes/create",
		`{"Driver":"agentbox","DriverOpts":{"from":"TOP/ro/data"}}`, "ok",
	},
	{"network", "POST", "/networks/create", `{"Name":"n","Driver":"bridge"}`, "ok"},
	{
		"network of an own subnet", "POST", "/networks/create",
		`{"Name":"n","CheckDuplicate":true,"IPAM":{"Driver":"default","Options":null,"Config":[{"Subnet":"10.99.0.0/24","IPRange":"10.99.0.128/25","Gateway":"10.99.0.1","AuxiliaryAddresses":{"a":"10.99.0.2","A":"10.99.0.3"}},{"Subnet":"fd99::/64"}]},"Options":{"com.docker.network.driver.mtu":"1400","com.docker.network.bridge.gateway_mode_ipv4":"isolated"},"Labels":{}}`, "ok",
	},
	{
		"connect", "POST", "/networks/n/connect",
		`{"Container":"x","EndpointConfig":{"IPAMConfig":{"IPv4Address":"10.99.0.9"},"Aliases":["a"],"DriverOpts":{"com.docker.network.endpoint.ifname":"eth7"}}}`, "ok",
	},
	{"disconnect", "POST", "/networks/n/disconnect", `{"Container":"x","Force":true}`, "ok"},
	{"login", "POST", "/auth", `{"username":"a","password":"b","serveraddress":"c"}`, "ok"},
	{"import of a file", "POST", "/images/create?fromSrc=-&repo=x", ``, "ok"},
	{"commit of a configuration", "POST", "/commit?container=x", `{"Env":["A=1"],"Labels":{"a":"b"}}`, "ok"},
	{
		"health and ports", "POST", "/containers/create",
		`{"Healthcheck":{"Test":["NONE"],"Interval":1},"ExposedPorts":{"80/tcp":{}},"HostConfig":{"PortBindings":{"80/tcp":[{"HostIp":"","HostPort":"8080"}]},"OomScoreAdj":500,"OomKillDisable":false,"Ulimits":[{"Name":"nofile","Hard":9,"Soft":9},{"Name":"memlock","Hard":-1,"Soft":-1}]}}`, "ok",
	},
	{"checkpoint", "POST", "/containers/x/checkpoints", `{"CheckpointID":"c1","Exit":true}`, "ok"},
	{"a container called checkpoints", "POST", "/containers/checkpoints/stop", ``, "ok"},

	// what they give of the host
	{"privileged", "POST", "/v1.41/containers/create?name=x", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"privileged, other case", "POST", "/containers/create", `{"hostconfig":{"pRIVILEGED":true}}`, "privileged"},
	{"privileged, long s", "POST", "/containers/create", `{"Ho\u017ftConfig":{"Privileged":true}}`, "privileged"},
	{"privileged at the top", "POST", "/containers/create", `{"Image":"x","Privileged":true}`, "privileged"},
	{"binds at the top", "POST", "/containers/create", `{"Binds":["/:/h"]}`, "mounts.docker_socket"},
	{"privileged exec", "POST", "/containers/x/exec", `{"Privileged":true}`, "privileged"},
	{"privileged exec in checkpoints", "POST", "/containers/checkpoints/exec", `{"Privileged":true}`, "privileged"},
	{"host network", "POST", "/containers/create", `{"HostConfig":{"NetworkMode":"host"}}`, "host_namespaces"},
	{
		"host network, endpoint", "POST", "/containers/create",
		`{"NetworkingConfig":{"EndpointsConfig":{"host":{}}}}`, "host_namespaces",
	},
	{"host network, connect", "POST", "/networks/host/connect", `{"Container":"x"}`, "host_namespaces"},
	{"host pid", "POST", "/containers/create", `{"HostConfig":{"PidMode":"host"}}`, "host_namespaces"},
	{"host ipc", "POST", "/containers/create", `{"HostConfig":{"IpcMode":"host"}}`, "host_namespaces"},
	{"host uts", "POST", "/containers/create", `{"HostConfig":{"UTSMode":"host"}}`, "host_namespaces"},
	{"host user", "POST", "/containers/create", `{"HostConfig":{"UsernsMode":"host"}}`, "host_namespaces"},
	{"host cgroup", "POST", "/containers/create", `{"HostConfig":{"CgroupnsMode":"host"}}`, "host_namespaces"},
	{"another's pid", "POST", "/containers/create", `{"HostConfig":{"PidMode":"container:x"}}`, "join_containers"},
	{
		"another's network", "POST", "/containers/create",
		`{"HostConfig":{"NetworkMode":"container:x"}}`, "join_containers",
	},
	{"another's mounts", "POST", "/containers/create", `{"HostConfig":{"VolumesFrom":["x:ro"]}}`, "volumes_from"},
	{"capability", "POST", "/containers/create", `{"HostConfig":{"CapAdd":["SYS_ADMIN"]}}`, "capabilities.allow"},
	{"all capabilities", "POST", "/containers/create", `{"HostConfig":{"CapAdd":["all"]}}`, "capabilities.allow"},
	{
		"capability as a string", "POST", "/containers/create",
		`{"HostConfig":{"CapAdd":"CAP_SYS_PTRACE"}}`, "capabilities.allow",
	},
	{
		"apparmor", "POST", "/containers/create",
		`{"HostConfig":{"SecurityOpt":["apparmor=unconfined"]}}`, "security_opt",
	},
	{
		"apparmor, old", "POST", "/containers/create",
		`{"HostConfig":{"SecurityOpt":["apparmor:unconfined"]}}`, "security_opt",
	},
	{
		"seccomp", "POST", "/containers/create",
		`{"HostConfig":{"SecurityOpt":["seccomp={\"defaultAction\":\"SCMP_ACT_ALLOW\"}"]}}`, "security_opt",
	},
	{"label", "POST", "/containers/create", `{"HostConfig":{"SecurityOpt":["label=disable"]}}`, "security_opt"},
	{"label, oldest", "POST", "/containers/create", `{"HostConfig":{"SecurityOpt":["disable"]}}`, "security_opt"},
	{
		"new privileges", "POST", "/containers/create",
		`{"HostConfig":{"SecurityOpt":["no-new-privileges=false"]}}`, "security_opt",
	},
	{"unmasked", "POST", "/containers/create", `{"HostConfig":{"MaskedPaths":[],"ReadonlyPaths":[]}}`, "security_opt"},
	{"writable proc", "POST", "/containers/create", `{"HostConfig":{"ReadonlyPaths":["/proc/bus"]}}`, "security_opt"},
	{"runtime", "POST", "/containers/create", `{"HostConfig":{"Runtime":"kata"}}`, "runtimes"},
	{"sysctl", "POST", "/containers/create", `{"HostConfig":{"Sysctls":{"net.core.somaxconn":"1"}}}`, "sysctls"},
	{"cgroup parent", "POST", "/containers/create", `{"HostConfig":{"CgroupParent":"/x"}}`, "cgroup_parents"},
	{"annotation", "POST", "/containers/create", `{"HostConfig":{"Annotations":{"a.b":"/etc/x"}}}`, "annotations"},
	{
		"log driver", "POST", "/containers/create",
		`{"HostConfig":{"LogConfig":{"Type":"syslog","Config":{"syslog-address":"unix:///run/x"}}}}`, "log_drivers",
	},
	{"device", "POST", "/containers/create", `{"HostConfig":{"Devices":[{"PathOnHost":"/dev/zero"}]}}`, "devices"},
	{
		"device, dots", "POST", "/containers/create",
		`{"HostConfig":{"Devices":[{"PathOnHost":"/dev/null/../zero"}]}}`, "devices",
	},
	{"device dir", "POST", "/containers/create", `{"HostConfig":{"Devices":[{"PathOnHost":"/dev"}]}}`, "devices"},
	{
		"device rule", "POST", "/containers/create",
		`{"HostConfig":{"DeviceCgroupRules":["c 1:1 rwm"]}}`, "device_cgroup_rules",
	},
	{
		"gpu", "POST", "/containers/create",
		`{"HostConfig":{"DeviceRequests":[{"Count":-1,"Capabilities":[["gpu"]]}]}}`, "device_requests",
	},
	{
		"cdi", "POST", "/containers/create",
		`{"HostConfig":{"DeviceRequests":[{"Driver":"cdi","DeviceIDs":["x/y=z"]}]}}`, "device_requests",
	},
	{
		"host network, id of the endpoint", "POST", "/containers/create",
		`{"NetworkingConfig":{"EndpointsConfig":{"n":{"NetworkID":"host"}}}}`, "host_namespaces",
	},
	{"cgroup of another", "POST", "/containers/create", `{"HostConfig":{"Cgroup":"container:x"}}`, "join_containers"},
	{
		"masks of an older engine", "POST", "/containers/create",
		`{"HostConfig":{"MaskedPaths":["/proc/acpi","/proc/kcore","/proc/keys","/proc/latency_stats","/proc/timer_list","/proc/sched_debug","/proc/scsi","/sys/firmware"]}}`, "security_opt",
	},
	{"killed last", "POST", "/containers/create", `{"HostConfig":{"OomScoreAdj":-1}}`, "priority"},
	{"not killed", "POST", "/containers/create", `{"HostConfig":{"OomKillDisable":true}}`, "priority"},
	{"real time", "POST", "/containers/create", `{"HostConfig":{"CpuRealtimePeriod":1000000}}`, "priority"},
	{"real time, update", "POST", "/containers/x/update", `{"CpuRealtimeRuntime":950000}`, "priority"},
	{
		"rtprio", "POST", "/containers/create",
		`{"HostConfig":{"Ulimits":[{"Name":"rtprio","Hard":99,"Soft":99}]}}`, "priority",
	},
	{
		"nice", "POST", "/containers/create",
		`{"HostConfig":{"Ulimits":[{"Name":"NICE","Hard":40,"Soft":40}]}}`, "priority",
	},
	{
		"sysctl of an endpoint", "POST", "/networks/n/connect",
		`{"EndpointConfig":{"DriverOpts":{"com.docker.network.endpoint.sysctls":"net.ipv4.conf.IFNAME.forwarding=1"}}}`,
		"sysctls",
	},
	{
		"sysctl of an endpoint, create", "POST", "/containers/create",
		`{"NetworkingConfig":{"EndpointsConfig":{"n":{"DriverOpts":{"com.docker.network.endpoint.sysctls":"net.ipv4.conf.IFNAME.forwarding=1"}}}}}`, "sysctls",
	},
	{
		"option of an endpoint", "POST", "/networks/n/connect",
		`{"EndpointConfig":{"DriverOpts":{"com.docker.network.endpoint.x":"1"}}}`, "networks.options",
	},
	{"public subnet", "POST", "/networks/create", `{"IPAM":{"Config":[{"Subnet":"1.1.1.0/24"}]}}`, "networks.subnets"},
	{
		"everything as a subnet", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"0.0.0.0/1"}]}}`, "networks.subnets",
	},
	{
		"more than a pool", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"10.0.0.0/7"}]}}`, "networks.subnets",
	},
	{
		"a subnet that the host routes", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"10.77.8.0/24"}]}}`, "networks.subnets",
	},
	{
		"around one that the host routes", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"10.64.0.0/10"}]}}`, "networks.subnets",
	},
	{
		"link-local", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"169.254.169.0/24"}]}}`, "networks.subnets",
	},
	{"no subnet", "POST", "/networks/create", `{"IPAM":{"Config":[{"Subnet":"10.1.1.1"}]}}`, "-"},
	{"mapped subnet", "POST", "/networks/create", `{"IPAM":{"Config":[{"Subnet":"::ffff:10.1.1.0/120"}]}}`, "-"},
	{
		"gateway elsewhere", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"10.99.0.0/24","Gateway":"1.1.1.1"}]}}`, "-",
	},
	{
		"range elsewhere", "POST", "/networks/create",
		`{"IPAM":{"Config":[{"Subnet":"10.99.0.0/24","IPRange":"10.0.0.0/8"}]}}`, "-",
	},
	{"gateway alone", "POST", "/networks/create", `{"IPAM":{"Config":[{"Gateway":"192.168.1.1"}]}}`, "-"},
	{
		"ipam driver", "POST", "/networks/create", `{"IPAM":{"Driver":"dhcp","Options":{"a":"b"}}}`,
		"networks.ipam_drivers",
	},
	{
		"bridge of the host", "POST", "/networks/create",
		`{"Options":{"com.docker.network.bridge.name":"br0"}}`, "networks.options",
	},
	{
		"routed", "POST", "/networks/create",
		`{"Options":{"com.docker.network.bridge.gateway_mode_ipv4":"routed"}}`, "networks.options",
	},
	{
		"source address", "POST", "/networks/create",
		`{"Options":{"com.docker.network.host_ipv4":"10.0.0.1"}}`, "networks.options",
	},
	{"configuration of another", "POST", "/networks/create", `{"ConfigFrom":{"Network":"x"}}`, "networks.config_from"},
	{"swarm's network", "POST", "/networks/create", `{"Scope":"swarm"}`, "swarm"},
	{"ingress", "POST", "/networks/create", `{"Ingress":true}`, "swarm"},
	{"cluster volume", "POST", "/volumes/create", `{"ClusterVolumeSpec":{"Group":"x"}}`, "swarm"},
	{"import of a URL", "POST", "/images/create?fromSrc=http%3A%2F%2F169.254.169.254%2F", ``, "image_urls"},
	{"import without a scheme", "POST", "/images/create?fromSrc=-&fromSrc=127.0.0.1:2375/x", ``, "image_urls"},
	{"unknown field of a network", "POST", "/networks/create", `{"Name":"n","Portal":true}`, "unknown_fields"},
	{
		"unknown field of an endpoint", "POST", "/networks/n/connect",
		`{"EndpointConfig":{"Portal":1}}`, "unknown_fields",
	},
	{"unknown field at the top", "POST", "/containers/create", `{"Portal":1}`, "unknown_fields"},
	{
		"unknown field of a mount", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"tmpfs","Target":"/x","TmpfsOptions":{"Portal":1}}]}}`, "unknown_fields",
	},
	{"unknown field of a pull", "POST", "/images/create?fromImage=x", `{"Portal":1}`, "unknown_fields"},
	{"unknown field of a commit", "POST", "/commit?container=x", `{"Portal":1}`, "unknown_fields"},
	{"a body where none is taken", "POST", "/containers/x/stop", `{"t":1}`, "unknown_fields"},
	{"an object for a name", "POST", "/commit", `{"Labels":{"a":{"b":1}}}`, "unknown_fields"},
	{"update with devices", "POST", "/containers/x/update", `{"Devices":[{"PathOnHost":"/dev/zero"}]}`, "devices"},
	{"update, cgroup parent", "POST", "/containers/x/update", `{"CgroupParent":"/x"}`, "cgroup_parents"},

	// host mounts
	{"root", "POST", "/containers/create", `{"HostConfig":{"Binds":["/:/host"]}}`, "mounts.docker_socket"},
	{"etc", "POST", "/containers/create", `{"HostConfig":{"Binds":["/etc/ssl:/x:ro"]}}`, "mounts.allow"},
	{
		"mounts below a read-only one", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"bind","Source":"TOP/ro/data","Target":"/x","ReadOnly":true,"BindOptions":{"ReadOnlyNonRecursive":true}}]}}`, "mounts.allow",
	},
	{
		"etc by Mounts", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"bind","Source":"/etc/ssl","Target":"/x","ReadOnly":true}]}}`, "mounts.allow",
	},
	{"beside", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/workers:/x"]}}`, "mounts.allow"},
	{"above", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work:/x"]}}`, "mounts.allow"},
	{"dots out", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/a/../../ro:/x"]}}`, "mounts.allow"},
	{
		"symlink to root", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/root:/x"]}}`,
		"mounts.docker_socket",
	},
	{
		"below a symlink to root", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/root/usr:/x"]}}`, "mounts.allow",
	},
	{
		"new below a symlink", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/etc/new/dir:/x"]}}`, "mounts.allow",
	},
	{
		"relative symlink up", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/up:/x"]}}`, "mounts.allow",
	},
	{
		"dangling symlink", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/dangling:/x"]}}`, "mounts.allow",
	},
	{
		"dots after a symlink", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/etc/../a:/x"]}}`, "mounts.allow",
	},
	{"loop", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/loop:/x"]}}`, "-"},
	{"magic link", "POST", "/containers/create", `{"HostConfig":{"Binds":["/proc/1/root:/x"]}}`, "-"},
	{"symlink to a magic link", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/proc/usr:/x"]}}`, "-"},
	{
		"socket", "POST", "/containers/create", `{"HostConfig":{"Binds":["/var/run/docker.sock:/s"]}}`,
		"mounts.docker_socket",
	},
	{
		"socket, other name", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["/run/../run//docker.sock:/s:ro"]}}`, "mounts.docker_socket",
	},
	{
		"socket through a symlink", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/sock:/s"]}}`,
		"mounts.docker_socket",
	},
	{
		"dir of the socket", "POST", "/containers/create", `{"HostConfig":{"Binds":["/var/run/:/s"]}}`,
		"mounts.docker_socket",
	},
	{
		"containerd's socket", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"bind","Source":"/run/containerd/containerd.sock","Target":"/s"}]}}`,
		"mounts.docker_socket",
	},
	{
		"plugin's socket", "POST", "/containers/create", `{"HostConfig":{"Binds":["/run/docker/plugins:/s"]}}`,
		"mounts.docker_socket",
	},
	{
		"engine's state", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["/var/lib/docker/volumes/x:/s"]}}`, "mounts.engine_state",
	},
	{
		"our state", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["/var/lib/agentbox:/s"]}}`, "mounts.engine_state",
	},
	{"guarded", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/state:/s"]}}`, "mounts.engine_state"},
	{
		"guarded, hard link", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/work/hard:/s"]}}`, "mounts.engine_state",
	},
	{"write to read-only", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/ro/data:/x"]}}`, "mounts.allow"},
	{
		"relabel of read-only", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/ro/data:/x:ro,Z"]}}`, "mounts.allow",
	},
	{
		"user can exchange it", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/user/home:/x"]}}`, "mounts.exchangeable",
	},
	{
		"anybody can exchange it", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/open/dir:/x"]}}`, "mounts.exchangeable",
	},
	{
		"a container can exchange it", "POST", "/containers/create",
		`{"HostConfig":{"Binds":["TOP/deep/x/y:/x"]}}`, "mounts.exchangeable",
	},
	{"shared", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/a:/x:rshared"]}}`, "mounts.shared"},
	{
		"shared by Mounts", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"bind","Source":"TOP/work/a","Target":"/x","BindOptions":{"Propagation":"shared"}}]}}`, "mounts.shared",
	},
	{"too many colons", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/a:/x:ro:/"]}}`, "-"},
	{
		"backslash", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"bind","Source":"\\etc","Target":"/x"}]}}`, "-",
	},
	{"zero byte", "POST", "/containers/create", `{"HostConfig":{"Binds":["TOP/work/a\u0000:/x"]}}`, "-"},
	{
		"npipe", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"npipe","Source":"/x","Target":"/x"}]}}`, "-",
	},
	{
		"path as a volume", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"volume","Source":"../../etc","Target":"/x"}]}}`, "-",
	},
	{
		"volume in a mount", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"volume","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"none","o":"bind","device":"/etc"}}}}]}}`, "mounts.engine_state",
	},
	{
		"driver of a bind", "POST", "/containers/create", `{"HostConfig":{"Binds":["v:/x"],"VolumeDriver":"other"}}`,
		"mounts.volume_drivers",
	},

	// volumes
	{
		"bound volume", "POST", "/volumes/create",
		`{"Driver":"local","DriverOpts":{"type":"none","device":"/","o":"bind"}}`, "mounts.docker_socket",
	},
	{
		"bound volume, later option", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"tmpfs","device":"/usr","o":"size=1m,rbind"}}`, "mounts.allow",
	},
	{
		"overlay volume", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"overlay","device":"overlay","o":"lowerdir=/,upperdir=/x,workdir=/y"}}`,
		"mounts.volume_types",
	},
	{
		"block device volume", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"ext4","device":"/dev/sda1"}}`, "mounts.volume_types",
	},
	{
		"nfs", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"nfs","device":":/x","o":"addr=1.2.3.4"}}`, "mounts.volume_types",
	},
	{
		"tmpfs volume, remount", "POST", "/volumes/create",
		`{"DriverOpts":{"type":"tmpfs","device":"x","o":"remount"}}`, "-",
	},
	{"volume driver", "POST", "/volumes/create", `{"Driver":"other"}`, "mounts.volume_drivers"},
	{
		"our volume of root", "POST", "/volumes/create", `{"Driver":"agentbox","DriverOpts":{"from":"/"}}`,
		"mounts.docker_socket",
	},
	{
		"our volume of etc", "POST", "/volumes/create",
		`{"Driver":"agentbox","DriverOpts":{"from":"TOP/work/etc/ssl"}}`, "mounts.allow",
	},

	// other calls
	{"plugin", "POST", "/v1.41/plugins/pull?remote=x", ``, "plugins"},
	{"plugin, slashes in its name", "POST", "/plugins/a/b/enable", ``, "plugins"},
	{"plugin removed", "DELETE", "/plugins/x", ``, "plugins"},
	{"swarm", "POST", "/swarm/init", `{}`, "swarm"},
	{"service", "POST", "/services/create", `{}`, "swarm"},
	{"secret", "DELETE", "/secrets/x", ``, "swarm"},
	{"build", "POST", "/v1.41/build?networkmode=host", ``, "build"},
	{"session", "POST", "/session", ``, "build"},
	{"grpc", "POST", "/v1.47/grpc", ``, "build"},
	{"macvlan", "POST", "/networks/create", `{"driver":"macvlan"}`, "network_drivers"},
	{"unknown call", "POST", "/v9.9/containers/x/become-root", ``, "unknown_calls"},
	{"unknown method", "PATCH", "/containers/x", ``, "unknown_calls"},
	{"method in small letters", "get", "/containers/json", ``, "unknown_calls"},
	{
		"checkpoint elsewhere", "POST", "/containers/x/checkpoints",
		`{"CheckpointID":"c1","CheckpointDir":"/usr"}`, "mounts.allow",
	},
	{"checkpoint with a path", "POST", "/containers/x/checkpoints", `{"CheckpointID":"../c1"}`, "-"},
	{"checkpoint removed elsewhere", "DELETE", "/containers/x/checkpoints/lib?dir=/usr", ``, "mounts.allow"},
	{"checkpoints listed elsewhere", "GET", "/containers/x/checkpoints?dir=/usr", ``, "mounts.allow"},
	{"start from elsewhere", "POST", "/containers/x/start?checkpoint=c1&checkpoint-dir=/usr", ``, "mounts.allow"},
	{"start with a HostConfig", "POST", "/v1.23/containers/x/start", `{"Binds":["/usr:/x"]}`, "mounts.allow"},
	{"start, privileged", "POST", "/v1.18/containers/x/start", `{"Privileged":true}`, "privileged"},

	// addresses
	{"without a version", "POST", "/containers/create", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"percent", "POST", "/v1.41/%63ontainers/cre%61te", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"double slashes", "POST", "//v1.41///containers//create", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"trailing slash", "POST", "/containers/create/", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"dots", "POST", "/containers/x/../create", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"escaped slash", "POST", "/containers%2fcreate", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"absolute", "POST", "http://h/v1.41/containers/create", `{"HostConfig":{"Privileged":true}}`, "privileged"},
	{"two versions", "POST", "/v1.41/v1.41/containers/create", `{}`, "unknown_calls"},
	{"bad escape", "POST", "/containers/%zz", ``, "-"},
	{"empty", "POST", "", ``, "-"},
	{"semicolon", "DELETE", "/containers/x/checkpoints/y?a;dir=/etc", ``, "-"},

	// bodies
	{"no body", "POST", "/containers/create", ``, "-"},
	{"blank body", "POST", "/containers/create", "\n\t ", "-"},
	{"exec without a body", "POST", "/containers/x/exec", ``, "-"},
	{"volume without a body", "POST", "/volumes/create", ``, "-"},
	{"update without a body", "POST", "/containers/x/update", ``, "-"},
	{"no JSON", "POST", "/containers/create", `{"HostConfig":`, "-"},
	{"trailing data", "POST", "/containers/create", `{}{"HostConfig":{"Privileged":true}}`, "-"},
	{"trailing text", "POST", "/containers/create", `{} x`, "-"},
	{
		"key twice", "POST", "/containers/create",
		`{"HostConfig":{"Privileged":true},"HostConfig":{"Privileged":false}}`, "-",
	},
	{
		"key twice, two cases", "POST", "/containers/create",
		`{"HostConfig":{"Privileged":false,"privileged":true}}`, "-",
	},
	{
		"key twice, in a list", "POST", "/containers/create",
		`{"HostConfig":{"Mounts":[{"Type":"tmpfs","type":"bind","Source":"/"}]}}`, "-",
	},
	{"key twice, escaped", "POST", "/containers/create", `{"HostConfig":{"Binds":["/:/x"],"\u0042inds":[]}}`, "-"},
	{"unknown setting", "POST", "/containers/create", `{"HostConfig":{"Superpowers":true}}`, "unknown_fields"},
	{"wrong type", "POST", "/containers/create", `{"HostConfig":{"Privileged":"true"}}`, "-"},
	{"deep", "POST", "/containers/create", strings.Repeat("[", 100000), "-"},
	{"too many mounts", "POST", "/containers/create", `{"HostConfig":{"Binds":[` +
		strings.Repeat(`"/x",`, maxPaths) + `"/x"]}}`, "-"},
	{"byte order mark", "POST", "/containers/create", "\ufeff{}", "-"},
}

func TestJudge(t *testing.T) {
	top := tree(t)
	j := judge(t, allowing, top)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := Request{
				RequestMethod: c.method, RequestURI: strings.ReplaceAll(c.uri, "TOP", top),
				RequestBody: text(c.body, top),
			}
			d := j.Judge(r)
			switch {
			case c.key == "ok":
				if !d.Allow || d.Msg != "" {
					t.Errorf("refused: %s", d.Msg)
				}
			case d.Allow || d.Rule == "" || !strings.HasPrefix(d.Msg, d.Rule+": "):
				t.Errorf("not refused, or without a reason: %+v", d)
			case c.key == "-":
				if d.Key != "" || !strings.Contains(d.Msg, "(no key of the policy allows it)") {
					t.Errorf("%+v", d)
				}
			case d.Key != c.key || !strings.Contains(d.Msg, "(policy key "+c.key+")"):
				t.Errorf("key %q, want %q: %s", d.Key, c.key, d.Msg)
			}
		})
	}
	if len(cases) < 60 {
		t.Errorf("%d cases", len(cases))
	}
}

// A refusal that names a key passes under a policy that sets all of them, so that no message sends
// its reader to the wrong place.
func TestJudgeAllowsAll(t *testing.T) {
	top := tree(t)
	j := judge(t, everything, top)
	for _, c := range cases {
		d := j.Judge(Request{RequestMethod: c.method, RequestURI: c.uri, RequestBody: text(c.body, top)})
		if want := c.key != "-"; d.Allow != want {
			t.Errorf("%s: %v: %s", c.name, d.Allow, d.Msg)
		}
	}
}

// The default opens nothing that a case with a key asks for.
func TestJudgeDefault(t *testing.T) {
	top := tree(t)
	j := judge(t, "", top)
	for _, c := range cases {
		d := j.Judge(Request{RequestMethod: c.method, RequestURI: c.uri, RequestBody: text(c.body, top)})
		if d.Allow && c.key != "ok" {
			t.Errorf("%s passes", c.name)
		}
	}
}

// A body that was left out shows in the declaration of one.
func TestOldStartHidesItsBody(t *testing.T) {
	j := NewJudge(nil, Options{})
	for uri, want := range map[string]bool{
		"/v1.23/containers/x/start": false, "/v1.24/containers/x/start": true, "/containers/x/start": true,
	} {
		for _, key := range []string{"Content-Type", "content-type"} {
			d := j.Judge(Request{
				RequestMethod: "POST", RequestURI: uri, RequestHeaders: map[string]string{key: "text/plain"},
			})
			if d.Allow != want {
				t.Errorf("%s: %+v", uri, d)
			}
		}
	}
}

// Parameters in a body that dockerd does not send along.
func TestForms(t *testing.T) {
	j := NewJudge(nil, Options{})
	for kind, want := range map[string]bool{"": true, "text/plain": true, "application/x-tar": true,
		"application/json; charset=utf-8":   true,
		"application/x-www-form-urlencoded": false, "Application/X-WWW-Form-URLencoded; a=b": false,
		"multipart/form-data; boundary=x": false, "/": false} {
		for _, uri := range []string{"/images/create?fromImage=x", "/containers/x/start"} {
			d := j.Judge(Request{
				RequestMethod: "POST", RequestURI: uri, RequestHeaders: map[string]string{"Content-Type": kind},
			})
			if d.Allow != want {
				t.Errorf("%s as %q: %+v", uri, kind, d)
			}
		}
	}
}

// The kernel's routes are read, those of other tables included.
func TestHostRoutes(t *testing.T) {
	routes, err := hostRoutes()
	if err != nil {
		t.Fatal(err)
	}
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	if !slices.ContainsFunc(routes, loopback.Overlaps) {
		t.Errorf("no %s in %v", loopback, routes)
	}
	j := NewJudge(nil, Options{})
	j.routes = func() ([]netip.Prefix, error) { return nil, os.ErrPermission }
	d := j.Judge(Request{
		RequestMethod: "POST", RequestURI: "/networks/create",
		RequestBody: []byte(`{"IPAM":{"Config":[{"Subnet":"10.1.0.0/24"}]}}`),
	})
	if d.Allow || d.Key != "networks.subnets" {
		t.Errorf("allowed without the routes: %+v", d)
	}
}

func TestJudgeNamesEverything(t *testing.T) {
	j := NewJudge(nil, Options{})
	d := j.Judge(Request{RequestMethod: "POST", RequestURI: "/containers/create",
		RequestBody: []byte(`{"HostConfig":{"Privileged":true,"PidMode":"host","CapAdd":["A","B","C","D","E","F","G","H","I","J"]}}`)})
	for _, want := range []string{"privileged: ", "host namespace: ", `"A"`, "and more"} {
		if !strings.Contains(d.Msg, want) {
			t.Errorf("no %q in %s", want, d.Msg)
		}
	}
	long := j.Judge(Request{RequestMethod: "POST", RequestURI: "/containers/create",
		RequestBody: []byte(`{"HostConfig":{"Runtime":"` + strings.Repeat(`\n\u001b`, 10000) + `"}}`)})
	if len(long.Msg) > 2000 || strings.ContainsAny(long.Msg, "\n\x1b") {
		t.Errorf("%d bytes: %.300s", len(long.Msg), long.Msg)
	}
}

func TestOptions(t *testing.T) {
	top := tree(t)
	p, err := Parse([]byte(`{mounts: {allow: [/**], exchangeable: true}}`))
	if err != nil {
		t.Fatal(err)
	}
	j := NewJudge(p, Options{Driver: "box", Sockets: []string{top + "/work/a/s"}, State: []string{top + "/ro"}})
	for body, key := range map[string]string{
		`{"HostConfig":{"Binds":["` + top + `/work/a/sub:/x"]}}`: "",
		`{"HostConfig":{"Binds":["` + top + `/work/a:/x"]}}`:     "mounts.docker_socket",
		`{"HostConfig":{"Binds":["` + top + `/ro/data:/x"]}}`:    "mounts.engine_state",
		`{"HostConfig":{"VolumeDriver":"box"}}`:                  "",
		`{"HostConfig":{"VolumeDriver":"agentbox"}}`:             "mounts.volume_drivers",
	} {
		d := j.Judge(Request{RequestMethod: "POST", RequestURI: "/containers/create", RequestBody: []byte(body)})
		if d.Key != key || d.Allow != (key == "") {
			t.Errorf("%s: %+v", body, d)
		}
	}
}

// A pattern keeps the meaning it had when the policy was read, whatever symlinks are put
// in its way.
func TestPatternsCannotBeMoved(t *testing.T) {
	top := tree(t)
	for _, dir := range []string{"user/mine", "deep/x/pub", "fine/dir"} {
		if err := os.MkdirAll(filepath.Join(top, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(top, "fine"), filepath.Join(top, "link")); err != nil {
		t.Fatal(err)
	}
	const policy = "mounts: {allow: [TOP/user/mine/*, TOP/deep/**, TOP/deep/x/pub/*, TOP/link/*]}"
	before := judge(t, policy, top)
	for _, dir := range []string{"user/mine", "deep/x/pub"} {
		if err := os.Remove(filepath.Join(top, dir)); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/usr", filepath.Join(top, dir)); err != nil {
			t.Fatal(err)
		}
	}
	ask := func(j *Judge, p string) Decision {
		return j.Judge(Request{
			RequestMethod: "POST", RequestURI: "/containers/create",
			RequestBody: []byte(`{"HostConfig":{"Binds":["` + p + `:/x"]}}`),
		})
	}
	for name, j := range map[string]*Judge{"before": before, "after": judge(t, policy, top)} {
		for _, p := range []string{"/usr/bin", top + "/user/mine/bin", top + "/deep/x/pub/bin"} {
			if d := ask(j, p); d.Allow {
				t.Errorf("policy read %s the swap: %s passes", name, p)
			}
		}
		for _, p := range []string{top + "/link/dir", top + "/fine/dir"} {
			if d := ask(j, p); !d.Allow {
				t.Errorf("policy read %s the swap: %s: %s", name, p, d.Msg)
			}
		}
	}
}

func TestDockerSocketAlone(t *testing.T) {
	j := judge(t, "mounts: {docker_socket: true}", "")
	body := func(p string) []byte { return []byte(`{"HostConfig":{"Binds":["` + p + `:/x"]}}`) }
	if d := j.Judge(Request{
		RequestMethod: "POST", RequestURI: "/containers/create", RequestBody: body("/var/run/docker.sock"),
	}); !d.Allow {
		t.Error(d.Msg)
	}
	if d := j.Judge(Request{
		RequestMethod: "POST", RequestURI: "/containers/create", RequestBody: body("/var/run"),
	}); d.Allow {
		t.Errorf("%+v", d)
	}
}

// FuzzJudge: no panic, and what makes no sense to the decoder is refused.
func FuzzJudge(f *testing.F) {
	for _, c := range cases {
		f.Add(c.method, c.uri, []byte(c.body), "application/json")
	}
	j := NewJudge(nil, Options{})
	f.Fuzz(func(t *testing.T, method, uri string, body []byte, kind string) {
		j.Judge(Request{
			RequestMethod: method, RequestURI: uri, RequestBody: body,
			RequestHeaders: map[string]string{"Content-Type": kind},
		})
		d := j.Judge(Request{RequestMethod: "POST", RequestURI: "/containers/create", RequestBody: body})
		if d.Allow != (d.Msg == "") {
			t.Fatalf("%+v", d)
		}
		if !d.Allow {
			return
		}
		var v any
		if err := json.Unmarshal(body, &v); err != nil {
			t.Fatalf("malformed and allowed: %q", body)
		}
		// A body that passed says nothing else to a decoder that reads it its
		// own way: the daemon's, which goes by the last of two keys.
		var last struct {
			HostConfig *struct {
				Privileged bool
				PidMode    string
				Binds      []string
			}
			Privileged bool
		}
		if json.NewDecoder(bytes.NewReader(body)).Decode(&last) != nil {
			return
		}
		if h := last.HostConfig; last.Privileged || h != nil && (h.Privileged || h.PidMode == "host") {
			t.Fatalf("allowed: %q", body)
		}
	})
}
