package traces

import (
	"context"
	"io"

	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Every verb that only looks.

func (s *Service) Wait(ctx context.Context, ref string) (int, error) {
	return looked(ctx, s, "wait", sandbox(ref), func(ctx context.Context, span trace.Span) (int, error) {
		out, err := s.next.Wait(ctx, ref)
		if err == nil {
			span.SetAttributes(attrExit.Int(out))
		}
		return out, err
	})
}

func (s *Service) Logs(ctx context.Context, ref string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	return s.look(ctx, "logs", sandbox(ref), func(ctx context.Context) error { return s.next.Logs(ctx, ref, opts, stdout, stderr) })
}

func (s *Service) Sandbox(ctx context.Context, ref string) (runtime.Sandbox, error) {
	return looked(ctx, s, "inspect", sandbox(ref), func(ctx context.Context, span trace.Span) (runtime.Sandbox, error) {
		out, err := s.next.Sandbox(ctx, ref)
		boxed(span, out)
		return out, err
	})
}

func (s *Service) Sandboxes(ctx context.Context) ([]runtime.Sandbox, error) {
	return listed(ctx, s, "ps", target{}, func(ctx context.Context) ([]runtime.Sandbox, error) { return s.next.Sandboxes(ctx) })
}

func (s *Service) Stats(ctx context.Context, opts runtime.StatsOptions) ([]runtime.Stats, error) {
	return listed(ctx, s, "top", target{}, func(ctx context.Context) ([]runtime.Stats, error) { return s.next.Stats(ctx, opts) })
}

func (s *Service) CopyFrom(ctx context.Context, ref, path string, w io.Writer) error {
	return s.look(ctx, "cp", sandbox(ref), func(ctx context.Context) error { return s.next.CopyFrom(ctx, ref, path, w) })
}

func (s *Service) Stat(ctx context.Context, ref, path string) (runtime.PathStat, error) {
	return looked(ctx, s, "stat", sandbox(ref), func(ctx context.Context, _ trace.Span) (runtime.PathStat, error) { return s.next.Stat(ctx, ref, path) })
}

func (s *Service) Checkpoints(ctx context.Context, filter runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
	return listed(ctx, s, "checkpoint ls", sandbox(filter.Sandbox), func(ctx context.Context) ([]runtime.Checkpoint, error) { return s.next.Checkpoints(ctx, filter) })
}

func (s *Service) CheckpointInfo(ctx context.Context, ref string) (runtime.Checkpoint, error) {
	return looked(ctx, s, "checkpoint inspect", checkpoint(ref), func(ctx context.Context, span trace.Span) (runtime.Checkpoint, error) {
		out, err := s.next.CheckpointInfo(ctx, ref)
		taken(span, out)
		return out, err
	})
}

func (s *Service) Diff(ctx context.Context, req runtime.DiffRequest) (runtime.Diff, error) {
	return looked(ctx, s, "diff", sandbox(req.Sandbox), func(ctx context.Context, span trace.Span) (runtime.Diff, error) {
		out, err := s.next.Diff(ctx, req)
		span.SetAttributes(attrCount.Int(len(out.Changes)))
		return out, err
	})
}

func (s *Service) History(ctx context.Context, ref string, opts runtime.HistoryOptions) ([]runtime.HistoryEntry, error) {
	return listed(ctx, s, "log", sandbox(ref), func(ctx context.Context) ([]runtime.HistoryEntry, error) { return s.next.History(ctx, ref, opts) })
}

func (s *Service) PlanRestore(ctx context.Context, ref string, opts runtime.RestoreOptions) (runtime.RestorePlan, error) {
	return looked(ctx, s, "restore plan", sandbox(ref), func(ctx context.Context, _ trace.Span) (runtime.RestorePlan, error) {
		return s.next.PlanRestore(ctx, ref, opts)
	})
}

func (s *Service) Usage(ctx context.Context) (runtime.Usage, error) {
	return looked(ctx, s, "df", target{}, func(ctx context.Context, _ trace.Span) (runtime.Usage, error) { return s.next.Usage(ctx) })
}

func (s *Service) Images(ctx context.Context) ([]runtime.Image, error) {
	return listed(ctx, s, "image ls", target{}, func(ctx context.Context) ([]runtime.Image, error) { return s.next.Images(ctx) })
}

func (s *Service) InspectImage(ctx context.Context, ref string) (runtime.ImageDetails, error) {
	return looked(ctx, s, "image inspect", named(ref), func(ctx context.Context, _ trace.Span) (runtime.ImageDetails, error) {
		return s.next.InspectImage(ctx, ref)
	})
}

func (s *Service) Events(ctx context.Context, ref string, opts runtime.EventOptions, each func(runtime.Event) error) error {
	return s.look(ctx, "events", sandbox(ref), func(ctx context.Context) error { return s.next.Events(ctx, ref, opts, each) })
}

func (s *Service) Effects(ctx context.Context, ref string, all bool) ([]runtime.Effect, error) {
	return listed(ctx, s, "effect ls", sandbox(ref), func(ctx context.Context) ([]runtime.Effect, error) { return s.next.Effects(ctx, ref, all) })
}

func (s *Service) Lease(ctx context.Context, ref string) (runtime.Lease, error) {
	return looked(ctx, s, "lease inspect", named(ref), func(ctx context.Context, _ trace.Span) (runtime.Lease, error) { return s.next.Lease(ctx, ref) })
}

func (s *Service) Leases(ctx context.Context, all bool) ([]runtime.Lease, error) {
	return listed(ctx, s, "lease ls", target{}, func(ctx context.Context) ([]runtime.Lease, error) { return s.next.Leases(ctx, all) })
}

func (s *Service) Policies(ctx context.Context) ([]runtime.PolicyEntry, error) {
	return listed(ctx, s, "policy ls", target{}, func(ctx context.Context) ([]runtime.PolicyEntry, error) { return s.next.Policies(ctx) })
}

func (s *Service) Policy(ctx context.Context, ref string) (*policy.Policy, error) {
	return looked(ctx, s, "policy show", named(ref), func(ctx context.Context, _ trace.Span) (*policy.Policy, error) { return s.next.Policy(ctx, ref) })
}
