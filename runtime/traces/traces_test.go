package traces

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// newEngine makes the real one, over a store without sandboxes, on record and traced.
func (tr *Traces) newEngine(t testing.TB) *engine.Engine {
	t.Helper()
	root := t.TempDir()
	st, err := store.Open(context.Background(), root)
	if err != nil {
		t.Fatal(err)
	}
	e := engine.New(engine.Options{Run: filepath.Join(root, "run"), Store: st, Backend: "oci",
		Observers: []runtime.Observer{tr.Observer("test"), audit.Open(root).Observer("test")},
		Open: func(string) (engine.Host, error) {
			return engine.Host{}, fmt.Errorf("no engine: %w", runtime.ErrUnsupported)
		}})
	t.Cleanup(func() { e.Close() })
	return e
}

// environment sets the variables, and no others of OpenTelemetry.
func environment(t *testing.T, pairs ...string) {
	t.Helper()
	for _, name := range []string{
		"OTEL_SDK_DISABLED", exporterVar, prefix + "ENDPOINT", prefix + "TRACES_ENDPOINT", prefix + "PROTOCOL",
		prefix + "TRACES_PROTOCOL", prefix + "HEADERS", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
		"OTEL_TRACES_SAMPLER", "TRACEPARENT",
	} {
		t.Setenv(name, "")
	}
	for _, p := range pairs {
		name, v, _ := strings.Cut(p, "=")
		t.Setenv(name, v)
	}
}

func opened(t *testing.T, o Options) *Traces {
	t.Helper()
	tr, err := Open(o)
	if err != nil || tr == nil {
		t.Fatal(tr, err)
	}
	t.Cleanup(tr.Close)
	return tr
}

// logged is the log from now on.
func logged(t *testing.T) *bytes.Buffer {
	t.Helper()
	var log bytes.Buffer
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { slog.SetDefault(old) })
	return &log
}

// The environment says whether there are traces; nothing else starts any.
func TestWanted(t *testing.T) {
	const at = prefix + "ENDPOINT=http://127.0.0.1:4318"
	for _, c := range []struct {
		env  []string
		want bool
		err  error
	}{
		{nil, false, nil},
		{[]string{"OTEL_SERVICE_NAME=x", "TRACEPARENT=00-1-1-01"}, false, nil},
		{[]string{at}, true, nil},
		{[]string{prefix + "TRACES_ENDPOINT=https://collector.example/otlp"}, true, nil},
		{[]string{exporterVar + "=otlp"}, true, nil},
		{[]string{at, exporterVar + "=none"}, false, nil},
		{[]string{at, "OTEL_SDK_DISABLED=true"}, false, nil},
		{[]string{at, "OTEL_SDK_DISABLED=TRUE"}, false, nil},
		{[]string{at, "OTEL_SDK_DISABLED=no"}, true, nil},
		{[]string{at, exporterVar + "=jaeger"}, false, fault.ErrUnsupported},
		{[]string{at, prefix + "PROTOCOL=grpc"}, false, fault.ErrUnsupported},
		{[]string{at, prefix + "PROTOCOL=grpc", prefix + "TRACES_PROTOCOL=http/protobuf"}, true, nil},
		{[]string{prefix + "ENDPOINT=127.0.0.1:4318"}, false, fault.ErrInvalid},
		{[]string{prefix + "ENDPOINT=localhost:4318"}, false, fault.ErrInvalid},
		{[]string{prefix + "ENDPOINT=http://"}, false, fault.ErrInvalid},
		{[]string{prefix + "ENDPOINT=file:///etc/passwd"}, false, fault.ErrInvalid},
		{[]string{prefix + "ENDPOINT=http://user:hunter2\x7f@c"}, false, fault.ErrInvalid},
	} {
		t.Run(strings.Join(c.env, " "), func(t *testing.T) {
			environment(t, c.env...)
			tr, err := Open(Options{})
			if (tr != nil) != c.want || !errors.Is(err, c.err) || err != nil && len(fault.Hint(err)) == 0 {
				t.Errorf("%v: %v", tr != nil, err)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Error(err)
			}
			if tr != nil {
				tr.Close() // nothing was recorded: no collector is asked
			}
		})
	}
	var none *Traces
	none.Close()
	if none.Tracer() != nil || none.Observer("test") != nil {
		t.Error("no traces do something")
	}
}

