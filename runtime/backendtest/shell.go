package backendtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/signal"

	"github.com/agentbox/agentbox/runtime"
)

// process is a process of the memory backend: one of the commands below, or
// "sh -c" with them, joined by ; or &&, with quotes, $VARIABLES, redirections
// of output, and "while :; do ...; done".
type process struct {
	b        *box
	dead     context.Context // killed
	env      map[string]string
	in       io.Reader
	out, err io.Writer
	signals  chan syscall.Signal
	traps    map[syscall.Signal]string
}

// exited ends a process from inside a command.
type exited int

func (e exited) Error() string { return "exit " + strconv.Itoa(int(e)) }

var commands map[string]func(*process, []string) (int, error)

// Not at the declaration: a shell runs commands, and is one.
func init() {
	commands = map[string]func(*process, []string) (int, error){
		"sh":    (*process).shell,
		"echo":  (*process).echo,
		"cat":   (*process).cat,
		"sleep": (*process).sleep,
		"exit":  (*process).exit,
		"trap":  (*process).trap,
		"kill":  (*process).killSelf,
		"mkdir": (*process).mkdir,
		"rm":    (*process).rm,
		"true":  func(*process, []string) (int, error) { return 0, nil },
		"false": func(*process, []string) (int, error) { return 1, nil },
	}
}

func newProcess(b *box, dead context.Context, env []string, in io.Reader, out, errw io.Writer) *process {
	p := &process{
		b: b, dead: dead, env: map[string]string{}, in: in, out: out, err: errw,
		signals: make(chan syscall.Signal, 8), traps: map[syscall.Signal]string{},
	}
	for _, list := range [][]string{b.spec.Env, b.env, env} {
		for _, kv := range list {
			k, v, _ := strings.Cut(kv, "=")
			p.env[k] = v
		}
	}
	return p
}

// look checks that a command can be started.
func (p *process) look(name string) error {
	fail := func(code int, why string) error {
		return &runtime.ExecError{Command: name, Code: code, Err: fmt.Errorf("%s: %s", name, why)}
	}
	if !strings.Contains(name, "/") {
		if commands[name] == nil {
			return fail(127, "command not found")
		}
		return nil
	}
	f, err := p.b.read(name)
	if err != nil {
		return fail(127, "no such file")
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() || fi.Mode()&0o111 == 0 {
		return fail(126, "cannot be executed")
	}
	return nil
}

func (p *process) signal(sig syscall.Signal) {
	select {
	case p.signals <- sig:
	default: // as many are pending as will be read
	}
}

// run runs a command to its end and returns its exit code.
func (p *process) run(args []string) int {
	code, err := p.command(args)
	var e exited
	if errors.As(err, &e) {
		return int(e)
	}
	return code
}

func (p *process) command(args []string) (int, error) {
	if err := p.pending(); err != nil {
		return 0, err
	}
	if cmd := commands[args[0]]; cmd != nil {
		return cmd(p, args[1:])
	}
	if f, err := p.b.read(args[0]); err == nil { // a script, by its path
		defer f.Close()
		text, err := io.ReadAll(f)
		if err != nil {
			return 126, nil
		}
		_, body, _ := strings.Cut(string(text), "\n")
		return p.shell([]string{"-c", strings.ReplaceAll(strings.TrimSpace(body), "\n", "; ")})
	}
	fmt.Fprintf(p.err, "sh: %s: not found\n", args[0])
	return 127, nil
}

// pending obeys what happened since the last command.
func (p *process) pending() error {
	select {
	case <-p.dead.Done():
		return exited(128 + syscall.SIGKILL)
	case sig := <-p.signals:
		return p.obey(sig)
	default:
		return nil
	}
}

func (p *process) obey(sig syscall.Signal) error {
	script, ok := p.traps[sig]
	if !ok {
		return exited(128 + sig)
	}
	_, err := p.script(script)
	return err
}

func (p *process) shell(args []string) (int, error) {
	if len(args) < 2 || args[0] != "-c" {
		return 2, nil
	}
	return p.script(args[1])
}

// script runs commands one after the other.
func (p *process) script(text string) (code int, err error) {
	for text = strings.TrimSpace(text); text != ""; text = strings.TrimSpace(text) {
		if body, ok := strings.CutPrefix(text, "while :; do "); ok {
			i := strings.LastIndex(body, "done")
			if i < 0 {
				return 2, nil
			}
			for {
				if _, err := p.script(body[:i]); err != nil {
					return 0, err
				}
			}
		}
		var words []word
		var end string
		words, end, text = p.parse(text)
		if code, err = p.simple(words); err != nil {
			return code, err
		}
		if end == "&&" && code != 0 {
			_, _, text = p.parse(text)
		}
	}
	return code, nil
}

// word is one word of a command; operator: > >> >&2.
type word struct {
	text     string
	operator bool
}

// parse reads one command, its end (";", "&&" or "") and what follows.
func (p *process) parse(s string) (words []word, end, rest string) {
	var cur strings.Builder
	open := false
	flush := func() {
		if open {
			words = append(words, word{text: cur.String()})
		}
		cur.Reset()
		open = false
	}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == ';':
			flush()
			return words, ";", s[i+1:]
		case strings.HasPrefix(s[i:], "&&"):
			flush()
			return words, "&&", s[i+2:]
		case c == ' ':
			flush()
		case c == '>':
			flush()
			op := ">"
			for _, longer := range []string{">>", ">&2"} {
				if strings.HasPrefix(s[i:], longer) {
					op = longer
				}
			}
			words = append(words, word{op, true})
			i += len(op) - 1
		case c == '\'' || c == '"':
			j := strings.IndexByte(s[i+1:], c)
			if j < 0 {
				j = len(s) - i - 1
			}
			quoted := s[i+1 : i+1+j]
			if c == '"' {
				quoted = os.Expand(quoted, p.variable)
			}
			cur.WriteString(quoted)
			open = true
			i += j + 1
		case c == '$':
			j := i + 1
			for j < len(s) && (s[j] == '_' || s[j] == '$' || s[j] >= '0' && s[j] <= '9' || s[j] >= 'A' && s[j] <= 'Z') {
				j++
			}
			if v := p.variable(s[i+1 : j]); v != "" {
				cur.WriteString(v)
				open = true
			}
			i = j - 1
		default:
			cur.WriteByte(c)
			open = true
		}
	}
	flush()
	return words, "", ""
}

