package server

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// Bounds of what callers send.
const (
	maxBody    = 4 << 20  // of a JSON body
	maxSecrets = 40 << 20 // of one that may have secrets in it
	maxHeader  = 64 << 10
)

// Options modify New; the zero value works.
type Options struct {
	// Requests is a directory for what was done for idempotency keys; empty:
	// keys are refused.
	Requests string
	Info     wire.Info
	// Examine reports what this host can do; nil: unsupported.
	Examine func(context.Context) doctor.Report
	Log     *slog.Logger // nil: slog.Default
	// Before puts what killed processes left in order, and is called before each
	// verb that may change something.
	Before func(context.Context) error
	// Stall is how long a caller may neither take nor send any of a stream; 0: 10 minutes.
	Stall time.Duration
	// Drain is how long verbs under way may take when the service is to end, before they are
	// cancelled; 0: 30 s.
	Drain time.Duration
	// Body is how long a caller may take to send a JSON body; 0: 30 s.
	Body time.Duration
	// Linger is how long the exit code of an --rm sandbox is kept for a caller
	// whose connection has ended; 0: 10 s.
	Linger time.Duration
	// Turns is how many heavy verbs are at work at a time, while others wait; 0: as
	// many as there are processors, and at least 2.
	Turns int
	// Queue is how many wait for their turn before others are refused; 0: 256, half of the
	// connections, so that callers that only read still get in.
	Queue int
	// TurnTime is how long a turn lasts before another caller gets one too; 0: 10 s.
	TurnTime time.Duration
	// Metrics are counted there; nil: of the handler alone.
	Metrics *Metrics
	// Tracer makes a span of each request of a verb, as part of its caller's trace;
	// nil: there are none.
	Tracer trace.Tracer
}

// A Handler serves a Service.
type Handler struct {
	svc      runtime.Service
	opts     Options
	log      *slog.Logger
	mux      *http.ServeMux
	verbs    map[string]bool // method and path of the routes
	requests *requests
	turns    *turns
	under    sync.WaitGroup // requests under way, sessions too
	health   health

	mu       sync.Mutex
	running  map[string]context.CancelFunc // by the caller and the request's name
	draining chan struct{}                 // closed: no new verbs
	end      context.Context               // ends what is under way
	stop     context.CancelFunc
}

//go:embed openapi.json
var openAPI []byte

// New serves svc. Close ends what the handler has begun.
func New(svc runtime.Service, opts Options) (*Handler, error) {
	opts.Stall = cmp.Or(opts.Stall, 10*time.Minute)
	opts.Body = cmp.Or(opts.Body, 30*time.Second)
	opts.Drain = cmp.Or(opts.Drain, 30*time.Second)
	opts.Linger = cmp.Or(opts.Linger, 10*time.Second)
	opts.Turns = cmp.Or(opts.Turns, max(2, goruntime.NumCPU()))
	opts.Queue = cmp.Or(opts.Queue, maxConns/2)
	opts.TurnTime = cmp.Or(opts.TurnTime, 10*time.Second)
	h := &Handler{
		svc: svc, opts: opts, log: opts.Log, mux: http.NewServeMux(), verbs: map[string]bool{},
		running: map[string]context.CancelFunc{}, draining: make(chan struct{}),
	}
	if h.opts.Metrics == nil {
		h.opts.Metrics = &Metrics{}
	}
	h.turns = &turns{
		free: opts.Turns, time: opts.TurnTime, room: opts.Queue, metrics: h.opts.Metrics, ending: h.draining,
	}
	h.end, h.stop = context.WithCancel(context.Background())
	if h.log == nil {
		h.log = slog.Default()
	}
	if opts.Requests != "" {
		var err error
		if h.requests, err = openRequests(opts.Requests, h.log); err != nil {
			return nil, err
		}
	}
	for _, r := range h.routes() {
		h.mux.HandleFunc(r.method+" "+r.path, r.strictly())
		h.verbs[r.method+" "+r.path] = true
	}
	h.mux.HandleFunc("GET /openapi.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(openAPI) // the caller may be gone
	})
	h.mux.HandleFunc("DELETE /v1/requests/{request}", h.cancel)
	h.mux.HandleFunc("/", h.nowhere)
	return h, nil
}

