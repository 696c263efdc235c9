package test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	otlp "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/agentbox/agentbox/runtime/traces"
	"github.com/agentbox/agentbox/runtime/traces/tracestest"
)

// collectAt is the environment of a process that sends its traces somewhere.
func collectAt(url string) []string {
	return []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=" + url, "OTEL_RESOURCE_ATTRIBUTES=team=core", "OTEL_BSP_SCHEDULE_DELAY=50",
	}
}

// An agent's trace goes on in the command line that it gives, in the service where
// there is one, and in the verb; each in its own process.
func TestTraces(t *testing.T) {
	t.Parallel()
	for _, through := range []string{"engine", "service"} {
		t.Run(through, func(t *testing.T) {
			b := memoryBox(t)
			c := tracestest.New(t)
			stop := func() {}
			if through == "service" {
				cmd, _ := b.serve(append(collectAt(c.URL), "OTEL_SERVICE_NAME=sandboxes")...)
				stop = func() {
					if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
						t.Fatal(err)
					}
					if err := cmd.Wait(); err != nil {
						t.Errorf("serve: %v", err)
					}
				}
			}
			secret := "hunter" + "2"
			steps := []struct {
				name string
				code int
				args []string
			}{
				{"run", 0, []string{"run", "-d", "--name", "c", "-e", "P=" + secret, "busybox", "sleep", "1000"}},
				{"checkpoint", 0, []string{"checkpoint", "--name", "one", "c"}},
				{"exec", 5, []string{"exec", "-e", "Q=" + secret, "c", "sh", "-c", "echo " + secret + "; exit 5"}},
				{"restore", 0, []string{"restore", "c", "one"}},
				{"again", 3, []string{"restore", "c", "none-such"}},
				{"usage", 2, []string{"checkpoint", "--tcp", "nonsense", "c"}},
				{"ps", 0, []string{"ps"}},
			}
			trace, caller := map[string]string{}, "b7ad6b7169203331"
			for i, s := range steps {
				trace[s.name] = fmt.Sprintf("%032x", i+1)
				env := append(collectAt(c.URL), "TRACEPARENT=00-"+trace[s.name]+"-"+caller+"-01")
				if r := b.try(env, s.args...); r.code != s.code || s.code == 0 && r.err != "" {
					t.Fatalf("want exit %d and no word: %s", s.code, r)
				}
			}
			// A command that sends nothing itself hands its caller's trace on.
			handed := fmt.Sprintf("%032x", 99)
			if r := b.try([]string{"TRACEPARENT=00-" + handed + "-" + caller + "-01"}, "pause", "c"); r.code != 0 {
				t.Fatal(r)
			}
			id := b.inspect("c").ID
			stop()

			of := func(trace, name string) tracestest.Span {
				t.Helper()
				var names []string
				var found []tracestest.Span
				for _, s := range c.Spans() {
					if s.Trace == trace {
						names = append(names, s.Name)
						if s.Name == name {
							found = append(found, s)
						}
					}
				}
				if len(found) != 1 {
					t.Fatalf("%d spans %q in trace %s: %q", len(found), name, trace, names)
				}
				return found[0]
			}
			// chain is the way from the agent's span to the verb's.
			chain := func(step, command, route, verb string) tracestest.Span {
				t.Helper()
				cmd := of(trace[step], command)
				if cmd.Parent != caller || cmd.Resource["service.name"] != "agentbox" ||
					cmd.Resource["team"] != "core" || cmd.Resource["host.name"] == "" {
					t.Errorf("%+v", cmd)
				}
				above := cmd
				if through == "service" {
					above = of(trace[step], route)
					if above.Parent != cmd.ID || above.Kind != otlp.Span_SPAN_KIND_SERVER ||
						above.Resource["service.name"] != "sandboxes" ||
						route != above.Attrs["http.request.method"].(string)+" "+above.Attrs["http.route"].(string) {
						t.Errorf("%+v", above)
					}
				}
				v := of(trace[step], verb)
				if v.Parent != above.ID || v.Resource["service.name"] != above.Resource["service.name"] {
					t.Errorf("%+v is not below %+v", v, above)
				}
				return v
			}
			ck := chain("checkpoint", "agentbox checkpoint",
				"POST /v1/sandboxes/{sandbox}/checkpoints", "agentbox.checkpoint")
			if a := ck.Attrs; ck.Error != "" || a["agentbox.sandbox.id"] != id || a["agentbox.sandbox.name"] != "c" ||
				a["agentbox.checkpoint.kind"] != "full" || a["agentbox.checkpoint.id"] == "" ||
				a["agentbox.frozen_ms"].(float64) <= 0 || a["agentbox.checkpoint.bytes"].(int64) <= 0 ||
				a["agentbox.checkpoint.added"].(int64) <= 0 || ck.Nanos == 0 {
				t.Errorf("%+v", ck)
			}
			re := chain("restore", "agentbox restore", "POST /v1/sandboxes/{sandbox}/restore", "agentbox.restore")
			if a := re.Attrs; re.Error != "" || a["agentbox.checkpoint.id"] != ck.Attrs["agentbox.checkpoint.id"] ||
				a["agentbox.backend"] != "oci" || a["agentbox.down_ms"].(float64) <= 0 ||
				a["agentbox.restore.undo"] == "" {
				t.Errorf("%+v", re)
			}
			ex := chain("exec", "agentbox exec", "GET /v1/sandboxes/{sandbox}/exec", "agentbox.exec")
			if ex.Error != "" || ex.Attrs["agentbox.exit_code"] != int64(5) {
				t.Errorf("%+v", ex)
			}
			if s := of(trace["exec"], "agentbox exec"); s.Error != "" || s.Attrs["process.exit.code"] != int64(5) {
				t.Errorf("%+v", s)
			}
			if s := chain("again", "agentbox restore", "POST /v1/sandboxes/{sandbox}/restore",
				"agentbox.restore"); s.Error != "not_found" || s.Attrs["error.type"] != "not_found" ||
				s.Attrs["agentbox.sandbox.id"] != id {
				t.Errorf("%+v", s)
			}
			if s := of(trace["again"], "agentbox restore"); s.Error != "not_found" ||
				s.Attrs["process.exit.code"] != int64(3) {
				t.Errorf("%+v", s)
			}
			chain("run", "agentbox run", "POST /v1/sandboxes", "agentbox.create")
			chain("ps", "agentbox ps", "GET /v1/sandboxes", "agentbox.ps")
			for _, s := range c.Spans() {
				switch {
				case s.Parent == "":
					t.Errorf("what only looked begins a trace: %+v", s)
				case s.Trace == trace["usage"]:
					t.Errorf("a command line that is wrong asks for nothing: %+v", s)
				case s.Trace == handed && (through == "engine" ||
					s.Name != "POST /v1/sandboxes/{sandbox}/pause" && s.Name != "agentbox.pause"):
					t.Errorf("%+v", s)
				}
			}
			if through == "service" {
				if s := of(handed, "POST /v1/sandboxes/{sandbox}/pause"); s.Parent != caller ||
					of(handed, "agentbox.pause").Parent != s.ID {
					t.Errorf("%+v", s)
				}
			}
			for _, text := range []string{secret, "sleep", "echo"} {
				if c.Contains(text) {
					t.Errorf("%q is in a span", text)
				}
			}
		})
	}
}

