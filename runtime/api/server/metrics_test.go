package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
	"github.com/agentbox/agentbox/runtime/doctor"
)

func fetched(t *testing.T, c *caller, path string) (*http.Response, []byte) {
	t.Helper()
	resp, err := c.http.Get("http://agentbox" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, data
}

// Prometheus's own parser reads /metrics, and the values are what was done.
func TestMetrics(t *testing.T) {
	var fails error
	m := &Metrics{}
	svc := &service{
		sandboxes: func(context.Context) ([]runtime.Sandbox, error) {
			return []runtime.Sandbox{
				{Status: runtime.Running}, {Status: runtime.Running}, {Status: runtime.Exited},
			}, fails
		},
		checkpoint: func(context.Context, string, runtime.CheckpointOptions) (runtime.Checkpoint, error) {
			return runtime.Checkpoint{Frozen: 20 * time.Millisecond, Added: 1000}, fails
		},
		checkpoints: func(runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
			return []runtime.Checkpoint{{Status: runtime.CheckpointReady}, {Status: runtime.CheckpointFailed}}, nil
		},
	}
	c := client(t, serving(t, svc, Options{Metrics: m, Info: wire.Info{Version: `v"1\` + "\n"}}))
	for _, fails = range []error{nil, nil, fault.ErrBusy} {
		if _, err := c.Checkpoint(t.Context(), "c", runtime.CheckpointOptions{}); !errors.Is(err, fails) {
			t.Fatal(err)
		}
	}
	fails = nil
	fetched(t, c, "/no-such-thing/"+strings.Repeat("x", 100))
	m.Leak("mount")
	resp, data := fetched(t, c, "/metrics")
	if got := resp.Header.Get("Content-Type"); got != metricsType {
		t.Error(got)
	}
	var parser expfmt.TextParser
	families, err := parser.TextToMetricFamilies(bytes.NewReader(data))
	if err != nil {
		t.Fatalf("%v:\n%s", err, data)
	}
	sample := func(name string, labels ...string) *dto.Metric {
		t.Helper()
		for _, one := range families[name].GetMetric() {
			have := map[string]string{}
			for _, l := range one.Label {
				have[l.GetName()] = l.GetValue()
			}
			ok := true
			for i := 0; i < len(labels); i += 2 {
				ok = ok && have[labels[i]] == labels[i+1]
			}
			if ok {
				return one
			}
		}
		t.Fatalf("no %s %v in:\n%s", name, labels, data)
		return nil
	}
	const verb = "sandboxes checkpoints"
	for _, w := range []struct {
		got, want float64
	}{
		{sample("agentbox_requests_total", "verb", verb, "outcome", "ok").Counter.GetValue(), 2},
		{sample("agentbox_requests_total", "verb", verb, "outcome", "busy").Counter.GetValue(), 1},
		{sample("agentbox_requests_total", "verb", "other", "outcome", "not_found").Counter.GetValue(), 1},
		{float64(sample("agentbox_request_seconds", "verb", verb).Histogram.GetSampleCount()), 3},
		{float64(sample("agentbox_checkpoint_frozen_seconds").Histogram.GetSampleCount()), 2},
		{sample("agentbox_checkpoint_frozen_seconds").Histogram.GetSampleSum(), 0.04},
		{float64(sample("agentbox_checkpoint_frozen_seconds").Histogram.Bucket[3].GetCumulativeCount()), 0}, // 0.01
		{float64(sample("agentbox_checkpoint_frozen_seconds").Histogram.Bucket[4].GetCumulativeCount()), 2}, // 0.025
		{sample("agentbox_checkpoint_stored_bytes_total").Counter.GetValue(), 2000},
		{sample("agentbox_leaks_found_total", "kind", "mount").Counter.GetValue(), 1},
		{sample("agentbox_sandboxes", "status", "running").Gauge.GetValue(), 2},
		{sample("agentbox_sandboxes", "status", "paused").Gauge.GetValue(), 0},
		{sample("agentbox_checkpoints").Gauge.GetValue(), 1},
		{sample("agentbox_up").Gauge.GetValue(), 1},
		{sample("agentbox_build_info", "version", `v"1\`+"\n").Gauge.GetValue(), 1},
	} {
		if w.got != w.want {
			t.Errorf("%v, want %v, in:\n%s", w.got, w.want, data)
		}
	}
	if sample("process_resident_memory_bytes").Gauge.GetValue() < 1<<20 {
		t.Errorf("%s", data)
	}
	// An engine that does not answer is no failure of the rest.
	fails = fault.ErrCorrupt
	if _, data := fetched(t, c, "/metrics"); !bytes.Contains(data, []byte("\nagentbox_up 0\n")) ||
		bytes.Contains(data, []byte("agentbox_sandboxes")) {
		t.Errorf("%s", data)
	}
}

// Alive is one thing, able to checkpoint another.
func TestHealth(t *testing.T) {
	able := false
	c := client(t, serving(t, &service{}, Options{Info: wire.Info{Version: "v1"},
		Examine: func(context.Context) doctor.Report {
			return doctor.Report{OK: able, Checks: []doctor.Check{{
				Name: "criu", Status: doctor.Fail, Detail: "there is none", Remedy: "Install it.",
			}}}
		}}))
	resp, data := fetched(t, c, "/readyz")
	var r doctor.Report
	if err := json.Unmarshal(data, &r); err != nil || resp.StatusCode != http.StatusServiceUnavailable || r.OK ||
		len(r.Checks) != 1 || r.Checks[0].Detail != "there is none" {
		t.Errorf("%s %s: %v", resp.Status, data, err)
	}
	if h, err := c.Health(t.Context()); err != nil || h.Status != "ok" || h.Version != "v1" || h.Started.IsZero() {
		t.Errorf("%+v: %v", h, err)
	}
}

// A host that lacks nothing is ready.
func TestAble(t *testing.T) {
	c := client(t, serving(t, &service{}, Options{Examine: func(context.Context) doctor.Report {
		return doctor.Report{OK: true, Checks: []doctor.Check{}}
	}}))
	if resp, data := fetched(t, c, "/readyz"); resp.StatusCode != http.StatusOK {
		t.Errorf("%s %s", resp.Status, data)
	}
}
