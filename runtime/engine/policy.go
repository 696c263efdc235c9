package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// admission has policies judge what a request or a checkpoint asks for.
type admission struct {
	*core
}

// PolicyRequest returns what a policy judges of a request. The image's own user and digest
// are not known yet.
func PolicyRequest(req runtime.CreateRequest) policy.Request {
	ask := askFor(req.Spec)
	ask.CapAdd, ask.CapDrop, ask.Privileged, ask.UserNS = req.CapAdd, req.CapDrop, req.Privileged, req.UserNS
	return ask
}

// askFor translates a spec into a request to a policy.
func askFor(s runtime.Spec) policy.Request {
	ask := policy.Request{
		Image: s.Image, User: s.User, Labels: s.Labels, Every: s.CheckpointEvery,
		Capabilities: s.Security.Capabilities, NoNewPrivileges: s.Security.NoNewPrivileges,
		NewPrivileges: s.Security.NewPrivileges,
		Seccomp:       s.Security.Seccomp, AppArmor: s.Security.AppArmor, IOUring: s.Security.IOUring,
		Network: s.Network.Mode, Egress: s.Network.Egress, Group: s.Network.Group,
		Memory: s.Resources.Memory, CPUs: s.Resources.CPUs, Pids: s.Resources.Pids,
		Swap: s.Resources.Swap, IO: s.Resources.IO, Storage: s.Resources.Storage,
		TTL: max(0, s.Lifetime.TTL), Idle: max(0, s.Lifetime.Idle),
		Mounts: mountsOf(s),
	}
	if text := s.Security.SeccompProfile; text != "" {
		ask.Seccomp = policy.SeccompDigest(text) // regardless of the digest in the spec
	}
	for _, secret := range s.Secrets {
		if secret.File != "" {
			ask.Mounts = append(ask.Mounts, secretMount(secret.File))
		}
	}
	for _, p := range s.Network.Ports {
		ask.Ports = append(ask.Ports, policy.Port{IP: p.HostIP, Host: p.Host, Protocol: p.Protocol})
	}
	return ask
}

func mountsOf(s runtime.Spec) []policy.Mount {
	var list []policy.Mount
	for _, m := range s.Mounts {
		list = append(list, policy.Mount{Type: m.Type, Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly})
	}
	return list
}

// admit has the policy of a request judge a completed spec, and changes the spec to what the
// policy grants. The policy judges only the user's labels, not those of the image.
func (a *admission) admit(s *runtime.Spec, req runtime.CreateRequest, img image.Image, labels map[string]string) error {
	req.Spec = *s
	ask := PolicyRequest(req)
	ask.Labels = labels
	ask.Digests = []string{img.Digest}
	for _, d := range img.RepoDigests {
		_, digest, _ := strings.Cut(d, "@")
		ask.Digests = append(ask.Digests, digest)
	}
	got, findings := req.Policy.Judge(ask)
	if err := policy.Denials(findings); err != nil {
		return err
	}
	grant(s, req.Policy, got)
	for i := range s.Mounts {
		s.Mounts[i].Source = got.Mounts[i].Source
	}
	if err := a.policies.Remember(s.Policy.Digest); err != nil {
		return fmt.Errorf("remember the policy %s: %w", s.Policy.Name, err)
	}
	return nil
}

// grant changes a spec to what a policy grants. It leaves the sources of mounts, because
// restored processes keep theirs.
func grant(s *runtime.Spec, p *policy.Policy, got policy.Request) {
	s.User, s.CheckpointEvery = got.User, got.Every
	s.Lifetime = livesFor(got.TTL, got.Idle)
	s.Network.Mode, s.Network.Egress = got.Network, got.Egress
	s.Resources = runtime.Resources{
		Memory: got.Memory, Swap: got.Swap, CPUs: got.CPUs, Pids: got.Pids, IO: got.IO, Storage: got.Storage,
	}
	profile := s.Security.SeccompProfile
	s.Security = runtime.Security{
		Capabilities: got.Capabilities, NoNewPrivileges: got.NoNewPrivileges, NewPrivileges: got.NewPrivileges,
		AppArmor: got.AppArmor, IOUring: got.IOUring,
	}
	if got.Seccomp != policy.SeccompDefault {
		s.Security.Seccomp, s.Security.SeccompProfile = got.Seccomp, profile
	}
	s.Policy = &runtime.Policy{Name: p.Name, Digest: p.Rules.Digest(), Rules: p.Rules.Canonical()}
}

// recorded returns the policy that a sandbox was created under; nil: there was none.
func recorded(s runtime.Spec) (*policy.Policy, error) {
	if s.Policy == nil {
		return nil, nil
	}
	return policy.ParseCanonical(s.Policy.Name, s.Policy.Rules)
}

// readmit applies policy to the spec of a checkpoint from which a sandbox is to be made. The
// spec names the policy that it was made under, but the author of a foreign checkpoint could
// name any: a policy that was never used here does not count, and the sandbox is made under
// the default policy instead.
func (a *admission) readmit(s *runtime.Spec) error {
	p, err := recorded(*s)
	if err != nil {
		return err
	}
	strange := p == nil || !a.policies.Remembers(p.Rules.Digest())
	if strange {
		if p, err = a.policies.Find(policy.Default); err != nil {
			return err
		}
	}
	if s.IDs == nil && p.Rules.NeedsNamespace() {
		return p.NoNamespace("the checkpoint is of a sandbox that had them")
	}
	got, err := judged(*s, p, s.IDs != nil)
	if err != nil {
		if strange && s.Policy != nil {
			err = hint(err, "The policy of the checkpoint, "+s.Policy.Name+
				", was never used here, so that the default one counts.")
		}
		return err
	}
	grant(s, p, got)
	return nil
}

