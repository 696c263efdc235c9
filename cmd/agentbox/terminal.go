package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/agentbox/agentbox/runtime"
)

// attachOptions say how a command is connected to the caller.
type attachOptions struct {
	Interactive bool // connect stdin
	TTY         bool
	DetachKeys  string
	SigProxy    bool
}

func (o *attachOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.DetachKeys, "detach-keys", "ctrl-p,ctrl-q", "with a terminal, detach on these `KEYS`; empty: none")
}

func (o *attachOptions) addSigProxy(fl *pflag.FlagSet) {
	fl.BoolVar(&o.SigProxy, "sig-proxy", true,
		"without a raw terminal, pass signals on to the sandbox; the third of a kind ends agentbox, not the sandbox")
}

// A session is one command in the foreground of the caller's terminal.
type session struct {
	app  *app
	opts attachOptions
	keys []byte
	raw  bool // the caller's terminal is ours while attached

	output io.Writer // what the command prints; nil: the caller's stdout
}

// newSession checks everything that can be wrong before anything starts.
func (a *app) newSession(opts attachOptions) (*session, error) {
	keys, err := parseDetachKeys(opts.DetachKeys)
	if err != nil {
		return nil, err
	}
	if opts.TTY && opts.Interactive && !isTerminal(a.stdin) {
		return nil, usageErrorf("the input device is not a TTY")
	}
	return &session{app: a, opts: opts, keys: keys, raw: opts.TTY && opts.Interactive}, nil
}

// run hands fn the streams and returns what fn returns. While fn runs, the
// terminal is raw and its size followed; whatever happens, a panic included,
// it is put back. A cancelled context ends the session even when fn does not
// notice.
func (s *session) run(ctx context.Context, fn func(runtime.Streams) error) error {
	streams := runtime.Streams{Stdout: s.app.stdout, Stderr: s.app.stderr}
	if s.output != nil {
		streams.Stdout = s.output
	}
	if s.opts.Interactive {
		streams.Stdin = s.app.stdin
	}
	restore := func() {}
	if s.opts.TTY {
		streams.DetachKeys = s.keys
		sizes, stop := followSize(s.app.stdout, s.app.stdin)
		defer stop()
		streams.Resize = sizes
	}
	if s.raw {
		state, err := term.MakeRaw(int(s.app.stdin.Fd()))
		if err != nil {
			return err
		}
		restore = sync.OnceFunc(func() { _ = term.Restore(int(s.app.stdin.Fd()), state) })
		defer restore()
	}
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				restore()
				panic(p)
			}
		}()
		done <- fn(streams)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(sessionGrace):
		return context.Cause(ctx)
	}
}

// sessionGrace is how long a cancelled session may take to end in order.
const sessionGrace = 2 * time.Second

// forward passes the caller's signals on to the sandbox while the session
// lasts; those that come before it runs wait for ready. In raw mode Ctrl-C is a byte like any other, and a signal is meant
// for agentbox.
func (s *session) forward(ctx context.Context, svc runtime.Service, id string, ready <-chan struct{}) (stop func()) {
	if !s.opts.SigProxy || s.raw {
		return func() {}
	}
	return s.app.signals.forwardTo(func(sig os.Signal) {
		select {
		case <-ready:
		case <-ctx.Done():
			return
		}
		// The sandbox may be gone already; then the signal has no target.
		_ = svc.Kill(ctx, id, signalName(sig))
	})
}

// left returns the error of a caller that disconnected from a running sandbox.
func left(ctx context.Context, verb, name string) error {
	return &runtime.Error{
		Op: verb, ID: name, Err: context.Cause(ctx), Hint: "The sandbox goes on; end it with: agentbox stop " + name,
	}
}

func signalName(sig os.Signal) string {
	switch sig {
	case syscall.SIGINT:
		return "SIGINT"
	case syscall.SIGTERM:
		return "SIGTERM"
	case syscall.SIGHUP:
		return "SIGHUP"
	case syscall.SIGQUIT:
		return "SIGQUIT"
	case syscall.SIGUSR1:
		return "SIGUSR1"
	default:
		return "SIGUSR2"
	}
}

func isTerminal(f *os.File) bool { return f != nil && term.IsTerminal(int(f.Fd())) }

// isTerminalWriter reports whether w, which need not be a file, is a terminal.
func isTerminalWriter(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isTerminal(f)
}

// firstTerminal returns the first of files that is a terminal, or nil.
func firstTerminal(files ...*os.File) *os.File {
	for _, f := range files {
		if isTerminal(f) {
			return f
		}
	}
	return nil
}

// terminalSize returns the size of a terminal.
func terminalSize(tty *os.File) (runtime.Size, bool) {
	w, h, err := term.GetSize(int(tty.Fd()))
	if err != nil || w <= 0 || h <= 0 {
		return runtime.Size{}, false
	}
	return runtime.Size{Width: uint16(w), Height: uint16(h)}, true
}

// followSize sends the size of the first of files that is a terminal, at once
// and after each change. Only the newest size waits in the channel: a slow
// reader never sees a stale one.
func followSize(files ...*os.File) (<-chan runtime.Size, func()) {
	sizes := make(chan runtime.Size, 1)
	tty := firstTerminal(files...)
	if tty == nil {
		return sizes, func() {}
	}
	send := func() {
		size, ok := terminalSize(tty)
		if !ok {
			return
		}
		for {
			select {
			case sizes <- size:
				return
			default:
			}
			select {
			case <-sizes:
			default:
			}
		}
	}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	send()
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-changed:
				send()
			case <-done:
				return
			}
		}
	}()
	return sizes, func() { signal.Stop(changed); close(done) }
}