// call calls a method of the Service with whatever, and text.
func call(t *testing.T, svc runtime.Local, ctx context.Context, m reflect.Method, text string) error {
	t.Helper()
	args := []reflect.Value{reflect.ValueOf(ctx)}
	for j := 1; j < m.Type.NumIn(); j++ {
		switch in := m.Type.In(j); {
		case in == reflect.TypeFor[io.Reader]():
			args = append(args, reflect.ValueOf(strings.NewReader("")))
		case in == reflect.TypeFor[io.Writer]():
			args = append(args, reflect.ValueOf(io.Discard))
		case in == reflect.TypeFor[time.Duration]():
			args = append(args, reflect.ValueOf(time.Hour))
		case in.Kind() == reflect.Func:
			args = append(args, reflect.MakeFunc(in, func([]reflect.Value) []reflect.Value {
				return []reflect.Value{reflect.Zero(in.Out(0))}
			}))
		case in.Kind() == reflect.String:
			args = append(args, reflect.ValueOf(text))
		default:
			args = append(args, reflect.Zero(in))
		}
	}
	outs := reflect.ValueOf(svc).MethodByName(m.Name).Call(args)
	err, _ := outs[len(outs)-1].Interface().(error)
	return err
}

// Every verb is one span, with the code of its error; one that only looks is one
// where there is a trace that it is part of.
func TestEveryVerb(t *testing.T) {
	c := tracestest.New(t)
	environment(t, prefix+"ENDPOINT="+c.URL, prefix+"HEADERS=authorization=Bearer%20token-12345",
		"OTEL_SERVICE_NAME=box", "OTEL_RESOURCE_ATTRIBUTES=team=core,deployment.environment=test")
	tr := opened(t, Options{Version: "v9"})
	svc := tr.newEngine(t)
	ctx, end := tr.Command(t.Context(), "agentbox test")
	type seen struct {
		method string
		err    error
	}
	var want []seen
	for i := range reflect.TypeFor[runtime.Local]().NumMethod() {
		m := reflect.TypeFor[runtime.Local]().Method(i)
		if m.Name == "Close" {
			continue
		}
		want = append(want, seen{m.Name, call(t, svc, ctx, m, "none-such")})
	}
	end(3, "not_found")
	tr.Close()
	spans := c.Spans()
	if len(want) < 60 || len(spans) != len(want)+1 {
		t.Fatalf("%d verbs, %d spans", len(want), len(spans))
	}
	root := c.One(t, "agentbox test")
	if root.Parent != "" || root.Error != "not_found" || root.Attrs["process.exit.code"] != int64(3) {
		t.Errorf("%+v", root)
	}
	for i, s := range spans[:len(want)] {
		m := want[i]
		code := audit.Outcome(m.err)
		if code == "ok" {
			code = ""
		}
		if s.Trace != root.Trace || s.Parent != root.ID || s.Error != code || !strings.HasPrefix(s.Name, "agentbox.") ||
			strings.Contains(s.Name, " ") ||
			s.Resource["service.name"] != "box" || s.Resource["service.version"] != "v9" ||
			s.Resource["team"] != "core" {
			t.Errorf("%s ends with %v: %+v", m.method, m.err, s)
		}
		if code != "" && s.Attrs["error.type"] != code {
			t.Errorf("%s: %+v", m.method, s)
		}
	}
	for _, h := range c.Headers("Authorization") {
		if h != "Bearer token-12345" {
			t.Errorf("the header is %q", h)
		}
	}
	if c.Contains("token-12345") {
		t.Error("a header is in a span")
	}
}

