package server

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// An unknown parameter of a query is refused, as in bodies: a filter without effect would
// list, and have a caller remove, objects of others.
func TestQuery(t *testing.T) {
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) { return nil, nil },
		checkpoints: func(f runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
			if d := cmp.Diff(runtime.CheckpointFilter{
				Sandbox: "c", All: true, Labels: map[string]string{"a": "1", "b": "2"},
			}, f); d != "" {
				t.Error(d)
			}
			return nil, nil
		},
	}
	socket := serving(t, svc, Options{})
	for _, tt := range []struct {
		method, path string
		status       int
		detail       string
	}{
		{"GET", "/v1/checkpoints?sandbox=c&all=true&label=a=1&label=b=2&limit=5&cursor=", 200, ""},
		{
			"GET", "/v1/checkpoints?sandbx=c", 400,
			`unknown parameter "sandbx"; known are sandbox, all, trigger, policy, label, limit, cursor`,
		},
		{"GET", "/v1/checkpoints?sandbox=c&sandbox=d", 400, "sandbox is there twice"},
		{"GET", "/v1/checkpoints?all=maybe", 400, `all "maybe": true or false`},
		{"GET", "/v1/sandboxes?limit=%zz", 400, "query: invalid URL escape"},
		{"GET", "/v1/sandboxes/c?all=true", 400, `unknown parameter "all"; it has none`},
		{"POST", "/v1/sandboxes/c/pause?force=true", 400, `unknown parameter "force"`},
		{"GET", "/healthz?verbose", 200, ""}, // a probe's
		{"GET", "/v1/nothing", 404, "GET /v1/nothing: not found"},
	} {
		resp, p := plain(t, socket, tt.method, tt.path)
		if resp.StatusCode != tt.status || !strings.Contains(p.Detail, tt.detail) {
			t.Errorf("%s %s: %d %q, want %d %q", tt.method, tt.path, resp.StatusCode, p.Detail, tt.status, tt.detail)
		}
	}
}

// A path that takes other methods says which.
func TestMethods(t *testing.T) {
	socket := serving(t, &service{sandboxes: func(context.Context) ([]runtime.Sandbox, error) {
		return nil, nil
	}}, Options{})
	for _, tt := range []struct{ method, path, allow, hint string }{
		{"DELETE", "/v1/sandboxes/c", "GET", "POST /v1/sandboxes/c/remove removes it."},
		{"PUT", "/v1/sandboxes", "GET, POST", ""},
		{"GET", "/v1/sandboxes/c/restore", "POST", ""},
		{"GET", "/v1/requests/x", "DELETE", ""},
		{"POST", "/v1/sandboxes/c/archive", "GET, PUT", ""},
	} {
		resp, p := plain(t, socket, tt.method, tt.path)
		var hints []string
		if tt.hint != "" {
			hints = []string{tt.hint}
		}
		if resp.StatusCode != http.StatusMethodNotAllowed || resp.Header.Get("Allow") != tt.allow ||
			p.Status != resp.StatusCode || p.Code != "invalid" || !slices.Equal(p.Hints, hints) {
			t.Errorf("%s %s: %d, allows %q, %+v", tt.method, tt.path, resp.StatusCode, resp.Header.Get("Allow"), p)
		}
	}
	// HEAD is GET without its body.
	head, _ := plain(t, socket, "HEAD", "/v1/sandboxes")
	get, _ := plain(t, socket, "GET", "/v1/sandboxes")
	if tag := get.Header.Get("ETag"); tag == "" || head.StatusCode != 200 || head.Header.Get("ETag") != tag {
		t.Errorf("HEAD: %d %v, GET has %v", head.StatusCode, head.Header, get.Header)
	}
}

// plain sends a request as it is; a problem is what it was answered with, if it was.
func plain(t *testing.T, socket, method, path string) (resp *http.Response, p wire.Problem) {
	t.Helper()
	c := client(t, socket)
	req, err := http.NewRequestWithContext(t.Context(), method, "http://agentbox"+path, nil)
	if err == nil {
		resp, err = c.http.Do(req)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		if err := json.NewDecoder(resp.Body).Decode(&p); err != nil {
			t.Fatal(err)
		}
	}
	return resp, p
}
