// Package session lets a Go program have sandboxes and checkpoints that go when it
// is done with them, over any Service: the embedded engine, or the service of a host.
//
//	s := session.New(svc)
//	defer func() { err = errors.Join(err, s.Close(ctx)) }()
//
// What the rules are for listing, removing and choosing checkpoints stands on
// runtime.Service (Checkpoints, RemoveCheckpoints, Restore); a session adds which of
// them are its own. The client for Python has the same shape; see docs/api.md.
package session

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"sync"

	"github.com/agentbox/agentbox/runtime"
)

// Label is on all that a session makes, with the session's id.
const Label = "agentbox.session"

// Service is the part of runtime.Service that a session needs.
type Service interface {
	runtime.SandboxService
	runtime.CheckpointService
}

// A Session makes what Close removes. It may be used by several goroutines.
type Session struct {
	svc Service
	id  string

	mu     sync.Mutex
	kept   map[string]bool // ids of checkpoints that outlive it
	remade map[string]bool // ids of sandboxes that a restore has made again, without the label
}

// New begins a session.
func New(svc Service) *Session {
	return &Session{svc: svc, id: rand.Text(), kept: map[string]bool{}, remade: map[string]bool{}}
}

func (s *Session) own(labels map[string]string) map[string]string {
	all := maps.Clone(labels)
	if all == nil {
		all = map[string]string{}
	}
	all[Label] = s.id
	return all
}

// Run makes a sandbox of the session and starts it. If the start fails, the sandbox is removed.
func (s *Session) Run(ctx context.Context, req runtime.CreateRequest) (runtime.Sandbox, error) {
	req.Spec.Labels = s.own(req.Spec.Labels)
	sb, err := s.svc.Create(ctx, req)
	if err != nil {
		return sb, err
	}
	if _, err := s.svc.Start(ctx, sb.ID, nil); err != nil {
		return runtime.Sandbox{}, errors.Join(err, s.svc.Remove(context.WithoutCancel(ctx), sb.ID,
			runtime.RemoveOptions{Force: true}))
	}
	return s.svc.Sandbox(ctx, sb.ID)
}

// Open returns the sandbox that the request names at the newest ready checkpoint that match
// (Checkpoint, or Trigger and Labels) selects, made again if it was removed, or a fresh one if it
// does not exist. It leaves alone a sandbox without such a checkpoint, and returns ErrExists.
func (s *Session) Open(
	ctx context.Context, req runtime.CreateRequest, match runtime.RestoreOptions,
) (runtime.Sandbox, error) {
	r, err := s.svc.Restore(ctx, req.Spec.Name, match)
	if errors.Is(err, runtime.ErrNotFound) {
		return s.Run(ctx, req)
	}
	if r.Recreated {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.remade[r.Sandbox.ID] = true
	}
	return r.Sandbox, err
}

// Checkpoint takes one and waits until it is ready. With keep it outlives the session.
func (s *Session) Checkpoint(
	ctx context.Context, sandbox string, keep bool, opts runtime.CheckpointOptions,
) (runtime.Checkpoint, error) {
	opts.Labels = s.own(opts.Labels)
	c, err := s.svc.Checkpoint(ctx, sandbox, opts)
	if err == nil && keep {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.kept[c.ID] = true
	}
	return c, err
}

// Fork starts new sandboxes of the session from a checkpoint, or from where the
// sandbox is now.
func (s *Session) Fork(ctx context.Context, sandbox string, opts runtime.ForkOptions) ([]runtime.Forked, error) {
	opts.Labels = s.own(opts.Labels)
	if opts.Checkpoint == "" {
		c, err := s.Checkpoint(ctx, sandbox, false, runtime.CheckpointOptions{Trigger: "fork"})
		if err != nil {
			return nil, err
		}
		opts.Checkpoint = c.ID
	}
	return s.svc.Fork(ctx, sandbox, opts)
}

// Close removes what the session has made, except the checkpoints it was to keep. It goes by the
// records, not by the answers that the session got: one may have been lost. A failing step does
// not keep the others from being tried; all errors are returned, the first one first. ctx may
// have ended. Close may be called again.
func (s *Session) Close(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	attempt := func(err error) {
		if err != nil && !errors.Is(err, runtime.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	sandboxes, gone := maps.Clone(s.remade), map[string]bool{}
	list, err := s.svc.Sandboxes(ctx)
	attempt(err)
	for _, sb := range list {
		if sb.Labels[Label] == s.id {
			sandboxes[sb.ID] = true
		}
	}
	mine, err := s.svc.Checkpoints(ctx, runtime.CheckpointFilter{All: true, Labels: map[string]string{Label: s.id}})
	attempt(err)
	for id := range sandboxes {
		of, err := s.svc.Checkpoints(ctx, runtime.CheckpointFilter{All: true, Sandbox: id})
		attempt(err)
		for _, c := range of {
			// One that was made again has checkpoints from before; its undo checkpoints have
			// no use any more.
			if !s.remade[id] || c.Trigger == runtime.TriggerUndo {
				mine = append(mine, c)
			}
		}
	}
	for id := range sandboxes {
		attempt(s.svc.Remove(ctx, id, runtime.RemoveOptions{Force: true}))
	}
	for _, c := range mine {
		if !s.kept[c.ID] && !gone[c.ID] {
			gone[c.ID] = true
			attempt(s.svc.RemoveCheckpoint(ctx, c.ID))
		}
	}
	if len(errs) == 0 {
		clear(s.remade)
	}
	return errors.Join(errs...)
}