// A verb that only reads begins no trace; one that changes something does.
func TestOnlyLooks(t *testing.T) {
	c := tracestest.New(t)
	environment(t, prefix+"ENDPOINT="+c.URL)
	tr := opened(t, Options{})
	svc := tr.newEngine(t)
	_, _ = svc.Sandboxes(t.Context())
	_, _ = svc.Sandbox(t.Context(), "c")
	_ = svc.Files(runtime.Reading(t.Context()), "c", nil)
	_ = svc.Pause(t.Context(), "c")
	tr.Close()
	if list := c.Spans(); len(list) != 1 {
		t.Fatalf("%+v", list)
	}
	if s := c.One(t, "agentbox.pause"); s.Parent != "" || s.Error != "not_found" || s.Attrs["agentbox.ref"] != "c" {
		t.Errorf("%+v", s)
	}
}

// No arguments, environments, contents or texts of errors.
func TestNoSecrets(t *testing.T) {
	c := tracestest.New(t)
	environment(t, prefix+"ENDPOINT="+c.URL)
	tr := opened(t, Options{})
	svc := tr.newEngine(t)
	secret := "hunter" + "2"
	env := []string{"P=" + secret}
	_, _ = svc.Exec(t.Context(), "c", runtime.Process{Args: []string{"login", secret}, Env: env}, runtime.Streams{})
	_, _ = svc.Create(t.Context(), runtime.CreateRequest{Spec: runtime.Spec{
		Image: "i", Args: []string{secret}, Env: env, Labels: map[string]string{"l": secret},
	}})
	_, _ = svc.AddEffect(t.Context(), "c", runtime.EffectRequest{Command: []string{"undo", secret}})
	_ = svc.CopyTo(t.Context(), "c", "/x", strings.NewReader(secret))
	_, _ = svc.Restore(t.Context(), "c", runtime.RestoreOptions{
		AlertSecret: "/" + secret, Alert: "https://u:" + secret + "@h/",
	})
	_ = svc.TagCheckpoint(t.Context(), strings.Repeat("x", 10_000), "t")
	_ = svc.Pause(t.Context(), "not \xff UTF-8")
	tr.Close()
	if n := len(c.Spans()); n != 7 || c.Contains(secret) || c.Contains("login") ||
		c.Contains(strings.Repeat("x", 300)) {
		t.Errorf("%d spans: %+v", n, c.Spans())
	}
}

// A caller's sampling holds, and so does the sampler that the environment names.
func TestSampling(t *testing.T) {
	for _, c := range []struct {
		env  []string
		want int
	}{
		{[]string{"TRACEPARENT=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, 1},
		{[]string{"TRACEPARENT=00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}, 0},
		{[]string{"TRACEPARENT=nonsense"}, 1},
		{[]string{"OTEL_TRACES_SAMPLER=always_off"}, 0},
		{[]string{"OTEL_TRACES_SAMPLER=traceidratio", "OTEL_TRACES_SAMPLER_ARG=0"}, 0},
	} {
		t.Run(strings.Join(c.env, " "), func(t *testing.T) {
			col := tracestest.New(t)
			environment(t, append(c.env, prefix+"ENDPOINT="+col.URL)...)
			tr := opened(t, Options{})
			_, end := tr.Command(Parent(t.Context()), "agentbox test")
			end(0, "")
			tr.Close()
			list := col.Spans()
			if len(list) != c.want {
				t.Fatalf("%+v", list)
			}
			if strings.HasSuffix(c.env[0], "-01") && (list[0].Trace != "0af7651916cd43dd8448eb211c80319c" ||
				list[0].Parent != "b7ad6b7169203331") {
				t.Errorf("%+v", list[0])
			}
		})
	}
	environment(t)
	if Parent(t.Context()) != t.Context() {
		t.Error("without TRACEPARENT there is a trace")
	}
}

// A collector that is gone, refuses, or does not answer is reported once, without the
// content of the headers, and delays no verb.
func TestNoCollector(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts, and no process reads
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	refuses := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "bad key "+r.Header.Get("X-Key"), http.StatusUnauthorized)
	}))
	defer refuses.Close()
	for name, at := range map[string]string{
		"gone": "http://" + closed.Addr().String(), "silent": "http://" + silent.Addr().String(),
		"refuses": refuses.URL,
	} {
		for _, lasting := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " lasting=", lasting), func(t *testing.T) {
				environment(t, prefix+"ENDPOINT="+at, prefix+"HEADERS=x-key=swordfish-1")
				log := logged(t)
				tr := opened(t, Options{Lasting: lasting})
				svc := tr.newEngine(t)
				began := time.Now()
				ctx, end := tr.Command(t.Context(), "agentbox test")
				for range 5000 { // more than are kept
					_, _ = svc.Lease(ctx, "l")
				}
				end(0, "")
				closing := time.Now()
				tr.Close()
				if took := time.Since(closing); took > FlushTime+time.Second {
					t.Errorf("the end takes %v", took)
				}
				t.Logf("5000 verbs in %v", closing.Sub(began))
				text := log.String()
				if strings.Count(text, "traces not sent") != 1 || strings.Count(text, "\n") != 1 ||
					strings.Contains(text, "swordfish") {
					t.Errorf("the log: %s", text)
				}
				if name == "refuses" && !strings.Contains(text, "bad key ***") {
					t.Errorf("the log: %s", text)
				}
			})
		}
	}
}

