package authz

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/network"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// plainNetworkOptions change nothing outside of the network.
var plainNetworkOptions = []string{
	"com.docker.network.bridge.enable_icc=*",
	"com.docker.network.bridge.enable_ip_masquerade=*",
	"com.docker.network.bridge.gateway_mode_ipv4=isolated",
	"com.docker.network.bridge.gateway_mode_ipv4=nat",
	"com.docker.network.bridge.gateway_mode_ipv6=isolated",
	"com.docker.network.bridge.gateway_mode_ipv6=nat",
	"com.docker.network.bridge.host_binding_ipv4=*",
	"com.docker.network.bridge.inhibit_ipv4=*",
	"com.docker.network.container_iface_prefix=*",
	"com.docker.network.driver.mtu=*",
	"com.docker.network.enable_ipv4=*",
	"com.docker.network.enable_ipv6=*",
}

// plainEndpointOptions are a container's own affair.
var plainEndpointOptions = []string{
	"com.docker.network.advertise_addr_ms=*",
	"com.docker.network.advertise_addr_nmsgs=*",
	"com.docker.network.endpoint.ifname=*",
}

const endpointSysctls = "com.docker.network.endpoint.sysctls"

// privatePools are the pools from which networks may choose their subnets.
var privatePools = []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"}

// maxSubnets bounds the subnets of one network.
const maxSubnets = 64

func (j *Judge) network(c *call, f *findings) {
	var body network.CreateRequest
	if !j.read(c, f, "network", &body) {
		return
	}
	p := &j.policy.Networks
	if body.Driver != "" && body.Driver != "bridge" && !slices.Contains(j.policy.NetworkDrivers, body.Driver) {
		f.add("network driver", "network_drivers", "networks of the driver %s are not allowed", quote(body.Driver))
	}
	if (body.Ingress || body.Scope != "" && body.Scope != "local") && !j.policy.Swarm {
		f.add("network", "swarm", "a network of the swarm is not allowed")
	}
	if body.ConfigFrom != nil && body.ConfigFrom.Network != "" && !p.ConfigFrom {
		f.add("network", "networks.config_from",
			"the configuration of %s, which the judge may not have seen, is not allowed",
			quote(body.ConfigFrom.Network))
	}
	j.networkOptions("network", body.Options, plainNetworkOptions, f)
	if body.IPAM != nil {
		j.ipam(body.IPAM, f)
	}
}

// networkOptions judges options of a network or an endpoint.
func (j *Judge) networkOptions(rule string, opts map[string]string, plain []string, f *findings) {
	for _, key := range sorted(opts) {
		if f.full() {
			return
		}
		allowed := func(list []string) bool {
			return slices.Contains(list, key+"="+opts[key]) || slices.Contains(list, key+"=*")
		}
		if !allowed(plain) && !allowed(j.policy.Networks.Options) {
			f.add(rule, "networks.options", "the option %s is not allowed", quote(key+"="+opts[key]))
		}
	}
}

func (j *Judge) ipam(ipam *network.IPAM, f *findings) {
	const rule = "network"
	if ipam.Driver != "" && ipam.Driver != "default" || len(ipam.Options) > 0 {
		if !slices.Contains(j.policy.Networks.IPAMDrivers, ipam.Driver) {
			f.add(rule, "networks.ipam_drivers",
				"addresses from the driver %s, or options for it, are not allowed", quote(ipam.Driver))
		}
	}
	if len(ipam.Config) > maxSubnets {
		f.add(rule, "", "%d subnets in one network; %d are the most that the judge looks at",
			len(ipam.Config), maxSubnets)
		return
	}
	for _, conf := range ipam.Config {
		if f.full() {
			return
		}
		j.subnet(conf, f)
	}
}

// subnet judges which addresses a network takes over: the host's packets to them then go to
// the network, even if the addresses are in use outside.
func (j *Judge) subnet(conf network.IPAMConfig, f *findings) {
	const rule = "network"
	if conf.Subnet == "" {
		if conf.IPRange != "" || conf.Gateway != "" || len(conf.AuxAddress) > 0 {
			f.add(rule, "", "addresses without a subnet")
		}
		return // the engine chooses
	}
	subnet, err := netip.ParsePrefix(conf.Subnet)
	if err != nil || subnet.Addr().Is4In6() {
		f.add(rule, "", "%s is no subnet", quote(conf.Subnet))
		return
	}
	if conf.IPRange != "" {
		if r, err := netip.ParsePrefix(conf.IPRange); err != nil || !holds(subnet, r) {
			f.add(rule, "", "the range %s is not in the subnet %s", quote(conf.IPRange), subnet)
		}
	}
	if conf.Gateway != "" {
		if a, err := netip.ParseAddr(conf.Gateway); err != nil || !subnet.Contains(a) {
			f.add(rule, "", "the gateway %s is not in the subnet %s", quote(conf.Gateway), subnet)
		}
	}
	if anyHolds(j.policy.Networks.Subnets, subnet) {
		return
	}
	if !anyHolds(privatePools, subnet) {
		f.add(rule, "networks.subnets", "the subnet %s is outside of %s", subnet, strings.Join(privatePools, ", "))
		return
	}
	taken, err := j.routes()
	if err != nil {
		f.add(rule, "networks.subnets", "the subnet %s: what the host routes cannot be read: %v", subnet, err)
		return
	}
	for _, r := range taken {
		if r.Overlaps(subnet) {
			f.add(rule, "networks.subnets", "the subnet %s overlaps %s, which the host has a route for", subnet, r)
			return
		}
	}
}

func holds(outer, inner netip.Prefix) bool {
	return inner.Bits() >= outer.Bits() && outer.Contains(inner.Addr())
}

func anyHolds(pools []string, subnet netip.Prefix) bool {
	return slices.ContainsFunc(pools, func(pool string) bool {
		p, err := netip.ParsePrefix(pool)
		return err == nil && holds(p, subnet)
	})
}

// hostRoutes returns the destinations of the host's routes, in all tables, except the default
// ones.
func hostRoutes() ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC},
			netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			addr, ok := netip.AddrFromSlice(r.Dst.IP)
			ones, _ := r.Dst.Mask.Size()
			if ok && ones > 0 {
				all = append(all, netip.PrefixFrom(addr.Unmap(), ones))
			}
		}
	}
	return all, nil
}

func (j *Judge) connect(c *call, f *findings) {
	var body network.ConnectOptions
	if !j.read(c, f, "connect", &body) {
		return
	}
	j.endpoint(c.parts[1], body.EndpointConfig, f)
}

// endpoint judges how a container joins a network. The engine takes the id in
// the settings before the name.
func (j *Judge) endpoint(name string, e *network.EndpointSettings, f *findings) {
	if strings.EqualFold(name, "host") || e != nil && strings.EqualFold(e.NetworkID, "host") {
		j.hostNamespace("network", f)
	}
	if e == nil {
		return
	}
	rest := map[string]string{}
	for _, key := range sorted(e.DriverOpts) {
		if key != endpointSysctls {
			rest[key] = e.DriverOpts[key]
			continue
		}
		for set := range strings.SplitSeq(e.DriverOpts[key], ",") {
			name, _, _ := strings.Cut(set, "=")
			if !matchesAny(j.policy.Sysctls, strings.TrimSpace(name)) && !f.full() {
				f.add("sysctl", "sysctls", "%s is not allowed", quote(name))
			}
		}
	}
	j.networkOptions("endpoint", rest, plainEndpointOptions, f)
}
