package mcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

const (
	maxLogged = 50     // checkpoints that log lists
	maxForks  = 8      // of one call
	maxPatch  = 50_000 // bytes of a diff
	maxDiff   = 1000   // changes
)

// checkpointOf finds a checkpoint of this sandbox, and of no other.
func (s *Server) checkpointOf(ctx context.Context, b *box, ref string) (string, error) {
	var denied, first error
	// A bare name is meant in this sandbox first.
	for _, full := range []string{b.name + "@" + ref, ref} {
		c, err := s.svc.CheckpointInfo(ctx, full)
		if err == nil && c.Sandbox == b.id {
			return c.ID, nil
		}
		if first == nil {
			first = err
		}
		if err != nil && !errors.Is(err, runtime.ErrNotFound) && !errors.Is(err, runtime.ErrInvalid) {
			denied = err
		}
	}
	if denied != nil {
		return "", denied
	}
	if first != nil && (strings.ContainsAny(ref, "~{^") || strings.EqualFold(ref, "HEAD")) {
		return "", first // it says what is wrong with the steps or the time
	}
	return "", &runtime.Error{Op: "find", ID: ref, Err: fmt.Errorf("no such checkpoint of sandbox %s: %w", b.name,
		runtime.ErrNotFound), Hint: "log lists them."}
}

type checkpointArgs struct {
	Target
	Name      string `json:"name,omitempty" jsonschema:"name to restore it by; it must be new"`
	FilesOnly bool   `json:"files_only,omitempty" jsonschema:"leave the processes out"`
}

func (s *Server) checkpoint(ctx context.Context, b *box, in checkpointArgs) (reply, error) {
	b.files.Lock()
	defer b.files.Unlock()
	c, err := s.svc.Checkpoint(ctx, b.id, runtime.CheckpointOptions{
		Name: in.Name, FilesOnly: in.FilesOnly, Trigger: runtime.TriggerMCP,
	})
	if err != nil {
		return reply{}, err
	}
	note, err := s.makeRoom(ctx, b, c.ID)
	if err != nil {
		return reply{}, fmt.Errorf("checkpoint %s is taken, but older ones that have to go for it could not be removed: %w", c.ID, err)
	}
	return reply{
		text: "checkpoint " + describeCheckpoint(c), note: strings.TrimSpace(warnings(c.Warnings) + " " + note),
	}, nil
}

func describeCheckpoint(c runtime.Checkpoint) string {
	text := c.ID
	if c.Name != "" {
		text += " (" + c.Name + ")"
	}
	text += ", " + c.Kind
	if c.Kind == runtime.KindFull {
		text += fmt.Sprintf(", %d processes", c.Processes)
	}
	return text
}

func warnings(all []string) string {
	if len(all) == 0 {
		return ""
	}
	return "[" + cutText(strings.Join(all, "; "), 2000) + "]"
}

type restoreArgs struct {
	Target
	Checkpoint string `json:"checkpoint,omitempty" jsonschema:"id, name, HEAD~1 for the one before HEAD, or {5m} for the newest at least 5 minutes old; omit it for HEAD, where the sandbox was last"`
	FilesOnly  bool   `json:"files_only,omitempty" jsonschema:"start the processes afresh"`
	Undo       bool   `json:"undo,omitempty" jsonschema:"take the last restore back instead"`
}

func (s *Server) restore(ctx context.Context, b *box, in restoreArgs) (_ reply, err error) {
	// Files of the host are its owner's to put back, not an agent's.
	opts := runtime.RestoreOptions{FilesOnly: in.FilesOnly, Undo: in.Undo, NoAttached: true}
	if in.Checkpoint != "" {
		if in.Undo {
			return reply{}, fmt.Errorf("%w: undo names no checkpoint", runtime.ErrInvalid)
		}
		if opts.Checkpoint, err = s.checkpointOf(ctx, b, in.Checkpoint); err != nil {
			return reply{}, err
		}
	}
	b.files.Lock()
	defer b.files.Unlock()
	s.cutOff(b)
	r, err := s.svc.Restore(ctx, b.id, opts)
	if err != nil {
		return reply{}, err
	}
	text := fmt.Sprintf("sandbox %s is at checkpoint %s again; %d paths were changed back; this is attempt %d", b.name,
		describeCheckpoint(r.Checkpoint), r.Changed, r.Sandbox.Attempt)
	if r.Undo != "" {
		text += "; restore with undo takes it back"
	}
	return reply{text: text, note: warnings(ownerPuts(r.Warnings))}, nil
}

type undoArgs struct {
	Target
	Steps     int  `json:"steps,omitempty" jsonschema:"how many; default 1"`
	FilesOnly bool `json:"files_only,omitempty" jsonschema:"start the processes afresh"`
}

func (s *Server) undo(ctx context.Context, b *box, in undoArgs) (reply, error) {
	return s.step(ctx, b, in, s.svc.Undo)
}

func (s *Server) redo(ctx context.Context, b *box, in undoArgs) (reply, error) {
	return s.step(ctx, b, in, s.svc.Redo)
}

func (s *Server) step(
	ctx context.Context, b *box, in undoArgs,
	do func(context.Context, string, runtime.UndoOptions) (runtime.Restored, error),
) (reply, error) {
	// Files of the host are its owner's to put back, not an agent's.
	opts := runtime.UndoOptions{Steps: in.Steps, FilesOnly: in.FilesOnly, NoAttached: true}
	b.files.Lock()
	defer b.files.Unlock()
	s.cutOff(b)
	r, err := do(ctx, b.id, opts)
	if err != nil {
		return reply{}, err
	}
	text := fmt.Sprintf("sandbox %s is at checkpoint %s; %d paths were changed; this is attempt %d; redo can go %d steps",
		b.name, describeCheckpoint(r.Checkpoint), r.Changed, r.Sandbox.Attempt, r.Redo)
	return reply{text: text, note: warnings(ownerPuts(r.Warnings))}, nil
}

