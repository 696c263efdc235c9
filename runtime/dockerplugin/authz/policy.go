package authz

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Policy says what calls of Docker's API may ask for. The zero value is the
// safe default: containers with Docker's own restrictions, named and anonymous
// volumes, bridge networks; nothing of the host.
type Policy struct {
	Privileged     bool     `yaml:"privileged"`      // docker run and docker exec --privileged
	HostNamespaces []string `yaml:"host_namespaces"` // of network, pid, ipc, uts, user, cgroup
	JoinContainers bool     `yaml:"join_containers"` // namespaces of other containers (container:NAME)
	VolumesFrom    bool     `yaml:"volumes_from"`    // the mounts of other containers
	Mounts         Mounts   `yaml:"mounts"`

	// Devices are host paths or patterns (see Mounts.Allow).
	Devices           []string `yaml:"devices"`
	DeviceCgroupRules []string `yaml:"device_cgroup_rules"` // as given to docker run
	// drivers (nvidia, cdi), or capabilities (gpu) of requests that name none
	DeviceRequests []string `yaml:"device_requests"`

	// Capabilities: Docker's default ones may always be added back.
	Capabilities Capabilities `yaml:"capabilities"`
	// SecurityOpt are options as given to docker run, KEY=VALUE or KEY=*;
	// systempaths=unconfined stands for unmasked /proc and /sys.
	SecurityOpt []string `yaml:"security_opt"`

	Runtimes       []string `yaml:"runtimes"`        // besides the daemon's default, runc and agentbox
	Sysctls        []string `yaml:"sysctls"`         // names, with * for any rest: net.ipv4.*
	CgroupParents  []string `yaml:"cgroup_parents"`  // exact
	Annotations    []string `yaml:"annotations"`     // keys, with * for any rest
	LogDrivers     []string `yaml:"log_drivers"`     // besides none, json-file, local and journald
	NetworkDrivers []string `yaml:"network_drivers"` // besides bridge
	Networks       Networks `yaml:"networks"`

	// OomScoreAdj below 0, no OOM killer, real-time scheduling, ulimits nice and rtprio
	Priority  bool `yaml:"priority"`
	ImageURLs bool `yaml:"image_urls"` // docker import of a URL, which dockerd fetches from the host's network

	Build   bool `yaml:"build"`   // builds; BuildKit can use the host's network
	Plugins bool `yaml:"plugins"` // calls that change engine plugins, which are root on the host
	Swarm   bool `yaml:"swarm"`   // calls that change swarm, services, nodes, secrets, configs

	UnknownCalls  Choice `yaml:"unknown_calls"`  // refuse or allow calls that are not GET or HEAD
	UnknownFields Choice `yaml:"unknown_fields"` // refuse or allow settings that a newer client sends
}

// Mounts is the part of a Policy about files of the host.
//
// A pattern is an absolute path whose components may hold * (anything but a
// slash); a last component ** stands for the path before it and all below.
type Mounts struct {
	Allow    []string `yaml:"allow"`     // patterns of what may be mounted
	ReadOnly []string `yaml:"read_only"` // patterns of what may be mounted read-only

	Volumes       *bool    `yaml:"volumes"`        // volumes of drivers that are allowed; default true
	VolumeDrivers []string `yaml:"volume_drivers"` // besides local and this plugin's own
	// file systems that volumes of the local driver may mount (nfs, cifs) besides tmpfs
	VolumeTypes []string `yaml:"volume_types"`

	DockerSocket bool `yaml:"docker_socket"` // the sockets of engines, which are root on the host
	// the directories that engines and agentbox keep their state in, and Guard
	EngineState bool     `yaml:"engine_state"`
	Guard       []string `yaml:"guard"` // further paths that a wider entry of Allow does not open

	Shared       bool `yaml:"shared"`       // mounts in the container appear on the host (shared, rshared)
	Exchangeable bool `yaml:"exchangeable"` // accept paths that others could exchange later; see the package's text
}

// Networks is the part of a Policy about networks that calls make.
type Networks struct {
	// that may be chosen, besides private ones that the host has no route for
	Subnets     []string `yaml:"subnets"`
	IPAMDrivers []string `yaml:"ipam_drivers"` // besides default
	Options     []string `yaml:"options"`      // of networks and endpoints, KEY=VALUE or KEY=*, besides harmless ones
	ConfigFrom  bool     `yaml:"config_from"`  // the configuration of another network (config-only)
}

