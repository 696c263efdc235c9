package traces

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
)

// Names of attributes.
const (
	// the sandbox, checkpoint or image as the caller named it, if that is the form of a name
	attrRef     = attribute.Key("agentbox.ref")
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

	// Attributes of what agentbox does by itself.
	attrBy  = attribute.Key("agentbox.by")
	attrWhy = attribute.Key("agentbox.why")
)

// Observer gives each verb of an Engine a span (engine.Options.Observers); nil: there are
// no traces. by is as in audit.Log.Observer.
func (t *Traces) Observer(by string) runtime.Observer {
	if t == nil {
		return nil
	}
	tries := &audit.Tries{}
	return func(ctx context.Context, op *runtime.Op, do func(context.Context) error) error {
		switch {
		case op.Own != nil:
			return t.own(ctx, tries, by, op, do)
		case op.Reads && !trace.SpanFromContext(ctx).SpanContext().IsValid():
			// A verb that changes nothing is part of its caller's trace and begins none: a
			// program that polls would fill the collector.
			return do(ctx)
		}
		ctx, span := t.tracer.Start(ctx, spanName(op.Verb))
		defer span.End()
		if plain(op.Ref, op.About != runtime.AboutOther) {
			span.SetAttributes(attrRef.String(clip(op.Ref)))
		}
		if span.IsRecording() {
			about(span, op.Subject(ctx))
		}
		err := do(ctx)
		came(span, op, err)
		if !errors.Is(err, runtime.ErrDetached) {
			fail(span, audit.Outcome(err))
		}
		return err
	}
}

// own gives what an Engine does by itself a span: the root of a trace of its own or, for a step
// of a verb, part of that verb's trace. A repeated failure that equals the last one has none.
func (t *Traces) own(
	ctx context.Context, tries *audit.Tries, by string, op *runtime.Op, do func(context.Context) error,
) error {
	began := time.Now()
	err := do(ctx)
	if tries.FailedBefore(ctx, op, err) {
		return err
	}
	opts := []trace.SpanStartOption{trace.WithTimestamp(began)}
	if op.Own.By != "" {
		opts = append(opts, trace.WithNewRoot())
	}
	_, span := t.tracer.Start(ctx, spanName(op.Verb), opts...)
	defer span.End()
	span.SetAttributes(attrBy.String(cmp.Or(op.Own.By, by)), attrWhy.String(clip(op.Own.Why)))
	about(span, op.Subject(ctx))
	if op.Verb == "lease end" {
		span.SetAttributes(attrLease.String(op.To))
	}
	if n := max(len(op.Own.Made), len(op.Own.Did)); n > 0 {
		span.SetAttributes(attrCount.Int(n))
	}
	came(span, op, err)
	fail(span, audit.Outcome(err))
	return err
}

// came adds the result of a verb to its span.
func came(span trace.Span, op *runtime.Op, err error) {
	if op.Exit != nil {
		span.SetAttributes(attrExit.Int(*op.Exit))
	}
	switch out := op.Result.(type) {
	case runtime.Sandbox:
		boxed(span, out)
	case runtime.Checkpoint:
		taken(span, out)
		if err == nil && op.Verb == "checkpoint" {
			span.SetAttributes(attrAdded.Int64(out.Added), attrFrozen.Float64(ms(out.Frozen)))
		}
	case runtime.Restored:
		restored(span, out, err)
	case []runtime.Forked:
		var ids []string
		for _, f := range out[:min(len(out), maxSome)] {
			ids = append(ids, f.Sandbox.ID)
		}
		if len(out) > 0 {
			span.SetAttributes(attrForks.StringSlice(ids), attrCount.Int(len(out)),
				attrCheckpoint.String(out[0].Checkpoint.ID), attrKind.String(out[0].Checkpoint.Kind),
				attrBackend.String(out[0].Sandbox.Backend))
		}
	case runtime.RemovedCheckpoints:
		span.SetAttributes(attrCount.Int(len(out.Removed)))
	case runtime.Pruned:
		span.SetAttributes(attrCount.Int(len(out.Removed)), attrMoved.Int64(out.Freed))
	case runtime.Pushed:
		span.SetAttributes(attrMoved.Int64(out.Bytes))
	case runtime.Applied:
		span.SetAttributes(attrCount.Int(len(out.Changes)))
	case runtime.Diff:
		span.SetAttributes(attrCount.Int(len(out.Changes)))
	case runtime.Committed:
		box(span, out.Sandbox, out.SandboxName, "")
		span.SetAttributes(attrCheckpoint.String(out.Checkpoint), attrImage.String(out.Digest))
	case runtime.ReconcileReport:
		span.SetAttributes(attrCount.Int(len(out.Actions)))
	case runtime.Lease:
		span.SetAttributes(attrLease.String(out.ID))
	default:
		if list := reflect.ValueOf(op.Result); op.Reads && list.Kind() == reflect.Slice {
			span.SetAttributes(attrCount.Int(list.Len()))
		}
	}
}

// restored adds the results of a restore to a span.
func restored(span trace.Span, out runtime.Restored, err error) {
	taken(span, out.Checkpoint)
	boxed(span, out.Sandbox)
	if err == nil && out.Checkpoint.ID != "" {
		span.SetAttributes(attrDown.Float64(ms(out.Down)), attrFiles.Float64(ms(out.Files)), attrUndo.String(out.Undo),
			attrChanged.Int(out.Changed), attrStrategy.String(out.Strategy))
	}
}

func about(span trace.Span, s runtime.Subject) {
	box(span, s.Sandbox, s.Name, "")
	if s.Checkpoint != "" {
		span.SetAttributes(attrCheckpoint.String(s.Checkpoint))
	}
}

var (
	imageRule  = lazy.Regexp(`^[\w./:+~-]+(@sha256:[0-9a-f]{64})?$`)
	taggedRule = lazy.Regexp(`^[\w.-]+@[\w.-]+$`)
)

// plain reports whether a ref has the form of one: of an image or, with tagged, also of a
// sandbox's checkpoint. A user may type a URL with a password or a token in its place, which
// no reference has.
func plain(ref string, tagged bool) bool {
	return imageRule().MatchString(ref) || tagged && taggedRule().MatchString(ref)
}

func spanName(verb string) string { return "agentbox." + strings.ReplaceAll(verb, " ", ".") }

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
	if plain(c.Trigger, false) { // it is the caller's, too
		span.SetAttributes(attrTrigger.String(clip(c.Trigger)))
	}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func clip(s string) string { return strings.ToValidUTF8(audit.Clip(s), "\uFFFD") }

// maxSome bounds the lists of a span.
const maxSome = 64
