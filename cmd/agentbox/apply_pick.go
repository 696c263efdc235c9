package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// errNothingPicked ends an apply from which nothing was chosen.
var errNothingPicked = errors.New("nothing was applied")

// A picker asks which changes to apply.
type picker struct {
	ctx   context.Context
	plan  runtime.Applied
	items []applyItem
	lines *answers
	out   io.Writer
	color bool
}

// pick asks which changes of a plan to apply. It names those that cannot come, and leaves them out.
func (o applyOptions) pick(
	ctx context.Context, plan runtime.Applied, stdin io.Reader, out io.Writer,
) ([]runtime.ApplyPick, error) {
	dry := o
	dry.DryRun = true // the output says what would be needed
	warnApply(dry, plan, out)
	p := &picker{
		ctx: ctx, plan: plan, lines: readAnswers(stdin), out: out,
		color: isTerminalWriter(out) && os.Getenv("NO_COLOR") == "",
	}
	defer close(p.lines.more)
	p.items = slices.DeleteFunc(applyItems(plan), func(it applyItem) bool {
		return slices.ContainsFunc(plan.Refused, func(r runtime.Refusal) bool {
			name := pathOf(r.Path, r.PathB64)
			return slices.ContainsFunc(it.picks(), func(p runtime.ApplyPick) bool { return pathOf(p.Path, p.PathB64) == name })
		})
	})
	if len(p.items) == 0 {
		return nil, fmt.Errorf("%w: nothing can come to %s", errNothingPicked, originals(plan))
	}
	choose := p.byHunk
	if o.Interactive {
		choose = p.byNumber
	}
	list, err := choose()
	if err == nil && len(list) == 0 {
		err = errNothingPicked
	}
	return list, err
}

// answers are lines of stdin, read while nothing else waits for them.
type answers struct {
	lines chan string
	more  chan struct{}
}

func readAnswers(stdin io.Reader) *answers {
	a := &answers{lines: make(chan string, 1), more: make(chan struct{})}
	guard.Go(func() {
		defer close(a.lines)
		r := bufio.NewReader(stdin)
		for range a.more {
			s, err := r.ReadString('\n')
			if err != nil && s == "" {
				return
			}
			a.lines <- strings.TrimSpace(s)
		}
	})
	return a
}

// ask asks a question; ok: there was an answer.
func (p *picker) ask(question string) (answer string, ok bool, err error) {
	fmt.Fprint(p.out, printable(question))
	select {
	case p.lines.more <- struct{}{}:
	case answer, ok = <-p.lines.lines: // stdin has ended before
	}
	select {
	case answer, ok = <-p.lines.lines:
	case <-p.ctx.Done(): // a read of a terminal cannot be called off
		fmt.Fprintln(p.out)
		return "", false, context.Cause(p.ctx)
	}
	if !ok {
		fmt.Fprintln(p.out)
	}
	return answer, ok, nil
}

func (p *picker) paint(color, s string) string {
	if s = printable(s); p.color && s != "" {
		return color + s + colorOff
	}
	return s
}

// name is the path of a change, relative to the workspace if there is only one.
func (p *picker) name(c runtime.Change) string { return changeName(p.plan, c) }

// head prints the change that the next question is about.
func (p *picker) head(it applyItem) {
	text := it.Change.Change + " " + quotePath(p.name(it.Change))
	if it.New != nil && it.Change.Change != "M" {
		text += " " + fileStateText(*it.New)
	}
	fmt.Fprintln(p.out, p.paint(colorHeader, text))
	for _, c := range it.with {
		fmt.Fprintln(p.out, p.paint(colorHeader, "  "+c.Change+" "+quotePath(p.name(c))))
	}
}

// show prints a patch, in color on a terminal.
func (p *picker) show(patch string) {
	for line := range strings.Lines(patch) {
		line = strings.TrimSuffix(line, "\n")
		color := map[byte]string{'-': colorOld, '+': colorNew, '@': colorHunk}[(line + " ")[0]]
		if color == "" {
			color = colorOff
		}
		fmt.Fprintln(p.out, p.paint(color, line))
	}
}

// A verdict is an answer about one part of an item.
type verdict struct {
	take, rest, quit, split bool // rest: the same for all that follows of the item
}

const hunkHelp = `y - apply this
n - leave this out
q - quit; leave this and all that follows out
a - apply this and all that follows in the file
d - leave this and all that follows in the file out
`

// judge asks about one part of an item.
func (p *picker) judge(question string, splits bool) (verdict, error) {
	keys, help := "y,n,q,a,d", hunkHelp
	if splits {
		keys += ",s"
		help += "s - split this hunk into smaller ones\n"
	}
	for {
		answer, ok, err := p.ask(fmt.Sprintf("%s [%s,?]? ", question, keys))
		if err != nil || !ok {
			return verdict{quit: true}, err
		}
		switch strings.ToLower(answer) {
		case "y", "yes":
			return verdict{take: true}, nil
		case "n", "no":
			return verdict{}, nil
		case "q", "quit":
			return verdict{quit: true}, nil
		case "a":
			return verdict{take: true, rest: true}, nil
		case "d":
			return verdict{rest: true}, nil
		case "s":
			if splits {
				return verdict{split: true}, nil
			}
			fmt.Fprintln(p.out, "This hunk cannot be split.")
			continue
		}
		fmt.Fprint(p.out, help+"? - print this help\n")
	}
}

