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

// EgressChange is what Update does to the egress rules of a sandbox.
type EgressChange struct {
	Add    []string `json:"add"`
	Remove []string `json:"remove"`
}

// EgressService is the part of Service about filtered sandboxes.
type EgressService interface {
	// UpdateEgress changes what a sandbox may reach, at once if it runs, and
	// returns all its rules. Of a rule that is to be removed and not there it
	// makes ErrNotFound, and then changes nothing.
	UpdateEgress(ctx context.Context, sandbox string, change EgressChange) ([]string, error)
}
