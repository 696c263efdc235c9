package traces

import (
	"cmp"
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	"github.com/agentbox/agentbox/runtime/engine"
)

// Of what agentbox does by itself.
const (
	attrBy  = attribute.Key("agentbox.by")
	attrWhy = attribute.Key("agentbox.why")
)

// Deeds returns next (engine.Options.Deeds, which puts on record what an Engine does by
// itself) with a span of each deed: the root of a trace of its own, unless it is a step of
// a verb, in whose trace it is then. One that fails as it did the last time has no other.
// by is as in audit.New.
func (t *Traces) Deeds(by string, next func(context.Context, *engine.Deed, func() error) error) func(context.Context, *engine.Deed, func() error) error {
	if t == nil {
		return next
	}
	tries := &audit.Tries{}
	return func(ctx context.Context, d *engine.Deed, do func() error) error {
		began := time.Now()
		err := next(ctx, d, do)
		if tries.Again(d, err) {
			return err
		}
		opts := []trace.SpanStartOption{trace.WithTimestamp(began)}
		if d.By != "" {
			opts = append(opts, trace.WithNewRoot())
		}
		_, span := t.tracer.Start(ctx, spanName(d.Verb), opts...)
		defer span.End()
		span.SetAttributes(attrBy.String(cmp.Or(d.By, by)), attrWhy.String(clip(d.Why)))
		box(span, d.Sandbox, d.Name, "")
		if d.Checkpoint != "" {
			span.SetAttributes(attrCheckpoint.String(d.Checkpoint))
		}
		if d.Verb == "lease end" {
			span.SetAttributes(attrLease.String(d.To))
		}
		if n := max(len(d.Made), len(d.Did)); n > 0 {
			span.SetAttributes(attrCount.Int(n))
		}
		restored(span, d.Restored, err)
		fail(span, audit.Outcome(err))
		return err
	}
}

// restored tells what came of a restore.
func restored(span trace.Span, out runtime.Restored, err error) {
	taken(span, out.Checkpoint)
	boxed(span, out.Sandbox)
	if err == nil && out.Checkpoint.ID != "" {
		span.SetAttributes(attrDown.Float64(ms(out.Down)), attrFiles.Float64(ms(out.Files)), attrUndo.String(out.Undo), attrChanged.Int(out.Changed), attrStrategy.String(out.Strategy))
	}
}

func spanName(verb string) string { return "agentbox." + strings.ReplaceAll(verb, " ", ".") }
