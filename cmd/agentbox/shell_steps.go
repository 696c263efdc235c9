package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// The shells of 'agentbox shell' print a mark before each prompt but their first: an operating
// system command with the command line, percent-encoded. What they print is not trusted, so a mark
// is no more than a hint to take a step.
const (
	markBegin = "\x1b]633;agentbox;"
	maxMark   = 2048 // bytes of a command line as it is encoded
)

// A markReader passes the output of a terminal on, without its marks.
type markReader struct {
	out  io.Writer
	mark func(line string)
	held []byte // what may be the beginning of a mark
}

// Write passes p on, but for marks and for what may be the beginning of one at its end.
func (m *markReader) Write(p []byte) (int, error) {
	rest := p
	if len(m.held) > 0 {
		rest = append(m.held, p...)
		m.held = nil
	}
	for len(rest) > 0 {
		at, text, size := findMark(rest)
		if at > 0 {
			if _, err := m.out.Write(rest[:at]); err != nil {
				return 0, err
			}
		}
		rest = rest[at:]
		if size == 0 {
			m.held = bytes.Clone(rest)
			break
		}
		m.mark(text)
		rest = rest[size:]
	}
	return len(p), nil
}

// flush passes on what was held back.
func (m *markReader) flush() {
	_, _ = m.out.Write(m.held) // the terminal is gone, or has it
	m.held = nil
}

// findMark finds the first mark in data: where it begins, the line that it has, and its size. A
// size of 0 means that there is none; what begins there may become one.
func findMark(data []byte) (at int, line string, size int) {
	for from := 0; ; {
		next := bytes.IndexByte(data[from:], markBegin[0])
		if next < 0 {
			return len(data), "", 0
		}
		at = from + next
		tail := data[at:]
		if len(tail) < len(markBegin) {
			if strings.HasPrefix(markBegin, string(tail)) {
				return at, "", 0
			}
		} else if string(tail[:len(markBegin)]) == markBegin {
			text := tail[len(markBegin):]
			end := bytes.IndexFunc(text, unicode.IsControl)
			switch {
			case end >= 0 && end <= maxMark && text[end] == '\a':
				return at, plainLine(string(text[:end])), len(markBegin) + end + 1
			case end < 0 && len(text) <= maxMark:
				return at, "", 0
			}
		}
		from = at + 1
	}
}

// maxStepLine bounds the message of a step, in bytes.
const maxStepLine = 500

// plainLine is a command line of a mark as the message of a step.
func plainLine(text string) string {
	if s, err := url.PathUnescape(text); err == nil {
		text = s
	}
	return stepLine(text)
}

