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
	begun time.Time
	drawn time.Time
	shown bool
	ended bool
}

const progressPause = 100 * time.Millisecond // between two updates of the line

// watch returns what to hand to long work that counts bytes, nil when w is no
// terminal, and what takes the line away; both may be called at any time.
func watch(w io.Writer, what string) (runtime.Progress, func()) {
	f, ok := w.(*os.File)
	if !ok || !isTerminal(f) {
		return nil, func() {}
	}
	p := &progress{w: w, what: what, width: 80, begun: time.Now()}
	if cols, _, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 {
		p.width = cols
	}
	return p.update, p.end
}

func (p *progress) update(done, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if p.ended || now.Sub(p.drawn) < progressPause {
		return
	}
	p.drawn, p.shown = now, true
	// \r and "erase to the end of the line": no scrolling, no rest of a longer line.
	fmt.Fprintf(p.w, "\r%s\x1b[K", shorten(p.line(done, total, now.Sub(p.begun)), max(p.width-1, 10)))
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
	p.ended = true
}
