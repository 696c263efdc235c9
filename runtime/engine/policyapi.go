package engine

import (
	"context"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Policies lists the policies of this host.
func (v hostVerbs) Policies(ctx context.Context) ([]runtime.PolicyEntry, error) {
	return verb(ctx, v.e, errorsNamed(reads(on("policy ls", ""))), func(context.Context) ([]runtime.PolicyEntry, error) {
		return ListPolicies(v.e.policies)
	})
}

// Policy returns the policy with a name.
func (v hostVerbs) Policy(ctx context.Context, name string) (*policy.Policy, error) {
	return verb(ctx, v.e, errorsNamed(reads(on("policy show", name))), func(context.Context) (*policy.Policy, error) {
		return v.e.policies.Find(name)
	})
}

// ListPolicies lists the policies that find knows.
func ListPolicies(find policy.Finder) ([]runtime.PolicyEntry, error) {
	names, err := find.List()
	if err != nil {
		return nil, err
	}
	list := []runtime.PolicyEntry{}
	for _, name := range names {
		e := runtime.PolicyEntry{Name: name, Base: []string{}}
		if p, err := find.Find(name); err != nil {
			e.Error = err.Error()
		} else {
			e.Base, e.File, e.Description, e.Digest = append(e.Base, p.Base...), p.File, p.Description, p.Rules.Digest()
		}
		list = append(list, e)
	}
	return list, nil
}
