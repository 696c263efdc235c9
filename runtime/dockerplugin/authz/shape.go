package authz

import (
	"strings"
	"sync"
)

// A shape is the fields that a body may have. Engines ignore unknown fields and get new ones with
// each version, so a body is judged by a list of the fields that were examined, not by one of
// dangerous fields.
type shape struct {
	fields map[string]*shape // by fold(name); nil: no object is taken here
	keyed  bool              // an object with keys that users choose, each value of the shape in fields, or no object
	judged bool              // the judge decides by its value
	name   string
}

// parseShape reads the fields of an object: NAME, !NAME for one that is
// judged, NAME{FIELDS} for an object, NAME<FIELDS> for one with keys that users
// choose. A list has the shape of its items.
func parseShape(text string) *shape {
	words := strings.Fields(strings.NewReplacer("{", " { ", "}", " } ", "<", " < ", ">", " > ").Replace(text))
	s, rest := parseFields(words)
	if len(rest) > 0 {
		panic("authz: a shape closes what it has not opened")
	}
	return s
}

func parseFields(words []string) (*shape, []string) {
	s := &shape{fields: map[string]*shape{}}
	for len(words) > 0 && words[0] != "}" && words[0] != ">" {
		name, judged := strings.CutPrefix(words[0], "!")
		one := &shape{}
		words = words[1:]
		if len(words) > 0 && (words[0] == "{" || words[0] == "<") {
			keyed := words[0] == "<"
			one, words = parseFields(words[1:])
			one.keyed = keyed
			words = words[1:] // what closes it
		}
		one.name, one.judged = name, judged
		s.fields[fold(name)] = one
	}
	return s, words
}

const (
	configShape = ` Hostname Domainname User AttachStdin AttachStdout AttachStderr ExposedPorts<> Tty OpenStdin StdinOnce
		Env Cmd Healthcheck{Test Interval Timeout StartPeriod StartInterval Retries} ArgsEscaped Image Volumes<>
		WorkingDir Entrypoint NetworkDisabled MacAddress OnBuild Labels<> StopSignal StopTimeout Shell `

	resourcesShape = ` CpuShares Memory NanoCpus !CgroupParent BlkioWeight BlkioWeightDevice{Path Weight}
		BlkioDeviceReadBps{Path Rate} BlkioDeviceWriteBps{Path Rate} BlkioDeviceReadIOps{Path Rate} BlkioDeviceWriteIOps{Path Rate}
		CpuPeriod CpuQuota !CpuRealtimePeriod !CpuRealtimeRuntime CpusetCpus CpusetMems
		!Devices{!PathOnHost PathInContainer CgroupPermissions} !DeviceCgroupRules
		!DeviceRequests{!Driver Count DeviceIDs !Capabilities Options<>} KernelMemory KernelMemoryTCP MemoryReservation MemorySwap
		MemorySwappiness !OomKillDisable PidsLimit !Ulimits{!Name Hard Soft}
		CpuCount CpuPercent IOMaximumIOps IOMaximumBandwidth `

	restartShape = ` RestartPolicy{Name MaximumRetryCount} `

	hostConfigShape = resourcesShape + restartShape + ` !Binds ContainerIDFile !LogConfig{!Type Config<>} !NetworkMode
		PortBindings<HostIp HostPort> AutoRemove !VolumeDriver !VolumesFrom ConsoleSize !Annotations<> !CapAdd CapDrop
		!CgroupnsMode Dns DnsOptions DnsSearch ExtraHosts GroupAdd !IpcMode !Cgroup Links !OomScoreAdj !PidMode !Privileged
		PublishAllPorts ReadonlyRootfs !SecurityOpt StorageOpt<> Tmpfs<> !UTSMode !UsernsMode ShmSize !Sysctls<> !Runtime
		Isolation !Mounts{!Type !Source Target !ReadOnly Consistency
			!BindOptions{!Propagation NonRecursive CreateMountpoint !ReadOnlyNonRecursive ReadOnlyForceRecursive}
			!VolumeOptions{NoCopy Labels<> Subpath !DriverConfig{!Name !Options<>}}
			ImageOptions{Subpath} TmpfsOptions{SizeBytes Mode Options} ClusterOptions{}}
		!MaskedPaths !ReadonlyPaths Init Umask `

	// The addresses of an endpoint that the engine works out are taken, since
	// callers send what they were shown; the engine overwrites them.
	endpointShape = ` IPAMConfig{IPv4Address IPv6Address LinkLocalIPs} Links Aliases MacAddress !DriverOpts<> GwPriority
		!NetworkID EndpointID Gateway IPAddress IPPrefixLen IPv6Gateway GlobalIPv6Address GlobalIPv6PrefixLen DNSNames `

	networkShape = ` Name CheckDuplicate !Driver !Scope EnableIPv4 EnableIPv6
		!IPAM{!Driver !Options<> !Config{!Subnet !IPRange !Gateway AuxiliaryAddresses<>}}
		Internal Attachable !Ingress ConfigOnly !ConfigFrom{!Network} !Options<> Labels<> `

	// A cluster volume is refused with all that is in it, or allowed so.
	volumeShape = ` Name !Driver !DriverOpts<> Labels<> !ClusterVolumeSpec{Group
		AccessMode{Scope Sharing MountVolume{FsType MountFlags} BlockVolume{}}
		AccessibilityRequirements{Requisite{Segments<>} Preferred{Segments<>}}
		CapacityRange{RequiredBytes LimitBytes} Secrets{Key Secret} Availability} `
)

// shapes are the bodies of calls, by what they are for.
var shapes = sync.OnceValue(func() map[string]*shape {
	all := map[string]*shape{}
	for name, text := range map[string]string{
		"nothing": "",
		// Engines before 23 took the HostConfig's fields beside the Config's.
		"create": configShape + hostConfigShape + `Cpuset HostConfig{` + hostConfigShape +
			`} NetworkingConfig{EndpointsConfig<` +
			endpointShape + `>}`,
		"start":      hostConfigShape,
		"update":     resourcesShape + restartShape,
		"commit":     configShape,
		"exec":       `User !Privileged Tty ConsoleSize AttachStdin AttachStderr AttachStdout DetachKeys Env WorkingDir Cmd Detach Container`,
		"exec start": `Detach Tty ConsoleSize`,
		"copy":       `Resource`,
		"checkpoint": `!CheckpointID !CheckpointDir Exit`,
		"volume":     volumeShape,
		"network":    networkShape,
		"connect":    `Container !EndpointConfig{` + endpointShape + `}`,
		"disconnect": `Container Force`,
		"auth":       `username password auth email serveraddress identitytoken registrytoken`,
	} {
		all[name] = parseShape(text)
	}
	return all
})

// unknownField returns the path of the first field of v that the shape does
// not have, or "".
func (s *shape) unknownField(v any, at string) string {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			if bad := s.unknownField(item, at); bad != "" {
				return bad
			}
		}
	case map[string]any:
		if s.fields == nil {
			return at + ".{}"
		}
		for key, value := range v {
			next, name := s.fields[fold(key)], strings.TrimPrefix(at+"."+key, ".")
			if s.keyed {
				next = &shape{}
				if len(s.fields) > 0 {
					next = &shape{fields: s.fields}
				} else if m, ok := value.(map[string]any); ok && len(m) == 0 {
					continue // {"/data": {}}, as Volumes and ExposedPorts have it
				}
			}
			if next == nil {
				return name
			}
			if bad := next.unknownField(value, name); bad != "" {
				return bad
			}
		}
	}
	return ""
}
