package traces

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	"github.com/agentbox/agentbox/runtime/engine"
)

// untraced are the methods that are no verbs of a caller. A new method of the
// Engine is either here or in verbs.go, or this does not compile.
type untraced interface {
	Subject(ctx context.Context, ref string, checkpoint bool) runtime.Subject
	RecoverInterrupted(ctx context.Context) (runtime.Recovery, error)
	ReviveWatches(ctx context.Context) error
	EndLeases(ctx context.Context) (did []string, err error)
	KeepLeases(ctx context.Context) error
	Reap(ctx context.Context, id string) error
	Watch(ctx context.Context, id string) error
	Upkeep(ctx context.Context, u engine.Upkeep)
	Release(id string)
	Close() error
}

// Service is an Engine with a span of each verb.
type Service struct {
	untraced
	next   audit.Engine
	tracer trace.Tracer
}

var _ audit.Engine = (*Service)(nil)

// Names of attributes.
const (
	attrRef     = attribute.Key("agentbox.ref") // the sandbox, checkpoint or image as the caller named it, if that is the form of a name
	attrID      = attribute.Key("agentbox.sandbox.id")
	attrName    = attribute.Key("agentbox.sandbox.name")
	attrBackend = attribute.Key("agentbox.backend")

	attrCheckpoint = attribute.Key("agentbox.checkpoint.id")
	attrKind       = attribute.Key("agentbox.checkpoint.kind")
	attrTrigger    = attribute.Key("agentbox.checkpoint.trigger")
	attrBytes      = attribute.Key("agentbox.checkpoint.bytes") // at rest, of all that it needs
	attrAdded      = attribute.Key("agentbox.checkpoint.added") // bytes that it brought to the store

	attrFrozen = attribute.Key("agentbox.frozen_ms")
	attrDown   = attribute.Key("agentbox.down_ms")
	attrFiles  = attribute.Key("agentbox.files_ms")

	attrUndo     = attribute.Key("agentbox.restore.undo")
	attrChanged  = attribute.Key("agentbox.restore.changed")
	attrStrategy = attribute.Key("agentbox.restore.strategy")

	attrForks = attribute.Key("agentbox.fork.ids")
	attrCount = attribute.Key("agentbox.count") // of what a list has, or of what was removed
	attrMoved = attribute.Key("agentbox.bytes") // that travelled, or were freed
	attrImage = attribute.Key("agentbox.image.digest")
	attrLease = attribute.Key("agentbox.lease.id")
	attrExit  = attribute.Key("agentbox.exit_code") // of a process in the sandbox
)

// A target is what a verb is about, as its caller names it.
type target struct {
	ref  string
	kind byte // 's': a sandbox, 'c': a checkpoint; else nothing that has an id
}

func sandbox(ref string) target    { return target{ref, 's'} }
func checkpoint(ref string) target { return target{ref, 'c'} }
func named(ref string) target      { return target{ref: ref} }

var (
	imageRule  = lazy.Regexp(`^[\w./:+~-]+(@sha256:[0-9a-f]{64})?$`)
	taggedRule = lazy.Regexp(`^[\w.-]+@[\w.-]+$`)
)

// plain reports whether the ref has the form of one. What is typed in its place may be
// a URL with a password or a token, which no reference has.
func (t target) plain() bool {
	return imageRule().MatchString(t.ref) || t.kind != 0 && taggedRule().MatchString(t.ref)
}

// made is a verb with its span, which do may tell more about.
func made[T any](ctx context.Context, s *Service, verb string, on target, do func(context.Context, trace.Span) (T, error)) (T, error) {
	ctx, span := s.tracer.Start(ctx, spanName(verb))
	defer span.End()
	if on.plain() {
		span.SetAttributes(attrRef.String(clip(on.ref)))
	}
	if on.ref != "" && on.kind != 0 && span.IsRecording() {
		about := s.next.Subject(ctx, on.ref, on.kind == 'c')
		box(span, about.Sandbox, about.Name, "")
		if about.Checkpoint != "" {
			span.SetAttributes(attrCheckpoint.String(about.Checkpoint))
		}
	}
	out, err := do(ctx, span)
	if !errors.Is(err, runtime.ErrDetached) {
		fail(span, audit.Outcome(err))
	}
	return out, err
}

func (s *Service) do(ctx context.Context, verb string, on target, do func(context.Context, trace.Span) error) error {
	_, err := made(ctx, s, verb, on, func(ctx context.Context, span trace.Span) (struct{}, error) { return struct{}{}, do(ctx, span) })
	return err
}

// looked is made for a verb that changes nothing. It is part of its caller's trace
// and begins none: who looks again and again would fill the collector.
func looked[T any](ctx context.Context, s *Service, verb string, on target, do func(context.Context, trace.Span) (T, error)) (T, error) {
	if span := trace.SpanFromContext(ctx); !span.SpanContext().IsValid() {
		return do(ctx, span)
	}
	return made(ctx, s, verb, on, do)
}

func (s *Service) look(ctx context.Context, verb string, on target, do func(context.Context) error) error {
	_, err := looked(ctx, s, verb, on, func(ctx context.Context, _ trace.Span) (struct{}, error) { return struct{}{}, do(ctx) })
	return err
}

// listed is looked for a list.
func listed[T any](ctx context.Context, s *Service, verb string, on target, do func(context.Context) ([]T, error)) ([]T, error) {
	return looked(ctx, s, verb, on, func(ctx context.Context, span trace.Span) ([]T, error) {
		list, err := do(ctx)
		span.SetAttributes(attrCount.Int(len(list)))
		return list, err
	})
}

func box(span trace.Span, id, name, backend string) {
	if id != "" {
		span.SetAttributes(attrID.String(id), attrName.String(clip(name)))
	}
	if backend != "" {
		span.SetAttributes(attrBackend.String(backend))
	}
}

func boxed(span trace.Span, sb runtime.Sandbox) { box(span, sb.ID, sb.Name, sb.Backend) }

func taken(span trace.Span, c runtime.Checkpoint) {
	if c.ID == "" {
		return
	}
	box(span, c.Sandbox, c.SandboxName, "")
	span.SetAttributes(attrCheckpoint.String(c.ID), attrKind.String(c.Kind), attrBytes.Int64(c.Bytes))
	if (target{ref: c.Trigger}).plain() { // it is the caller's, too
		span.SetAttributes(attrTrigger.String(clip(c.Trigger)))
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func clip(s string) string { return strings.ToValidUTF8(audit.Clip(s), "\uFFFD") }

// maxSome bounds the lists of a span.
const maxSome = 64
