package main

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// signals decides which process gets a signal that was sent to agentbox. The first one cancels
// the verb, which undoes what it began; the second ends the process at once, which the journal
// survives. While a sandbox's command has the foreground without a terminal, signals go to it
// instead (forwardTo).
type signals struct {
	cancel context.CancelCauseFunc
	ch     chan os.Signal
	done   chan struct{}

	mu      sync.Mutex
	first   os.Signal
	forward func(os.Signal)
	times   map[os.Signal]int
}

// A signalError is the cause of a context cancelled by a signal.
type signalError struct{ sig os.Signal }

func (e signalError) Error() string { return "stopped by signal: " + e.sig.String() }

// status is the exit code of a program that ended by the signal.
func (e signalError) status() exitStatus {
	if sig, ok := e.sig.(syscall.Signal); ok {
		return exitStatus(128 + int(sig))
	}
	return exitFailure
}

func catchSignals(parent context.Context) (context.Context, *signals) {
	ctx, cancel := context.WithCancelCause(parent)
	s := &signals{cancel: cancel, ch: make(chan os.Signal, 16), done: make(chan struct{}), times: map[os.Signal]int{}}
	s.notify(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go s.loop()
	return ctx, s
}

// notify leaves ignored signals ignored: nohup and shells' background jobs
// rely on that.
func (s *signals) notify(sigs ...os.Signal) {
	for _, sig := range sigs {
		if !signal.Ignored(sig) {
			signal.Notify(s.ch, sig)
		}
	}
}

func (s *signals) loop() {
	for {
		select {
		case sig := <-s.ch:
			s.handle(sig)
		case <-s.done:
			return
		}
	}
}

func (s *signals) handle(sig os.Signal) {
	s.mu.Lock()
	forward := s.forward
	s.times[sig]++
	if forward != nil && s.times[sig] < 3 {
		s.mu.Unlock()
		go forward(sig) // a slow one must not keep the next signal waiting
		return
	}
	second := s.first != nil
	if !second {
		s.first = sig
	}
	s.mu.Unlock()
	s.cancel(signalError{sig})
	if second {
		signal.Reset(sig)
		_ = syscall.Kill(os.Getpid(), sig.(syscall.Signal))
	}
}

// forwardTo sends further signals to fn until the returned function is
// called. The third of a kind is agentbox's own again: a command that ignores
// Ctrl-C does not hold the caller for ever.
func (s *signals) forwardTo(fn func(os.Signal)) (stop func()) {
	s.mu.Lock()
	s.forward = fn
	s.times = map[os.Signal]int{}
	s.mu.Unlock()
	s.notify(syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	return func() {
		signal.Reset(syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
		s.mu.Lock()
		s.forward = nil
		s.mu.Unlock()
	}
}

// caught is the signal that cancelled the command, or nil.
func (s *signals) caught() os.Signal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.first
}

func (s *signals) stop() {
	signal.Stop(s.ch)
	close(s.done)
	s.cancel(nil)
}
