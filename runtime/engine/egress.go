package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/network/egress"
	"github.com/agentbox/agentbox/runtime/store"
)

// updating is the journal's data of an update.
type updating struct {
	Egress []string `json:"egress"`
}

// checkFilter refuses invalid egress rules, and rules on a backend that cannot enforce them.
func checkFilter(s runtime.Spec, host Host) error {
	if s.Network.Mode != runtime.NetworkFiltered {
		if len(s.Network.Egress) > 0 {
			return fmt.Errorf("%w: egress rules need --network filtered", runtime.ErrInvalid)
		}
		return nil
	}
	if p := host.Properties(); !p.Filters {
		return hint(fmt.Errorf("%w: network filtered with the backend %s", runtime.ErrUnsupported, p.Name),
			"Use the backend oci.")
	}
	_, err := egress.ParseRules(s.Network.Egress)
	return err
}

// UpdateEgress changes what a sandbox may reach.
func (v hostVerbs) UpdateEgress(ctx context.Context, ref string, change runtime.EgressChange) ([]string, error) {
	return verb(ctx, v.e, onSandbox("update", ref), func(ctx context.Context) ([]string, error) {
		return v.e.sandboxes.updateEgress(ctx, ref, change)
	})
}

func (bx *sandboxes) updateEgress(
	ctx context.Context, ref string, change runtime.EgressChange,
) (rules []string, err error) {
	sb, err := bx.acquire(ctx, ref, "update", lockWait)
	if err != nil {
		return nil, err
	}
	defer sb.lock.Unlock()
	s, filter, err := filtered(sb.Sandbox, sb.host)
	if err != nil {
		return nil, err
	}
	if rules, err = changed(s.Network.Egress, change); err != nil {
		return nil, err
	}
	if p, err := recorded(s); err != nil {
		return nil, err
	} else if p != nil {
		if err := p.MayReach(change.Add); err != nil {
			return nil, err
		}
	}
	err = bx.intent(ctx, store.Intent{Op: opUpdate, Sandbox: sb.ID}, updating{rules}, func(int64) error {
		err := bx.setEgress(ctx, sb.Sandbox, filter, rules)
		if err == nil {
			return nil
		}
		// The sandbox keeps its former rules.
		return errors.Join(err, bx.setEgress(context.WithoutCancel(ctx), sb.Sandbox, filter, s.Network.Egress))
	})
	if err != nil {
		return nil, err
	}
	bx.log.Info("egress rules changed", "sandbox", sb.ID, "rules", len(rules))
	return rules, nil
}

// changed returns the rules after a change, in canonical form.
func changed(old []string, change runtime.EgressChange) ([]string, error) {
	canonical := func(texts []string) ([]string, error) {
		parsed, err := policy.ParseEgress(texts)
		return policy.EgressText(parsed), err
	}
	rules, err := canonical(old)
	if err != nil {
		return nil, err
	}
	add, err := canonical(change.Add)
	if err != nil {
		return nil, err
	}
	remove, err := canonical(change.Remove)
	if err != nil {
		return nil, err
	}
	for _, r := range remove {
		i := slices.Index(rules, r)
		if i < 0 {
			return nil, hint(fmt.Errorf("egress rule %q: %w", r, runtime.ErrNotFound),
				"See the rules there are with: agentbox inspect")
		}
		rules = slices.Delete(rules, i, i+1)
	}
	for _, r := range add {
		if !slices.Contains(rules, r) {
			rules = append(rules, r)
		}
	}
	_, err = egress.ParseRules(rules) // not too many
	return rules, err
}

// setEgress records rules and puts them in force.
func (bx *sandboxes) setEgress(
	ctx context.Context, sb store.Sandbox, filter runtime.EgressFilter, rules []string,
) error {
	s, err := spec(sb)
	if err != nil {
		return err
	}
	s.Network.Egress = rules
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := bx.store.SetSpec(ctx, sb.ID, data); err != nil {
		return err
	}
	if err := failpoint.Hit("update.after-row"); err != nil {
		return err
	}
	return filter.SetEgress(ctx, sb.ID, rules)
}

// filtered returns what is needed to deal with a filtered sandbox.
func filtered(sb store.Sandbox, host Host) (runtime.Spec, runtime.EgressFilter, error) {
	s, err := spec(sb)
	if err != nil {
		return s, nil, err
	}
	if s.Network.Mode != runtime.NetworkFiltered {
		return s, nil, fmt.Errorf("%w: its network is %s, not filtered", runtime.ErrState, s.Network.Mode)
	}
	filter, ok := host.Backend.(runtime.EgressFilter)
	if !ok {
		return s, nil, fmt.Errorf("%w: its backend has no egress rules", runtime.ErrUnsupported)
	}
	return s, filter, nil
}

// finishUpdate puts the rules of the killed verb in force.
func (bx *sandboxes) finishUpdate(ctx context.Context, in store.Intent, host Host) (string, error) {
	data, err := decode[updating](in.Data)
	if err != nil {
		return "", err
	}
	sb, err := bx.store.Sandbox(ctx, in.Sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	_, filter, err := filtered(sb, host)
	if err != nil {
		return "", err
	}
	return unless(bx.setEgress(ctx, sb, filter, data.Egress),
		"finished the change of the egress rules of sandbox %s", short(in.Sandbox))
}
