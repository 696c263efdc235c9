package store

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/policy"
)

// A ref is what stands after the @ of SANDBOX@REF:
//
//	NAME       a name, a tag or a prefix of an id
//	HEAD       the checkpoint that the sandbox was last at, in any case
//	{5m}       the newest checkpoint that is at least that old, as policy.ParseDuration reads it
//	{INSTANT}  the newest checkpoint of this instant (RFC 3339) or before it
//	REF~N      N steps before REF in the history; ~ is ~1
//
// A step goes from a checkpoint to its parent, as agentbox log draws it, and never to a
// checkpoint of another sandbox. The undo checkpoint of a restore hangs beside the history
// and is a step only where the sandbox went on from it. A restore with Undo has it do so.
type ref struct {
	base  string        // NAME, or HEAD as it was written; empty: age or at
	head  bool          // base is HEAD
	age   time.Duration // with a zero at: how old it has to be
	at    time.Time
	steps int
}

// The reserved names that are more than a name.
const (
	refHead  = "HEAD"
	refImage = "image"
)

// maxSteps bounds a number of steps in digits: more checkpoints than that are in no history.
const maxSteps = 9

// parseRef reads a ref. An @ may stand before it, for a ref beside its sandbox is written
// that way, too.
func parseRef(text string) (p ref, err error) {
	text = strings.TrimPrefix(text, "@")
	if strings.Contains(text, "@") {
		return ref{base: text}, nil // SANDBOX@REF where a REF is wanted: no checkpoint has this name
	}
	base, steps, back := strings.Cut(text, "~")
	if back {
		if p.steps, err = parseSteps(steps); err != nil {
			return p, badRef(text, err.Error(), "HEAD~2 is two steps before HEAD.")
		}
	}
	inner, braced := strings.CutPrefix(base, "{")
	switch {
	case base == "":
		return p, badRef(text, "no checkpoint is named", "Name the one to go back from, as in HEAD~1.")
	case braced:
		inner, closed := strings.CutSuffix(inner, "}")
		if !closed {
			return p, badRef(text, "it has a { without its }", "{5m} is the newest that is at least 5 minutes old.")
		}
		return p, p.parseTime(text, inner)
	case strings.ContainsAny(base, "^{}"):
		return p, badRef(text, "no name has a ^, { or } in it",
			"HEAD~1 is the one before HEAD, and {5m} alone the newest that is at least 5 minutes old.")
	}
	p.base, p.head = base, strings.EqualFold(base, refHead)
	return p, nil
}

func parseSteps(digits string) (int, error) {
	if digits == "" {
		return 1, nil
	}
	if strings.Trim(digits, "0123456789") != "" {
		return 0, fmt.Errorf("after ~ comes a number of steps, and %.40q is none", digits)
	}
	if len(digits) > maxSteps {
		return 0, fmt.Errorf("the number of steps has more than %d digits", maxSteps)
	}
	return strconv.Atoi(digits)
}

func (p *ref) parseTime(text, inner string) error {
	at, err := time.Parse(time.RFC3339, inner)
	if err == nil {
		p.at = at
		return nil
	}
	if p.age, err = policy.ParseDuration(inner); err != nil {
		return badRef(text, fmt.Sprintf("%.40q is neither a duration nor an instant", inner),
			"Write for example {90s}, {5m}, {1d12h} or {2026-01-02T15:04:05Z}.")
	}
	return nil
}

func badRef(text, why, hint string) error {
	return &fault.Error{Hint: hint, Err: fmt.Errorf("checkpoint %.100q: %w: %s", text, fault.ErrInvalid, why)}
}

// before returns the instant that p means, in nanoseconds as the database has them.
func (p ref) before(now time.Time) int64 {
	at := p.at
	if at.IsZero() {
		at = now.Add(-p.age)
	}
	switch y := at.Year(); { // beyond these years there are not so many nanoseconds
	case y < 1700:
		return math.MinInt64
	case y > 2200:
		return math.MaxInt64
	}
	return at.UnixNano()
}

// image reports whether p is the image, which is no checkpoint.
func (p ref) image() bool { return strings.EqualFold(p.base, refImage) }

// IsHead reports whether a ref is HEAD itself.
func IsHead(text string) bool {
	p, err := parseRef(text)
	return err == nil && p.head && p.steps == 0
}

// scope is a sandbox that a ref is resolved in, or are the removed ones of a name.
type scope struct {
	called string // as errors name it; empty: every sandbox
	where  string // a condition over ?2
	arg    any
	head   string // id of the checkpoint that it was last at; empty: none
	gone   bool   // it was removed
}