// stepLine is a command line as the message of a step: bounded text without control characters.
func stepLine(text string) string {
	text = strings.TrimSpace(strings.Map(func(r rune) rune {
		if !unicode.IsGraphic(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "�")))
	for len(text) > maxStepLine {
		text = strings.ToValidUTF8(text[:maxStepLine], "")
	}
	return text
}

// A stepper takes steps of a sandbox one at a time, beside its terminal. Marks that come while a step
// is being taken become one more.
type stepper struct {
	take func(ctx context.Context, message string) error
	wake chan struct{}
	quit chan struct{}
	done <-chan error

	mu      sync.Mutex
	wanted  bool
	message string // of the step that is wanted
	failed  error  // of the last step
	missed  int    // steps that failed
}

// newStepper starts a stepper. It ends with its context, at once, or by end.
func newStepper(ctx context.Context, take func(context.Context, string) error) *stepper {
	s := &stepper{take: take, wake: make(chan struct{}, 1), quit: make(chan struct{})}
	s.done = guard.Start(func() error {
		for {
			select {
			case <-s.wake:
				s.step(ctx)
			case <-s.quit:
				return nil
			case <-ctx.Done():
				return nil
			}
		}
	})
	return s
}

// want asks for a step.
func (s *stepper) want(message string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wanted = true; message != "" {
		s.message = message
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *stepper) step(ctx context.Context) {
	s.mu.Lock()
	message := s.message
	s.wanted, s.message = false, ""
	s.mu.Unlock()
	err := s.take(ctx, message)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed = err; err != nil {
		s.missed++
		if !s.wanted { // what it would have had is the next one's
			s.message = message
		}
	}
}

// end waits for the step at work. When one is still wanted, or the last has failed, it takes one more,
// of what the sandbox was left with. It returns what to say of steps that could not be taken.
func (s *stepper) end(ctx context.Context) (warning string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastStep)
	defer cancel()
	close(s.quit)
	select {
	case err := <-s.done:
		if err != nil {
			return err.Error()
		}
	case <-ctx.Done():
		return "the last step was not taken in time"
	}
	s.mu.Lock()
	again := s.wanted || s.failed != nil
	s.mu.Unlock()
	if again {
		s.step(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed == nil || errors.Is(s.failed, runtime.ErrNotFound) {
		return ""
	}
	return fmt.Sprintf("%s could not be taken: %v", countText(int64(s.missed), "step"), s.failed)
}

// lastStep bounds the wait for steps when a shell has ended.
const lastStep = 30 * time.Second

// stepping runs fn, a session in which a shell of the sandbox has the terminal, and takes a step at
// each of its prompts.
func (sh *shell) stepping(ctx context.Context, svc runtime.Service, sb runtime.Sandbox, fn func() error) error {
	if !sh.steps() {
		return fn()
	}
	s := newStepper(ctx, func(ctx context.Context, message string) error {
		opts := runtime.CheckpointOptions{Trigger: runtime.TriggerPrompt, Message: message, IfChanged: true}
		_, err := svc.Checkpoint(ctx, sb.ID, opts)
		if err != nil && ctx.Err() == nil && !errors.Is(err, runtime.ErrBusy) && !errors.Is(err, runtime.ErrNotFound) {
			// Its processes cannot be dumped, perhaps, but its files can be brought back.
			opts.FilesOnly = true
			_, err = svc.Checkpoint(ctx, sb.ID, opts)
		}
		return err
	})
	reader := &markReader{out: sh.app.stdout, mark: s.want}
	sh.sess.output = reader
	err := fn()
	reader.flush()
	if warning := s.end(ctx); warning != "" {
		warn(sh.app.stderr, []string{warning})
	}
	return err
}

// steps reports whether the shell takes steps: it is one, at a terminal, in a sandbox that stays.
func (sh *shell) steps() bool {
	return sh.tty && len(sh.command) == 0 && sh.opts.Steps != runtime.StepsOff && !sh.opts.Remove
}

// stepsVariable tells the shell's program not to print marks.
const stepsVariable = "AGENTBOX_STEPS"

// Files of the shells, which read the user's own first.
var shellRC = []runtime.SetupFile{
	rcFile("bashrc", `# Of bash in 'agentbox shell': a mark before each prompt, of which a step is taken.
[ -r ~/.bashrc ] && . ~/.bashrc
# Else the end of the shell would be one more change to undo.
[ "$HISTFILE" != ~/.bash_history ] || unset HISTFILE
__agentbox_mark() {
	local line= number=
	if [[ $(HISTTIMEFORMAT= builtin history 1) =~ ^\ *([0-9]+)[*\ ]\ (.*)$ ]]; then
		number=${BASH_REMATCH[1]} line=${BASH_REMATCH[2]}
	fi
	if [ -n "${__agentbox_number+x}" ]; then
		[ "$number" != "$__agentbox_number" ] || line=
		line=${line:0:500}
		line=${line//%/%25}
		line=${line//$'\n'/%0a}
		printf '\e]633;agentbox;%s\a' "${line//[[:cntrl:]]/ }"
	fi
	__agentbox_number=$number
}
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 501)); then
	PROMPT_COMMAND+=(__agentbox_mark)
else
	PROMPT_COMMAND="${PROMPT_COMMAND:+$PROMPT_COMMAND; }__agentbox_mark"
fi
`),
	rcFile("zsh/.zshenv", `[[ -r ~/.zshenv ]] && source ~/.zshenv
ZDOTDIR=`+shellDir+`/zsh
`),
	rcFile("zsh/.zshrc", `# Of zsh in 'agentbox shell': a mark before each prompt, of which a step is taken.
unset ZDOTDIR
[[ -r ~/.zshrc ]] && source ~/.zshrc
__agentbox_line() { __agentbox_last=$1 }
__agentbox_mark() {
	local line=${__agentbox_last[1,500]}
	__agentbox_last=
	if (( ${+__agentbox_on} )); then
		line=${line//\%/%25}
		line=${line//$'\n'/%0a}
		printf '\e]633;agentbox;%s\a' "${line//[[:cntrl:]]/ }"
	fi
	__agentbox_on=
}
autoload -Uz add-zsh-hook
add-zsh-hook preexec __agentbox_line
add-zsh-hook precmd __agentbox_mark
`),
	rcFile("fish", `# Of fish in 'agentbox shell': a mark before each prompt, of which a step is taken.
set -q fish_history; or set -g fish_history '' # else each command would change a file
function __agentbox_line --on-event fish_postexec
	set -g __agentbox_last $argv[1]
end
function __agentbox_mark --on-event fish_prompt
	if set -q __agentbox_on
		set -l line (string sub -l 500 -- "$__agentbox_last" | string replace -a % %25 | string join %0a)
		printf '\e]633;agentbox;%s\a' (string replace -ra '[[:cntrl:]]' ' ' -- "$line")
	end
	set -g __agentbox_on
	set -e __agentbox_last
end
`),
}

func rcFile(name, text string) runtime.SetupFile {
	return runtime.SetupFile{Path: shellDir + "/" + name, Mode: 0o644, Data: []byte(text)}
}
