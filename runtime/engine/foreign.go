package engine

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/moby/sys/signal"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

const madeHere = "the checkpoint was made here, and its sandbox has what it had"

// noGrants refuses grants where nothing can be granted.
func noGrants(g runtime.Grants, why string) error {
	if !g.TrustSpec && len(g.Mounts) == 0 && len(g.Ports) == 0 && g.Policy == "" {
		return nil
	}
	return fmt.Errorf("%w: nothing can be granted: %s", runtime.ErrInvalid, why)
}

// foreignHint says how to choose a foreign checkpoint.
func foreignHint(sandbox string) string {
	return "A checkpoint from elsewhere is not chosen unasked. Name it, or give --foreign: agentbox checkpoint ls " +
		sandbox
}

// foreignHead refuses to choose the foreign checkpoint that a sandbox was last at.
func foreignHead(sandbox string, row store.Checkpoint) error {
	return hint(
		fmt.Errorf("%s@HEAD that was made here: %w: checkpoint %s comes from elsewhere", sandbox, runtime.ErrNotFound,
			short(row.ID)),
		"It is not chosen unasked. Name it: agentbox restore "+sandbox+" HEAD")
}

func onlyForeign(sandbox string) error {
	return hint(
		fmt.Errorf("checkpoint of %s that was made here: %w", sandbox, runtime.ErrNotFound),
		foreignHint(sandbox))
}

// claim turns the spec of a foreign checkpoint into that of the sandbox that is made from it,
// and returns the requests that it refuses. The checkpoint's processes may depend on them.
func claim(s *runtime.Spec, row store.Checkpoint, g runtime.Grants, processes bool) (withheld []string, err error) {
	if !row.Foreign {
		return nil, noGrants(g, madeHere)
	}
	if s.Adopted {
		return nil, nil // an adopted sandbox is never recreated
	}
	if err := checkForeign(*s); err != nil {
		return nil, err
	}
	for _, m := range g.Mounts {
		if err := checkMount(m); err != nil {
			return nil, err
		}
	}
	asked := *s
	if !g.TrustSpec {
		*s = modest(asked, processes)
	}
	s.ID, s.Name, s.ImageDigest, s.Policy = row.SandboxID, row.SandboxName, row.ImageDigest, nil
	s.Mounts = slices.Concat(slices.DeleteFunc(slices.Clone(s.Mounts), func(m runtime.Mount) bool {
		return slices.ContainsFunc(g.Mounts, func(o runtime.Mount) bool {
			return path.Clean(o.Target) == path.Clean(m.Target)
		})
	}), g.Mounts)
	s.Network.Ports = slices.Concat(s.Network.Ports, g.Ports)
	if s.Network.Mode == runtime.NetworkHost || s.Network.Mode == runtime.NetworkNone {
		if s.Network.Ports = nil; len(g.Ports) > 0 {
			return nil, fmt.Errorf("%w: ports need the network bridge, and the checkpoint is for %s",
				runtime.ErrInvalid, s.Network.Mode)
		}
	}
	if g.TrustSpec {
		return nil, nil
	}
	for _, m := range asked.Mounts {
		given := slices.ContainsFunc(s.Mounts, func(o runtime.Mount) bool {
			return path.Clean(o.Target) == path.Clean(m.Target)
		})
		if processes && !given {
			return nil, hint(fmt.Errorf("%w: the checkpoint comes from elsewhere, and its processes have %s",
				runtime.ErrDenied, mountText(m)),
				"Give it one there with --mount (--workspace), or restore its files alone: --files-only.")
		}
	}
	if processes && asked.Network.Mode == runtime.NetworkHost {
		return nil, hint(fmt.Errorf("%w: the checkpoint comes from elsewhere, and its processes have the host's network", runtime.ErrDenied),
			"Restore its files alone (--files-only), or trust all that it asks for with --trust-spec.")
	}
	for _, text := range asks(asked, processes) {
		withheld = append(withheld, "not given, as the checkpoint comes from elsewhere: "+text)
	}
	return withheld, nil
}

