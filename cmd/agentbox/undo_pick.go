package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// Escape sequences of the terminal.
const (
	screenOn  = "\x1b[?1049h\x1b[?25l\x1b[?7l" // a screen of its own, no cursor, no wrapping
	screenOff = "\x1b[?7h\x1b[?25h\x1b[?1049l"
	reversed  = "\x1b[7m"
)

// Bounds of what the picker shows of a diff.
const (
	pickedChanges = 200
	pickedLines   = 5000
)

// A stepPicker has the user choose one of the steps of undo and redo. It shows what a move to the step
// would change.
type stepPicker struct {
	svc   runtime.Service
	list  runtime.UndoList
	now   time.Time
	color bool

	at, top int // the step that is chosen; the first one on the screen
	scroll  int // of the diff
	diffs   map[int][]string
	size    runtime.Size
	asks    bool   // the question whether to go there is open
	note    string // in the place of the keys
	pending []byte // the beginning of an incomplete key sequence
}

// picksStep reports whether a list of steps is shown for a choice.
func (a *app) picksStep(cmd *cobra.Command) bool {
	if !isTerminal(a.stdout) || !isTerminal(a.stdin) || os.Getenv("TERM") == "dumb" || cmd.Flags().Changed("format") {
		return false
	}
	size, ok := terminalSize(a.stdout)
	return ok && size.Width >= 40 && size.Height >= 10
}

// runUndoPick goes to the step that the user chooses.
func (a *app) runUndoPick(ctx context.Context, opts runtime.UndoOptions, sandbox string, svc runtime.Service) error {
	list, err := svc.UndoList(ctx, sandbox)
	if err != nil {
		return err
	}
	if len(list.Steps) == 0 {
		return printUndoList(a.stdout, list, a.now())
	}
	chosen, err := a.pickStep(ctx, svc, list)
	if err != nil || chosen == nil {
		return err
	}
	// There may be new steps since.
	if list, err = svc.UndoList(ctx, sandbox); err != nil {
		return err
	}
	at := slices.IndexFunc(list.Steps, func(s runtime.UndoStep) bool { return s.ID == chosen.ID })
	if at < 0 || list.Steps[at].Back == 0 {
		return &runtime.Error{Op: "undo", ID: sandbox, Err: fmt.Errorf("%w: %s is no longer a step",
			runtime.ErrState, shortID(chosen.ID)), Hint: "Choose again: agentbox undo --list " + sandbox}
	}
	opts.Steps, opts.Redo = list.Steps[at].Back, false
	if opts.Steps < 0 {
		opts.Steps, opts.Redo = -opts.Steps, true
	}
	return runUndo(ctx, opts, "name", sandbox, svc, a.stdout, a.stderr)
}

// pickStep lets the user choose a step on a terminal; nil: the user chose none. It always leaves the
// terminal as it was.
func (a *app) pickStep(ctx context.Context, svc runtime.Service, list runtime.UndoList) (*runtime.UndoStep, error) {
	p := &stepPicker{
		svc: svc, list: list, now: a.now(), diffs: map[int][]string{}, color: os.Getenv("NO_COLOR") == "",
		size: runtime.Size{Width: 80, Height: 24},
	}
	for p.at < len(list.Steps)-1 && list.Steps[p.at].Back < 1 {
		p.at++ // where undo leads
	}
	state, err := term.MakeRaw(int(a.stdin.Fd()))
	if err != nil {
		return nil, err
	}
	restore := sync.OnceFunc(func() {
		_, _ = io.WriteString(a.stdout, screenOff) // the terminal may be gone
		_ = term.Restore(int(a.stdin.Fd()), state)
	})
	defer restore()
	sizes, stop := followSize(a.stdout, a.stdin)
	defer stop()
	if _, err := io.WriteString(a.stdout, screenOn); err != nil {
		return nil, err
	}
	return p.run(ctx, readKeys(a.stdin), sizes, a.stdout)
}

// readKeys reads what is typed, until the end of stdin. A read of a terminal cannot be called off.
func readKeys(stdin io.Reader) <-chan []byte {
	keys := make(chan []byte, 16)
	guard.Go(func() {
		defer close(keys)
		for {
			buf := make([]byte, 64)
			n, err := stdin.Read(buf)
			if n > 0 {
				keys <- buf[:n]
			}
			if err != nil {
				return
			}
		}
	})
	return keys
}

