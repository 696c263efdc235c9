package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/server"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// service is one with a list of sandboxes, and none that can be paused.
type service struct {
	runtime.Service
	list []runtime.Sandbox
}

func (s *service) Sandboxes(context.Context) ([]runtime.Sandbox, error) { return s.list, nil }

func (s *service) Pause(context.Context, string) error {
	return &fault.Error{Op: "pause", ID: "c", Err: fault.ErrNotFound}
}

// serving runs a service until the test ends, and returns a client of it.
func serving(t *testing.T, svc runtime.Service, opts server.Options) *Client {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	socket := filepath.Join(t.TempDir(), SocketName)
	l, err := server.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	opts.Log = slog.New(slog.DiscardHandler)
	h, err := server.New(svc, opts)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx, l, h) }()
	c := Dial(socket)
	t.Cleanup(func() {
		c.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return c
}

// dying is a client of a service that is killed when it has answered so much of a request.
func dying(t *testing.T, answer string) *Client {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), SocketName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if req, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				_, _ = io.Copy(io.Discard, req.Body)
				_, _ = io.WriteString(conn, answer)
			}
			conn.Close()
		}
	}()
	c := Dial(l.Addr().String())
	t.Cleanup(func() { c.Close() })
	return c
}

// A service that is killed while it answers is told as that, with what is known of
// the verb.
func TestCutShort(t *testing.T) {
	const (
		json    = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"id\""
		chunked = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nevent:\r\n"
		refused = "HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\nContent-Length: 100\r\n\r\n{"
		upgrade = "HTTP/1.1 101 Switching Protocols\r\n"

		look, verb, keyed = "Nothing was to be changed: ask again.",
			"Look with 'agentbox ps' and 'agentbox audit ls' before you ask again",
			"ask again with the same idempotency key"
	)
	pause := func(ctx context.Context, c *Client) error { return c.Pause(ctx, "c") }
	list := func(ctx context.Context, c *Client) error { _, err := c.Sandboxes(ctx); return err }
	prune := func(ctx context.Context, c *Client) error {
		_, err := do[wire.None](ctx, c.conn, at("prune"), wire.None{}, func([]byte) error { return nil })
		return err
	}
	logs := func(ctx context.Context, c *Client) error {
		return c.Logs(ctx, "c", runtime.LogOptions{}, io.Discard, io.Discard)
	}
	fetch := func(ctx context.Context, c *Client) error { return c.CopyFrom(ctx, "c", "/", io.Discard) }
	put := func(ctx context.Context, c *Client) error { return c.CopyTo(ctx, "c", "/", strings.NewReader("")) }
	exec := func(ctx context.Context, c *Client) error {
		_, err := c.Exec(ctx, "c", runtime.Process{Args: []string{"true"}}, runtime.Streams{})
		return err
	}
	for _, tc := range []struct {
		name, answer string
		ask          func(context.Context, *Client) error
		key, hint    string
	}{
		{"a verb, before its answer", "", pause, "", verb},
		{"a verb with a key", "", pause, "k", keyed},
		{"a verb, in its answer", json, pause, "", verb},
		{"a verb, in its events", chunked, prune, "", verb},
		{"a verb with a key, in its events", chunked, prune, "k", keyed},
		{"a verb, in its problem", refused, pause, "", verb},
		{"a list, before its answer", "", list, "", look},
		{"a list, in its answer", json, list, "", look},
		{"a stream", chunked, logs, "", look},
		{"a download", chunked, fetch, "", look},
		{
			"a download without its last word",
			"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", fetch, "", look,
		},
		{"an upload, which no key keeps from being done twice", "", put, "k", verb},
		{"a session", upgrade, exec, "", verb},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, ctx := dying(t, tc.answer), t.Context()
			if tc.key != "" {
				ctx = WithKey(ctx, tc.key)
			}
			err := tc.ask(ctx, c)
			if err == nil || !strings.HasPrefix(err.Error(),
				"service "+c.where+": it ended, or was cut off, before all of its answer was there: ") {
				t.Fatalf("%v", err)
			}
			if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
				t.Errorf("%v is no end of file", err)
			}
			hints := strings.Join(fault.Hint(err), "\n")
			if !strings.Contains(hints, tc.hint) || !strings.Contains(hints, "'journalctl -u agentbox' tells why.") {
				t.Errorf("%q does not say %q", hints, tc.hint)
			}
		})
	}
}