// byHunk asks about each hunk of texts, and each other change, as `git add -p` does.
func (p *picker) byHunk() (list []runtime.ApplyPick, err error) {
	for _, it := range p.items {
		picks, quit, err := p.ofItem(it)
		if err != nil {
			return nil, err
		}
		if list = append(list, picks...); quit {
			break
		}
	}
	return list, nil
}

// ofItem asks about the parts of an item.
func (p *picker) ofItem(it applyItem) (picks []runtime.ApplyPick, quit bool, err error) {
	p.head(it)
	if len(it.hunks) == 0 {
		p.show(it.Patch)
		v, err := p.judge(wholeQuestion(it.Change), false)
		if err != nil || !v.take {
			return nil, v.quit, err
		}
		return it.picks(), false, nil
	}
	var hunks []int
	mode := false
	var v verdict
	if it.modeChange() {
		fmt.Fprintf(p.out, "mode %s -> %s\n", it.Old.Mode, it.New.Mode)
		if v, err = p.judge("Apply the new mode", false); err != nil || v.quit {
			return nil, true, err
		}
		mode = v.take
	}
	todo := it.hunks
	for i := 0; i < len(todo) && !v.quit; i++ {
		h := todo[i]
		if !v.rest {
			p.show(h.text())
			question := fmt.Sprintf("(%d/%d) Apply this hunk", i+1, len(todo))
			if v, err = p.judge(question, h.runs > 1); err != nil {
				return nil, true, err
			}
			if v.split {
				todo = slices.Replace(slices.Clone(todo), i, i+1, h.split()...)
				fmt.Fprintf(p.out, "Split into %d hunks.\n", h.runs)
				i--
				continue
			}
		}
		if v.take {
			hunks = append(hunks, h.numbers()...)
		}
	}
	return it.picked(hunks, mode), v.quit, nil
}

func wholeQuestion(c runtime.Change) string {
	switch {
	case c.Change == "A":
		return "Apply this addition"
	case c.Change == "D":
		return "Apply this deletion"
	case c.Change == "M" && slices.Equal(c.What, []string{"mode"}):
		return fmt.Sprintf("Apply the mode %s -> %s", c.Old.Mode, c.New.Mode)
	}
	if len(c.What) == 0 {
		return "Apply this change"
	}
	return "Apply this change (" + strings.Join(c.What, ", ") + ")"
}

const numbersHelp = `1 3-5     mark these
-2        unmark this
*         mark all
d 2       show the changes of this one
p 2       choose among its hunks
(empty)   apply what is marked
q         quit, and apply nothing
`

// byNumber prints the changes as a numbered list, and reads which ones to mark.
func (p *picker) byNumber() ([]runtime.ApplyPick, error) {
	marked := make([][]runtime.ApplyPick, len(p.items))
	for {
		for i, it := range p.items {
			mark := " "
			if len(marked[i]) > 0 {
				mark = "*"
				if marked[i][0].Hunks != nil {
					mark = "+" // a part of it
				}
			}
			fmt.Fprintln(p.out, printable(fmt.Sprintf("%s %3d  %s %s", mark, i+1, it.Change.Change,
				quotePath(p.name(it.Change)))))
		}
		answer, ok, err := p.ask("Apply which (numbers, *, d N, p N, ?, q; empty: what is marked)> ")
		switch {
		case err != nil:
			return nil, err
		case !ok || answer == "q":
			return nil, errNothingPicked
		case answer == "":
			return slices.Concat(marked...), nil
		case answer == "?":
			fmt.Fprint(p.out, numbersHelp)
			continue
		}
		if err := p.mark(answer, marked); err != nil {
			fmt.Fprintln(p.out, printable(err.Error()))
			fmt.Fprint(p.out, numbersHelp)
		}
	}
}

// mark carries out one command line of byNumber.
func (p *picker) mark(line string, marked [][]runtime.ApplyPick) error {
	words := strings.Fields(strings.ReplaceAll(line, ",", " "))
	if words[0] == "d" || words[0] == "p" {
		if len(words) != 2 {
			return fmt.Errorf("%q needs one number", words[0])
		}
		from, to, err := numberRange(words[1], len(p.items))
		if err != nil || from != to {
			return errors.Join(err, fmt.Errorf("%q needs one number", words[0]))
		}
		it := p.items[from]
		if words[0] == "p" {
			marked[from], _, err = p.ofItem(it)
			return err
		}
		p.head(it)
		p.show(it.Patch)
		return nil
	}
	for _, word := range words {
		rest, out := strings.CutPrefix(word, "-")
		from, to, err := numberRange(rest, len(p.items))
		if err != nil {
			return err
		}
		for i := from; i <= to; i++ {
			if marked[i] = nil; !out {
				marked[i] = p.items[i].picks()
			}
		}
	}
	return nil
}

// numberRange reads N, N-M or *, as places in a list of n.
func numberRange(s string, n int) (from, to int, err error) {
	if s == "*" {
		return 0, n - 1, nil
	}
	a, b, both := strings.Cut(s, "-")
	if !both {
		b = a
	}
	from, err = strconv.Atoi(a)
	to, e2 := strconv.Atoi(b)
	if err != nil || e2 != nil || from < 1 || to < from || to > n {
		return 0, 0, fmt.Errorf("%q is neither a number from 1 to %d nor a range of them", s, n)
	}
	return from - 1, to - 1, nil
}
