package mcp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// effect is what a tool does to a sandbox.
type effect int

const (
	reads    effect = iota
	adds            // something that was not there; nothing is lost
	changes         // what is there may be lost, and a checkpoint brings it back
	destroys        // for good
)

type tool struct {
	name   string
	title  string
	text   string // what it does; where it acts is added
	effect effect
}

// reply is the answer of a tool: its result, and notes on it.
type reply struct {
	text   string
	note   string
	failed bool
}

// add registers a tool whose arguments are the struct In.
func add[In any](s *Server, t tool, handle func(context.Context, In) (reply, error)) {
	if s.opts.ReadOnly && t.effect != reads {
		return
	}
	destructive, closed := t.effect == changes || t.effect == destroys, false
	def := &sdk.Tool{
		Name: t.name, Title: t.title, Description: t.text + " " + s.where(),
		Annotations: &sdk.ToolAnnotations{
			Title: t.title, ReadOnlyHint: t.effect == reads, DestructiveHint: &destructive, OpenWorldHint: &closed,
		},
	}
	sdk.AddTool(s.sdk, def, func(ctx context.Context, _ *sdk.CallToolRequest, in In) (*sdk.CallToolResult, any, error) {
		s.log.Info("tool called", "name", t.name)
		if t.effect == reads {
			ctx = runtime.Reading(ctx)
		}
		r, err := handle(ctx, in)
		if err != nil {
			s.log.Info("tool failed", "name", t.name, "err", err)
			r = reply{text: s.errorText(err), failed: true}
		}
		res := &sdk.CallToolResult{
			IsError: r.failed, Content: []sdk.Content{&sdk.TextContent{Text: strings.ToValidUTF8(r.text, "\uFFFD")}},
		}
		if r.note != "" {
			res.Content = append(res.Content, &sdk.TextContent{Text: strings.ToValidUTF8(r.note, "\uFFFD")})
		}
		return res, nil, nil
	})
}

// addOn registers a tool that acts on a sandbox, which its arguments may name.
func addOn[In interface{ sandbox() string }](s *Server, t tool, handle func(context.Context, *box, In) (reply, error)) {
	add(s, t, func(ctx context.Context, in In) (reply, error) {
		b, err := s.box(in.sandbox())
		if err != nil {
			return reply{}, err
		}
		return handle(ctx, b, in)
	})
}

// where returns the end of every tool description: which sandbox and directory are the default.
func (s *Server) where() string {
	if !s.given {
		return "An omitted sandbox means the only one that you have made; an omitted path means the working directory of that sandbox."
	}
	b := s.boxes[0]
	return fmt.Sprintf("Acts in sandbox %q, whose working directory is %s; an omitted path means the working directory.", b.name, b.workdir)
}

// errorText is an error with what to do about it, in the names that the agent
// knows.
func (s *Server) errorText(err error) string {
	text := err.Error()
	for _, h := range fault.Hint(err) {
		text += "\n" + h
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.boxes {
		text = strings.ReplaceAll(text, b.id, b.name)
	}
	return text
}

// corrected sets the path in an error to at, the path as the sandbox has it, unless at is
// empty, and adds a hint to an ErrNotFound that has none.
func (b *box) corrected(at string, err error) error {
	if err == nil {
		return nil
	}
	var pe *fs.PathError
	if at != "" && errors.As(err, &pe) {
		pe.Path = at
	}
	if !errors.Is(err, runtime.ErrNotFound) || len(fault.Hint(err)) > 0 {
		return err
	}
	return &runtime.Error{Err: err, Hint: fmt.Sprintf("You are in sandbox %s; its working directory is %s, where relative paths begin. glob and list_files find what is there.", b.name, b.workdir)}
}

// before takes the checkpoint that is to precede a change. Without it the
// change is refused: the way back comes first.
func (s *Server) before(ctx context.Context, b *box, tool string) error {
	if !s.opts.CheckpointEvery {
		return nil
	}
	b.files.Lock()
	defer b.files.Unlock()
	c, err := s.svc.Checkpoint(ctx, b.id, runtime.CheckpointOptions{
		Trigger: runtime.TriggerTool, Labels: map[string]string{"tool": tool}, Message: tool, IfChanged: b.steps,
	})
	if err == nil && !c.Reused {
		_, err = s.makeRoom(ctx, b, c.ID)
	}
	if err != nil {
		return fmt.Errorf("the checkpoint before it failed, so that nothing was done: %w", err)
	}
	return nil
}

// cutText is the beginning of s, at most so many bytes, whole characters.
func cutText(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// orDefault is n, or def when it is not given, and not over most.
func orDefault(name string, n, def, most int) (int, error) {
	switch {
	case n == 0:
		return def, nil
	case n < 0 || n > most:
		return 0, fmt.Errorf("%w: %s %d: give 1 to %d", runtime.ErrInvalid, name, n, most)
	}
	return n, nil
}
