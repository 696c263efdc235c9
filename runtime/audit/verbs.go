package audit

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Every verb that may change something, each as its command is called.

func (s *Service) Create(ctx context.Context, req runtime.CreateRequest) (runtime.Sandbox, error) {
	return made(ctx, s, Record{Verb: "create", Ref: Clip(req.Spec.Image), Name: Clip(req.Spec.Name)}, func(r *Record) (runtime.Sandbox, error) {
		sb, err := s.next.Create(ctx, req)
		r.box(sb)
		return sb, err
	})
}

func (s *Service) Start(ctx context.Context, sandbox string, streams *runtime.Streams) (wait func() error, err error) {
	return made(ctx, s, s.on(ctx, "start", sandbox, false), func(*Record) (func() error, error) { return s.next.Start(ctx, sandbox, streams) })
}

func (s *Service) Attach(ctx context.Context, sandbox string, streams runtime.Streams) error {
	return s.do(ctx, s.on(ctx, "attach", sandbox, false), func(*Record) error { return s.next.Attach(ctx, sandbox, streams) })
}

func (s *Service) Exec(ctx context.Context, sandbox string, p runtime.Process, streams runtime.Streams) (int, error) {
	r := s.on(ctx, "exec", sandbox, false)
	if len(p.Args) > 0 {
		r.Program = Clip(p.Args[0])
	}
	return made(ctx, s, r, func(r *Record) (int, error) {
		exit, err := s.next.Exec(ctx, sandbox, p, streams)
		if err == nil && !p.Detach {
			r.Exit = &exit
		}
		return exit, err
	})
}

func (s *Service) Kill(ctx context.Context, sandbox, signal string) error {
	r := s.on(ctx, "kill", sandbox, false)
	r.Signal = Clip(signal)
	return s.do(ctx, r, func(*Record) error { return s.next.Kill(ctx, sandbox, signal) })
}

func (s *Service) Stop(ctx context.Context, sandbox string, timeout time.Duration) error {
	return s.do(ctx, s.on(ctx, "stop", sandbox, false), func(*Record) error { return s.next.Stop(ctx, sandbox, timeout) })
}

func (s *Service) Restart(ctx context.Context, sandbox string, timeout time.Duration) error {
	return s.do(ctx, s.on(ctx, "restart", sandbox, false), func(*Record) error { return s.next.Restart(ctx, sandbox, timeout) })
}

func (s *Service) Pause(ctx context.Context, sandbox string) error {
	return s.do(ctx, s.on(ctx, "pause", sandbox, false), func(*Record) error { return s.next.Pause(ctx, sandbox) })
}

func (s *Service) Unpause(ctx context.Context, sandbox string) error {
	return s.do(ctx, s.on(ctx, "unpause", sandbox, false), func(*Record) error { return s.next.Unpause(ctx, sandbox) })
}

func (s *Service) Remove(ctx context.Context, sandbox string, opts runtime.RemoveOptions) error {
	return s.do(ctx, s.on(ctx, "rm", sandbox, false), func(*Record) error { return s.next.Remove(ctx, sandbox, opts) })
}

func (s *Service) CopyTo(ctx context.Context, sandbox, path string, in io.Reader) error {
	r := s.on(ctx, "cp", sandbox, false)
	r.To = Clip(path)
	return s.do(ctx, r, func(*Record) error { return s.next.CopyTo(ctx, sandbox, path, in) })
}

// Files is on record unless the caller has said that it only reads.
func (s *Service) Files(ctx context.Context, sandbox string, fn func(*policy.Jail) error) error {
	if runtime.OnlyReads(ctx) {
		return s.next.Files(ctx, sandbox, fn)
	}
	return s.do(ctx, s.on(ctx, "files", sandbox, false), func(*Record) error { return s.next.Files(ctx, sandbox, fn) })
}

func (s *Service) Checkpoint(ctx context.Context, sandbox string, opts runtime.CheckpointOptions) (runtime.Checkpoint, error) {
	return made(ctx, s, s.on(ctx, "checkpoint", sandbox, false), func(r *Record) (runtime.Checkpoint, error) {
		c, err := s.next.Checkpoint(ctx, sandbox, opts)
		r.at(c)
		for _, f := range c.Attached {
			r.Attached = some(r.Attached, f.Path)
		}
		return c, err
	})
}

func (s *Service) Restore(ctx context.Context, sandbox string, opts runtime.RestoreOptions) (runtime.Restored, error) {
	return made(ctx, s, s.on(ctx, "restore", sandbox, false), func(r *Record) (runtime.Restored, error) {
		out, err := s.next.Restore(ctx, sandbox, opts)
		r.restored(s.log, out)
		return out, err
	})
}

