// Package tracestest is a collector of traces for tests: it takes OTLP over HTTP on
// loopback, and keeps what it was sent.
package tracestest

import (
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Span is one that was sent.
type Span struct {
	Name, Trace, ID, Parent string // ids in hexadecimal; a Parent may be empty
	Kind                    otlp.Span_SpanKind
	Error                   string // the text of its status; "" unless that is an error
	Attrs                   map[string]any
	Resource                map[string]any
	Nanos                   uint64 // how long it took
}

// A Collector keeps the spans that it is sent.
type Collector struct {
	URL string

	mu     sync.Mutex
	spans  []Span
	raw    bytes.Buffer
	header []http.Header
}

// New starts a collector that ends with the test.
func New(t *testing.T) *Collector {
	c := &Collector{}
	s := httptest.NewServer(c)
	t.Cleanup(s.Close)
	c.URL = s.URL
	return c
}

// ServeHTTP takes POST /v1/traces.
func (c *Collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := c.take(r); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (c *Collector) take(r *http.Request) error {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/traces" ||
		r.Header.Get("Content-Type") != "application/x-protobuf" {
		return fmt.Errorf("%s %s: %s", r.Method, r.URL, r.Header.Get("Content-Type"))
	}
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		var err error
		if body, err = gzip.NewReader(body); err != nil {
			return err
		}
	}
	data, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	var req collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(data, &req); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.raw.Write(data)
	c.header = append(c.header, r.Header)
	for _, rs := range req.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				out := Span{Name: s.Name, Trace: hex.EncodeToString(s.TraceId), ID: hex.EncodeToString(s.SpanId),
					Parent: hex.EncodeToString(s.ParentSpanId), Kind: s.Kind,
					Attrs: values(s.Attributes), Resource: values(rs.Resource.GetAttributes()),
					Nanos: s.EndTimeUnixNano - s.StartTimeUnixNano}
				if s.Status.GetCode() == otlp.Status_STATUS_CODE_ERROR {
					out.Error = s.Status.GetMessage()
				}
				c.spans = append(c.spans, out)
			}
		}
	}
	return nil
}

func values(list []*common.KeyValue) map[string]any {
	out := map[string]any{}
	for _, kv := range list {
		switch v := kv.Value.GetValue().(type) {
		case *common.AnyValue_StringValue:
			out[kv.Key] = v.StringValue
		case *common.AnyValue_IntValue:
			out[kv.Key] = v.IntValue
		case *common.AnyValue_DoubleValue:
			out[kv.Key] = v.DoubleValue
		case *common.AnyValue_BoolValue:
			out[kv.Key] = v.BoolValue
		default:
			out[kv.Key] = fmt.Sprint(kv.Value)
		}
	}
	return out
}

// Spans are those that came so far.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans)
}

// One is the only span of a name.
func (c *Collector) One(t *testing.T, name string) Span {
	t.Helper()
	var found []Span
	names := map[string]int{}
	for _, s := range c.Spans() {
		names[s.Name]++
		if s.Name == name {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d spans %q among %v", len(found), name, slices.Sorted(maps.Keys(names)))
	}
	return found[0]
}

// Contains reports whether text is anywhere in what was sent.
func (c *Collector) Contains(text string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Contains(c.raw.Bytes(), []byte(text))
}

// Headers are those of all requests, each as one text.
func (c *Collector) Headers(name string) (list []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.header {
		list = append(list, strings.Join(h.Values(name), ","))
	}
	return list
}

// Forget is a new beginning.
func (c *Collector) Forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spans, c.header = nil, nil
	c.raw.Reset()
}
