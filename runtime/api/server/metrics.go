package server

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// Metrics are the counters of /metrics, in the text format of Prometheus. The format is
// written here: the client library of Prometheus would cost each command 0.8 ms at its start.
// The zero value works.
type Metrics struct {
	mu     sync.Mutex
	verbs  map[verbOutcome]int64
	took   map[string]*histogram // by verb
	frozen histogram
	down   histogram
	stored int64
	leaks  map[string]int64

	// The turns of heavy verbs.
	atWork, inQueue int
	turnedAway      int64
	wait            histogram
}

type verbOutcome struct{ verb, outcome string }

// bounds of the histograms' buckets, in seconds.
var bounds = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300}

type histogram struct {
	buckets [17]int64 // one more than bounds
	sum     float64
	count   int64
}

func (h *histogram) add(d time.Duration) {
	s := d.Seconds()
	i, _ := slices.BinarySearch(bounds, s)
	h.buckets[i]++
	h.sum += s
	h.count++
}

// Leak counts what was found to differ from the records: a finding of a Reconcile.
func (m *Metrics) Leak(kind string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.leaks == nil {
		m.leaks = map[string]int64{}
	}
	m.leaks[kind]++
}

func (m *Metrics) request(verb, outcome string, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.verbs == nil {
		m.verbs, m.took = map[verbOutcome]int64{}, map[string]*histogram{}
	}
	m.verbs[verbOutcome{verb, outcome}]++
	if m.took[verb] == nil {
		m.took[verb] = &histogram{}
	}
	m.took[verb].add(took)
}

func (m *Metrics) checkpointed(c runtime.Checkpoint) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen.add(c.Frozen)
	m.stored += c.Added
}

func (m *Metrics) restored(r runtime.Restored) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.down.add(r.Down)
}

// taken counts a turn, and how long it was waited for.
func (m *Metrics) taken(waited time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.atWork++
	m.wait.add(waited)
}

func (m *Metrics) given() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.atWork--
}

func (m *Metrics) queued(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.inQueue += n
}

func (m *Metrics) refused() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.turnedAway++
}

// escaped is a label's value.
var escaped = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

// exposition writes the text format.
type exposition struct{ *bufio.Writer }

