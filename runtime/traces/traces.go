package traces

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/internal/fault"
)

// FlushTime is how long the end of a process waits for its last spans to be sent.
const FlushTime = 2 * time.Second

// Options modify Open.
type Options struct {
	Version string
	// Lasting is a process that lives on, such as the service: what cannot be sent
	// is tried again. A command has no time for that.
	Lasting bool
}

// Traces sends spans. The zero value, and nil, send none.
type Traces struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
	out      *sender
}

// variable is one of the environment; an empty one counts as not set.
func variable(names ...string) string {
	for _, name := range names {
		if v := os.Getenv(name); v != "" {
			return v
		}
	}
	return ""
}

const (
	prefix      = "OTEL_EXPORTER_OTLP_"
	exporterVar = "OTEL_TRACES_EXPORTER"
)

// wanted reports whether the environment asks for traces. An error says why they
// cannot be sent as it asks.
func wanted() (bool, error) {
	endpoint := variable(prefix+"TRACES_ENDPOINT", prefix+"ENDPOINT")
	exporter := variable(exporterVar)
	switch {
	case strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true"), exporter == "none",
		exporter == "" && endpoint == "":
		return false, nil
	case exporter != "" && exporter != "otlp":
		return false, &fault.Error{Op: "traces", Err: fmt.Errorf("%s=%.64q: %w", exporterVar, exporter,
			fault.ErrUnsupported), Hint: "otlp and none are."}
	}
	if p := variable(prefix+"TRACES_PROTOCOL", prefix+"PROTOCOL"); p != "" && p != "http/protobuf" && p != "http/json" {
		return false, &fault.Error{Op: "traces", Err: fmt.Errorf("OTLP by %.64q: %w", p, fault.ErrUnsupported),
			Hint: "Set " + prefix + "TRACES_PROTOCOL=http/protobuf and " + prefix + "TRACES_ENDPOINT, or " +
				exporterVar + "=none."}
	}
	if endpoint == "" {
		return true, nil // it is what the exporter takes: http://localhost:4318
	}
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return false, &fault.Error{Op: "traces", Err: fmt.Errorf("%sENDPOINT or %sTRACES_ENDPOINT: %w", prefix, prefix,
			fault.ErrInvalid), Hint: "Write http://HOST:PORT or https://HOST:PORT."}
	}
	return true, nil
}

// Open starts what sends spans if the environment asks for it; nil: it does not.
func Open(o Options) (*Traces, error) {
	if ok, err := wanted(); !ok || err != nil {
		return nil, err
	}
	out := &sender{redact: headerValues()}
	// Both are process-wide, and report what the SDK makes of its variables.
	odd := func(err error) { slog.Warn("traces environment invalid", "err", out.text(err)) }
	otel.SetErrorHandler(otel.ErrorHandlerFunc(odd))
	otel.SetLogger(logr.New(quiet{odd}))
	// A client of our own would take no certificates and no timeout from the environment.
	opts := []otlptracehttp.Option{otlptracehttp.WithMaxResponseSize(64 << 10), otlptracehttp.WithProxy(proxy)}
	if !o.Lasting {
		opts = append(opts, otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false}))
	}
	ctx := context.Background()
	var err error
	if out.SpanExporter, err = otlptracehttp.New(ctx, opts...); err != nil {
		return nil, &fault.Error{Op: "traces", Err: errors.New(out.text(err))}
	}
	host, _ := os.Hostname() // a host without a name has none
	about, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(
		attribute.String("service.name", "agentbox"), attribute.String("service.version", cmp.Or(o.Version, "dev")),
		attribute.String("host.name", host)), resource.WithFromEnv())
	if err != nil {
		odd(err)
	}
	t := &Traces{out: out, provider: sdk.NewTracerProvider(sdk.WithResource(about), sdk.WithBatcher(out))}
	t.tracer = t.provider.Tracer("github.com/agentbox/agentbox")
	return t, nil
}

