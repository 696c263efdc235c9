package runtime

import (
	"context"

	"github.com/agentbox/agentbox/policy"
)

// HostService is the part of Service about the host: what sandboxes change on it, what they
// may use of it, by which policies, and its upkeep.
type HostService interface {
	// Apply copies a sandbox's changes into the directory that it is layered over, or
	// undoes the last Apply: all changes or none.
	Apply(ctx context.Context, sandbox string, opts ApplyOptions) (Applied, error)
	// Approvals lists the applies that a person has to approve, newest first.
	Approvals(ctx context.Context) ([]Approval, error)
	// Approve approves the apply with an id, once and until the approval expires. The id may be
	// shortened.
	Approve(ctx context.Context, id string) (Approval, error)
	// AddEffect records that a sandbox has just done something outside itself. A
	// restore to an earlier checkpoint compensates it.
	AddEffect(ctx context.Context, sandbox string, req EffectRequest) (Effect, error)
	// Effects lists the ledger, newest first; without all only the outstanding
	// entries. The sandbox may have been removed, if checkpoints of it are left.
	Effects(ctx context.Context, sandbox string, all bool) ([]Effect, error)
	// RemoveEffect removes an entry, named by a prefix of its id, without running its
	// undo command.
	RemoveEffect(ctx context.Context, sandbox, effect string) error

	// UpdateLifetime changes how long a sandbox may live from now on, how long it may
	// be idle, and whether it is restarted when it ends. An expired sandbox can then
	// be started again.
	UpdateLifetime(ctx context.Context, sandbox string, change LifetimeChange) (Sandbox, error)
	// UpdateStorage changes how much space a sandbox's files may take, at once if it
	// runs.
	UpdateStorage(ctx context.Context, sandbox string, change StorageChange) (Sandbox, error)
	// UpdateEgress changes what a sandbox may reach, at once if it runs, and returns
	// all its rules. If a rule to remove does not exist, it returns ErrNotFound and
	// changes nothing.
	UpdateEgress(ctx context.Context, sandbox string, change EgressChange) ([]string, error)
	// ReleaseHold allows verbs again on a sandbox that a failed restore has put on
	// hold. The sandbox stays paused or stopped.
	ReleaseHold(ctx context.Context, sandbox string) error
	// Events calls each with the events of a sandbox, oldest first; when following,
	// until ctx ends or the sandbox is removed.
	Events(ctx context.Context, sandbox string, opts EventOptions, each func(Event) error) error

	// Policies lists the policies by name, invalid ones included.
	Policies(ctx context.Context) ([]PolicyEntry, error)
	// Policy returns the policy with a name.
	Policy(ctx context.Context, name string) (*policy.Policy, error)

	// Usage returns what the store takes on disk.
	Usage(ctx context.Context) (Usage, error)
	// Prune removes the checkpoints that no retention rule keeps, and frees the space
	// that nothing uses any more.
	Prune(ctx context.Context, opts PruneOptions) (Pruned, error)
	// Verify checks that all data of checkpoints is in the store, and with ReadData or
	// Rehearse that it is intact.
	Verify(ctx context.Context, opts VerifyOptions) (VerifyReport, error)
	// Reindex rebuilds the store's index from its files.
	Reindex(ctx context.Context) (Reindexed, error)
	// Reconcile finishes or rolls back interrupted verbs, then compares the records
	// with the host: it repairs records and frees orphans.
	Reconcile(ctx context.Context) (ReconcileReport, error)
}
