package traces

import (
	"context"
	"io"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Every verb that may change something, each as its command is called.

func (s *Service) Create(ctx context.Context, req runtime.CreateRequest) (runtime.Sandbox, error) {
	return made(ctx, s, "create", named(req.Spec.Image), func(ctx context.Context, span trace.Span) (runtime.Sandbox, error) {
		out, err := s.next.Create(ctx, req)
		boxed(span, out)
		return out, err
	})
}

func (s *Service) Start(ctx context.Context, ref string, streams *runtime.Streams) (func() error, error) {
	return made(ctx, s, "start", sandbox(ref), func(ctx context.Context, _ trace.Span) (func() error, error) { return s.next.Start(ctx, ref, streams) })
}

func (s *Service) Attach(ctx context.Context, ref string, streams runtime.Streams) error {
	return s.do(ctx, "attach", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Attach(ctx, ref, streams) })
}

// Exec: neither the command nor its environment is in the span.
func (s *Service) Exec(ctx context.Context, ref string, p runtime.Process, streams runtime.Streams) (int, error) {
	return made(ctx, s, "exec", sandbox(ref), func(ctx context.Context, span trace.Span) (int, error) {
		out, err := s.next.Exec(ctx, ref, p, streams)
		if err == nil && !p.Detach {
			span.SetAttributes(attrExit.Int(out))
		}
		return out, err
	})
}

func (s *Service) Kill(ctx context.Context, ref, signal string) error {
	return s.do(ctx, "kill", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Kill(ctx, ref, signal) })
}

func (s *Service) Stop(ctx context.Context, ref string, timeout time.Duration) error {
	return s.do(ctx, "stop", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Stop(ctx, ref, timeout) })
}

func (s *Service) Restart(ctx context.Context, ref string, timeout time.Duration) error {
	return s.do(ctx, "restart", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Restart(ctx, ref, timeout) })
}

func (s *Service) Pause(ctx context.Context, ref string) error {
	return s.do(ctx, "pause", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Pause(ctx, ref) })
}

func (s *Service) Unpause(ctx context.Context, ref string) error {
	return s.do(ctx, "unpause", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Unpause(ctx, ref) })
}

func (s *Service) Remove(ctx context.Context, ref string, opts runtime.RemoveOptions) error {
	return s.do(ctx, "rm", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Remove(ctx, ref, opts) })
}

func (s *Service) CopyTo(ctx context.Context, ref, path string, in io.Reader) error {
	return s.do(ctx, "cp", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.CopyTo(ctx, ref, path, in) })
}

// Files that are only read are part of their caller's trace, and begin none.
func (s *Service) Files(ctx context.Context, ref string, fn func(*policy.Jail) error) error {
	if runtime.OnlyReads(ctx) {
		return s.look(ctx, "files", sandbox(ref), func(ctx context.Context) error { return s.next.Files(ctx, ref, fn) })
	}
	return s.do(ctx, "files", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.Files(ctx, ref, fn) })
}

func (s *Service) Checkpoint(ctx context.Context, ref string, opts runtime.CheckpointOptions) (runtime.Checkpoint, error) {
	return made(ctx, s, "checkpoint", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Checkpoint, error) {
		out, err := s.next.Checkpoint(ctx, ref, opts)
		taken(span, out)
		if err == nil {
			span.SetAttributes(attrAdded.Int64(out.Added), attrFrozen.Float64(ms(out.Frozen)))
		}
		return out, err
	})
}

func (s *Service) Restore(ctx context.Context, ref string, opts runtime.RestoreOptions) (runtime.Restored, error) {
	return made(ctx, s, "restore", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Restored, error) {
		out, err := s.next.Restore(ctx, ref, opts)
		restored(span, out, err)
		return out, err
	})
}

func (s *Service) RemoveCheckpoint(ctx context.Context, ref string) error {
	return s.do(ctx, "checkpoint rm", checkpoint(ref), func(ctx context.Context, _ trace.Span) error { return s.next.RemoveCheckpoint(ctx, ref) })
}

