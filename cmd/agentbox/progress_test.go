package main

import (
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func TestProgressLine(t *testing.T) {
	p := &progress{what: "push"}
	for _, c := range []struct {
		done, total int64
		took        time.Duration
		want        string
	}{
		{0, 0, 0, "push: 0B"},
		{2_000_000, 0, 2 * time.Second, "push: 2MB, 1MB/s"},
		{1_500_000, 3_000_000, time.Second, "push:  50%  1.5MB of 3MB, 1.5MB/s"},
		{4, 3, 0, "push: 100%  4B of 3B"},
	} {
		if got := p.line(c.done, c.total, c.took); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	if update, end := watch(&strings.Builder{}, "x"); update != nil {
		t.Error("progress without a terminal")
	} else {
		end()
	}
}

// A long verb shows its progress, on a terminal only, and leaves no trace of it.
func TestSteps(t *testing.T) {
	for _, c := range []struct{ args, line string }{
		{"checkpoint --name slow run", "\rcheckpoint: saving the processes\x1b[K"},
		{"restore run slow", "\rrestore: keeping the present processes\x1b[K"},
		{"fork run@slow", "\rfork: saving the processes\x1b[K"},
	} {
		p := onPty(t, strings.Fields(c.args)...)
		p.expect(c.line)
		p.write("\x03")
		p.expect("\r\x1b[K")
		p.expect("stopped by signal")
		p.end(130)
	}
	for _, args := range []string{"checkpoint --name quick run", "restore run before", "fork run@before"} {
		p := onPty(t, strings.Fields(args)...)
		p.end(0)
		if seen := p.seen.String(); strings.Contains(seen, "\x1b[K") || strings.Contains(seen, "storing") {
			t.Errorf("%s: %q", args, seen)
		}
	}
	if fn, end := watchSteps(&strings.Builder{}, "x"); fn != nil {
		t.Error("steps without a terminal")
	} else {
		end()
	}
}

// lines is a terminal.
type lines chan string

func (l lines) Write(p []byte) (int, error) { l <- string(p); return len(p), nil }

func TestStepLines(t *testing.T) {
	shown := make(lines, 100)
	p := &progress{w: shown, what: "restore", width: 80, begun: time.Now()}
	p.at(runtime.Step{Phase: runtime.PhaseFiles})
	p.at(runtime.Step{Phase: runtime.PhaseStaging, Done: 1, Total: 4})
	p.at(runtime.Step{Phase: runtime.PhaseStarting}) // comes too soon, and is the last for long
	for _, want := range []string{"\rrestore: keeping the present files\x1b[K", "\rrestore: starting\x1b[K"} {
		if got := <-shown; got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	p.at(runtime.Step{Phase: runtime.PhaseProving})
	p.end()
	p.at(runtime.Step{Phase: runtime.PhaseSyncing})
	p.show(time.Now().Add(time.Hour)) // as the timer would
	if got := <-shown; got != "\r\x1b[K" || len(shown) > 0 {
		t.Errorf("%q, and %d more", got, len(shown))
	}

	early := &progress{w: shown, what: "checkpoint", from: time.Now().Add(time.Hour)}
	early.at(runtime.Step{Phase: runtime.PhaseFiles})
	early.end()
	if len(shown) > 0 {
		t.Errorf("%q", <-shown)
	}
	for _, c := range []struct {
		what string
		step runtime.Step
		took time.Duration
		want string
	}{
		{
			"checkpoint", runtime.Step{Phase: runtime.PhaseFiles, Done: 2_000_000}, 2 * time.Second,
			"checkpoint: reading files: 2MB, 1MB/s",
		},
		{"checkpoint", runtime.Step{Phase: runtime.PhaseStoring, Total: 4}, 0, "checkpoint: storing:   0%  0B of 4B"},
		{"restore", runtime.Step{Phase: runtime.PhaseStoring}, 0, "restore: storing the present state"},
		{
			"fork", runtime.Step{Phase: runtime.PhaseForking, Done: 3_000_000, Total: 3_000_000}, time.Second,
			"fork: making forks: 100%  3MB of 3MB, 3MB/s",
		},
		{"fork", runtime.Step{Phase: "new\x1b[2J"}, 0, "fork: new\uFFFD[2J"},
	} {
		if got := (&progress{what: c.what}).stepLine(c.step, c.took); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	for _, phase := range runtime.Phases {
		if phaseTexts[phase] == "" {
			t.Errorf("no words for %q", phase)
		}
	}
}