func (e exposition) family(name, kind, help string) {
	fmt.Fprintf(e, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

// sample writes one; labels are names and values in turn.
func (e exposition) sample(name string, v float64, labels ...string) {
	e.WriteString(name) // Flush returns the writer's error
	for i := 0; i < len(labels); i += 2 {
		fmt.Fprintf(e, `%c%s="%s"`, "{,"[min(i, 1)], labels[i], escaped.Replace(labels[i+1]))
	}
	if len(labels) > 0 {
		e.WriteByte('}')
	}
	fmt.Fprintf(e, " %s\n", strconv.FormatFloat(v, 'g', -1, 64))
}

func (e exposition) histogram(name string, h *histogram, labels ...string) {
	n := int64(0)
	for i, count := range h.buckets {
		le := "+Inf"
		if i < len(bounds) {
			le = strconv.FormatFloat(bounds[i], 'g', -1, 64)
		}
		n += count
		e.sample(name+"_bucket", float64(n), append(slices.Clone(labels), "le", le)...)
	}
	e.sample(name+"_sum", h.sum, labels...)
	e.sample(name+"_count", float64(h.count), labels...)
}

// write writes all; what is counted now, sandboxes and checkpoints, are given.
func (m *Metrics) write(
	w io.Writer, info wire.Info, sandboxes map[runtime.Status]int, checkpoints int, counted bool,
) error {
	e := exposition{bufio.NewWriter(w)}
	m.mu.Lock()
	defer m.mu.Unlock()
	e.family("agentbox_build_info", "gauge", "Which service this is.")
	e.sample("agentbox_build_info", 1, "version", info.Version, "backend", info.Backend)
	e.family("agentbox_requests_total", "counter",
		"Requests that were answered, by the verb's method and path and by ok or the code of the error.")
	for _, k := range slices.SortedFunc(maps.Keys(m.verbs), func(a, b verbOutcome) int {
		return cmp.Or(strings.Compare(a.verb, b.verb), strings.Compare(a.outcome, b.outcome))
	}) {
		e.sample("agentbox_requests_total", float64(m.verbs[k]), "verb", k.verb, "outcome", k.outcome)
	}
	e.family("agentbox_request_seconds", "histogram", "How long requests took, sessions and streams to their end.")
	for _, verb := range slices.Sorted(maps.Keys(m.took)) {
		e.histogram("agentbox_request_seconds", m.took[verb], "verb", verb)
	}
	e.family("agentbox_checkpoint_frozen_seconds", "histogram",
		"How long sandboxes stood still for checkpoints that callers asked for.")
	e.histogram("agentbox_checkpoint_frozen_seconds", &m.frozen)
	e.family("agentbox_checkpoint_stored_bytes_total", "counter", "What these checkpoints brought to the store.")
	e.sample("agentbox_checkpoint_stored_bytes_total", float64(m.stored))
	e.family("agentbox_restore_down_seconds", "histogram", "From the old processes' end to the new ones' first step.")
	e.histogram("agentbox_restore_down_seconds", &m.down)
	e.family("agentbox_heavy_verbs", "gauge", "Heavy verbs at work, and those that wait for their turn.")
	e.sample("agentbox_heavy_verbs", float64(m.atWork), "state", "at work")
	e.sample("agentbox_heavy_verbs", float64(m.inQueue), "state", "waiting")
	e.family("agentbox_heavy_verbs_refused_total", "counter", "Heavy verbs that were refused, as too many waited.")
	e.sample("agentbox_heavy_verbs_refused_total", float64(m.turnedAway))
	e.family("agentbox_turn_wait_seconds", "histogram", "How long heavy verbs waited for their turn.")
	e.histogram("agentbox_turn_wait_seconds", &m.wait)
	e.family("agentbox_panics_total", "counter",
		"Defects of agentbox that have ended a piece of work of this process, with their stack in its log.")
	e.sample("agentbox_panics_total", float64(guard.Count()))
	e.family("agentbox_leaks_found_total", "counter",
		"What the service found, at its comparisons, to differ from its records, by its kind.")
	for _, kind := range slices.Sorted(maps.Keys(m.leaks)) {
		e.sample("agentbox_leaks_found_total", float64(m.leaks[kind]), "kind", kind)
	}
	e.family("agentbox_up", "gauge", "Whether sandboxes and checkpoints could be counted.")
	e.sample("agentbox_up", map[bool]float64{true: 1}[counted])
	if counted {
		e.family("agentbox_sandboxes", "gauge", "Sandboxes by status.")
		for _, s := range []runtime.Status{
			runtime.Created, runtime.Running, runtime.Paused, runtime.Exited, runtime.Unknown,
		} {
			e.sample("agentbox_sandboxes", float64(sandboxes[s]), "status", cmp.Or(string(s), "unknown"))
		}
		e.family("agentbox_checkpoints", "gauge", "Ready checkpoints, those of restores for their undo included.")
		e.sample("agentbox_checkpoints", float64(checkpoints))
	}
	e.family("process_resident_memory_bytes", "gauge", "Memory of the service.")
	e.sample("process_resident_memory_bytes", float64(resident()))
	e.family("go_goroutines", "gauge", "Goroutines of the service.")
	e.sample("go_goroutines", float64(goruntime.NumGoroutine()))
	return e.Flush()
}

// resident is this process's memory; 0: the kernel does not say.
func resident() int64 {
	data, err := os.ReadFile("/proc/self/statm")
	var size, rss int64
	if err == nil {
		_, err = fmt.Sscan(string(data), &size, &rss)
	}
	if err != nil {
		return 0
	}
	return rss * int64(os.Getpagesize())
}

const metricsType = "text/plain; version=0.0.4; charset=utf-8"

// scrapeTime bounds how long a scrape waits for what it counts.
const scrapeTime = 5 * time.Second

func (h *Handler) metricsRoute() route {
	return route{method: http.MethodGet, path: "/metrics",
		summary: "Tell figures of the service, as Prometheus reads them", stream: metricsType,
		serve: func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), scrapeTime)
			defer cancel()
			list, err := h.svc.Sandboxes(ctx)
			var cks []runtime.Checkpoint
			if err == nil {
				cks, err = h.svc.Checkpoints(ctx, runtime.CheckpointFilter{All: true})
			}
			if err != nil {
				h.log.Warn("metrics not collected", "err", err)
			}
			states, ready := map[runtime.Status]int{}, 0
			for _, sb := range list {
				states[sb.Status]++
			}
			for _, c := range cks {
				if c.Status == runtime.CheckpointReady {
					ready++
				}
			}
			w.Header().Set("Content-Type", metricsType)
			_ = h.opts.Metrics.write(h.writer(w), h.opts.Info, states, ready, err == nil) // the caller may be gone
		}}
}
