package engine

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/eventlog"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestHitsAreNotedOnce: the kernel's counts become events once, even if the log has dropped
// them since, or the separate counts were not written.
func TestHitsAreNotedOnce(t *testing.T) {
	st, err := store.Open(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	e := &eventLog{core: &core{store: st, run: t.TempDir()}}
	spec, err := json.Marshal(runtime.Spec{ID: "0123456789ab"})
	if err != nil {
		t.Fatal(err)
	}
	sb := store.Sandbox{ID: "0123456789ab", Spec: spec}
	noted := func(oom int64, start time.Time) (counts []int64) {
		t.Helper()
		if err := e.noteHits(t.Context(), sb, runtime.Container{
			Started: start, Hits: runtime.LimitHits{OOMKills: oom},
		}); err != nil {
			t.Fatal(err)
		}
		r := eventlog.NewReader(e.dir(), sb.ID)
		defer r.Close()
		err := readEvents([]eventSource{{Reader: r, sandbox: sb.ID}}, runtime.EventOptions{},
			func(ev runtime.Event) error {
				counts = append(counts, ev.Count)
				return nil
			})
		if err != nil {
			t.Fatal(err)
		}
		return counts
	}
	equal := func(what string, got []int64, want ...int64) {
		t.Helper()
		g, _ := json.Marshal(got)
		w, _ := json.Marshal(want)
		if string(g) != string(w) {
			t.Errorf("%s: %s, want %s", what, g, w)
		}
	}
	start := time.Now()
	equal("at first", noted(2, start), 2)
	equal("again", noted(2, start), 2)
	if err := os.Remove(e.countsPath(sb.ID)); err != nil {
		t.Fatal(err)
	}
	equal("killed before the count was kept", noted(2, start), 2)
	if err := os.Remove(e.countsPath(sb.ID)); err != nil {
		t.Fatal(err)
	}
	equal("one more after that", noted(3, start), 2, 1)
	if err := eventlog.Remove(e.dir(), sb.ID); err != nil {
		t.Fatal(err)
	}
	equal("dropped by the log", noted(3, start))
	equal("one more after that", noted(4, start), 1)
	equal("of the next start", noted(1, start.Add(time.Second)), 1, 1)
	if err := e.drop(sb.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(e.dir()); !os.IsNotExist(err) {
		t.Errorf("left: %v", err)
	}
}

// TestEventsOfAConfinedWriter: the writer of denied events can report nothing else, and no
// control character of its events reaches a terminal.
func TestEventsOfAConfinedWriter(t *testing.T) {
	source := eventSource{sandbox: "0123456789ab", only: runtime.EventDenied}
	line, err := json.Marshal(runtime.Event{
		Time: time.Unix(1, 0).UTC(), Sandbox: "another", Type: runtime.EventExpired, Used: 7,
		Name: "a\x1b]0;b\u009b\u202e", Reason: "\x1b[2J",
	})
	if err != nil {
		t.Fatal(err)
	}
	got, err := source.event(line)
	if want := (runtime.Event{
		Time: time.Unix(1, 0).UTC(), Sandbox: "0123456789ab", Type: runtime.EventDenied,
		Name: "a?]0;b??", Reason: "?[2J",
	}); got != want || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := source.event([]byte(strings.Repeat("[", 100))); err == nil {
		t.Error("no event is one")
	}
}
