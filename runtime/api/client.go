package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// The words of the service that callers of a Client see.
type (
	Info     = wire.Info
	Health   = wire.Health
	TLSFiles = wire.TLSFiles
)

// SocketName is the service's socket in RUN.
const SocketName = "agentbox.sock"

// Client is the Service at the other end of a socket. A context that ends cancels
// the verb there, which undoes what it began, and is waited for. An OpenTelemetry
// span that it has is the parent of what the service does.
type Client struct {
	*conn
	sandboxCalls
	checkpointCalls
	imageCalls
	leaseCalls
	hostCalls
}

// The calls of a Client are those of the parts of Service.
type (
	sandboxCalls    struct{ *conn }
	checkpointCalls struct{ *conn }
	imageCalls      struct{ *conn }
	leaseCalls      struct{ *conn }
	hostCalls       struct{ *conn }
)

var (
	_ runtime.Service           = (*Client)(nil)
	_ runtime.SandboxService    = sandboxCalls{}
	_ runtime.CheckpointService = checkpointCalls{}
	_ runtime.ImageService      = imageCalls{}
	_ runtime.LeaseService      = leaseCalls{}
	_ runtime.HostService       = hostCalls{}
)

// conn is the socket's end that all calls go through.
type conn struct {
	where  string // for errors
	http   *http.Client
	lookup func(string) (string, bool) // the environment of secrets
}

// ErrHere is wrapped by the errors of what only the embedded engine can do: it
// reads or writes files by a path of the caller's. Nothing was done.
var ErrHere = fmt.Errorf("not through the service: %w", runtime.ErrUnsupported)

// cancelWait is how long a cancelled verb may take to undo what it began.
const cancelWait = 2 * time.Minute

// Dial returns a client of the service at a socket, which it does not speak to yet.
func Dial(socket string) *Client {
	return dial(socket, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "unix", socket)
	})
}

func dial(where string, connect func(context.Context) (net.Conn, error)) *Client {
	t := &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return connect(ctx) },
		DisableCompression: true, IdleConnTimeout: time.Minute, MaxResponseHeaderBytes: 1 << 20,
	}
	c := &conn{where: where, http: &http.Client{Transport: t}, lookup: os.LookupEnv}
	return &Client{c, sandboxCalls{c}, checkpointCalls{c}, imageCalls{c}, leaseCalls{c}, hostCalls{c}}
}

// Close ends the connections that are idle.
func (c *conn) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

// Remote reports whether the service may be another host's, which sees no process of
// this one.
func (c *conn) Remote() bool { return strings.HasPrefix(c.where, "tcp://") }

// keyOf is the context's key of WithKey.
type keyOf struct{}

// WithKey gives the next verb that is called an idempotency key: called again
// with the same, it is not done again.
func WithKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, keyOf{}, key)
}

// Info returns the version, root and backend of the service.
func (c *conn) Info(ctx context.Context) (Info, error) {
	return get[Info](ctx, c, at("info"), nil)
}

// Health checks that the service is alive.
func (c *Client) Health(ctx context.Context) (Health, error) {
	return get[Health](ctx, c.conn, "/healthz", nil)
}

// Ready reports whether the service's host can run, checkpoint and restore
// sandboxes, and if not, why.
func (c *Client) Ready(ctx context.Context) (doctor.Report, error) {
	return get[doctor.Report](ctx, c.conn, at("ready"), nil)
}

// at is the path of a route; each part is one segment.
func at(parts ...string) string {
	var b strings.Builder
	b.WriteString("/v1")
	for _, p := range parts {
		b.WriteByte('/')
		if p == "." || p == ".." {
			b.WriteString(strings.ReplaceAll(p, ".", "%2E"))
			continue
		}
		b.WriteString(url.PathEscape(p))
	}
	return b.String()
}

