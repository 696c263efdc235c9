package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// hooks are the hooks of one verb on a sandbox whose lock is held.
type hooks struct {
	e     *core
	list  map[string][]policy.Hook
	facts runtime.HookFacts
}

// hooksOf finds the hooks of a sandbox in the policy that it was created under. A policy
// that was never used here came from elsewhere, and none of its hooks run.
func (a *admission) hooksOf(verb string, s runtime.Spec) (*hooks, error) {
	h := &hooks{e: a.core, facts: runtime.HookFacts{Verb: verb, Sandbox: runtime.HookSandbox{
		ID: s.ID, Name: s.Name, Image: s.Image, ImageDigest: s.ImageDigest, Backend: s.Backend, Labels: s.Labels,
	}}}
	// Most policies have no hooks, and need no parsing.
	if s.Policy == nil || !bytes.Contains(s.Policy.Rules, []byte(`"hooks"`)) {
		return h, nil
	}
	p, err := recorded(s)
	if err != nil {
		return nil, err
	}
	if a.policies.Remembers(p.Rules.Digest()) {
		h.list, h.facts.Policy = p.Rules.Hooks, p.Name
	}
	return h, nil
}

// of sets the checkpoint that a verb acts on.
func (h *hooks) of(row store.Checkpoint) {
	h.facts.Checkpoint = &runtime.HookCheckpoint{ID: row.ID, Name: row.Name, Trigger: row.Trigger, Labels: row.Labels}
}

// before runs the hooks before a verb. The first that fails refuses the verb.
func (h *hooks) before(ctx context.Context, point string) error {
	for _, hook := range h.list[point] {
		if err := h.run(ctx, point, hook); err != nil {
			if ctx.Err() != nil {
				return err
			}
			return hint(fmt.Errorf("%w: %w", runtime.ErrDenied, err),
				fmt.Sprintf("Nothing was changed. The hook is one of policy %s.", h.facts.Policy))
		}
	}
	return nil
}

// after runs the hooks after a successful verb. A hook that fails is a warning, and a caller
// that disconnects does not end one.
func (h *hooks) after(ctx context.Context, point string) (warnings []string) {
	for _, hook := range h.list[point] {
		if err := h.run(context.WithoutCancel(ctx), point, hook); err != nil {
			h.e.log.Info("hook failed", "sandbox", h.facts.Sandbox.ID, "err", err)
			warnings = append(warnings, err.Error())
		}
	}
	return warnings
}

// failed runs the hooks of a verb that failed. The error stays the verb's.
func (h *hooks) failed(ctx context.Context, err error) {
	if err != nil {
		h.facts.Error = err.Error()
		h.after(ctx, policy.OnFailure)
	}
}

// run runs one hook until it ends or times out.
func (h *hooks) run(ctx context.Context, point string, hook policy.Hook) error {
	failed := func(err error) error {
		return fmt.Errorf("hook %s: %s: %w", point, hook.Run[0], err)
	}
	facts := h.facts
	facts.Hook = point
	input, err := json.Marshal(facts)
	if err != nil {
		return failed(err)
	}
	began := time.Now()
	said, err := hostRun(ctx, hook.Run, h.environ(facts), append(input, '\n'), hook.Timeout)
	h.e.log.Debug("hook run", "sandbox", facts.Sandbox.ID, "hook", point, "program", hook.Run[0], "took",
		time.Since(began), "err", err)
	if err != nil {
		return failed(saying(err, said))
	}
	return nil
}

// environ returns the environment of a hook, except PATH.
func (h *hooks) environ(facts runtime.HookFacts) []string {
	env := []string{
		"AGENTBOX_HOOK=" + facts.Hook,
		"AGENTBOX_VERB=" + facts.Verb,
		"AGENTBOX_SANDBOX=" + facts.Sandbox.ID,
		"AGENTBOX_SANDBOX_NAME=" + facts.Sandbox.Name,
	}
	env = append(env, h.e.rootEnv()...)
	if c := facts.Checkpoint; c != nil && c.ID != "" {
		env = append(env, "AGENTBOX_CHECKPOINT="+c.ID)
	}
	return env
}