// ServeHTTP answers one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	p := peerOf(r)
	seen := &statusWriter{ResponseWriter: w}
	ctl := http.NewResponseController(w)
	// Else net/http reads the rest of a body before it answers, for as long as
	// that comes.
	_ = ctl.EnableFullDuplex()
	defer func() {
		// Bound the remaining writes and reads of this request as well.
		_ = ctl.SetWriteDeadline(time.Now().Add(h.opts.Stall))
		_ = ctl.SetReadDeadline(time.Now().Add(min(h.opts.Stall, wire.LastTime)))
		verb := "other"
		if h.verbs[r.Pattern] {
			verb = verbOf(r.Pattern)
		}
		h.opts.Metrics.request(verb, cmp.Or(seen.code, "ok"), time.Since(began))
		attrs := []any{"method", r.Method, "path", r.URL.Path, "status", cmp.Or(seen.status, http.StatusOK)}
		if r.Pattern != "" {
			attrs = append(attrs, "verb", verbOf(r.Pattern))
		}
		for _, name := range []string{"sandbox", "checkpoint", "image"} {
			if v := r.PathValue(name); v != "" {
				attrs = append(attrs, name, v)
			}
		}
		h.log.Info("request", append(append(attrs, p.attrs()...), "ms", time.Since(began).Milliseconds())...)
	}()
	if err := admit(r, p); err != nil {
		writeProblem(seen, err)
		return
	}
	if r.Method == http.MethodDelete { // cancels, and is nothing to wait for
		h.mux.ServeHTTP(seen, r)
		return
	}
	ctx, cancel := context.WithCancel(runtime.WithCaller(r.Context(), p.caller()))
	defer cancel()
	done, err := h.enter(p, r.Header.Get(wire.HeaderRequest), cancel)
	if err != nil {
		writeProblem(seen, err)
		return
	}
	defer done()
	defer context.AfterFunc(h.end, cancel)()
	ctx, traced := h.traced(ctx, r)
	defer func() { traced(seen) }()
	r = r.WithContext(ctx) // whose Pattern the log wants
	h.answer(seen, r)
}

// kept calls a verb. A panic fails only that verb; what it left behind is recovered as if
// the verb had been killed.
func kept[O any](ctx context.Context, h *Handler, do func() (O, error)) (out O, panicked bool, err error) {
	err = guard.Do(func() (err error) {
		out, err = do()
		return err
	})
	if p := (*guard.Panic)(nil); errors.As(err, &p) {
		goruntime.GC() // frees locks whose holder panicked
		_ = h.before(context.WithoutCancel(ctx))
		return out, true, err
	}
	return out, false, err
}

// answer answers a request. A panic outside of a verb is answered, too.
func (h *Handler) answer(w *statusWriter, r *http.Request) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if v == http.ErrAbortHandler {
			panic(v)
		}
		p := guard.Caught(v)
		if w.status == 0 {
			w.Header().Set("Connection", "close") // how much of the body was read is unknown
			writeProblem(w, p)
			return
		}
		failedWith(w, problem(p).Code)
		panic(http.ErrAbortHandler) // what was written is not whole
	}()
	h.mux.ServeHTTP(w, r)
}

// verbOf is the verb of a route, in few words: "sandboxes restore", "checkpoints",
// "get sandboxes".
func verbOf(pattern string) string {
	method, path, _ := strings.Cut(pattern, " ")
	var words []string
	if method != http.MethodPost {
		words = append(words, strings.ToLower(method))
	}
	for _, part := range strings.Split(strings.TrimPrefix(path, "/v1"), "/") {
		if part != "" && part[0] != '{' {
			words = append(words, part)
		}
	}
	return strings.Join(words, " ")
}

// admit reports whether a request is served.
func admit(r *http.Request, p peer) error {
	if p.denied {
		return &runtime.Error{Op: "serve", Err: fmt.Errorf("%s: %w", p, runtime.ErrDenied)}
	}
	if !expected(r) {
		return &runtime.Error{Op: "serve", Err: fmt.Errorf("the host %.100q: %w", r.Host, runtime.ErrDenied),
			Hint: "Ask for http://agentbox/: a web page that got here by a name of its own must not."}
	}
	return nil
}