// fits refuses the processes of a foreign checkpoint if they need something that their
// existing sandbox was not given.
func (r *restoration) fits() error {
	if !r.full() || r.spec.Adopted {
		return nil
	}
	asked, err := specOf(r.row.SandboxID, r.row.Spec)
	if err != nil {
		return err
	}
	lacks := func(what string) error {
		return hint(fmt.Errorf("%w: the checkpoint comes from elsewhere, and the sandbox has not what its processes had: %s", runtime.ErrState, what),
			"Restore its files alone (--files-only), or have the sandbox made again (--strategy recreate).")
	}
	for _, m := range asked.Mounts {
		if !slices.ContainsFunc(r.spec.Mounts, func(o runtime.Mount) bool {
			return path.Clean(o.Target) == path.Clean(m.Target)
		}) {
			return lacks(mountText(m))
		}
	}
	switch {
	case (asked.Network.Mode == runtime.NetworkHost) != (r.spec.Network.Mode == runtime.NetworkHost):
		return lacks("another network")
	case (asked.IDs == nil) != (r.spec.IDs == nil), asked.IDs != nil && *asked.IDs != *r.spec.IDs:
		return lacks("other user ids")
	}
	return nil
}

// readmitOf is readmit for any checkpoint. Over the spec of a foreign one only the policy that
// the caller has named decides; the policy that its author names does not count, even if it
// is known here.
func (a *admission) readmitOf(row store.Checkpoint, s *runtime.Spec, g runtime.Grants, processes bool) error {
	if !row.Foreign {
		return a.readmit(s)
	}
	p, err := a.policies.Find(cmp.Or(g.Policy, policy.Default))
	if err != nil {
		return err
	}
	s.Network.Mode = cmp.Or(s.Network.Mode, p.Rules.Network, runtime.NetworkBridge)
	if processes && s.IDs == nil && p.Rules.NeedsNamespace() {
		return p.NoNamespace("the processes of the checkpoint have the host's ids")
	}
	got, err := judged(*s, p, !processes || s.IDs != nil)
	if err != nil {
		return hint(err, "The checkpoint comes from elsewhere: the policy "+p.Name+
			" decides. Name another one with --policy.")
	}
	grant(s, p, got)
	for i := range s.Mounts {
		s.Mounts[i].Source = got.Mounts[i].Source
	}
	if err := a.policies.Remember(s.Policy.Digest); err != nil {
		return fmt.Errorf("remember the policy %s: %w", s.Policy.Name, err)
	}
	return nil
}

// modest returns the part of a foreign spec that needs no grant: what concerns only the
// sandbox itself, and what restricts it.
func modest(s runtime.Spec, processes bool) runtime.Spec {
	out := runtime.Spec{
		Image: s.Image, ImageSource: s.ImageSource, Args: s.Args, Env: s.Env, Workdir: s.Workdir,
		User: s.User, Hostname: s.Hostname,
		Terminal: s.Terminal, OpenStdin: s.OpenStdin, Init: s.Init, ReadOnly: s.ReadOnly, StopSignal: s.StopSignal,
		Secrets: s.Secrets, Volumes: s.Volumes, Resources: s.Resources, IDs: s.IDs,
		Adopted: s.Adopted, Backend: s.Backend,
		Network:  runtime.Network{Mode: s.Network.Mode, Egress: s.Network.Egress},
		Security: runtime.Security{NoNewPrivileges: s.Security.NoNewPrivileges},
	}
	if s.Network.Mode == runtime.NetworkHost {
		out.Network = runtime.Network{}
	}
	if caps := s.Security.Capabilities; caps != nil {
		out.Security.Capabilities = slices.DeleteFunc(slices.Clone(caps), func(c string) bool {
			return !slices.Contains(usual(processes), c)
		})
	}
	for _, m := range s.Mounts {
		if m.Type == "tmpfs" {
			out.Mounts = append(out.Mounts, m)
		}
	}
	return out
}

// usual returns the capabilities that need no grant. Restored processes have Docker's, and a
// process that inspects them needs as many.
func usual(processes bool) []string {
	if processes {
		return policy.DockerCapabilities
	}
	return policy.DefaultCapabilities
}

