package authz

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func post(t *testing.T, h http.Handler, path, body string) (code int, r reply) {
	t.Helper()
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest("POST", path, strings.NewReader(body)))
	if rec.Code == http.StatusOK {
		if err := json.Unmarshal(rec.Body.Bytes(), &r); err != nil {
			t.Fatalf("%s: %v", rec.Body, err)
		}
	}
	return rec.Code, r
}

func TestHandler(t *testing.T) {
	var log bytes.Buffer
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(old)
	h := Handler(NewJudge(nil, Options{}))

	req, err := json.Marshal(Request{User: "eve", RequestMethod: "POST",
		RequestURI:  "/v1.41/containers/create?name=secret",
		RequestBody: []byte(`{"HostConfig":{"Privileged":true}}`)})
	if err != nil {
		t.Fatal(err)
	}
	code, r := post(t, h, "/AuthZPlugin.AuthZReq", string(req))
	if code != 200 || r.Allow || !strings.Contains(r.Msg, "policy key privileged") {
		t.Errorf("%d %+v", code, r)
	}
	line := log.String()
	if strings.Count(line, "\n") != 1 || strings.Contains(line, "secret") {
		t.Errorf("not one line, or the query in it: %s", line)
	}
	for _, want := range []string{
		"denied", "method=POST", "path=/v1.41/containers/create", "user=eve", "rule=privileged", "key=privileged",
	} {
		if !strings.Contains(line, want) {
			t.Errorf("no %s in %s", want, line)
		}
	}

	if code, r := post(t, h, "/AuthZPlugin.AuthZReq", `{"RequestMethod":"GET","RequestUri":"/_ping"}`); code != 200 ||
		!r.Allow || r.Msg != "" {
		t.Errorf("%d %+v", code, r)
	}
	for _, bad := range []string{
		"", "{", "[]", `{"RequestBody":7}`, `{"RequestBody":"!"}`,
		`{"RequestBody":"` + strings.Repeat("A", maxRequest) + `"}`, "{}",
	} {
		if code, r := post(t, h, "/AuthZPlugin.AuthZReq", bad); code != 200 || r.Allow || r.Msg == "" {
			t.Errorf("%.40s: %d %+v", bad, code, r)
		}
	}
	for _, any := range []string{"", "{}", string(req)} {
		if code, r := post(t, h, "/AuthZPlugin.AuthZRes", any); code != 200 || !r.Allow {
			t.Errorf("%d %+v", code, r)
		}
	}
	if code, _ := post(t, h, "/AuthZPlugin.Other", "{}"); code != http.StatusNotFound {
		t.Error(code)
	}
}

// A judge that panics refuses and goes on.
func TestPanicRefuses(t *testing.T) {
	var broken *Judge
	if d := broken.decide(Request{RequestMethod: "POST", RequestURI: "/build"}); d.Allow || d.Msg == "" {
		t.Errorf("%+v", d)
	}
}