// judged returns what a policy grants of a checkpoint's spec. mapped says that the sandbox
// gets a user namespace where possible.
func judged(s runtime.Spec, p *policy.Policy, mapped bool) (policy.Request, error) {
	ask := askFor(s)
	ask.Image = "" // the digest is fixed; the name was judged at the time
	if ask.Network == runtime.NetworkFiltered && ask.Egress == nil {
		ask.Egress = []string{} // the request was for no rules
	}
	if mapped {
		ask.UserNS = runtime.UserNSAuto
	}
	got, findings := p.Judge(ask)
	return got, policy.Denials(findings)
}

// mayMount judges the present targets of a sandbox's mount sources by the policy that it
// was created under.
func mayMount(s runtime.Spec) error {
	p, err := recorded(s)
	if err != nil || p == nil || len(s.Mounts) == 0 {
		return err
	}
	return p.Mounts(mountsOf(s))
}

// mayBe judges the user of an exec; empty means the sandbox's own.
func mayBe(sb store.Sandbox, user string) error {
	if user == "" {
		return nil
	}
	s, err := spec(sb)
	if err != nil {
		return err
	}
	p, err := recorded(s)
	if err != nil || p == nil {
		return err
	}
	return p.User(user)
}

// policyName returns the name in a stored spec, for messages; empty if the spec cannot be
// read.
func policyName(spec json.RawMessage) string {
	var s struct {
		Policy runtime.Policy `json:"policy"`
	}
	if json.Unmarshal(spec, &s) != nil {
		return ""
	}
	return s.Policy.Name
}

// retention is the retention rules of a sandbox's checkpoints.
type retention struct {
	policy.Keeping
	policy    string
	automatic []string // triggers of automatic checkpoints
}

// kept returns the retention rules of a sandbox's policy.
func kept(s runtime.Spec) (r retention, err error) {
	p, err := recorded(s)
	if err != nil || p == nil {
		return r, err
	}
	own, err := ownTriggers(s)
	automatic := append(own, runtime.TriggerTool, runtime.TriggerMCP, runtime.TriggerPrompt)
	return retention{p.Rules.Keeping(), p.Name, automatic}, err
}

// any reports whether the rules could remove a checkpoint.
func (r retention) any() bool {
	return r.All != (policy.Retention{}) || r.Automatic != (policy.Retention{}) && len(r.automatic) > 0
}

// covers reports whether a checkpoint was taken automatically or by an agent. It does not
// cover checkpoints that a user has named, or foreign ones.
func (r retention) covers(c store.Checkpoint) bool {
	return slices.Contains(r.automatic, c.Trigger) && (c.Name == "" || c.Trigger == runtime.TriggerMCP) && !c.Foreign
}

// keepByPolicy removes the checkpoints of one sandbox, or of each, that the sandbox's policy
// does not keep.
func (up *upkeep) keepByPolicy(ctx context.Context, sandbox string, out *runtime.Pruned) error {
	rows, err := up.store.Checkpoints(ctx, store.Filter{SandboxID: sandbox})
	if err != nil {
		return err
	}
	boxes, err := up.store.Sandboxes(ctx)
	if err != nil {
		return err
	}
	// The policy is that in the sandbox's spec or, if it is gone, its newest checkpoint's.
	specs := map[string]json.RawMessage{}
	for _, sb := range boxes {
		specs[sb.ID] = sb.Spec
	}
	seen := map[string]bool{}
	for _, row := range rows {
		text, alive := specs[row.SandboxID]
		if seen[row.SandboxID] || !alive && row.Foreign { // its policy would be its author's
			continue
		}
		seen[row.SandboxID] = true
		if !alive {
			text = row.Spec
		}
		s, err := specOf(row.SandboxID, text)
		if err != nil {
			return err
		}
		r, err := kept(s)
		if err != nil {
			return err
		}
		if !r.any() {
			continue
		}
		if err := up.retain(ctx, store.Filter{SandboxID: row.SandboxID}, r, out); err != nil {
			return err
		}
	}
	return nil
}

// makeRoom removes the checkpoints that a sandbox's policy does not keep beside the one that
// was just taken. A failure does not affect that one.
func (up *upkeep) makeRoom(ctx context.Context, sb store.Sandbox, c runtime.Checkpoint) {
	s, err := spec(sb)
	if err != nil {
		return // the checkpoint could not have been taken
	}
	var out runtime.Pruned
	r, err := kept(s)
	f := store.Filter{SandboxID: sb.ID}
	if err == nil && r.All == (policy.Retention{}) {
		// Only automatic checkpoints are limited: read no others.
		if f.Automatic = true; !r.any() || !slices.Contains(r.automatic, c.Trigger) {
			return
		}
	}
	ctx = context.WithoutCancel(ctx)
	if err == nil {
		err = up.retain(ctx, f, r, &out)
	}
	if err != nil {
		up.log.Warn("older checkpoints not removed; `agentbox prune` removes them", "sandbox", sb.ID, "err", err)
	}
	if len(out.Removed) > 0 {
		up.log.Info("checkpoints removed by policy", "sandbox", sb.ID, "policy", r.policy,
			"checkpoints", len(out.Removed))
		own := runtime.Own{Why: "retention of policy " + r.policy, Past: true}
		for _, p := range out.Removed {
			own.Made = append(own.Made, p.Checkpoint.ID)
		}
		// the error is logged
		_ = up.observed(ctx, runtime.ByItself("prune", subjectOf(sb), own), func(context.Context) error { return err })
		up.tidy(ctx)
	}
}