// expected reports whether a request's host is one that callers of this service
// have. A web page whose name leads here has another, and its browser takes the
// service for the page's own. Over TLS the certificate has the name; a browser that
// has one as well may be any page's, and says so.
func expected(r *http.Request) bool {
	if r.TLS != nil {
		return r.Header.Get("Origin") == ""
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	switch host = strings.Trim(host, "[]"); host {
	case "", "agentbox", "localhost":
		return true
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	tcp, _ := local.(*net.TCPAddr)
	ip := net.ParseIP(host)
	return ip != nil && (ip.IsLoopback() || tcp != nil && tcp.IP.Equal(ip))
}

// enter makes a request one that Drain waits for, and, with a name, one that
// cancel finds, until the returned function is called.
func (h *Handler) enter(p peer, id string, cancel context.CancelFunc) (done func(), err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.draining:
		return nil, errEnding()
	default:
	}
	key := p.identity() + " " + id
	if _, ok := h.running[key]; ok {
		return nil, &runtime.Error{Op: "serve", Err: fmt.Errorf("a request of the name %.100q is under way: %w", id,
			runtime.ErrExists), Hint: "Give each one a name of its own."}
	}
	if id != "" {
		h.running[key] = cancel
	}
	h.under.Add(1)
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.running, key)
		h.under.Done()
	}, nil
}

// Alive answers a request of its own, and returns only when it can.
func (h *Handler) Alive(ctx context.Context) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/v1/info", nil)
	if err != nil {
		return err
	}
	func() { h.mu.Lock(); defer h.mu.Unlock() }() // every request takes it
	w := &statusWriter{ResponseWriter: nowhere{}}
	h.mux.ServeHTTP(w, r)
	if w.status != 0 {
		return fmt.Errorf("the service answers itself with status %d", w.status)
	}
	return nil
}

// nowhere discards a response.
type nowhere struct{}

func (nowhere) Header() http.Header         { return http.Header{} }
func (nowhere) Write(p []byte) (int, error) { return len(p), nil }
func (nowhere) WriteHeader(int)             {}

// Drain lets no more verbs in and waits for those under way; when ctx ends it
// cancels them and waits for them to have undone what they began.
func (h *Handler) Drain(ctx context.Context) {
	h.mu.Lock()
	select {
	case <-h.draining:
	default:
		close(h.draining)
	}
	h.mu.Unlock()
	done := make(chan struct{})
	guard.Go(func() { h.under.Wait(); close(done) })
	select {
	case <-done:
	case <-ctx.Done():
	}
	h.stop()
	<-done
}

// cancel ends a request as Ctrl-C ends a command: the request undoes what it began and then
// answers its caller.
func (h *Handler) cancel(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	cancel, ok := h.running[peerOf(r).identity()+" "+r.PathValue("request")]
	h.mu.Unlock()
	if !ok {
		writeProblem(w, fmt.Errorf("request %.100q: %w", r.PathValue("request"), runtime.ErrNotFound))
		return
	}
	cancel()
	w.WriteHeader(http.StatusNoContent)
}

// A route is one verb.
type route struct {
	method, path, summary string
	in, out               reflect.Type // nil: no JSON
	event                 reflect.Type // of its progress, or of its stream
	query                 []string
	stream                string // media type of what is no JSON: "in", "out"
	heavy                 *bool  // it takes turns with others
	serve                 http.HandlerFunc
}

// query is a verb that changes nothing.
func query[O any](
	h *Handler, path, summary string, do func(context.Context, *request[wire.None]) (O, error), params ...string,
) route {
	heavy := new(bool)
	return route{method: http.MethodGet, path: path, summary: summary, out: reflect.TypeFor[O](), query: params,
		heavy: heavy, serve: func(w http.ResponseWriter, r *http.Request) {
			ctx, done, err := h.inTurn(r.Context(), *heavy)
			if err != nil {
				writeProblem(w, err)
				return
			}
			defer done()
			out, err := do(ctx, &request[wire.None]{Request: r, ref: ref(r)})
			done() // the caller may be slow
			if err != nil {
				writeProblem(w, err)
				return
			}
			h.writeJSON(w, r, out)
		}}
}