// exchange sends a request and returns its answer, which is no error.
func (c *conn) exchange(
	ctx context.Context, method, route string, q url.Values, body io.Reader, header http.Header,
) (*http.Response, error) {
	if strings.Contains(route, "//") {
		return nil, fmt.Errorf("%w: the name is empty", runtime.ErrInvalid)
	}
	u := "http://agentbox" + route
	if len(q) > 0 {
		u += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	passTrace(ctx, req.Header)
	what := asked(method, header)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unanswered(ctx, what, err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, c.refusal(ctx, what, resp)
}

// passTrace writes the trace that ctx is part of, if any, into a request's header, as W3C trace
// context. OpenTelemetry's package for that has all of baggage with it, which does not travel.
func passTrace(ctx context.Context, header http.Header) {
	span := trace.SpanContextFromContext(ctx)
	if !span.IsValid() {
		return
	}
	flags := span.TraceFlags() & (trace.FlagsSampled | trace.FlagsRandom)
	header.Set("Traceparent", fmt.Sprintf("00-%s-%s-%s", span.TraceID(), span.SpanID(), flags))
	if state := span.TraceState().String(); state != "" {
		header.Set("Tracestate", state)
	}
}

// refusal returns the error in a response.
func (c *conn) refusal(ctx context.Context, what asks, resp *http.Response) error {
	err := c.cutOff(ctx, what, problemOf(resp))
	if code := resp.StatusCode; (code == http.StatusNotFound || code == http.StatusMethodNotAllowed) &&
		noRoute(err, resp.Request) {
		return c.unknown(ctx, resp.Request)
	}
	return err
}

// noRoute reports whether an error means that the service lacks the route of a request, and not
// that a verb did not find its object.
func noRoute(err error, req *http.Request) bool {
	var other *noProblem
	var said *wire.Remote
	if !errors.As(err, &said) {
		return errors.As(err, &other)
	}
	route := wire.Route(req) + ": "
	return strings.HasPrefix(said.Text, route) ||
		errors.Is(err, runtime.ErrInvalid) && strings.Contains(said.Text, ": "+route)
}

// unknown is the error of a verb that the service lacks, as an older one does.
func (c *conn) unknown(ctx context.Context, req *http.Request) error {
	version := ""
	if req.Method != http.MethodGet || req.URL.Path != at("info") {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		if i, err := c.Info(ctx); err == nil && i.Version != "" {
			version = fmt.Sprintf(" (version %s)", i.Version)
		}
	}
	err := fmt.Errorf("%w: the service%s does not know %s (%s)",
		runtime.ErrUnsupported, version, path.Base(req.URL.Path), wire.Route(req))
	return &runtime.Error{Op: "service " + c.where, Err: err,
		Hint: "It is of another version than its caller: have it be this one, and restart it ('systemctl restart agentbox'; sandboxes go on)."}
}

// unanswered is the error of a request without an answer.
func (c *conn) unanswered(ctx context.Context, what asks, err error) error {
	if e := ctx.Err(); e != nil {
		return context.Cause(ctx)
	}
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" { // nothing was asked for
		err, hint := dial.Err, "Is it running? 'agentbox serve' runs it."
		if errors.Is(err, fs.ErrPermission) {
			err, hint = fmt.Errorf("%w: %w", runtime.ErrDenied, err),
				"It serves root and the members of its socket's group."
		}
		return &runtime.Error{Op: "service " + c.where, Err: err, Hint: hint}
	}
	err = noEOF(err)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) ||
		errors.Is(err, unix.EPIPE) {
		err = fmt.Errorf("it ended, or was cut off, before all of its answer was there: %w", err)
	}
	return &runtime.Error{Op: "service " + c.where, Err: err, Hint: c.afterwards(what)}
}

// asks is the purpose of a request.
type asks int

const (
	toChange asks = iota
	toLook
	toChangeOnce // it has an idempotency key
)

func asked(method string, header http.Header) asks {
	switch {
	case method == http.MethodGet:
		return toLook
	case header.Get(wire.HeaderKey) != "":
		return toChangeOnce
	}
	return toChange
}

// afterwards explains the state of a verb without an answer, and what to do.
func (c *conn) afterwards(what asks) string {
	there := ""
	if c.Remote() {
		there = " on its host"
	}
	why := "'journalctl -u agentbox'" + there + " tells why."
	switch what {
	case toLook:
		return "Nothing was to be changed: ask again. " + why
	case toChangeOnce:
		return "It may have been done, or not: ask again with the same idempotency key, which does not do it twice. " +
			why
	}
	return "It may have been done, or not; what was begun is finished or taken back. Look with 'agentbox ps' and 'agentbox audit ls'" + there + " before you ask again; " + why
}

