package docker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/versions"

	"github.com/agentbox/agentbox/internal/fault"
)

// Sandboxes are on networks of the daemon that agentbox makes, one for each
// group of a root and one for all that have no group, on which containers do
// not reach each other. A sandbox has one address for all its life, because a
// connection that a restore brings back ends at that address, and Docker gives
// a fixed one only on networks whose subnet was asked for.

// seat is a place on a network.
type seat struct {
	network string // name
	address netip.Addr
	mac     string
}

// endpoint asks for the seat, in the words of an API version.
func (s seat) endpoint(api string) *network.NetworkingConfig {
	e := &network.EndpointSettings{IPAMConfig: &network.EndpointIPAMConfig{IPv4Address: s.address.String()}}
	if perNetworkMAC(api) {
		e.MacAddress = s.mac
	}
	return &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{s.network: e}}
}

// networkName is the name of a group's network.
func (b *Backend) networkName(group string) string {
	sum := sha256.Sum256([]byte(b.root + "\x00" + group))
	name := "agentbox-" + hex.EncodeToString(sum[:4])
	return strings.TrimSuffix(name+"-"+group, "-")
}

// joinNetwork finds a free address, on a network that it makes if need be. The
// caller holds the lock until the container has it.
func (b *Backend) joinNetwork(ctx context.Context, group string) (seat, error) {
	name := b.networkName(group)
	call, cancel := whole(ctx)
	defer cancel()
	n, err := b.api.NetworkInspect(call, name, network.InspectOptions{})
	if cerrdefs.IsNotFound(err) {
		n, err = b.makeNetwork(call, name, group)
	}
	if err != nil {
		return seat{}, b.explain(call, err)
	}
	if n.Labels[labelRoot] != b.root || len(n.IPAM.Config) == 0 {
		return seat{}, fmt.Errorf("docker network %s: %w: it is not agentbox's", name, fault.ErrExists)
	}
	subnet, err := netip.ParsePrefix(n.IPAM.Config[0].Subnet)
	if err != nil || !subnet.Addr().Is4() {
		return seat{}, fmt.Errorf("docker network %s: subnet %q: %w", name,
			n.IPAM.Config[0].Subnet, fault.ErrUnsupported)
	}
	taken := map[netip.Addr]bool{subnet.Masked().Addr(): true, subnet.Masked().Addr().Next(): true}
	if gateway, err := netip.ParseAddr(n.IPAM.Config[0].Gateway); err == nil {
		taken[gateway] = true
	}
	users, err := b.users(call, name)
	if err != nil {
		return seat{}, err
	}
	for _, c := range users {
		if c.NetworkSettings == nil || c.NetworkSettings.Networks[name] == nil {
			continue
		}
		e := c.NetworkSettings.Networks[name]
		for _, s := range []string{e.IPAddress, fixed(e)} {
			if a, err := netip.ParseAddr(s); err == nil {
				taken[a] = true
			}
		}
	}
	for a := subnet.Masked().Addr(); subnet.Contains(a); a = a.Next() {
		if !taken[a] && subnet.Contains(a.Next()) { // the last one is for broadcasts
			return seat{name, a, macOf(a)}, nil
		}
	}
	return seat{}, hint(fmt.Errorf("docker network %s: %w: every address of %s is taken", name, fault.ErrBusy, subnet),
		"Remove sandboxes that are not needed any more, or use another --network group.")
}

func perNetworkMAC(api string) bool { return !versions.LessThan(api, "1.44") }

func fixed(e *network.EndpointSettings) string {
	if e.IPAMConfig == nil {
		return ""
	}
	return e.IPAMConfig.IPv4Address
}

// macOf is the MAC that Docker itself used to derive from an address.
func macOf(a netip.Addr) string {
	ip := a.As4()
	return net.HardwareAddr{0x02, 0x42, ip[0], ip[1], ip[2], ip[3]}.String()
}

// users lists the containers on a network, those that do not run included.
func (b *Backend) users(ctx context.Context, name string) ([]container.Summary, error) {
	list, err := b.api.ContainerList(ctx, container.ListOptions{
		All: true, Filters: filters.NewArgs(filters.Arg("network", name)),
	})
	return list, b.explain(ctx, err)
}

// makeNetwork makes a network. The daemon knows best which subnet is free, but gives fixed
// addresses only in a subnet of the request; so there are two requests.
func (b *Backend) makeNetwork(ctx context.Context, name, group string) (network.Inspect, error) {
	opts := network.CreateOptions{
		Driver: "bridge",
		Labels: map[string]string{labelRoot: b.root, labelGroup: group},
		Options: map[string]string{
			"com.docker.network.bridge.enable_icc": fmt.Sprint(group != ""),
		},
	}
	for try := 0; ; try++ {
		opts.IPAM = nil
		made, err := b.api.NetworkCreate(ctx, name, opts)
		if err != nil {
			return network.Inspect{}, err
		}
		n, err := b.api.NetworkInspect(ctx, made.ID, network.InspectOptions{})
		if e := b.api.NetworkRemove(ctx, made.ID); err == nil {
			err = e
		}
		if err != nil {
			return n, err
		}
		if len(n.IPAM.Config) == 0 {
			return n, fmt.Errorf("docker network %s: %w: it has no subnet", name, fault.ErrUnsupported)
		}
		opts.IPAM = &network.IPAM{Driver: "default", Config: []network.IPAMConfig{{Subnet: n.IPAM.Config[0].Subnet}}}
		if made, err = b.api.NetworkCreate(ctx, name, opts); err != nil {
			if try < 3 && strings.Contains(err.Error(), "overlap") {
				continue // another process was faster
			}
			return n, err
		}
		return b.api.NetworkInspect(ctx, made.ID, network.InspectOptions{})
	}
}

// pruneNetworks removes this root's networks that no container is on. The
// caller holds the lock.
func (b *Backend) pruneNetworks(ctx context.Context) error {
	call, cancel := whole(ctx)
	defer cancel()
	list, err := b.api.NetworkList(call, network.ListOptions{Filters: filters.NewArgs(filters.Arg("label",
		labelRoot+"="+b.root))})
	if err != nil {
		return b.explain(call, err)
	}
	var errs []error
	for _, n := range list {
		// A daemon takes a network away from under containers that do not run.
		users, err := b.users(call, n.Name)
		if err != nil {
			return err
		}
		if len(users) > 0 {
			continue
		}
		err = b.api.NetworkRemove(call, n.ID)
		if err != nil && !cerrdefs.IsNotFound(err) && !strings.Contains(err.Error(), "active endpoints") {
			errs = append(errs, b.explain(call, err))
		}
	}
	return errors.Join(errs...)
}
