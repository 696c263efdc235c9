package volume

import (
	"context"

	"github.com/agentbox/agentbox/runtime/audit"
)

// Recorded are volumes whose creation and removal the audit log has on record.
type Recorded struct {
	*Volumes
	log *audit.Log
	by  string
}

// Record returns the volumes with what is done to them on record; by is the part of agentbox
// that does it.
func Record(v *Volumes, log *audit.Log, by string) *Recorded { return &Recorded{v, log, by} }

// Create is Volumes.Create, on record.
func (v *Recorded) Create(ctx context.Context, name string, opts CreateOptions) error {
	return v.log.Do(audit.Self(v.by), audit.Record{Verb: "volume create", Ref: audit.Clip(name)},
		func(r *audit.Record) error {
			err := v.Volumes.Create(ctx, name, opts)
			if err == nil {
				v.names(ctx, name, r)
			}
			return err
		})
}

// Remove is Volumes.Remove, on record.
func (v *Recorded) Remove(ctx context.Context, name string) error {
	r := audit.Record{Verb: "volume rm", Ref: audit.Clip(name)}
	v.names(ctx, name, &r)
	return v.log.Do(audit.Self(v.by), r, func(*audit.Record) error { return v.Volumes.Remove(ctx, name) })
}

// names says in a record which volume it is about, as those of what is done to it as
// to a sandbox do.
func (v *Recorded) names(ctx context.Context, name string, r *audit.Record) {
	if one, err := v.Inspect(ctx, name); err == nil {
		r.Sandbox, r.Name = one.ID, "volume://"+one.Name
	}
}
