package server

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// queryTypes are, as JSON has them, those of the parameters that are no text.
var queryTypes = map[string]string{
	"all": "boolean", "follow": "boolean", "timestamps": "boolean", "trust": "boolean",
	"limit": "integer", "tail": "integer",
}

// queryLists are the parameters that may be given more than once.
var queryLists = []string{"label", "recipient", "type"}

// strictly has a route refuse what its query has and it does not know, as bodies
// are: a filter with a slip in its name would filter nothing.
func (r route) strictly() http.HandlerFunc {
	if !strings.HasPrefix(r.path, "/v1/") {
		return r.serve // probes and scrapers have parameters of their own
	}
	return func(w http.ResponseWriter, req *http.Request) {
		if err := r.checkQuery(req.URL.RawQuery); err != nil {
			writeProblem(w, err)
			return
		}
		r.serve(w, req)
	}
}

func (r route) checkQuery(raw string) error {
	q, err := url.ParseQuery(raw)
	if err != nil {
		return fmt.Errorf("%w: query: %v", runtime.ErrInvalid, err)
	}
	for name, values := range q {
		known := "it has none"
		if len(r.query) > 0 {
			known = "known are " + strings.Join(r.query, ", ")
		}
		if !slices.Contains(r.query, name) {
			return fmt.Errorf("%w: query: unknown parameter %.50q; %s", runtime.ErrInvalid, name, known)
		}
		if len(values) > 1 && !slices.Contains(queryLists, name) {
			return fmt.Errorf("%w: query: %s is there twice", runtime.ErrInvalid, name)
		}
		if queryTypes[name] != "boolean" || values[0] == "" {
			continue
		}
		if _, err := strconv.ParseBool(values[0]); err != nil {
			return fmt.Errorf("%w: query: %s %.50q: true or false", runtime.ErrInvalid, name, values[0])
		}
	}
	return nil
}

// nowhere answers what no route takes: with the methods that the path has, if it
// has any.
func (h *Handler) nowhere(w http.ResponseWriter, r *http.Request) {
	var allowed []string
	takes := func(method, path string) bool {
		_, pattern := h.mux.Handler(&http.Request{Method: method, Host: r.Host, URL: &url.URL{Path: path}})
		return strings.HasPrefix(pattern, method+" ")
	}
	for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
		if takes(m, r.URL.Path) {
			allowed = append(allowed, m)
		}
	}
	if allowed == nil {
		writeProblem(w, fmt.Errorf("%s: %w", wire.Route(r), runtime.ErrNotFound))
		return
	}
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	p := problem(fmt.Errorf("%w: %s: its methods are %s", runtime.ErrInvalid, wire.Route(r),
		strings.Join(allowed, ", ")))
	p.Status, p.Title = http.StatusMethodNotAllowed, http.StatusText(http.StatusMethodNotAllowed)
	if remove := r.URL.Path + "/remove"; r.Method == http.MethodDelete && takes(http.MethodPost, remove) {
		p.Hints = []string{fmt.Sprintf("POST %.200s removes it.", remove)}
	}
	writeAProblem(w, p)
}