// restored notes what came of a restore.
func (r *Record) restored(l *Log, out runtime.Restored) {
	r.at(out.Checkpoint)
	r.box(out.Sandbox)
	r.Undo = out.Undo
	for _, f := range out.Compensated {
		r.Effects = some(r.Effects, f.ID+" "+f.Status)
	}
	for _, f := range out.Attached {
		if f.Action == runtime.AttachedPut || f.Action == runtime.AttachedRemoved {
			r.Attached = some(r.Attached, f.Path+" "+f.Action)
		}
	}
	if out.Checkpoint.ID != "" {
		var err error
		if r.Undid, err = l.undone(r.Sandbox, out.Checkpoint.ID, out.Checkpoint.Created, r.Of); err != nil {
			slog.Warn("the audit log does not say what this restore has undone", "sandbox", r.Sandbox, "err", err)
		}
	}
}

func (s *Service) RemoveCheckpoint(ctx context.Context, checkpoint string) error {
	return s.do(ctx, s.on(ctx, "checkpoint rm", checkpoint, true), func(*Record) error { return s.next.RemoveCheckpoint(ctx, checkpoint) })
}

func (s *Service) RemoveCheckpoints(ctx context.Context, filter runtime.CheckpointFilter) (runtime.RemovedCheckpoints, error) {
	r := Record{Verb: "checkpoint rm"}
	if filter.Sandbox != "" {
		r = s.on(ctx, r.Verb, filter.Sandbox, false)
	}
	return made(ctx, s, r, func(r *Record) (runtime.RemovedCheckpoints, error) {
		out, err := s.next.RemoveCheckpoints(ctx, filter)
		for _, id := range out.Removed {
			r.Made = some(r.Made, id)
		}
		return out, err
	})
}

// VerifyCheckpoint notes what is damaged.
func (s *Service) VerifyCheckpoint(ctx context.Context, checkpoint string) error {
	return s.do(ctx, s.on(ctx, "checkpoint verify", checkpoint, true), func(*Record) error { return s.next.VerifyCheckpoint(ctx, checkpoint) })
}

func (s *Service) Apply(ctx context.Context, sandbox string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	return made(ctx, s, s.on(ctx, "apply", sandbox, false), func(*Record) (runtime.Applied, error) { return s.next.Apply(ctx, sandbox, opts) })
}

func (s *Service) Fork(ctx context.Context, sandbox string, opts runtime.ForkOptions) ([]runtime.Forked, error) {
	return made(ctx, s, s.on(ctx, "fork", sandbox, false), func(r *Record) ([]runtime.Forked, error) {
		list, err := s.next.Fork(ctx, sandbox, opts)
		for _, f := range list {
			r.Checkpoint = f.Checkpoint.ID
			r.Made = some(r.Made, f.Sandbox.ID)
		}
		return list, err
	})
}

func (s *Service) PinCheckpoint(ctx context.Context, checkpoint string, pinned bool) error {
	verb := "checkpoint pin"
	if !pinned {
		verb = "checkpoint unpin"
	}
	return s.do(ctx, s.on(ctx, verb, checkpoint, true), func(*Record) error { return s.next.PinCheckpoint(ctx, checkpoint, pinned) })
}

func (s *Service) TagCheckpoint(ctx context.Context, checkpoint, tag string) error {
	r := s.on(ctx, "checkpoint tag", checkpoint, true)
	r.To = Clip(tag)
	return s.do(ctx, r, func(*Record) error { return s.next.TagCheckpoint(ctx, checkpoint, tag) })
}

func (s *Service) UntagCheckpoint(ctx context.Context, ref string) error {
	return s.do(ctx, s.on(ctx, "checkpoint untag", ref, true), func(*Record) error { return s.next.UntagCheckpoint(ctx, ref) })
}

// Prune that only tells what it would do changes nothing.
func (s *Service) Prune(ctx context.Context, opts runtime.PruneOptions) (runtime.Pruned, error) {
	if opts.DryRun {
		return s.next.Prune(ctx, opts)
	}
	r := Record{Verb: "prune"}
	if opts.Sandbox != "" {
		r = s.on(ctx, "prune", opts.Sandbox, false)
	}
	return made(ctx, s, r, func(r *Record) (runtime.Pruned, error) {
		out, err := s.next.Prune(ctx, opts)
		for _, p := range out.Removed {
			r.Made = some(r.Made, p.Checkpoint.ID)
		}
		return out, err
	})
}

func (s *Service) Verify(ctx context.Context, opts runtime.VerifyOptions) (runtime.VerifyReport, error) {
	return made(ctx, s, Record{Verb: "verify"}, func(*Record) (runtime.VerifyReport, error) { return s.next.Verify(ctx, opts) })
}

func (s *Service) Reindex(ctx context.Context) (runtime.Reindexed, error) {
	return made(ctx, s, Record{Verb: "store reindex"}, func(*Record) (runtime.Reindexed, error) { return s.next.Reindex(ctx) })
}