// nothing discards spans.
type nothing struct{ sdk.SpanExporter }

func (nothing) ExportSpans(context.Context, []sdk.ReadOnlySpan) error { return nil }

// Variables that make no sense are told, without what is in headers; the others hold.
func TestOddVariables(t *testing.T) {
	c := tracestest.New(t)
	environment(t, prefix+"ENDPOINT="+c.URL, prefix+"HEADERS=Bearer swordfish,x%zz=swordfish,y=sword%zzfish",
		prefix+"TIMEOUT=soon", "OTEL_TRACES_SAMPLER=swirl", "OTEL_RESOURCE_ATTRIBUTES=team")
	log := logged(t)
	tr := opened(t, Options{})
	_, end := tr.Command(t.Context(), "agentbox test")
	end(0, "")
	tr.Close()
	text := log.String()
	for _, want := range []string{"parse headers", "parse duration", "swirl", "team"} {
		if !strings.Contains(text, want) {
			t.Errorf("the log does not tell of %q: %s", want, text)
		}
	}
	if strings.Contains(text, "fish") || strings.Contains(text, "not sent") || len(c.Spans()) != 1 {
		t.Errorf("%d spans: %s", len(c.Spans()), text)
	}
}

// A failure is logged again after a success in between.
func TestSaidOnce(t *testing.T) {
	log := logged(t)
	s := &sender{redact: []string{"secret"}}
	s.failed(errors.New("a secret"))
	s.failed(errors.New("b"))
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, `"a ***"`) {
		t.Error(text)
	}
	s.SpanExporter = nothing{}
	if err := s.ExportSpans(t.Context(), nil); err != nil || s.failing ||
		!strings.Contains(log.String(), "sent again") {
		t.Error(err, log)
	}
}

// A redirect is not followed: its target gets neither the spans nor the headers. The
// certificate is that of the environment all the same.
func TestRedirects(t *testing.T) {
	for _, scheme := range []string{"http", "https"} {
		for _, code := range []int{http.StatusFound, http.StatusTemporaryRedirect} {
			t.Run(fmt.Sprint(scheme, " ", code), func(t *testing.T) {
				serve := httptest.NewServer
				if scheme == "https" {
					serve = httptest.NewTLSServer
				}
				var asked, elsewhere atomic.Int64
				other := serve(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
				defer other.Close()
				first := serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					asked.Add(1)
					http.Redirect(w, r, other.URL+"/v1/traces", code)
				}))
				defer first.Close()
				env := []string{prefix + "ENDPOINT=" + first.URL, prefix + "HEADERS=x-api-key=swordfish-1"}
				if scheme == "https" {
					file := filepath.Join(t.TempDir(), "ca.pem")
					if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{
						Type: "CERTIFICATE", Bytes: first.Certificate().Raw,
					}), 0o600); err != nil {
						t.Fatal(err)
					}
					env = append(env, prefix+"CERTIFICATE="+file)
				}
				environment(t, env...)
				log := logged(t)
				tr := opened(t, Options{})
				_, end := tr.Command(t.Context(), "agentbox test")
				end(0, "")
				tr.Close()
				if text := log.String(); asked.Load() != 1 || elsewhere.Load() != 0 || strings.Count(text, "\n") != 1 ||
					!strings.Contains(text, "redirects, which is not followed") || strings.Contains(text, "swordfish") {
					t.Errorf("%d asked, %d elsewhere: %s", asked.Load(), elsewhere.Load(), text)
				}
			})
		}
	}
}