// cutOff is unanswered, where it is an answer that has no end; other errors stay.
func (c *conn) cutOff(ctx context.Context, what asks, err error) error {
	if cut := (*cutShort)(nil); errors.As(err, &cut) {
		return c.unanswered(ctx, what, cut.err)
	}
	return err
}

// problemOf returns the error in a response.
func problemOf(resp *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return &cutShort{err}
	}
	var p wire.Problem
	if err := json.Unmarshal(data, &p); err != nil || p.Detail == "" {
		return &noProblem{resp.Status, data}
	}
	err = p.Err()
	if len(p.Partial) > 0 {
		err = &partial{err, p.Partial}
	}
	return err
}

// noProblem is a response that is no error of the service's: of another server or version.
type noProblem struct {
	status string
	data   []byte
}

func (n *noProblem) Error() string {
	return fmt.Sprintf("the service answers %s: %.200s", n.status, n.data)
}

// partial is an error with what was done all the same.
type partial struct {
	error
	data json.RawMessage
}

// get asks for what changes nothing.
func get[O any](ctx context.Context, c *conn, route string, q url.Values) (out O, err error) {
	resp, err := c.exchange(ctx, http.MethodGet, route, q, nil, nil)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	return out, c.decode(ctx, toLook, resp, &out)
}

func (c *conn) decode(ctx context.Context, what asks, resp *http.Response, into any) error {
	var data bytes.Buffer
	// In few reads: each may have to wait for a processor.
	data.Grow(bytes.MinRead + int(min(max(resp.ContentLength, 0), maxAhead)))
	if _, err := data.ReadFrom(resp.Body); err != nil {
		return c.unanswered(ctx, what, err)
	}
	return json.Unmarshal(data.Bytes(), into)
}

// maxAhead bounds the room that an answer is given on the word of its header, in bytes.
const maxAhead = 4 << 20

// all gets every page of a list. It starts again if the cursor is gone meanwhile.
func all[T any](ctx context.Context, c *conn, route string, q url.Values) ([]T, error) {
	if q == nil {
		q = url.Values{}
	}
	for try := 0; ; try++ {
		list := []T{}
		for q.Del("cursor"); ; {
			p, err := get[wire.Page[T]](ctx, c, route, q)
			if errors.Is(err, runtime.ErrNotFound) && q.Get("cursor") != "" && try < 3 {
				break
			}
			if err != nil {
				return nil, err
			}
			if list = append(list, p.Items...); p.Next == "" {
				return list, nil
			}
			q.Set("cursor", p.Next)
		}
	}
}

// do performs a verb and calls each with its progress.
func do[O any](ctx context.Context, c *conn, route string, in any, each func([]byte) error) (out O, err error) {
	data, err := encode(in)
	if err != nil {
		return out, err
	}
	name := rand.Text()
	header := http.Header{"Content-Type": {"application/json"}, wire.HeaderRequest: {name}}
	if key, ok := ctx.Value(keyOf{}).(string); ok {
		header.Set(wire.HeaderKey, key)
	}
	if each != nil {
		header.Set("Accept", wire.EventStream)
	}
	// The request outlives ctx: what is undone there is waited for.
	held, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	defer c.cancelWith(ctx, name, cut)()
	resp, err := c.exchange(held, http.MethodPost, route, nil, bytes.NewReader(data), header)
	if err == nil {
		defer resp.Body.Close()
		if each == nil {
			return out, c.decode(held, asked(http.MethodPost, header), resp, &out)
		}
		var last []byte
		last, err = readEvents(resp.Body, func(_ string, data []byte) error { return each(data) })
		err = c.cutOff(held, asked(http.MethodPost, header), err)
		if len(last) > 0 {
			err = errors.Join(err, json.Unmarshal(last, &out))
		}
	}
	var part *partial
	if errors.As(err, &part) {
		if e := json.Unmarshal(part.data, &out); e != nil {
			return out, errors.Join(part.error, e)
		}
		err = part.error
	}
	if err != nil && held.Err() != nil {
		err = context.Cause(ctx)
	}
	return out, err
}