func (s *Service) RemoveCheckpoints(ctx context.Context, filter runtime.CheckpointFilter) (runtime.RemovedCheckpoints, error) {
	return made(ctx, s, "checkpoint rm", sandbox(filter.Sandbox), func(ctx context.Context, span trace.Span) (runtime.RemovedCheckpoints, error) {
		out, err := s.next.RemoveCheckpoints(ctx, filter)
		span.SetAttributes(attrCount.Int(len(out.Removed)))
		return out, err
	})
}

func (s *Service) VerifyCheckpoint(ctx context.Context, ref string) error {
	return s.do(ctx, "checkpoint verify", checkpoint(ref), func(ctx context.Context, _ trace.Span) error { return s.next.VerifyCheckpoint(ctx, ref) })
}

func (s *Service) Apply(ctx context.Context, ref string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	return made(ctx, s, "apply", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Applied, error) {
		out, err := s.next.Apply(ctx, ref, opts)
		span.SetAttributes(attrCount.Int(len(out.Changes)))
		return out, err
	})
}

func (s *Service) Fork(ctx context.Context, ref string, opts runtime.ForkOptions) ([]runtime.Forked, error) {
	return made(ctx, s, "fork", sandbox(ref), func(ctx context.Context, span trace.Span) ([]runtime.Forked, error) {
		out, err := s.next.Fork(ctx, ref, opts)
		var ids []string
		for _, f := range out[:min(len(out), maxSome)] {
			ids = append(ids, f.Sandbox.ID)
		}
		if len(out) > 0 {
			span.SetAttributes(attrForks.StringSlice(ids), attrCount.Int(len(out)), attrCheckpoint.String(out[0].Checkpoint.ID), attrKind.String(out[0].Checkpoint.Kind), attrBackend.String(out[0].Sandbox.Backend))
		}
		return out, err
	})
}

func (s *Service) PinCheckpoint(ctx context.Context, ref string, pinned bool) error {
	return s.do(ctx, "checkpoint pin", checkpoint(ref), func(ctx context.Context, _ trace.Span) error { return s.next.PinCheckpoint(ctx, ref, pinned) })
}

func (s *Service) TagCheckpoint(ctx context.Context, ref, tag string) error {
	return s.do(ctx, "checkpoint tag", checkpoint(ref), func(ctx context.Context, _ trace.Span) error { return s.next.TagCheckpoint(ctx, ref, tag) })
}

func (s *Service) UntagCheckpoint(ctx context.Context, ref string) error {
	return s.do(ctx, "checkpoint untag", checkpoint(ref), func(ctx context.Context, _ trace.Span) error { return s.next.UntagCheckpoint(ctx, ref) })
}

func (s *Service) Prune(ctx context.Context, opts runtime.PruneOptions) (runtime.Pruned, error) {
	return made(ctx, s, "prune", sandbox(opts.Sandbox), func(ctx context.Context, span trace.Span) (runtime.Pruned, error) {
		out, err := s.next.Prune(ctx, opts)
		span.SetAttributes(attrCount.Int(len(out.Removed)), attrMoved.Int64(out.Freed))
		return out, err
	})
}

func (s *Service) Verify(ctx context.Context, opts runtime.VerifyOptions) (runtime.VerifyReport, error) {
	return made(ctx, s, "verify", target{}, func(ctx context.Context, _ trace.Span) (runtime.VerifyReport, error) { return s.next.Verify(ctx, opts) })
}

func (s *Service) Reindex(ctx context.Context) (runtime.Reindexed, error) {
	return made(ctx, s, "store reindex", target{}, func(ctx context.Context, _ trace.Span) (runtime.Reindexed, error) { return s.next.Reindex(ctx) })
}

func (s *Service) ExportCheckpoint(ctx context.Context, ref string, w io.Writer, opts runtime.ExportOptions) error {
	return s.do(ctx, "checkpoint export", checkpoint(ref), func(ctx context.Context, _ trace.Span) error { return s.next.ExportCheckpoint(ctx, ref, w, opts) })
}