// verb is one that may change something.
func verb[I, O any](h *Handler, path, summary string, do func(context.Context, *request[I]) (O, error)) route {
	heavy := new(bool)
	return route{method: http.MethodPost, path: path, summary: summary, in: reflect.TypeFor[I](),
		out: reflect.TypeFor[O](), heavy: heavy, serve: func(w http.ResponseWriter, r *http.Request) {
			req := &request[I]{Request: r, ref: ref(r)}
			data, err := h.body(r, w, &req.in)
			if err != nil {
				writeProblem(w, err)
				return
			}
			h.once(w, r, data, func(rec *record) (any, error) {
				req.rec = rec
				ctx, done, err := h.inTurn(r.Context(), *heavy)
				if err != nil && req.again() {
					return nil, req.unsettled(err)
				}
				if err != nil {
					return nil, err
				}
				defer done()
				if err := h.before(r.Context()); err != nil && req.again() {
					// The first attempt may have left something neither whole nor gone.
					return nil, req.unsettled(err)
				}
				if !wantsEvents(r) {
					out, panicked, err := kept(ctx, h, func() (O, error) { return do(ctx, req) })
					if panicked {
						_ = req.unsettled(err)
					}
					return out, err
				}
				events := h.events(w, r)
				defer events.close()
				req.report = events.progress
				out, panicked, err := kept(ctx, h, func() (O, error) { return do(ctx, req) })
				if panicked {
					_ = req.unsettled(err)
				}
				done() // the caller may be slow
				events.end(out, err)
				return out, errors.Join(err, errAnswered)
			})
		}}
}

// before recovers what killed processes left. A failure is logged only: it must not keep
// callers from other sandboxes.
func (h *Handler) before(ctx context.Context) error {
	if h.opts.Before == nil {
		return nil
	}
	err := guard.Do(func() error { return h.opts.Before(ctx) })
	if err != nil {
		h.log.Error("recovery failed", "err", err)
	}
	return err
}

// withProgress says what the progress of a route is.
func (r route) withProgress(event any) route {
	r.event = reflect.TypeOf(event)
	return r
}

// ref returns the name in the path of a request.
func ref(r *http.Request) string {
	for _, name := range []string{"sandbox", "checkpoint", "image", "lease", "approval"} {
		if v := r.PathValue(name); v != "" {
			return v
		}
	}
	return ""
}

// body reads a JSON body. A member that is not known is an error: it could be
// what makes the verb do less.
func (h *Handler) body(r *http.Request, w http.ResponseWriter, into any) ([]byte, error) {
	limit := int64(maxBody)
	if _, ok := into.(interface {
		WithSecrets(context.Context) context.Context
	}); ok {
		limit = maxSecrets
	}
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Now().Add(h.opts.Body)) // in tests there is no connection
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if err != nil {
		// The rest of the body is not waited for.
		w.Header().Set("Connection", "close")
		return nil, fmt.Errorf("%w: body: %v", runtime.ErrInvalid, err)
	}
	_ = ctl.SetReadDeadline(time.Time{})
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, nil
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return nil, fmt.Errorf("%w: body: %v", runtime.ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: body: there is something behind the JSON", runtime.ErrInvalid)
	}
	if err := checkMembers(data, reflect.TypeOf(into)); err != nil {
		return nil, fmt.Errorf("%w: body: %v", runtime.ErrInvalid, err)
	}
	return data, nil
}

// writeJSON answers with a value; its digest is the ETag.
func (h *Handler) writeJSON(w http.ResponseWriter, r *http.Request, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		writeProblem(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		sum := sha256.Sum256(data)
		tag := `"` + hex.EncodeToString(sum[:16]) + `"`
		w.Header().Set("ETag", tag)
		if strings.Contains(r.Header.Get("If-None-Match"), tag) {
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	data = append(data, '\n')
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = h.writer(w).Write(data) // the caller may be gone
}

func writeProblem(w http.ResponseWriter, err error) { writeAProblem(w, problem(err)) }

func writeAProblem(w http.ResponseWriter, p wire.Problem) {
	data, err := json.Marshal(p)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	failedWith(w, p.Code)
	w.Header().Set("Content-Type", "application/problem+json")
	if p.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(p.RetryAfter))
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(data, '\n')) // the caller may be gone
}

// statusWriter records the status for the log.
type statusWriter struct {
	http.ResponseWriter
	status int
	code   string // of the error that it ended with
}

// failedWith notes for the metrics how a request ended.
func failedWith(w http.ResponseWriter, code string) {
	if s, ok := w.(*statusWriter); ok {
		s.code = code
	}
}

func (s *statusWriter) WriteHeader(status int) {
	s.status = status
	s.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController and websocket.Accept at the connection.
func (s *statusWriter) Unwrap() http.ResponseWriter { return s.ResponseWriter }