// resolve finds what p, written as text, means in a sandbox. Nothing that is found is no
// error where p is a name.
func (r *records) resolve(ctx context.Context, p ref, text string, in scope) ([]Checkpoint, error) {
	list, err := r.base(ctx, p, text, in)
	if err != nil || len(list) != 1 || p.steps == 0 {
		return list, err
	}
	c, err := r.back(ctx, list[0], p, text, in)
	return []Checkpoint{c}, err
}

// base finds what p means without its steps.
func (r *records) base(ctx context.Context, p ref, text string, in scope) ([]Checkpoint, error) {
	if p.base == "" {
		return r.aged(ctx, p, text, in)
	}
	if !p.head {
		list, err := r.named(ctx, p.base, in.where, in.arg)
		if err == nil && len(list) == 0 && p.image() {
			err = r.noImage(ctx, text, in)
		}
		return list, err
	}
	// Versions in which HEAD was a name like any other left checkpoints with it. No
	// archive may bring one, since that would choose what others mean by HEAD.
	list, err := r.named(ctx, p.base, "pulled = 0 AND "+in.where, in.arg)
	if err != nil || len(list) > 0 {
		return list, err
	}
	return r.atHead(ctx, text, in)
}

// Head returns the checkpoint that a sandbox was last at.
func (r *records) Head(ctx context.Context, b Sandbox) (Checkpoint, error) {
	list, err := r.atHead(ctx, refHead, scope{called: b.Name, arg: b.ID, head: b.Head})
	return first(b.Name+"@"+refHead, list, err)
}

// atHead finds the checkpoint that a sandbox was last at.
func (r *records) atHead(ctx context.Context, text string, in scope) ([]Checkpoint, error) {
	if in.called == "" {
		return nil, unplaced(text)
	}
	if in.gone {
		name, err := r.nameOf(ctx, in)
		if err != nil || name == "" {
			return nil, err
		}
		return nil, in.none(text, name+" was removed, and is at no checkpoint",
			"agentbox restore "+name+" brings it back at its newest; agentbox log "+name+" lists all.")
	}
	if in.head == "" {
		return nil, in.none(text, in.called+" is at no checkpoint",
			"Name one that agentbox log "+in.called+" lists, or take one: agentbox checkpoint "+in.called)
	}
	list, err := r.checkpoints(ctx, "WHERE id = ?1", in.head)
	switch {
	case err != nil:
		return nil, err
	case len(list) == 0:
		return nil, in.none(text, fmt.Sprintf("checkpoint %.12s, which %s was last at, was removed", in.head, in.called),
			"Name one that agentbox log "+in.called+" lists.")
	case list[0].SandboxID != in.arg:
		return nil, in.none(text, fmt.Sprintf("%s is at no checkpoint of its own, but began at one of %s",
			in.called, list[0].SandboxName), "That is checkpoint "+list[0].ID[:12]+".")
	}
	return list, nil
}

// aged finds the newest checkpoint of the age that p asks for. It passes over undo
// checkpoints and foreign ones, as every choice of a newest one does.
func (r *records) aged(ctx context.Context, p ref, text string, in scope) ([]Checkpoint, error) {
	if in.called == "" {
		return nil, unplaced(text)
	}
	const made = "WHERE status = 'ready' AND trigger_name <> 'undo' AND pulled = 0 AND created <= ?1 AND "
	now := time.Now()
	list, err := r.checkpoints(ctx, made+in.where+" ORDER BY created DESC, seq DESC LIMIT 1", p.before(now), in.arg)
	if err != nil || len(list) > 0 {
		return list, err
	}
	name, err := in.called, error(nil)
	if in.gone {
		if name, err = r.nameOf(ctx, in); err != nil || name == "" {
			return nil, err
		}
	}
	oldest, err := r.checkpoints(ctx, made+in.where+" ORDER BY created, seq LIMIT 1", int64(math.MaxInt64), in.arg)
	if err != nil {
		return nil, err
	}
	if len(oldest) == 0 {
		return nil, in.none(text, name+" has no checkpoint that was made here", "Take one with: agentbox checkpoint "+name)
	}
	when := "of " + oldest[0].Created.Format(time.RFC3339)
	if p.at.IsZero() {
		when = ageText(now.Sub(oldest[0].Created)) + " old"
	}
	return nil, in.none(text, "the oldest checkpoint of "+name+" is "+when, "agentbox log "+name+" lists all.")
}

