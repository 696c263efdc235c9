package runtime

import (
	"context"

	"github.com/agentbox/agentbox/policy"
)

// PolicyService is the part of Service about the policies that names stand for.
type PolicyService interface {
	// Policies lists them by name, also those that are wrong.
	Policies(ctx context.Context) ([]PolicyEntry, error)
	// Policy resolves a name.
	Policy(ctx context.Context, name string) (*policy.Policy, error)
}

// PolicyEntry is one of a list.
type PolicyEntry struct {
	Name        string   `json:"name"`
	Base        []string `json:"base"` // the nearest first
	File        string   `json:"file"`
	Description string   `json:"description"`
	Digest      string   `json:"digest"`
	Error       string   `json:"error"` // what is wrong with it; empty: nothing
}

// Policies lists the policies of this host.
func (e *Engine) Policies(context.Context) ([]PolicyEntry, error) {
	return ListPolicies(e.policies)
}

// Policy resolves the name of one.
func (e *Engine) Policy(_ context.Context, name string) (*policy.Policy, error) {
	return e.policies.Find(name)
}

// ListPolicies lists what is to be found.
func ListPolicies(find policy.Finder) ([]PolicyEntry, error) {
	names, err := find.List()
	if err != nil {
		return nil, err
	}
	list := []PolicyEntry{}
	for _, name := range names {
		e := PolicyEntry{Name: name, Base: []string{}}
		if p, err := find.Find(name); err != nil {
			e.Error = err.Error()
		} else {
			e.Base, e.File, e.Description, e.Digest = append(e.Base, p.Base...), p.File, p.Description, p.Rules.Digest()
		}
		list = append(list, e)
	}
	return list, nil
}