// proxy is that of the environment for what goes to the collector, and nothing for
// what a redirect leads to: the headers that are for the collector would go along,
// keys with them.
func proxy(r *http.Request) (*url.URL, error) {
	if r.Response != nil {
		return nil, errors.New("the collector redirects, which is not followed: name the address that it leads to")
	}
	return http.ProxyFromEnvironment(r)
}

// Tracer makes spans; nil: there are to be none.
func (t *Traces) Tracer() trace.Tracer {
	if t == nil {
		return nil
	}
	return t.tracer
}

// Close sends what is left, for FlushTime at most.
func (t *Traces) Close() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), FlushTime)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.out.failed(err)
	}
}

// Parent gives ctx the trace that the environment of this process is part of, by
// TRACEPARENT and TRACESTATE.
func Parent(ctx context.Context) context.Context {
	parent := os.Getenv("TRACEPARENT")
	if parent == "" {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{
		"traceparent": parent, "tracestate": os.Getenv("TRACESTATE"),
	})
}

// Command begins the span of a command line, "agentbox restore". A span that is not
// ended was none.
func (t *Traces) Command(ctx context.Context, name string) (_ context.Context, end func(exit int, code string)) {
	ctx, span := t.tracer.Start(ctx, name, trace.WithAttributes(attribute.Int("process.pid", os.Getpid())))
	return ctx, func(exit int, code string) {
		span.SetAttributes(attribute.Int("process.exit.code", exit))
		fail(span, code)
		span.End()
	}
}

// fail notes the code of an error; "" and "ok": there is none.
func fail(span trace.Span, code string) {
	if code != "" && code != "ok" {
		span.SetStatus(codes.Error, code)
		span.SetAttributes(attribute.String("error.type", code))
	}
}

// quiet is the SDK's log without the values that are wrong, which may be of headers.
type quiet struct{ odd func(error) }

func (quiet) Init(logr.RuntimeInfo)            {}
func (quiet) Enabled(int) bool                 { return false } // errors come all the same
func (quiet) Info(int, string, ...any)         {}
func (q quiet) WithValues(...any) logr.LogSink { return q }
func (q quiet) WithName(string) logr.LogSink   { return q }

func (q quiet) Error(err error, what string, _ ...any) { q.odd(fmt.Errorf("%s: %w", what, err)) }

// A sender hands spans on and says once what fails, until it works again.
type sender struct {
	sdk.SpanExporter
	redact []string

	mu      sync.Mutex
	failing bool
}

// ExportSpans never fails: what is wrong was said.
func (s *sender) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	err := s.SpanExporter.ExportSpans(ctx, spans)
	if err != nil {
		s.failed(err)
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failing {
		slog.Info("traces sent again")
	}
	s.failing = false
	return nil
}

func (s *sender) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.failing {
		slog.Warn("traces not sent; unsent spans are lost", "err", s.text(err))
	}
	s.failing = true
}

// text returns the text of an error without the content of the headers: a collector may answer with
// what it was sent.
func (s *sender) text(err error) string {
	text := err.Error()
	if errors.Is(err, context.DeadlineExceeded) {
		text = "the collector does not answer"
	}
	for _, secret := range s.redact {
		text = strings.ReplaceAll(text, secret, "***")
	}
	return clip(text)
}

// headerValues returns the values in the variables for headers.
func headerValues() (values []string) {
	for _, name := range []string{prefix + "HEADERS", prefix + "TRACES_HEADERS"} {
		for pair := range strings.SplitSeq(os.Getenv(name), ",") {
			_, v, _ := strings.Cut(pair, "=")
			if plain, err := url.PathUnescape(v); err == nil {
				v = plain
			}
			// "Bearer KEY" may come back as "KEY".
			for _, word := range strings.Fields(v) {
				if len(word) > 3 {
					values = append(values, word)
				}
			}
		}
	}
	return values
}
