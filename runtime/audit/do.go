package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// frees are the verbs that go on without the log: on a full disk they are the
// way out, and what runs amok must be stoppable.
var frees = map[string]bool{"checkpoint rm": true, "image logout": true, "image prune": true, "image rm": true,
	"kill": true, "pause": true, "prune": true,
	"lease end": true, "lease release": true, "lease renew": true, "lease transfer": true, "recover": true, "rm": true,
	"stop": true, "volume rm": true}

// Do performs a verb between its two records. do may add the outcome to the second one.
func (l *Log) Do(who Who, r Record, do func(r *Record) error) error {
	r.Phase, r.Who = Begin, who
	seq, err := l.Append(r, false)
	if err == nil {
		err = failpoint.Hit("audit.after-begin")
	}
	if err != nil && !frees[r.Verb] {
		return &fault.Error{Op: r.Verb, ID: r.Ref,
			Err:  fmt.Errorf("nothing was done, as it cannot be put on record: %w", err),
			Hint: "Everything that may change something is noted in " + l.Dir() + " first."}
	}
	if err != nil {
		slog.Error("audit record not written", "verb", r.Verb, "ref", r.Ref, "err", err)
	}
	done := r
	done.Of = seq
	err = guard.Do(func() error { return do(&done) })
	done.Phase, done.Outcome = End, Outcome(err)
	e := failpoint.Hit("audit.before-end")
	if e == nil {
		_, e = l.Append(done, true)
	}
	if e != nil && !frees[r.Verb] {
		e = fmt.Errorf("its end is not on record: %w", e)
		if err == nil {
			e = &fault.Error{Op: r.Verb, ID: r.Ref, Err: fmt.Errorf("it is done, but %w", e)}
		}
		return errors.Join(err, e)
	}
	if e != nil {
		slog.Error("end of the verb not recorded", "verb", r.Verb, "ref", r.Ref, "err", e)
	}
	return err
}

// outcomes are the codes of errors, as the API has them.
var outcomes = []struct {
	err  error
	code string
}{
	{fault.ErrNotFound, "not_found"}, {fault.ErrExists, "exists"}, {fault.ErrState, "state"},
	{fault.ErrDenied, "denied"}, {fault.ErrUnsupported, "unsupported"}, {fault.ErrApproval, "approval"},
	{fault.ErrCorrupt, "corrupt"}, {fault.ErrBusy, "busy"}, {fault.ErrInvalid, "invalid"},
	{runtime.ErrDetached, "detached"},
	{context.Canceled, "canceled"}, {context.DeadlineExceeded, "deadline"},
}

// Outcome is the code of an error: its text may have in it what is secret.
func Outcome(err error) string {
	if err == nil {
		return "ok"
	}
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			return o.code
		}
	}
	return "internal"
}

// whoAsks returns the caller of the verb, or this process itself if there is none.
func whoAsks(ctx context.Context, by string) Who {
	if c, ok := runtime.CallerOf(ctx); ok {
		if c.Address != "" {
			return Who{Client: Clip(c.Client), Address: c.Address, By: "service"}
		}
		return Who{UID: &c.UID, Pid: c.Pid, Login: loginOf(c.Pid), By: "service"}
	}
	return Self(by)
}

// Self is this process.
func Self(by string) Who {
	uid := uint32(os.Getuid())
	return Who{UID: &uid, Pid: os.Getpid(), Login: loginOf(os.Getpid()), By: by}
}

// loginOf returns the login user of a process, or nil if it has none or the kernel does not
// say.
func loginOf(pid int) *uint32 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/loginuid", pid))
	if err != nil {
		return nil
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
	uid := uint32(n)
	if err != nil || uid == ^uint32(0) {
		return nil
	}
	return &uid
}

// maxText bounds what of a caller's is on record.
const maxText = 256

// userinfo is that of a URL typed where a name belongs, which may be a password.
var userinfo = lazy.Regexp(`://[^/@\s]*@`)

// Clip bounds what of a caller's text goes on record, and takes the password of a URL out of it.
func Clip(s string) string {
	if strings.Contains(s, "://") {
		s = userinfo().ReplaceAllString(s, "://…@")
	}
	if len(s) <= maxText {
		return s
	}
	n := maxText
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
