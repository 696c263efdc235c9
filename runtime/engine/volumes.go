package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// usersTime bounds the search for other users of a volume: a sandbox may be frozen
// meanwhile, and an engine may work on its other containers for any length of time.
const usersTime = time.Minute

// takeVolumes adds the volumes of a sandbox to a checkpoint. No backend has both volumes of an
// engine and workspaces.
func (k *making) takeVolumes(ctx context.Context) error {
	for _, v := range k.c.Volumes {
		k.parts.Volumes = append(k.parts.Volumes, store.Volume{Name: v.Name})
		if v.Workspace() {
			k.parts.Volumes = append(k.parts.Volumes, store.Volume{Name: v.Name, Below: true})
		}
	}
	return alone(ctx, k.sb.host, k.sb.ID, k.c.Volumes)
}

// checkAlone proves that no other container uses a volume that the restore will change.
// The check counts once the sandbox has ended; earlier checks are for the processes' sake,
// which a refusal then leaves alone.
func (r *restoration) checkAlone(ctx context.Context) error {
	if r.resumed { // it goes on all the same
		return nil
	}
	var changes []runtime.Volume
	for _, v := range r.c.Volumes {
		if slices.ContainsFunc(r.data.Trees[1:], func(t worktree.Tree) bool { return t.Dir == v.Path }) {
			changes = append(changes, v)
		}
	}
	return alone(ctx, r.sb.host, r.sb.ID, changes)
}

// alone refuses volumes to which other containers could write at this moment.
func alone(ctx context.Context, host Host, id string, volumes []runtime.Volume) error {
	volumes = slices.DeleteFunc(slices.Clone(volumes), runtime.Volume.Workspace) // these are the sandbox's own
	if len(volumes) == 0 {
		return nil
	}
	sharer, ok := host.Backend.(runtime.VolumeSharer)
	if !ok {
		return fmt.Errorf("%w: backend %s does not tell what else uses a volume", runtime.ErrUnsupported,
			host.Properties().Name)
	}
	bound, cancel := context.WithTimeout(ctx, usersTime)
	defer cancel()
	var users map[string][]string
	done := guard.Start(func() (err error) {
		users, err = sharer.VolumeUsers(bound, id, volumes)
		return err
	})
	var err error
	select {
	case err = <-done:
	case <-bound.Done(): // it may be blocked on a filesystem that does not answer
		err = bound.Err()
	}
	const unknown = "who else has the volumes of the sandbox cannot be found out"
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && bound.Err() != nil:
		return hint(fmt.Errorf("%s: its engine has not told within %v", unknown, usersTime),
			"It may be at work on another container; try again once that is over, or leave the volumes out.")
	case errors.Is(err, runtime.ErrNotFound):
		return fmt.Errorf("%s: %v", unknown, err) // not wrapped: the error is not about the sandbox
	case err != nil:
		return fmt.Errorf("%s: %w", unknown, err)
	}
	for _, v := range volumes {
		if by := users[v.Name]; len(by) > 0 {
			return hint(
				fmt.Errorf("%w: volume %s is in use by %s, too", runtime.ErrState, v.Name, strings.Join(by, ", ")),
				"Stop that first, or leave the volume out.")
		}
	}
	return nil
}