// back goes p's steps back from a checkpoint. It reads the ancestry at once, and takes at
// most as many steps as there are checkpoints.
func (r *records) back(ctx context.Context, c Checkpoint, p ref, text string, in scope) (Checkpoint, error) {
	type node struct {
		parent string
		ready  bool
	}
	nodes := map[string]node{}
	err := r.query(ctx, "SELECT id, parent, status FROM checkpoints WHERE sandbox_id = ?", []any{c.SandboxID},
		func(row *sql.Rows) error {
			var id, parent, status string
			err := row.Scan(&id, &parent, &status)
			nodes[id] = node{parent, status == Ready}
			return err
		})
	if err != nil {
		return Checkpoint{}, err
	}
	if in.called != "" {
		in.called = c.SandboxName // it may have been named by its id
	}
	at, seen, count := c.ID, map[string]bool{c.ID: true}, 1
	for count <= p.steps {
		next := nodes[at].parent
		n, ok := nodes[next]
		if !ok {
			return Checkpoint{}, r.tooFar(ctx, p, text, in, c, count, next)
		}
		if seen[next] {
			return Checkpoint{}, fmt.Errorf("checkpoint %q: %w: the history of %s comes back to checkpoint %.12s",
				in.full(text), fault.ErrCorrupt, c.SandboxName, next)
		}
		seen[next], at = true, next
		if n.ready { // another one is being removed
			count++
		}
	}
	list, err := r.checkpoints(ctx, "WHERE id = ?1", at)
	return first(in.full(text), list, err)
}

// tooFar is the error of a history, that of checkpoint c, which is shorter than the steps.
// rest is the id of the checkpoint that it began at, if the sandbox is a fork.
func (r *records) tooFar(
	ctx context.Context, p ref, text string, in scope, c Checkpoint, count int, rest string,
) error {
	history := c.SandboxName
	if !p.head {
		history, _, _ = strings.Cut(in.full(text), "~")
	}
	hint := "agentbox log " + c.SandboxName + " shows it."
	if rest != "" {
		list, err := r.checkpoints(ctx, "WHERE id = ?1", rest)
		if err != nil {
			return err
		}
		if len(list) > 0 {
			hint = fmt.Sprintf("It began as a fork of checkpoint %.12s of %s.", rest, list[0].SandboxName)
		}
	}
	n := "1 checkpoint"
	if count != 1 {
		n = fmt.Sprintf("%d checkpoints", count)
	}
	return in.none(text, fmt.Sprintf("the history of %s has %s", history, n), hint)
}

// noImage is the error of a verb for checkpoints that is given the image.
func (r *records) noImage(ctx context.Context, text string, in scope) error {
	name, err := in.called, error(nil)
	if in.gone {
		if name, err = r.nameOf(ctx, in); err != nil || name == "" {
			return err
		}
	}
	whose, diff := "a sandbox", "SANDBOX"
	if name != "" {
		whose, diff = name, name
	}
	return in.none(text, "the image is no checkpoint, but what "+whose+" had before it changed anything",
		"Compare with it by agentbox diff "+diff+"@image; agentbox run makes a new sandbox of an image.")
}

// nameOf returns the name of a removed sandbox that left checkpoints, or nothing.
func (r *records) nameOf(ctx context.Context, in scope) (string, error) {
	list, err := r.checkpoints(ctx, "WHERE "+in.where+" ORDER BY seq DESC LIMIT 1", nil, in.arg)
	if err != nil || len(list) == 0 {
		return "", err
	}
	return list[0].SandboxName, nil
}

// none is the ErrNotFound of a ref, by the names that its user gave.
func (in scope) none(text, why, hint string) error {
	return &fault.Error{Hint: hint, Err: fmt.Errorf("%s: %s: %w", in.full(text), why, fault.ErrNotFound)}
}

func (in scope) full(text string) string {
	text = strings.TrimPrefix(text, "@")
	if in.called == "" {
		return text
	}
	return in.called + "@" + text
}

// unplaced is the error of a ref without a sandbox that needs one.
func unplaced(text string) error {
	return &fault.Error{Hint: "Write SANDBOX@" + text + ".",
		Err: fmt.Errorf("checkpoint %q: %w: it means nothing without a sandbox", text, fault.ErrInvalid)}
}

// ageText is a duration without what is zero at its end.
func ageText(d time.Duration) string {
	s := d.Truncate(time.Second).String()
	if cut, ok := strings.CutSuffix(s, "m0s"); ok {
		s = cut + "m"
	}
	if cut, ok := strings.CutSuffix(s, "h0m"); ok {
		s = cut + "h"
	}
	return s
}