// ExportCheckpoint changes nothing here, but what leaves may hold secrets.
func (s *Service) ExportCheckpoint(ctx context.Context, checkpoint string, w io.Writer, opts runtime.ExportOptions) error {
	return s.do(ctx, s.on(ctx, "checkpoint export", checkpoint, true), func(*Record) error { return s.next.ExportCheckpoint(ctx, checkpoint, w, opts) })
}

func (s *Service) ImportCheckpoint(ctx context.Context, in io.Reader, opts runtime.ImportOptions) (runtime.Checkpoint, error) {
	return made(ctx, s, Record{Verb: "checkpoint import", Name: Clip(opts.Name)}, func(r *Record) (runtime.Checkpoint, error) {
		c, err := s.next.ImportCheckpoint(ctx, in, opts)
		r.at(c)
		return c, err
	})
}

func (s *Service) PushCheckpoint(ctx context.Context, checkpoint, reference string, opts runtime.RegistryOptions) (runtime.Pushed, error) {
	r := s.on(ctx, "checkpoint push", checkpoint, true)
	r.To = Clip(reference)
	return made(ctx, s, r, func(*Record) (runtime.Pushed, error) { return s.next.PushCheckpoint(ctx, checkpoint, reference, opts) })
}

func (s *Service) PullCheckpoint(ctx context.Context, reference string, opts runtime.RegistryOptions) (runtime.Checkpoint, error) {
	return made(ctx, s, Record{Verb: "checkpoint pull", Ref: Clip(reference)}, func(r *Record) (runtime.Checkpoint, error) {
		c, err := s.next.PullCheckpoint(ctx, reference, opts)
		r.at(c)
		return c, err
	})
}

func (s *Service) PullImage(ctx context.Context, ref string, opts images.PullOptions) (runtime.Image, error) {
	return made(ctx, s, Record{Verb: "image pull", Ref: Clip(ref)}, func(*Record) (runtime.Image, error) { return s.next.PullImage(ctx, ref, opts) })
}

func (s *Service) PushImage(ctx context.Context, ref, to string, opts source.Options) (runtime.PushedImage, error) {
	return made(ctx, s, Record{Verb: "image push", Ref: Clip(ref), To: Clip(to)}, func(*Record) (runtime.PushedImage, error) { return s.next.PushImage(ctx, ref, to, opts) })
}

func (s *Service) ImportImage(ctx context.Context, name, source string) (runtime.Image, error) {
	return made(ctx, s, Record{Verb: "image import", Ref: Clip(source), To: Clip(name)}, func(*Record) (runtime.Image, error) { return s.next.ImportImage(ctx, name, source) })
}

func (s *Service) ImportImageFrom(ctx context.Context, name string, in io.Reader) (runtime.Image, error) {
	return made(ctx, s, Record{Verb: "image import", To: Clip(name)}, func(*Record) (runtime.Image, error) { return s.next.ImportImageFrom(ctx, name, in) })
}

func (s *Service) TagImage(ctx context.Context, ref, name string) error {
	return s.do(ctx, Record{Verb: "image tag", Ref: Clip(ref), To: Clip(name)}, func(*Record) error { return s.next.TagImage(ctx, ref, name) })
}

func (s *Service) RemoveImage(ctx context.Context, name string) error {
	return s.do(ctx, Record{Verb: "image rm", Ref: Clip(name)}, func(*Record) error { return s.next.RemoveImage(ctx, name) })
}

func (s *Service) PruneImages(ctx context.Context, all bool) (runtime.PrunedImages, error) {
	return made(ctx, s, Record{Verb: "image prune"}, func(*Record) (runtime.PrunedImages, error) { return s.next.PruneImages(ctx, all) })
}

func (s *Service) VerifyImage(ctx context.Context, ref string) (runtime.Image, error) {
	return made(ctx, s, Record{Verb: "image verify", Ref: Clip(ref)}, func(*Record) (runtime.Image, error) { return s.next.VerifyImage(ctx, ref) })
}

func (s *Service) Commit(ctx context.Context, ref, to string, opts runtime.CommitOptions) (runtime.Committed, error) {
	r := s.on(ctx, "commit", ref, false)
	r.To = Clip(to)
	return made(ctx, s, r, func(r *Record) (runtime.Committed, error) {
		c, err := s.next.Commit(ctx, ref, to, opts)
		if err == nil {
			r.Sandbox, r.Name, r.Checkpoint = c.Sandbox, Clip(c.SandboxName), c.Checkpoint
		}
		return c, err
	})
}

func (s *Service) UpdateEgress(ctx context.Context, sandbox string, change runtime.EgressChange) ([]string, error) {
	return made(ctx, s, s.on(ctx, "update", sandbox, false), func(*Record) ([]string, error) { return s.next.UpdateEgress(ctx, sandbox, change) })
}

