package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/agentbox/agentbox/images/image"
)

// layerBars are lines on the caller's terminal, one for each layer that
// travels and one for all of them.
type layerBars struct {
	mu     sync.Mutex
	w      io.Writer
	width  int
	begun  time.Time
	drawn  time.Time
	lines  int // on the screen
	layers []image.Progress
	ended  bool
}

const mostBars = 8

// watchLayers returns what shows how far a pull or a push is, nil when w is no
// terminal, and what takes the lines away; that may be called at any time.
func watchLayers(w io.Writer) (*layerBars, func()) {
	f, ok := w.(*os.File)
	if !ok || !isTerminal(f) {
		return nil, func() {}
	}
	b := &layerBars{w: w, width: 80, begun: time.Now()}
	if cols, _, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 {
		b.width = cols
	}
	return b, b.end
}

// pull takes the progress of a pull.
func (b *layerBars) pull(p image.Progress) {
	if p.Layer != "" {
		b.update(p)
	}
}

// push takes the progress of a push.
func (b *layerBars) push(p image.SourceProgress) {
	stage := image.StagePulling
	switch {
	case p.There:
		stage = image.StagePresent
	case p.Total > 0 && p.Done >= p.Total:
		stage = image.StageDone
	}
	b.update(image.Progress{Layer: p.Digest, Stage: stage, Done: p.Done, Total: p.Total})
}

func (b *layerBars) update(p image.Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := slices.IndexFunc(b.layers, func(have image.Progress) bool { return have.Layer == p.Layer }); i < 0 {
		b.layers = append(b.layers, p)
	} else {
		b.layers[i] = p
	}
	now := time.Now()
	if b.ended || now.Sub(b.drawn) < progressPause {
		return
	}
	b.drawn = now
	b.draw(now)
}

func (b *layerBars) draw(now time.Time) {
	var out strings.Builder
	b.rewind(&out)
	lines := b.text(now.Sub(b.begun))
	for _, line := range lines {
		// "Erase to the end of the line": no rest of a longer one.
		fmt.Fprintf(&out, "%s\x1b[K\n", shorten(line, max(b.width-1, 10)))
	}
	b.lines = len(lines)
	_, _ = io.WriteString(b.w, out.String())
}

// rewind goes back to where the first line begins, and clears what is below.
func (b *layerBars) rewind(out *strings.Builder) {
	if b.lines > 0 {
		fmt.Fprintf(out, "\x1b[%dA\x1b[J", b.lines)
	}
}

func (b *layerBars) text(took time.Duration) []string {
	var lines []string
	var done, total int64
	finished, more := 0, 0
	for _, l := range b.layers {
		total += l.Total
		switch l.Stage {
		case image.StageDone, image.StagePresent:
			finished++
			done += l.Total
		case image.StagePulling:
			done += l.Done
			if len(lines) == mostBars {
				more++
				continue
			}
			lines = append(lines, fmt.Sprintf("%s %s %s", shortDigest(l.Layer), bar(l.Done, l.Total), sizeText(l.Done)))
		}
	}
	if more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	sum := fmt.Sprintf("%d of %s, %s", finished, countText(int64(len(b.layers)), "layer"), sizeText(done))
	if total > 0 {
		sum += " of " + sizeText(total)
	}
	if secs := took.Seconds(); secs >= 0.5 && done > 0 {
		sum += ", " + sizeText(int64(float64(done)/secs)) + "/s"
	}
	return append(lines, sum)
}

// bar is [=====>    ] as wide as 30 characters.
func bar(done, total int64) string {
	const width = 30
	if total <= 0 {
		return "[" + strings.Repeat(" ", width) + "]"
	}
	n := int(min(done, total) * width / total)
	s := strings.Repeat("=", n)
	if n < width {
		s += ">" + strings.Repeat(" ", width-n-1)
	}
	return "[" + s + "]"
}

func (b *layerBars) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return
	}
	b.ended = true
	var out strings.Builder
	b.rewind(&out)
	_, _ = io.WriteString(b.w, out.String())
}