// ownerPuts says of host files why they are left alone: the caller did not give the flag.
func ownerPuts(warnings []string) []string {
	for i, w := range warnings {
		warnings[i] = strings.ReplaceAll(w, runtime.ByNoAttached, "an agent does not put files of the host back")
	}
	return warnings
}

type diffArgs struct {
	Target
	From  string `json:"from,omitempty" jsonschema:"checkpoint, or image for the files before any change; omit it for the last checkpoint"`
	To    string `json:"to,omitempty" jsonschema:"checkpoint; omit it for the files as they are now"`
	Patch bool   `json:"patch,omitempty" jsonschema:"show what changed in the text of files"`
}

func (s *Server) diff(ctx context.Context, b *box, in diffArgs) (_ reply, err error) {
	for _, ref := range []*string{&in.From, &in.To} {
		if *ref == "" || *ref == runtime.DiffImage {
			continue
		}
		if *ref, err = s.checkpointOf(ctx, b, *ref); err != nil {
			return reply{}, err
		}
	}
	d, err := s.svc.Diff(ctx, runtime.DiffRequest{
		Sandbox: b.id, From: in.From, To: in.To, Patch: in.Patch, Limit: maxDiff,
	})
	if err != nil {
		return reply{}, err
	}
	var text strings.Builder
	for i, c := range d.Changes {
		line := c.Change + " " + oneLine(c.Path)
		if c.Type == "dir" {
			line += "/"
		}
		if c.From != "" {
			line += " (was " + oneLine(c.From) + ")"
		} else if c.Change == "M" {
			line += " (" + strings.Join(c.What, ", ") + ")"
		}
		line += "\n" + c.Patch
		if text.Len()+len(line) > maxPatch {
			text.WriteString(cutText(line, maxPatch-text.Len()))
			return reply{
				text: text.String(),
				note: fmt.Sprintf("[cut off after %d bytes, in change %d of %d; leave patch out, or compare nearer checkpoints]", maxPatch, i+1, len(d.Changes)),
			}, nil
		}
		text.WriteString(line)
	}
	r := reply{text: text.String()}
	switch {
	case d.Truncated:
		r.note = fmt.Sprintf("[only the first %d changes are shown]", maxDiff)
	case len(d.Changes) == 0:
		r.note = "[no file has changed]"
	}
	return r, nil
}

type logArgs struct {
	Target
}

func (s *Server) history(ctx context.Context, b *box, in logArgs) (reply, error) {
	all, err := s.svc.History(ctx, b.id, runtime.HistoryOptions{})
	if err != nil {
		return reply{}, err
	}
	var text strings.Builder
	for _, e := range all[:min(len(all), maxLogged)] {
		mark := " "
		if e.Head {
			mark = "*"
		}
		from := ""
		if e.Foreign {
			from = ", from elsewhere"
		}
		fmt.Fprintf(&text, "%s %s, %s, by %s%s\n", mark, describeCheckpoint(e.Checkpoint),
			e.Created.UTC().Format(time.RFC3339), e.Trigger, from)
	}
	r := reply{text: text.String()}
	switch {
	case len(all) == 0:
		r.note = "[there is no checkpoint yet]"
	case len(all) > maxLogged:
		r.note = fmt.Sprintf("[the newest %d of %d]", maxLogged, len(all))
	}
	return r, nil
}

type forkArgs struct {
	Target
	Checkpoint string `json:"checkpoint,omitempty" jsonschema:"id or name; omit it to fork what is there now"`
	Count      int    `json:"count,omitempty" jsonschema:"how many forks; default 1"`
	FilesOnly  bool   `json:"files_only,omitempty" jsonschema:"start the processes afresh"`
}

func (s *Server) fork(ctx context.Context, b *box, in forkArgs) (reply, error) {
	count, err := orDefault("count", in.Count, 1, maxForks)
	if err != nil {
		return reply{}, err
	}
	opts := runtime.ForkOptions{FilesOnly: in.FilesOnly}
	if in.Checkpoint != "" {
		if opts.Checkpoint, err = s.checkpointOf(ctx, b, in.Checkpoint); err != nil {
			return reply{}, err
		}
	}
	done, err := s.reserve(count)
	if err != nil {
		return reply{}, err
	}
	defer done()
	b.files.Lock()
	defer b.files.Unlock()
	var names []string
	for range count {
		// One fork per call: the label holds its name.
		name := b.name + "-fork-" + randomName()
		opts.Count, opts.Names, opts.Labels = 1, []string{name}, s.label(nil, name)
		forks, ferr := s.svc.Fork(ctx, b.id, opts)
		for _, f := range forks {
			s.keepBox(f.Sandbox)
			names = append(names, f.Sandbox.Name)
			opts.Checkpoint = f.Checkpoint.ID
		}
		if ferr != nil {
			err = ferr
			break
		}
	}
	if len(names) == 0 {
		return reply{}, err
	}
	r := reply{text: "forked into " + strings.Join(names, ", ") + "; name one as sandbox in a call"}
	if err != nil {
		r.note, r.failed = "[then it failed: "+s.errorText(err)+"]", true
	}
	return r, nil
}
