// Package remotetest is a registry in the test's own process, which remembers
// what it was asked, and into which faults are put.
package remotetest

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
)

// Fault may answer in place of the registry, and reports whether it did.
type Fault func(w http.ResponseWriter, r *http.Request) bool

// Registry is a registry on this host.
type Registry struct {
	*httptest.Server

	work sync.RWMutex // held for reading while a request is answered

	mu    sync.Mutex
	asked []string // METHOD path [range]
	sent  int64    // bytes of bodies
	got   int64
	fault Fault
}

// New makes a registry that is yet to be started.
func New(opts ...registry.Option) *Registry {
	s := &Registry{}
	inner := registry.New(append([]registry.Option{
		registry.Logger(log.New(io.Discard, "", 0)), registry.WithReferrersSupport(true),
	}, opts...)...)
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.work.RLock()
		defer s.work.RUnlock()
		s.mu.Lock()
		s.asked = append(s.asked, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Range")))
		fault := s.fault
		s.mu.Unlock()
		r.Body = &meter{ReadCloser: r.Body, s: s}
		if fault != nil && fault(w, r) {
			return
		}
		inner.ServeHTTP(&counter{ResponseWriter: w, s: s}, r)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	return s
}

// Serve starts a registry, without TLS, for the length of the test.
func Serve(t testing.TB, opts ...registry.Option) *Registry {
	t.Helper()
	s := New(opts...)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// Host is what its references begin with.
func (s *Registry) Host() string { return s.Listener.Addr().String() }

type counter struct {
	http.ResponseWriter
	s *Registry
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.s.mu.Lock()
	c.s.sent += int64(n)
	c.s.mu.Unlock()
	return n, err
}

type meter struct {
	io.ReadCloser
	s *Registry
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	m.s.mu.Lock()
	m.s.got += int64(n)
	m.s.mu.Unlock()
	return n, err
}

// Breaks puts a fault in place of the last, or none, and returns how often it
// fired.
func (s *Registry) Breaks(f Fault) (fired func() int) {
	n := 0
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = nil
	if f != nil {
		s.fault = func(w http.ResponseWriter, r *http.Request) (did bool) {
			did = true // also when it panics
			defer func() {
				if s.mu.Lock(); did {
					n++
				}
				s.mu.Unlock()
			}()
			did = f(w, r)
			return did
		}
	}
	return func() int {
		s.work.Lock() // a client may have its answer before the handler has returned
		defer s.work.Unlock()
		s.mu.Lock()
		defer s.mu.Unlock()
		return n
	}
}

// Forget starts the record of requests anew.
func (s *Registry) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked, s.sent, s.got = nil, 0, 0
}

// Requests are those that begin with prefix, each METHOD PATH [RANGE].
func (s *Registry) Requests(prefix string) (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.asked {
		if strings.HasPrefix(l, prefix) {
			list = append(list, l)
		}
	}
	return list
}

// Bytes are those of the bodies that it gave and took.
func (s *Registry) Bytes() (sent, got int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent, s.got
}

// Cut sends the first n bytes of data in answer to r, which may ask for a
// range, and then ends the connection.
func Cut(w http.ResponseWriter, r *http.Request, data []byte, n int) {
	from := 0
	if h := r.Header.Get("Range"); h != "" {
		if _, err := fmt.Sscanf(h, "bytes=%d-", &from); err != nil {
			panic(err)
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(data)-1, len(data)))
	}
	rest := data[from:]
	w.Header().Set("Content-Length", strconv.Itoa(len(rest)))
	if from > 0 {
		w.WriteHeader(http.StatusPartialContent)
	}
	_, _ = w.Write(rest[:min(n, len(rest))])
	if len(rest) > n {
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}