func (p *process) variable(name string) string { return p.env[name] }

// simple runs one command with its redirections.
func (p *process) simple(words []word) (int, error) {
	var args []string
	q := *p
	for i := 0; i < len(words); i++ {
		switch {
		case !words[i].operator:
			args = append(args, words[i].text)
		case words[i].text == ">&2":
			q.out = p.err
		case i+1 < len(words):
			flags := os.O_CREATE | os.O_WRONLY | os.O_TRUNC
			if words[i].text == ">>" {
				flags = os.O_CREATE | os.O_WRONLY | os.O_APPEND
			}
			i++
			f, err := os.OpenFile(p.b.own(words[i].text), flags, 0o644)
			if err != nil {
				fmt.Fprintf(p.err, "sh: %v\n", err)
				return 1, nil
			}
			defer f.Close()
			q.out = f
		}
	}
	if len(args) == 0 {
		return 0, nil
	}
	return q.command(args)
}

// own is a path in the upperdir.
func (b *box) own(name string) string { return filepath.Join(b.upper, path.Clean("/"+name)) }

func (p *process) echo(args []string) (int, error) {
	end := "\n"
	if len(args) > 0 && args[0] == "-n" {
		args, end = args[1:], ""
	}
	_, _ = io.WriteString(p.out, strings.Join(args, " ")+end)
	return 0, nil
}

func (p *process) cat(args []string) (int, error) {
	if len(args) == 0 {
		done := make(chan struct{})
		go func() {
			_, _ = io.Copy(p.out, p.in)
			close(done)
		}()
		return 0, p.until(done)
	}
	for _, name := range args {
		f, err := p.b.read(name)
		if err != nil {
			fmt.Fprintf(p.err, "cat: can't open '%s': No such file or directory\n", name)
			return 1, nil
		}
		_, _ = io.Copy(p.out, f)
		f.Close()
	}
	return 0, nil
}

func (p *process) sleep(args []string) (int, error) {
	seconds, _ := strconv.ParseFloat(strings.Join(args, ""), 64)
	done := make(chan struct{})
	timer := time.AfterFunc(time.Duration(seconds*float64(time.Second)), func() { close(done) })
	defer timer.Stop()
	return 0, p.until(done)
}

// until blocks while signals are obeyed.
func (p *process) until(done <-chan struct{}) error {
	for {
		select {
		case <-done:
			return nil
		case <-p.dead.Done():
			return exited(128 + syscall.SIGKILL)
		case sig := <-p.signals:
			if err := p.obey(sig); err != nil {
				return err
			}
		}
	}
}

func (p *process) exit(args []string) (int, error) {
	code, _ := strconv.Atoi(strings.Join(args, ""))
	return 0, exited(code)
}

func (p *process) trap(args []string) (int, error) {
	if len(args) != 2 {
		return 2, nil
	}
	sig, err := signal.ParseSignal(args[1])
	if err != nil {
		return 1, nil
	}
	p.traps[sig] = args[0]
	return 0, nil
}

// killSelf is "kill -SIGNAL $$".
func (p *process) killSelf(args []string) (int, error) {
	sig, err := signal.ParseSignal(strings.TrimPrefix(strings.Join(args, ""), "-"))
	if err != nil {
		return 1, nil
	}
	if sig == syscall.SIGKILL {
		return 0, exited(128 + sig)
	}
	return 0, p.obey(sig)
}

func (p *process) mkdir(args []string) (int, error) {
	for _, name := range args {
		if err := os.MkdirAll(p.b.own(name), 0o755); err != nil {
			return 1, nil
		}
	}
	return 0, nil
}

func (p *process) rm(args []string) (int, error) {
	for _, name := range args {
		if err := os.Remove(p.b.own(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 1, nil
		}
	}
	return 0, nil
}