// asks returns what a spec asks for beyond that, a phrase each.
func asks(s runtime.Spec, processes bool) (list []string) {
	say := func(format string, a ...any) { list = append(list, fmt.Sprintf(format, a...)) }
	for _, m := range s.Mounts {
		if m.Type != "tmpfs" {
			say("%s", mountText(m))
		}
	}
	if s.Network.Mode == runtime.NetworkHost {
		say("the host's network")
	}
	if s.Network.Group != "" {
		say("the network group %s", s.Network.Group)
	}
	for _, p := range s.Network.Ports {
		say("port %s:%d of the host, for its %d/%s", p.HostIP, p.Host, p.Sandbox, p.Protocol)
	}
	if comesBack(s.Restart) {
		say("the restart policy %s", s.Restart.Policy)
	}
	sec := s.Security
	if more := slices.DeleteFunc(slices.Clone(sec.Capabilities), func(c string) bool {
		return slices.Contains(usual(processes), c)
	}); len(more) > 0 {
		say("the capabilities %s", strings.Join(more, ", "))
	}
	if sec.NewPrivileges {
		say("new privileges, by setuid programs and file capabilities")
	}
	if sec.Seccomp != "" || sec.SeccompProfile != "" {
		say("seccomp: %s", cmp.Or(sec.Seccomp, "a profile of its own"))
	}
	if sec.AppArmor != "" {
		say("AppArmor: %s", sec.AppArmor)
	}
	if sec.IOUring {
		say("io_uring")
	}
	for _, k := range slices.Sorted(maps.Keys(s.Labels)) {
		say("the label %s=%s", k, s.Labels[k])
	}
	if s.CheckpointEvery != "" {
		say("checkpoints that are taken by themselves: %s", s.CheckpointEvery)
	}
	if s.Lifetime != (runtime.Lifetime{}) {
		say("an end of its own time: --ttl %v, --idle %v", s.Lifetime.TTL, s.Lifetime.Idle)
	}
	if s.AutoRemove {
		say("its removal when it exits")
	}
	return list
}

func mountText(m runtime.Mount) string {
	mode := "read-write"
	if m.ReadOnly {
		mode = "read-only"
	}
	return fmt.Sprintf("%s %s at %s, %s", cmp.Or(m.Type, "mount"), m.Source, m.Target, mode)
}

// checkForeign refuses a spec with which no sandbox could have been created.
func checkForeign(s runtime.Spec) error {
	bad := func(what string) error { return fmt.Errorf("%w: the checkpoint's spec: %s", runtime.ErrInvalid, what) }
	switch s.Network.Mode {
	case "", runtime.NetworkNone, runtime.NetworkHost, runtime.NetworkBridge, runtime.NetworkFiltered:
	default:
		return bad(fmt.Sprintf("network %.40q", s.Network.Mode))
	}
	for _, list := range [][]string{s.Args, s.Env, {s.Workdir, s.User, s.Hostname}} {
		if i := slices.IndexFunc(list, func(t string) bool {
			return !utf8.ValidString(t) || strings.ContainsRune(t, 0)
		}); i >= 0 {
			return bad(fmt.Sprintf("%.40q is no text", list[i]))
		}
	}
	_, err := signal.ParseSignal(s.StopSignal)
	r := s.Resources
	switch {
	case len(s.Args) == 0:
		return bad("it has no command")
	case len(s.Hostname) > 63:
		return bad("its host name is longer than 63 bytes")
	case !path.IsAbs(s.Workdir):
		return bad(fmt.Sprintf("working directory %.40q", s.Workdir))
	case err != nil && s.StopSignal != "":
		return bad(fmt.Sprintf("stop signal %.40q", s.StopSignal))
	case r.Memory < 0 || r.CPUs < 0 || r.Pids < 0 || r.IO < 0 || r.Storage < 0:
		return bad("a limit is negative")
	}
	for _, dir := range s.Volumes {
		if !path.IsAbs(dir) {
			return bad(fmt.Sprintf("volume %.40q", dir))
		}
	}
	return nil
}