// Actions that agentbox takes by itself, in processes that no caller waits for, begin traces of
// their own.
func TestTracesOfDeeds(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	c := tracestest.New(t)
	env := append(collectAt(c.URL), "TRACEPARENT=00-"+fmt.Sprintf("%032x", 7)+"-b7ad6b7169203331-01")
	ttl := 3 * time.Second * patience
	if r := b.try(env, "run", "-d", "--name", "c", "--network", "none", "--ttl", ttl.String(), "--stop-signal", "KILL",
		"--checkpoint-every", "1s", "busybox", "sleep", "1000"); r.code != 0 {
		t.Fatal(r)
	}
	id := b.inspect("c").ID
	// own finds a root span.
	own := func(name string) (found tracestest.Span) {
		b.eventually(name, func() bool {
			for _, s := range c.Spans() {
				if s.Name == name {
					found = s
					return true
				}
			}
			return false
		})
		if found.Parent != "" || found.Trace == fmt.Sprintf("%032x", 7) || found.Error != "" ||
			found.Attrs["agentbox.sandbox.id"] != id || found.Attrs["agentbox.sandbox.name"] != "c" {
			t.Errorf("%+v", found)
		}
		return found
	}
	if s := own("agentbox.checkpoint"); s.Attrs["agentbox.checkpoint.trigger"] != "interval" {
		t.Errorf("%+v", s)
	}
	if s := own("agentbox.stop"); s.Attrs["agentbox.by"] != "watch" ||
		s.Attrs["agentbox.why"] != fmt.Sprintf("ttl: its time of %v is over", ttl) {
		t.Errorf("%+v", s)
	}
}

// A collector that takes a connection and never answers, or is none at all, changes
// nothing about a verb; it is said once, and the end of a process waits a moment.
func TestTracesNowhere(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel accepts, and no process reads
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	hangs := collectAt("http://" + silent.Addr().String())
	b := memoryBox(t)
	b.start("c", "busybox", "sleep", "1000")
	const slack = 5 * time.Second // of a host that has more to do
	said := func(r result, code, lines int, within time.Duration, began time.Time) {
		t.Helper()
		if took := time.Since(began); r.code != code || strings.Count(r.err,
			"traces not sent") != lines || took > within+slack {
			t.Errorf("want exit %d within %v, not %v: %s", code, within, took, r)
		}
	}
	for _, c := range []struct {
		code int
		args []string
	}{
		{0, []string{"pause", "c"}}, {0, []string{"unpause", "c"}}, {3, []string{"pause", "none-such"}},
		{7, []string{"exec", "c", "sh", "-c", "exit 7"}},
	} {
		began := time.Now()
		said(b.try(hangs, c.args...), c.code, 1, traces.FlushTime, began)
	}
	began := time.Now()
	said(b.try(collectAt("http://127.0.0.1:1"), "exec", "c", "sh", "-c", "exit 7"), 7, 1, 0, began)
	began = time.Now()
	said(b.try(hangs, "version"), 0, 0, 0, began) // nothing was recorded
	if r := b.try([]string{"OTEL_EXPORTER_OTLP_ENDPOINT=127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"}, "exec",
		"c", "true"); r.code != 0 || strings.Count(r.err, "\n") != 1 || !strings.Contains(r.err, "traces disabled") ||
		!strings.Contains(r.err, "http/protobuf") {
		t.Error(r)
	}

	cmd, _ := b.serve(hangs...)
	began = time.Now()
	for range 10 {
		b.ok("pause", "c")
		b.ok("unpause", "c")
	}
	t.Logf("10 times: %v", time.Since(began))
	ending := time.Now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || time.Since(ending) > traces.FlushTime+slack {
		t.Errorf("serve ends after %v: %v", time.Since(ending), err)
	}
	log, err := os.ReadFile(filepath.Join(b.root, "serve.log"))
	if err != nil || strings.Count(string(log), "traces not sent") != 1 {
		t.Errorf("%v: %s", err, log)
	}
}