func (s *Service) ImportCheckpoint(ctx context.Context, in io.Reader, opts runtime.ImportOptions) (runtime.Checkpoint, error) {
	return made(ctx, s, "checkpoint import", target{}, func(ctx context.Context, span trace.Span) (runtime.Checkpoint, error) {
		out, err := s.next.ImportCheckpoint(ctx, in, opts)
		taken(span, out)
		return out, err
	})
}

func (s *Service) PushCheckpoint(ctx context.Context, ref, to string, opts runtime.RegistryOptions) (runtime.Pushed, error) {
	return made(ctx, s, "checkpoint push", checkpoint(ref), func(ctx context.Context, span trace.Span) (runtime.Pushed, error) {
		out, err := s.next.PushCheckpoint(ctx, ref, to, opts)
		span.SetAttributes(attrMoved.Int64(out.Bytes))
		return out, err
	})
}

func (s *Service) PullCheckpoint(ctx context.Context, ref string, opts runtime.RegistryOptions) (runtime.Checkpoint, error) {
	return made(ctx, s, "checkpoint pull", named(ref), func(ctx context.Context, span trace.Span) (runtime.Checkpoint, error) {
		out, err := s.next.PullCheckpoint(ctx, ref, opts)
		taken(span, out)
		return out, err
	})
}

func (s *Service) PullImage(ctx context.Context, ref string, opts images.PullOptions) (runtime.Image, error) {
	return made(ctx, s, "image pull", named(ref), func(ctx context.Context, _ trace.Span) (runtime.Image, error) {
		return s.next.PullImage(ctx, ref, opts)
	})
}

func (s *Service) PushImage(ctx context.Context, ref, to string, opts source.Options) (runtime.PushedImage, error) {
	return made(ctx, s, "image push", named(ref), func(ctx context.Context, _ trace.Span) (runtime.PushedImage, error) {
		return s.next.PushImage(ctx, ref, to, opts)
	})
}

func (s *Service) ImportImage(ctx context.Context, name, from string) (runtime.Image, error) {
	return made(ctx, s, "image import", named(name), func(ctx context.Context, _ trace.Span) (runtime.Image, error) {
		return s.next.ImportImage(ctx, name, from)
	})
}

func (s *Service) ImportImageFrom(ctx context.Context, name string, in io.Reader) (runtime.Image, error) {
	return made(ctx, s, "image import", named(name), func(ctx context.Context, _ trace.Span) (runtime.Image, error) {
		return s.next.ImportImageFrom(ctx, name, in)
	})
}

func (s *Service) TagImage(ctx context.Context, ref, name string) error {
	return s.do(ctx, "image tag", named(ref), func(ctx context.Context, _ trace.Span) error { return s.next.TagImage(ctx, ref, name) })
}

func (s *Service) RemoveImage(ctx context.Context, ref string) error {
	return s.do(ctx, "image rm", named(ref), func(ctx context.Context, _ trace.Span) error { return s.next.RemoveImage(ctx, ref) })
}

func (s *Service) PruneImages(ctx context.Context, all bool) (runtime.PrunedImages, error) {
	return made(ctx, s, "image prune", target{}, func(ctx context.Context, _ trace.Span) (runtime.PrunedImages, error) {
		return s.next.PruneImages(ctx, all)
	})
}

func (s *Service) VerifyImage(ctx context.Context, ref string) (runtime.Image, error) {
	return made(ctx, s, "image verify", named(ref), func(ctx context.Context, _ trace.Span) (runtime.Image, error) { return s.next.VerifyImage(ctx, ref) })
}

func (s *Service) Commit(ctx context.Context, ref, to string, opts runtime.CommitOptions) (runtime.Committed, error) {
	return made(ctx, s, "commit", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Committed, error) {
		out, err := s.next.Commit(ctx, ref, to, opts)
		box(span, out.Sandbox, out.SandboxName, "")
		span.SetAttributes(attrCheckpoint.String(out.Checkpoint), attrImage.String(out.Digest))
		return out, err
	})
}

func (s *Service) UpdateEgress(ctx context.Context, ref string, change runtime.EgressChange) ([]string, error) {
	return made(ctx, s, "update", sandbox(ref), func(ctx context.Context, _ trace.Span) ([]string, error) {
		return s.next.UpdateEgress(ctx, ref, change)
	})
}