// loadedDiff is the diff of a step that has been read.
type loadedDiff struct {
	at    int
	lines []string
}

func (p *stepPicker) run(
	ctx context.Context, keys <-chan []byte, sizes <-chan runtime.Size, out io.Writer,
) (*runtime.UndoStep, error) {
	loaded := make(chan loadedDiff)
	ends := func() {}
	defer func() { ends() }()
	reads := -1
	for {
		if _, has := p.diffs[p.at]; !has && reads != p.at {
			ends()
			reads, ends = p.at, p.load(ctx, loaded)
		}
		if _, err := out.Write(p.draw()); err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case size := <-sizes:
			p.size = size
		case d := <-loaded:
			p.diffs[d.at] = d.lines
			reads = -1
		case typed, more := <-keys:
			if !more {
				return nil, nil
			}
			for _, key := range p.split(typed) {
				if leave, chosen := p.press(key); leave {
					return chosen, nil
				}
				if p.asks {
					break // an answer typed before the question does not count
				}
			}
		}
	}
}

// load reads the diff of the step that is chosen, until it is called off.
func (p *stepPicker) load(ctx context.Context, to chan<- loadedDiff) (callOff func()) {
	ctx, cancel := context.WithCancel(ctx)
	at := p.at
	guard.Go(func() {
		lines := p.read(ctx, p.list.Steps[at])
		select {
		case to <- loadedDiff{at, lines}:
		case <-ctx.Done():
		}
	})
	return cancel
}

// read returns what going to a step would change.
func (p *stepPicker) read(ctx context.Context, s runtime.UndoStep) []string {
	req := runtime.DiffRequest{Sandbox: p.list.Sandbox, From: s.ID, Patch: true, Limit: pickedChanges}
	if s.Back < 0 {
		req.From, req.To = "", s.ID
		for _, head := range p.list.Steps {
			if head.Back == 0 || p.list.Changed && head.Back == 1 {
				req.From = head.ID
			}
		}
	}
	d, err := p.svc.Diff(ctx, req)
	if err != nil {
		return strings.Split(printable(fmt.Sprintf("No diff: %v", err)), "\n")
	}
	var text strings.Builder
	w := bufio.NewWriter(&text)
	printPatches(w, diffOptions{}, d.Changes, p.color, true)
	_ = w.Flush() // to memory
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	if len(d.Changes) == 0 {
		lines = []string{"no file differs"}
	}
	if len(lines) > pickedLines || d.Truncated {
		lines = append(lines[:min(len(lines), pickedLines)], "... and more: see 'agentbox diff'")
	}
	return lines
}

// split makes keys of what was typed: a byte, or the sequence of a special key.
func (p *stepPicker) split(typed []byte) (keys []string) {
	p.pending = append(p.pending, typed...)
	for len(p.pending) > 0 {
		n := 1
		if p.pending[0] == 0x1b {
			if n = escapeLength(p.pending); n == 0 {
				return keys
			}
		}
		keys = append(keys, string(p.pending[:n]))
		p.pending = p.pending[n:]
	}
	return keys
}

// escapeLength returns how long the sequence at the beginning is; 0: the rest is to come.
func escapeLength(b []byte) int {
	switch {
	case len(b) == 1:
		return 0
	case b[1] == 'O' && len(b) < 3:
		return 0
	case b[1] == 'O':
		return 3
	case b[1] != '[':
		return 1 // the key itself
	}
	for i := 2; i < len(b); i++ {
		if b[i] >= 0x40 && b[i] <= 0x7e {
			return i + 1
		}
	}
	if len(b) > 16 {
		return len(b)
	}
	return 0
}

// press carries out a key. leave: the picker ends.
func (p *stepPicker) press(key string) (leave bool, chosen *runtime.UndoStep) {
	page := max(1, p.diffHeight()-1)
	if p.asks {
		p.asks, p.note = false, ""
		if key == "y" || key == "Y" {
			return true, &p.list.Steps[p.at]
		}
		if key != "\x03" && key != "q" {
			return false, nil
		}
		return true, nil
	}
	p.note = ""
	switch key {
	case "q", "\x03", "\x04":
		return true, nil
	case "k", "\x1b[A", "\x1bOA", "\x10":
		p.move(-1)
	case "j", "\x1b[B", "\x1bOB", "\x0e":
		p.move(1)
	case "g", "\x1b[H", "\x1bOH", "\x1b[1~":
		p.move(-len(p.list.Steps))
	case "G", "\x1b[F", "\x1bOF", "\x1b[4~":
		p.move(len(p.list.Steps))
	case " ", "\x1b[6~":
		p.scroll += page
	case "b", "\x1b[5~":
		p.scroll = max(0, p.scroll-page)
	case "\r", "\n":
		if s := p.list.Steps[p.at]; s.Back == 0 {
			p.note = "The sandbox is at this step."
		} else {
			p.asks = true
		}
	}
	return false, nil
}