// encode is the JSON of v, which can hold no text that is not UTF-8.
func encode(v any) ([]byte, error) {
	data, err := json.Marshal(v)
	for rest := data; err == nil; {
		// json.Marshal replaces such bytes by this escape, and writes the rune
		// itself where the text has that.
		i := bytes.Index(rest, []byte(`\ufffd`))
		if i < 0 {
			break
		}
		before := rest[:i]
		if (len(before)-len(bytes.TrimRight(before, `\`)))%2 == 0 {
			return nil, &runtime.Error{Err: fmt.Errorf("%w: what was asked for is not valid UTF-8", runtime.ErrInvalid)}
		}
		rest = rest[i+len(`\ufffd`):]
	}
	return data, err
}

// cancelWith cancels a named request when ctx ends, as a Ctrl-C would there; a
// service that does not hear it, or takes too long, is cut off.
func (c *conn) cancelWith(ctx context.Context, name string, cut func()) (stop func()) {
	done := make(chan struct{})
	ended := make(chan struct{})
	guard.Go(func() {
		defer close(ended)
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
		bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelWait)
		defer cancel()
		resp, err := c.exchange(bound, http.MethodDelete, at("requests", name), nil, nil, nil)
		if err != nil {
			cut()
			return
		}
		resp.Body.Close()
		select {
		case <-done:
		case <-bound.Done():
			cut()
		}
	})
	return func() { close(done); <-ended }
}

// none performs a verb that returns nothing.
func none(ctx context.Context, c *conn, route string, in any) error {
	_, err := do[wire.None](ctx, c, route, in, nil)
	return err
}

// follow reads a stream of events to its end.
func (c *conn) follow(
	ctx context.Context, route string, q url.Values, each func(name string, data []byte) error,
) error {
	resp, err := c.exchange(ctx, http.MethodGet, route, q, nil, http.Header{"Accept": {wire.EventStream}})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = readEvents(resp.Body, each)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return c.cutOff(ctx, toLook, err)
}

// download writes a stream to w. It returns an error if the stream was cut short.
func (c *conn) download(ctx context.Context, route string, q url.Values, w io.Writer) error {
	resp, err := c.exchange(ctx, http.MethodGet, route, q, nil, http.Header{"Te": {"trailers"}})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var wrote wroteWriter
	wrote.w = w
	if _, err = io.Copy(&wrote, resp.Body); err != nil {
		if wrote.err != nil {
			return wrote.err
		}
		return c.unanswered(ctx, toLook, err)
	}
	return c.cutOff(ctx, toLook, statusOf(resp.Trailer.Get(wire.TrailerStatus)))
}

// wroteWriter records the error of its writer, to distinguish it from one of the source.
type wroteWriter struct {
	w   io.Writer
	err error
}

func (w *wroteWriter) Write(p []byte) (n int, err error) {
	n, err = w.w.Write(p)
	w.err = err
	return n, err
}

// statusOf returns the error in the trailer of a stream.
func statusOf(s string) error {
	switch s {
	case "ok":
		return nil
	case "":
		return &cutShort{io.ErrUnexpectedEOF}
	}
	text, err := url.QueryUnescape(s)
	if err != nil {
		return err
	}
	var p wire.Problem
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return fmt.Errorf("status %q: %w", text, err)
	}
	return p.Err()
}

// send performs a verb with a stream. It does not read from r after it returns, unless a
// Read that does not end is under way.
func send[O any](
	ctx context.Context, c *conn, method, route string, q url.Values, r io.Reader, header http.Header,
) (out O, err error) {
	own := &ownReader{r: r}
	resp, err := c.exchange(ctx, method, route, q, own, header)
	if e := own.failed(); e != nil && err != nil {
		return out, e
	}
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	return out, c.decode(ctx, asked(method, header), resp, &out)
}

// ownReader records the error of its reader, to distinguish it from one of the connection.
type ownReader struct {
	r   io.Reader
	mu  sync.Mutex
	err error
}

func (o *ownReader) Read(p []byte) (int, error) {
	n, err := o.r.Read(p)
	if err != nil && err != io.EOF {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.err = err
	}
	return n, err
}

func (o *ownReader) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}
