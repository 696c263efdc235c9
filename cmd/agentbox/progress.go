package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/agentbox/agentbox/runtime"
)

// A progress is one line on the caller's terminal that long work keeps up to
// date: what it does, how far it is, how fast.
type progress struct {
	mu    sync.Mutex
	w     io.Writer
	what  string
	width int
	begun time.Time // the phase, if there are such
	drawn time.Time
	shown bool
	ended bool

	step runtime.Step // the last, of a verb of several phases
	from time.Time    // when its line may appear
	wake *time.Timer  // draws what came too soon
}

const (
	progressPause = 100 * time.Millisecond // between two updates of the line
	progressAfter = time.Second            // without a line, of verbs that mostly take less
)

// watch returns what to hand to long work that counts bytes, nil when w is no
// terminal, and what takes the line away; both may be called at any time.
func watch(w io.Writer, what string) (runtime.Progress, func()) {
	if p := newProgress(w, what); p != nil {
		return p.update, p.end
	}
	return nil, func() {}
}

// watchSteps is watch for a verb of several phases.
func watchSteps(w io.Writer, what string) (runtime.Steps, func()) {
	if p := newProgress(w, what); p != nil {
		return p.at, p.end
	}
	return nil, func() {}
}

// newProgress is nil where w is no terminal.
func newProgress(w io.Writer, what string) *progress {
	f, ok := w.(*os.File)
	if !ok || !isTerminal(f) {
		return nil
	}
	now := time.Now()
	p := &progress{w: w, what: what, width: 80, begun: now, from: now.Add(progressAfter)}
	if cols, _, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 {
		p.width = cols
	}
	return p
}

func (p *progress) update(done, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if p.ended || now.Sub(p.drawn) < progressPause {
		return
	}
	p.draw(now, p.line(done, total, now.Sub(p.begun)))
}

func (p *progress) draw(now time.Time, line string) {
	p.drawn, p.shown = now, true
	// \r and "erase to the end of the line": no scrolling, no rest of a longer line.
	fmt.Fprintf(p.w, "\r%s\x1b[K", shorten(line, max(p.width-1, 10)))
}

// at takes a step. A phase may take long without another: none is left out.
func (p *progress) at(s runtime.Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if s.Phase != p.step.Phase {
		p.begun = now
	}
	p.step = s
	p.show(now)
}

// show draws the last step, now or as soon as it may be.
func (p *progress) show(now time.Time) {
	if p.ended {
		return
	}
	due := p.drawn.Add(progressPause)
	if p.from.After(due) {
		due = p.from
	}
	if wait := due.Sub(now); wait > 0 {
		if p.wake == nil {
			p.wake = time.AfterFunc(wait, func() {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.wake = nil
				p.show(time.Now())
			})
		}
		return
	}
	p.draw(now, p.stepLine(p.step, now.Sub(p.begun)))
}

// phaseTexts are what the line says.
var phaseTexts = map[runtime.Phase]string{
	runtime.PhaseFiles: "reading files", runtime.PhaseProcesses: "saving the processes",
	runtime.PhaseStoring: "storing",
	runtime.PhaseSyncing: "waiting for the disk", runtime.PhaseImages: "laying out processes",
	runtime.PhaseLooking: "comparing files",
	runtime.PhaseStaging: "laying out files", runtime.PhaseEffects: "running undo commands",
	runtime.PhaseStopping: "stopping",
	runtime.PhasePutting:  "exchanging files", runtime.PhaseProving: "proving files", runtime.PhaseStarting: "starting",
	runtime.PhaseHostFiles: "putting host files back", runtime.PhaseForking: "making forks",
}

// keepTexts are those of the checkpoint that a restore takes of what it replaces.
var keepTexts = map[runtime.Phase]string{
	runtime.PhaseFiles: "keeping the present files", runtime.PhaseProcesses: "keeping the present processes",
	runtime.PhaseStoring: "storing the present state",
}

func (p *progress) stepLine(s runtime.Step, took time.Duration) string {
	text := phaseTexts[s.Phase]
	if keep := keepTexts[s.Phase]; keep != "" && (p.what == "restore" || p.what == "undo" || p.what == "redo") {
		text = keep
	}
	if text == "" { // of a later version of the service
		text = oneLine(string(s.Phase))
	}
	if s.Done == 0 && s.Total == 0 {
		return p.what + ": " + text
	}
	return p.what + ": " + text + strings.TrimPrefix(p.line(s.Done, s.Total, took), p.what)
}

func (p *progress) line(done, total int64, took time.Duration) string {
	parts := []string{sizeText(done)}
	if total > 0 {
		parts[0] = fmt.Sprintf("%3d%%  %s of %s", min(100, done*100/max(total, 1)), sizeText(done), sizeText(total))
	}
	if secs := took.Seconds(); secs >= 0.5 && done > 0 {
		parts = append(parts, sizeText(int64(float64(done)/secs))+"/s")
	}
	return p.what + ": " + strings.Join(parts, ", ")
}

func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown && !p.ended {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
	if p.ended = true; p.wake != nil {
		p.wake.Stop()
	}
}
