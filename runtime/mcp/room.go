package mcp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agentbox/agentbox/runtime"
)

// makeRoom removes the oldest checkpoints that agents have taken of a sandbox, in
// this session or an earlier one, until they are within the bounds. It spares the
// one that was just taken, pinned and tagged ones, and those that a lease keeps, and
// returns what it removed in words.
func (s *Server) makeRoom(ctx context.Context, b *box, taken string) (note string, err error) {
	all, err := s.svc.Checkpoints(ctx, runtime.CheckpointFilter{Sandbox: b.id})
	if err != nil {
		return "", err
	}
	slices.Reverse(all) // the oldest first
	all = slices.DeleteFunc(all, func(c runtime.Checkpoint) bool {
		return c.Trigger != runtime.TriggerMCP && c.Trigger != runtime.TriggerTool
	})
	var removed int
	var errs []error
	for _, c := range surplus(all, taken, s.opts.MaxCheckpoints, s.opts.MaxCheckpointBytes) {
		switch err := s.svc.RemoveCheckpoint(ctx, c.ID); {
		case err == nil:
			removed++
		case !errors.Is(err, runtime.ErrNotFound) && !errors.Is(err, runtime.ErrBusy):
			errs = append(errs, err)
		}
	}
	if removed > 0 {
		note = fmt.Sprintf("[the %d oldest checkpoints were removed: %d, and %d bytes, are kept]", removed,
			s.opts.MaxCheckpoints, s.opts.MaxCheckpointBytes)
	}
	return note, errors.Join(errs...)
}

// surplus returns the checkpoints that have to go, of checkpoints in the order of their age.
// They take at least what the oldest needs and each later one has added.
func surplus(all []runtime.Checkpoint, taken string, most int, bytes int64) (out []runtime.Checkpoint) {
	for len(all) > 0 {
		size := all[0].Bytes
		for _, c := range all[1:] {
			size += c.Added
		}
		if len(all) <= most && size <= bytes {
			return out
		}
		i := slices.IndexFunc(all, func(c runtime.Checkpoint) bool {
			return c.ID != taken && !c.Pinned && len(c.Tags) == 0 && c.Lease == ""
		})
		if i < 0 {
			return out
		}
		out = append(out, all[i])
		all = slices.Delete(slices.Clone(all), i, i+1)
	}
	return out
}