// A reference without the form of one is not recorded: it may be a URL with a password.
func TestRefs(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("0a", 32)
	for _, c := range []struct {
		ref          string
		tagged, want bool
	}{
		{"", true, false},
		{"c", true, true},
		{"docker://web_1", true, true},
		{"c@before-2", true, true},
		{"0af7651916cd", true, true},
		{"debian:12", false, true},
		{"docker://localhost:5000/a/b:c", false, true},
		{"r.example/x:1" + digest, false, true},
		{"oci:/srv/images:x", false, true},
		{"https://user:PASSW0RD@host/x", false, false},
		{"PASSW0RD@host", false, false},
		{"user:PASSW0RD@host/x" + digest, false, false},
		{"bootstrap:debian/trixie?mirror=http://user:PASSW0RD@host/debian", false, false},
		{"host/x?token=PASSW0RD", false, false},
		{"host/x#PASSW0RD", false, false},
		{"user%3APASSW0RD%40host", false, false},
		{"a\nPASSW0RD", false, false},
		{"https://PASSW0RD@host/x", true, false},
		{"https://PASSW0RD@host", true, false},
		{"user:PASSW0RD@host", true, false},
	} {
		if got := plain(c.ref, c.tagged); got != c.want {
			t.Errorf("%q: %v", c.ref, got)
		}
	}
	c := tracestest.New(t)
	environment(t, prefix+"ENDPOINT="+c.URL)
	tr := opened(t, Options{})
	svc := tr.newEngine(t)
	ctx, end := tr.Command(t.Context(), "agentbox test")
	for i := range reflect.TypeFor[runtime.Local]().NumMethod() {
		if m := reflect.TypeFor[runtime.Local]().Method(i); m.Name != "Close" {
			_ = call(t, svc, ctx, m, "https://user:PASSW0RD@host/x")
		}
	}
	_, _ = svc.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "PASSW0RD@h", Image: "https://user:PASSW0RD@host/x",
	}})
	_, _ = svc.CreateLease(ctx, runtime.LeaseRequest{Name: "https://user:PASSW0RD@host/x"})
	end(0, "")
	tr.Close()
	if n := len(c.Spans()); n < 60 || c.Contains("PASSW0RD") {
		t.Errorf("%d spans: %+v", n, c.Spans())
	}
}

// The cost of a verb with traces, and without.
func BenchmarkVerb(b *testing.B) {
	for _, on := range []bool{false, true} {
		b.Run(fmt.Sprint("traces=", on), func(b *testing.B) {
			c := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			defer c.Close()
			b.Setenv(prefix+"ENDPOINT", c.URL)
			var tr *Traces
			if on {
				var err error
				if tr, err = Open(Options{}); err != nil {
					b.Fatal(err)
				}
				defer tr.Close()
			}
			svc := tr.newEngine(b)
			ctx := trace.ContextWithSpanContext(b.Context(),
				trace.NewSpanContext(trace.SpanContextConfig{
					TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1}, TraceFlags: trace.FlagsSampled,
				}))
			for b.Loop() {
				_, _ = svc.Sandbox(ctx, "c")
			}
		})
	}
}
