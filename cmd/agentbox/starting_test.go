package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentbox/agentbox/runtime/api"
)

// A service that systemd is starting is waited for as long as that takes; one that
// merely does not answer is given up.
func TestAsk(t *testing.T) {
	const never = 24 * time.Hour
	for name, c := range map[string]struct {
		answers time.Duration // after this
		active  time.Duration // until then systemd says that it starts it
		err     error
		took    time.Duration
	}{
		"at once":       {answers: time.Second, took: time.Second},
		"silent":        {answers: never, err: errSilent, took: answerTime},
		"slow to start": {answers: 10 * time.Minute, active: 10 * time.Minute, took: 10 * time.Minute},
		"started, and slow to speak": {
			answers: 3*answerTime + answerTime/2, active: 3*answerTime - 1, took: 3*answerTime + answerTime/2,
		},
		"started, and silent": {answers: never, active: 3*answerTime - 1, err: errSilent, took: 4 * answerTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				info, err := ask(t.Context(), func(ctx context.Context) (api.Info, error) {
					select {
					case <-time.After(c.answers):
						return api.Info{Version: "1"}, nil
					case <-ctx.Done():
						return api.Info{}, ctx.Err()
					}
				}, func(context.Context) bool { return time.Since(begun) < c.active })
				if !errors.Is(err, c.err) || time.Since(begun) != c.took || (err == nil) != (info.Version == "1") {
					t.Errorf("%+v, %v after %v; want %v after %v", info, err, time.Since(begun), c.err, c.took)
				}
			})
		})
	}
}

// An interrupt ends the wait, and is not reported as a silent service.
func TestAskInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		interrupt := errors.New("interrupt")
		ctx, cancel := context.WithCancelCause(t.Context())
		begun := time.Now()
		time.AfterFunc(time.Minute, func() { cancel(interrupt) })
		_, err := ask(ctx, func(ctx context.Context) (api.Info, error) {
			<-ctx.Done()
			return api.Info{}, context.Cause(ctx)
		}, func(context.Context) bool { return true })
		if !errors.Is(err, interrupt) || time.Since(begun) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

func TestComesUp(t *testing.T) {
	for _, c := range []struct {
		shown, invocation string
		want              bool
	}{
		{"ActiveState=activating\nInvocationID=abc\n", "", true},
		{"ActiveState=activating\nInvocationID=abc\n", "def", true},
		{"ActiveState=activating\nInvocationID=abc\n", "abc", false}, // it waits for us
		{"ActiveState=active\nInvocationID=abc\n", "", false},
		{"Job=7\nActiveState=active\nInvocationID=abc\n", "", false}, // and about to be stopped
		{"Job=7\nActiveState=deactivating\nInvocationID=abc\n", "", false},
		{"Job=7\nActiveState=inactive\nInvocationID=\n", "", true},
		{"ActiveState=inactive\nInvocationID=\n", "", false},
		{"Job=0\nActiveState=failed\n", "", false},
		{"", "", false},
	} {
		if got := comesUp(c.shown, c.invocation); got != c.want {
			t.Errorf("%q for %q: %v", c.shown, c.invocation, got)
		}
	}
}