func (s *Service) UpdateLifetime(ctx context.Context, sandbox string, change runtime.LifetimeChange) (runtime.Sandbox, error) {
	return made(ctx, s, s.on(ctx, "update", sandbox, false), func(*Record) (runtime.Sandbox, error) { return s.next.UpdateLifetime(ctx, sandbox, change) })
}

func (s *Service) UpdateStorage(ctx context.Context, sandbox string, change runtime.StorageChange) (runtime.Sandbox, error) {
	return made(ctx, s, s.on(ctx, "update", sandbox, false), func(*Record) (runtime.Sandbox, error) { return s.next.UpdateStorage(ctx, sandbox, change) })
}

// AddEffect: an undo command's arguments are not on record, like those of exec.
func (s *Service) AddEffect(ctx context.Context, sandbox string, req runtime.EffectRequest) (runtime.Effect, error) {
	r := s.on(ctx, "effect add", sandbox, false)
	if len(req.Command) > 0 {
		r.Program = Clip(req.Command[0])
	}
	return made(ctx, s, r, func(r *Record) (runtime.Effect, error) {
		f, err := s.next.AddEffect(ctx, sandbox, req)
		r.To = f.ID
		return f, err
	})
}

func (s *Service) RemoveEffect(ctx context.Context, sandbox, effect string) error {
	r := s.on(ctx, "effect rm", sandbox, false)
	r.To = Clip(effect)
	return s.do(ctx, r, func(*Record) error { return s.next.RemoveEffect(ctx, sandbox, effect) })
}

func (s *Service) ReleaseHold(ctx context.Context, sandbox string) error {
	return s.do(ctx, s.on(ctx, "release hold", sandbox, false), func(*Record) error { return s.next.ReleaseHold(ctx, sandbox) })
}

func (s *Service) Reconcile(ctx context.Context) (runtime.ReconcileReport, error) {
	return made(ctx, s, Record{Verb: "recover"}, func(r *Record) (runtime.ReconcileReport, error) {
		out, err := s.next.Reconcile(ctx)
		r.did(out.Actions)
		r.concerns(out)
		return out, err
	})
}

func (s *Service) CreateLease(ctx context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	return made(ctx, s, Record{Verb: "lease create", Ref: Clip(req.Name)}, func(r *Record) (runtime.Lease, error) {
		l, err := s.next.CreateLease(ctx, req)
		r.To = l.ID
		return l, err
	})
}

func (s *Service) HoldLease(ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error) error {
	return s.do(ctx, Record{Verb: "lease hold", Ref: Clip(req.Name)}, func(r *Record) error {
		return s.next.HoldLease(ctx, req, func(ctx context.Context, l runtime.Lease) error {
			r.To = l.ID
			return fn(ctx, l)
		})
	})
}

// RenewLease: a heartbeat is not on record, nor does it depend on one. Whoever
// misses it loses sandboxes.
func (s *Service) RenewLease(ctx context.Context, lease string, deadline time.Duration) (runtime.Lease, error) {
	if deadline == 0 {
		return s.next.RenewLease(ctx, lease, 0)
	}
	return made(ctx, s, Record{Verb: "lease renew", Ref: Clip(lease)}, func(r *Record) (runtime.Lease, error) {
		return s.next.RenewLease(ctx, lease, deadline)
	})
}

func (s *Service) TransferLease(ctx context.Context, lease string, terms runtime.LeaseTerms) (runtime.Lease, error) {
	return made(ctx, s, Record{Verb: "lease transfer", Ref: Clip(lease)}, func(r *Record) (runtime.Lease, error) {
		return s.next.TransferLease(ctx, lease, terms)
	})
}

func (s *Service) ReleaseLease(ctx context.Context, lease string) (runtime.Lease, error) {
	return made(ctx, s, Record{Verb: "lease release", Ref: Clip(lease)}, func(r *Record) (runtime.Lease, error) {
		return s.next.ReleaseLease(ctx, lease)
	})
}

func (r *Record) did(actions []string) {
	for _, a := range actions {
		r.Text = some(r.Text, Clip(a))
	}
}

// concerns notes which sandboxes something was done about, so that they are found.
func (r *Record) concerns(out runtime.ReconcileReport) {
	for _, f := range out.Findings {
		if f.Sandbox != "" && f.Action != "" && !f.Left && !slices.Contains(r.Made, f.Sandbox) {
			r.Made = some(r.Made, f.Sandbox)
		}
	}
}

// maxSome bounds the lists of a record.
const maxSome = 64

// some is a list with one more, or with word that there were more.
func some(list []string, one string) []string {
	switch {
	case len(list) < maxSome:
		return append(list, one)
	case len(list) == maxSome:
		return append(list, "…")
	}
	return list
}