func (s *Service) UpdateLifetime(ctx context.Context, ref string, change runtime.LifetimeChange) (runtime.Sandbox, error) {
	return made(ctx, s, "update", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Sandbox, error) {
		out, err := s.next.UpdateLifetime(ctx, ref, change)
		boxed(span, out)
		return out, err
	})
}

func (s *Service) UpdateStorage(ctx context.Context, ref string, change runtime.StorageChange) (runtime.Sandbox, error) {
	return made(ctx, s, "update", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Sandbox, error) {
		out, err := s.next.UpdateStorage(ctx, ref, change)
		boxed(span, out)
		return out, err
	})
}

func (s *Service) AddEffect(ctx context.Context, ref string, req runtime.EffectRequest) (runtime.Effect, error) {
	return made(ctx, s, "effect add", sandbox(ref), func(ctx context.Context, _ trace.Span) (runtime.Effect, error) {
		return s.next.AddEffect(ctx, ref, req)
	})
}

func (s *Service) RemoveEffect(ctx context.Context, ref, effect string) error {
	return s.do(ctx, "effect rm", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.RemoveEffect(ctx, ref, effect) })
}

func (s *Service) ReleaseHold(ctx context.Context, ref string) error {
	return s.do(ctx, "release hold", sandbox(ref), func(ctx context.Context, _ trace.Span) error { return s.next.ReleaseHold(ctx, ref) })
}

func (s *Service) Reconcile(ctx context.Context) (runtime.ReconcileReport, error) {
	return made(ctx, s, "recover", target{}, func(ctx context.Context, span trace.Span) (runtime.ReconcileReport, error) {
		out, err := s.next.Reconcile(ctx)
		span.SetAttributes(attrCount.Int(len(out.Actions)))
		return out, err
	})
}

func (s *Service) CreateLease(ctx context.Context, req runtime.LeaseRequest) (runtime.Lease, error) {
	return made(ctx, s, "lease create", named(req.Name), func(ctx context.Context, span trace.Span) (runtime.Lease, error) {
		out, err := s.next.CreateLease(ctx, req)
		span.SetAttributes(attrLease.String(out.ID))
		return out, err
	})
}

func (s *Service) HoldLease(ctx context.Context, req runtime.LeaseRequest, fn func(context.Context, runtime.Lease) error) error {
	return s.do(ctx, "lease hold", named(req.Name), func(ctx context.Context, span trace.Span) error {
		return s.next.HoldLease(ctx, req, func(ctx context.Context, l runtime.Lease) error {
			span.SetAttributes(attrLease.String(l.ID))
			return fn(ctx, l)
		})
	})
}

// RenewLease: a heartbeat begins no trace.
func (s *Service) RenewLease(ctx context.Context, ref string, deadline time.Duration) (runtime.Lease, error) {
	if deadline == 0 {
		return looked(ctx, s, "lease renew", named(ref), func(ctx context.Context, _ trace.Span) (runtime.Lease, error) { return s.next.RenewLease(ctx, ref, 0) })
	}
	return made(ctx, s, "lease renew", named(ref), func(ctx context.Context, _ trace.Span) (runtime.Lease, error) {
		return s.next.RenewLease(ctx, ref, deadline)
	})
}

func (s *Service) TransferLease(ctx context.Context, ref string, terms runtime.LeaseTerms) (runtime.Lease, error) {
	return made(ctx, s, "lease transfer", named(ref), func(ctx context.Context, span trace.Span) (runtime.Lease, error) {
		out, err := s.next.TransferLease(ctx, ref, terms)
		span.SetAttributes(attrLease.String(out.ID))
		return out, err
	})
}

func (s *Service) ReleaseLease(ctx context.Context, ref string) (runtime.Lease, error) {
	return made(ctx, s, "lease release", named(ref), func(ctx context.Context, span trace.Span) (runtime.Lease, error) {
		out, err := s.next.ReleaseLease(ctx, ref)
		span.SetAttributes(attrLease.String(out.ID))
		return out, err
	})
}
