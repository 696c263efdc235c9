package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// A sandbox is named by its name, its id or a unique prefix of the id. A container that
// agentbox did not make is named BACKEND://REF, REF being its engine's name for it. The
// first verb that names such a container adopts it: it gets a record under that name and
// is a sandbox from then on.

// located is a sandbox with its backend.
type located struct {
	store.Sandbox
	host Host
}

// locate finds a sandbox that a user names, and its backend.
func (e *core) locate(ctx context.Context, ref string) (located, error) {
	sb, err := e.find(ctx, ref)
	if err != nil {
		return located{}, err
	}
	host, err := e.host(sb.Backend)
	return located{sb, host}, err
}

// find finds the record of a sandbox that a user names. A name that no sandbox has may be
// that of a container of the chosen backend.
func (e *core) find(ctx context.Context, ref string) (store.Sandbox, error) {
	if backend, name, ok := strings.Cut(ref, "://"); ok {
		return e.adopt(ctx, backend, name)
	}
	sb, err := e.store.Sandbox(ctx, ref)
	if !errors.Is(err, runtime.ErrNotFound) {
		return sb, err
	}
	adopted, aerr := e.adopt(ctx, e.first, ref)
	if errors.Is(aerr, runtime.ErrUnsupported) || errors.Is(aerr, runtime.ErrNotFound) {
		return sb, err
	}
	return adopted, aerr
}

// checkpoint finds a checkpoint that a user names; see find for the sandbox in
// SANDBOX@NAME.
func (e *core) checkpoint(ctx context.Context, ref string) (store.Checkpoint, error) {
	row, err := e.store.Checkpoint(ctx, ref)
	if at := strings.LastIndexByte(ref, '@'); errors.Is(err, runtime.ErrNotFound) && at > 0 {
		if sb, e2 := e.find(ctx, ref[:at]); e2 == nil {
			row, err = e.store.Checkpoint(ctx, sb.ID+ref[at:])
			if unknown(err) { // by the name that was given
				err = hint(fmt.Errorf("sandbox %s has no checkpoint %q: %w", ref[:at], ref[at+1:], runtime.ErrNotFound),
					"List what there is with: agentbox checkpoint ls "+ref[:at])
			}
		}
	}
	return row, err
}

// checkpointIn finds a checkpoint that a user names beside its sandbox: one of its own or,
// failing that, any.
func (e *core) checkpointIn(ctx context.Context, sandbox, ref string) (store.Checkpoint, error) {
	row, err := e.store.Checkpoint(ctx, sandbox+"@"+ref)
	if unknown(err) {
		row, err = e.checkpoint(ctx, ref)
	}
	return row, err
}

// unknown reports whether an error of the store says no more than that there is no such
// checkpoint. One with a hint says why: the name is there, and the history is too short.
func unknown(err error) bool { return errors.Is(err, runtime.ErrNotFound) && len(fault.Hint(err)) == 0 }

// adopt finds or creates the record of a container that its engine knows.
func (e *core) adopt(ctx context.Context, backend, ref string) (store.Sandbox, error) {
	host, err := e.host(backend)
	if err != nil {
		return store.Sandbox{}, err
	}
	s, err := host.Adopt(ctx, ref)
	if errors.Is(err, runtime.ErrNotFound) {
		// What its checkpoints say of it can still be asked for.
		if sb, e2 := e.store.Sandbox(ctx, backend+"://"+ref); e2 == nil {
			// Not when it only has another name by now: that one was not meant.
			if _, e2 := host.Inspect(ctx, sb.ID); errors.Is(e2, runtime.ErrNotFound) {
				return sb, nil
			}
		}
	}
	if err != nil {
		return store.Sandbox{}, err
	}
	sb, err := e.store.Sandbox(ctx, s.ID)
	if !errors.Is(err, runtime.ErrNotFound) {
		return sb, err
	}
	if !s.Adopted {
		// Created by an agentbox with another root, or just being created.
		return sb, hint(
			fmt.Errorf("container %s is a sandbox (%s) of another root: %w", ref, s.Name, runtime.ErrNotFound),
			"Name that root with --root.")
	}
	row := store.Sandbox{
		ID: s.ID, Name: backend + "://" + s.Name, Backend: backend, Image: s.Image, ImageDigest: s.ImageDigest,
		Attempt: 1, Labels: s.Labels,
	}
	s.Name, s.Backend = row.Name, backend
	if row.Spec, err = json.Marshal(s); err != nil {
		return sb, err
	}
	if store.ValidLabels(row.Labels) != nil {
		row.Labels = nil // the engine has them, and its rules are its own
	}
	err = e.store.PutSandbox(ctx, row)
	if errors.Is(err, runtime.ErrExists) {
		// The name belonged to a container that is gone by now, or another process
		// was faster.
		if old, e2 := e.store.Sandbox(ctx, row.Name); e2 == nil && old.ID != row.ID {
			now, e2 := host.Adopt(ctx, old.ID)
			switch {
			case errors.Is(e2, runtime.ErrNotFound):
				err = errors.Join(e.events.drop(old.ID), e.store.DeleteSandbox(ctx, old.ID),
					e.store.PutSandbox(ctx, row))
			case e2 == nil && now.ID == old.ID && backend+"://"+now.Name != old.Name:
				// It was renamed since, and this container got its old name.
				old.Name = backend + "://" + now.Name
				err = errors.Join(e.store.DeleteSandbox(ctx, old.ID), e.store.PutSandbox(ctx, old),
					e.store.PutSandbox(ctx, row))
			}
		}
	}
	if err != nil && !errors.Is(err, runtime.ErrExists) {
		return sb, err
	}
	e.log.Info("container adopted", "sandbox", row.ID, "name", row.Name)
	return e.store.Sandbox(ctx, row.ID)
}