func (p *stepPicker) move(by int) {
	at := min(max(p.at+by, 0), len(p.list.Steps)-1)
	if at != p.at {
		p.at, p.scroll = at, 0
	}
}

// wide reports whether the diff is beside the list; else it is below.
func (p *stepPicker) wide() bool { return p.size.Width >= 110 }

const pickedListWidth = 52

func (p *stepPicker) listHeight() int {
	h := int(p.size.Height) - 1
	if !p.wide() {
		h = min(len(p.list.Steps), max(3, (h-1)/3))
	}
	return max(1, h)
}

func (p *stepPicker) diffHeight() int {
	h := int(p.size.Height) - 2 // the title, and the keys
	if !p.wide() {
		h -= p.listHeight()
	}
	return max(1, h)
}

// draw draws the screen, each line at its place.
func (p *stepPicker) draw() []byte {
	var b strings.Builder
	b.WriteString("\x1b[H\x1b[2J")
	put := func(row, column int, text string) { fmt.Fprintf(&b, "\x1b[%d;%dH%s%s", row, column, text, colorOff) }
	n := p.listHeight()
	p.top = min(max(p.top, p.at-n+1), p.at)
	listWidth := int(p.size.Width)
	if p.wide() {
		listWidth = pickedListWidth
	}
	for i := 0; i < n && p.top+i < len(p.list.Steps); i++ {
		text := p.row(p.list.Steps[p.top+i], listWidth)
		if p.top+i == p.at {
			text = reversed + text
		}
		put(i+1, 1, text)
	}
	row, column := n+1, 1
	if p.wide() {
		row, column = 1, pickedListWidth+3
		for i := range n {
			put(i+1, pickedListWidth+1, "│")
		}
	}
	put(row, column, p.paint(colorHeader, p.title()))
	lines, has := p.diffs[p.at]
	if !has {
		lines = []string{"reading ..."}
	}
	height := p.diffHeight()
	p.scroll = max(0, min(p.scroll, len(lines)-height))
	for i := 0; i < height && p.scroll+i < len(lines); i++ {
		put(row+1+i, column, lines[p.scroll+i])
	}
	status := "up/down choose  enter goes there  space/b scroll  q leaves"
	switch s := p.list.Steps[p.at]; {
	case p.asks && s.Back < 0:
		status = fmt.Sprintf("Redo %s in %s? [y/N]", countText(int64(-s.Back), "step"), p.list.SandboxName)
	case p.asks:
		status = fmt.Sprintf("Undo %s in %s? [y/N]", countText(int64(s.Back), "step"), p.list.SandboxName)
	case p.note != "":
		status = p.note
	}
	put(int(p.size.Height), 1, reversed+printable(clipText(status, int(p.size.Width))))
	return []byte(b.String())
}

func (p *stepPicker) paint(color, s string) string {
	if p.color {
		return color + s
	}
	return s
}

func (p *stepPicker) title() string {
	switch s := p.list.Steps[p.at]; {
	case s.Back < 0:
		return "What redo to here brings:"
	case s.Back == 0:
		return "What has changed since:"
	}
	return "What has changed since, and undo takes back:"
}

// row is a step in one line.
func (p *stepPicker) row(s runtime.UndoStep, width int) string {
	step := strconv.Itoa(s.Back)
	switch {
	case s.Back == 0:
		step = "now"
	case s.Back < 0:
		step = "redo " + strconv.Itoa(-s.Back)
	}
	text := fmt.Sprintf(" %-7s ", step)
	tail := fmt.Sprintf(" %-12s %4s ", changesText(s.Changes), shortAge(p.now.Sub(s.Created)))
	room := max(8, width-len(text)-len(tail))
	what := clipText(strings.ReplaceAll(printable(stepText(s.Checkpoint)), "\n", " "), room)
	return text + what + strings.Repeat(" ", max(0, room-len([]rune(what)))) + tail
}
