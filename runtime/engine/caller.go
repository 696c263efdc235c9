package engine

import (
	"context"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Subject looks up what a sandbox or, with checkpoint, a checkpoint is that a
// caller names. It asks no engine, and what is not known is left empty.
func (e *Engine) Subject(ctx context.Context, ref string, checkpoint bool) runtime.Subject {
	if !checkpoint {
		if sb, err := e.store.Sandbox(ctx, ref); err == nil {
			return runtime.Subject{Sandbox: sb.ID, Name: sb.Name}
		}
		return runtime.Subject{}
	}
	row, err := e.store.Checkpoint(ctx, ref)
	if err != nil {
		row = store.Checkpoint{}
	}
	return runtime.Subject{Sandbox: row.SandboxID, Name: row.SandboxName, Checkpoint: row.ID}
}