// Capabilities is the part of a Policy about what may be added to a container.
type Capabilities struct {
	Allow []string `yaml:"allow"` // names with or without CAP_; ALL
}

// Choice is refuse, the default, or allow.
type Choice string

// Allow is the other value of a Choice than the default.
const Allow Choice = "allow"

var namespaces = []string{"network", "pid", "ipc", "uts", "user", "cgroup"}

// maxPolicy bounds a policy file.
const maxPolicy = 1 << 20

// Load reads the policy from a file. Its errors name the file, and the line
// and column of what is wrong in it.
func Load(file string) (*Policy, error) {
	f, err := os.Open(file)
	if err != nil {
		if os.IsNotExist(err) {
			return nil, fmt.Errorf("%w: the policy %s", fault.ErrNotFound, file)
		}
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxPolicy+1))
	if err != nil {
		return nil, fmt.Errorf("read the policy: %w", err)
	}
	if len(data) > maxPolicy {
		return nil, fmt.Errorf("%w: the policy %s is larger than %d bytes", fault.ErrInvalid, file, maxPolicy)
	}
	p, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s:%w", file, err)
	}
	return p, nil
}

// Trusted returns an error unless only root, or the caller, can change the file: a process
// that can write the policy can have everything it guards.
func Trusted(file string) error {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return fmt.Errorf("look at the policy %s: %w", file, err)
	}
	if (st.Uid != 0 && int(st.Uid) != os.Geteuid()) || st.Mode&0o022 != 0 {
		return &fault.Error{
			Err: fmt.Errorf("%w: others than root can change the policy %s (mode %04o, uid %d)", fault.ErrDenied, file,
				st.Mode&0o7777, st.Uid),
			Hint: fmt.Sprintf("Run 'chown root %s && chmod go-w %s'.", file, file),
		}
	}
	return nil
}

// volumes reports whether volumes may be used at all.
func (m *Mounts) volumes() bool { return m.Volumes == nil || *m.Volumes }

// check returns what is wrong with the value of the key, in words.
func checkValue(key, value string) string {
	switch key {
	case "host_namespaces":
		if !slices.Contains(namespaces, value) {
			return fmt.Sprintf("%q is none of %s", value, strings.Join(namespaces, ", "))
		}
	case "unknown_calls", "unknown_fields":
		if value != "refuse" && value != string(Allow) {
			return fmt.Sprintf("%q is neither refuse nor allow", value)
		}
	case "mounts.allow", "mounts.read_only", "mounts.guard", "devices":
		return checkPattern(value)
	case "networks.subnets":
		if _, err := netip.ParsePrefix(value); err != nil {
			return fmt.Sprintf("%q is no subnet", value)
		}
	case "security_opt", "networks.options":
		if k, v, ok := strings.Cut(value, "="); !ok || k == "" || v == "" {
			return fmt.Sprintf("%q is not KEY=VALUE", value)
		}
	case "capabilities.allow":
		if !isCapability(value) {
			return fmt.Sprintf("%q is no capability", value)
		}
	default:
		if value == "" {
			return "it is empty"
		}
	}
	return ""
}

func checkPattern(p string) string {
	if !strings.HasPrefix(p, "/") {
		return fmt.Sprintf("%q is no absolute path", p)
	}
	if strings.ContainsRune(p, 0) {
		return "a path cannot hold a zero byte"
	}
	parts := strings.Split(strings.Trim(p, "/"), "/")
	for i, c := range parts {
		switch {
		case c == ".." || c == ".":
			return fmt.Sprintf("%q has a component %q: write the path that it means", p, c)
		case c == "" && p != "/":
			return fmt.Sprintf("%q has an empty component", p)
		case c == "**" && i == len(parts)-1:
		case strings.Contains(c, "**"):
			return fmt.Sprintf("%q: ** can only be the last component, alone", p)
		}
		if _, err := path.Match(c, ""); err != nil {
			return fmt.Sprintf("%q is no pattern: %v", p, err)
		}
	}
	return ""
}