// An older service does not have the route of a newer verb: that is told as such,
// and not as that the sandbox is not there.
func TestUnknownVerb(t *testing.T) {
	c := serving(t, &service{}, server.Options{Info: Info{Version: "v0.9"}})
	again := func(ctx context.Context, c *Client) error {
		return none(ctx, c.conn, at("sandboxes", "a%b", "again"), wire.None{})
	}
	// its method is another
	other := func(ctx context.Context, c *Client) error { return none(ctx, c.conn, at("info"), wire.None{}) }
	foreign := dying(t, "HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\nnot found")
	for _, tc := range []struct {
		c    *Client
		ask  func(context.Context, *Client) error
		want string
	}{
		{c, again, "the service (version v0.9) does not know again (POST /v1/sandboxes/a%b/again)"},
		{c, other, "the service (version v0.9) does not know info (POST /v1/info)"},
		{foreign, again, "the service does not know again (POST /v1/sandboxes/a%b/again)"},
	} {
		err := tc.ask(t.Context(), tc.c)
		if !errors.Is(err, runtime.ErrUnsupported) || errors.Is(err, runtime.ErrNotFound) ||
			!strings.HasSuffix(fmt.Sprint(err), tc.want) ||
			!strings.Contains(fmt.Sprint(fault.Hint(err)), "restart it") {
			t.Errorf("%v (%q), want %s", err, fault.Hint(err), tc.want)
		}
	}
	// A verb's own ErrNotFound stays that.
	if err := c.Pause(t.Context(), "c"); !errors.Is(err, runtime.ErrNotFound) ||
		errors.Is(err, runtime.ErrUnsupported) {
		t.Error(err)
	}
	// An older one says it just so; nowhere must go on saying it.
	if err := writtenBy(c, "GET", "/v1/nothing"); err != "GET /v1/nothing: not found" {
		t.Errorf("%q", err)
	}
}

// writtenBy is the detail of a service's problem.
func writtenBy(c *Client, method, path string) string {
	req, _ := http.NewRequest(method, "http://agentbox"+path, nil)
	resp, err := c.http.Do(req)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	return problemOf(resp).Error()
}

func TestEncode(t *testing.T) {
	for s, ok := range map[string]bool{
		"a": true, "\xff": false, "\ufffd": true, `\ufffd`: true, `\` + "\xff": false, `\\ufffd`: true,
	} {
		if _, err := encode([]string{s}); (err == nil) != ok || err != nil && !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
}

func TestPages(t *testing.T) {
	var list []runtime.Sandbox
	for i := range 2001 {
		list = append(list, runtime.Sandbox{ID: fmt.Sprint(i)})
	}
	svc := &service{list: list}
	c := serving(t, svc, server.Options{})
	got, err := c.Sandboxes(t.Context())
	if err != nil || len(got) != len(list) || got[len(got)-1].ID != list[len(list)-1].ID {
		t.Error(len(got), err)
	}
	if _, err := get[wire.Page[runtime.Sandbox]](t.Context(), c.conn, at("sandboxes"),
		map[string][]string{"limit": {"x"}}); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	resp, err := c.exchange(t.Context(), http.MethodGet, at("sandboxes"), nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	_, err = c.exchange(t.Context(), http.MethodGet, at("sandboxes"), nil, nil,
		http.Header{"If-None-Match": {resp.Header.Get("ETag")}})
	if err == nil || !strings.Contains(err.Error(), "304") {
		t.Error(err)
	}
}

// A stream without an end was cut short.
func TestReadEvents(t *testing.T) {
	if _, err := readEvents(strings.NewReader("event: stdout\ndata: {}\n\n"), func(string, []byte) error {
		return nil
	}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}

// The headers of a trace are those that OpenTelemetry writes.
func TestPassTrace(t *testing.T) {
	state, err := trace.ParseTraceState("vendor=a,other=b")
	if err != nil {
		t.Fatal(err)
	}
	whole := trace.SpanContextConfig{
		TraceID: trace.TraceID{1, 0xab}, SpanID: trace.SpanID{2, 0xcd}, TraceFlags: 0xff, TraceState: state,
	}
	for _, config := range []trace.SpanContextConfig{
		whole,
		{TraceID: whole.TraceID, SpanID: whole.SpanID},
		{TraceID: whole.TraceID},
		{},
	} {
		ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(config))
		got, want := http.Header{}, http.Header{}
		passTrace(ctx, got)
		propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(want))
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}
