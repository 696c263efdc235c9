package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/criu/crlog"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/proc"
)

// No dump is unbounded. A dump that makes no progress, or whose time is up, is ended by something
// that CRIU itself takes for a failure, so that it lets its processes go on: while it still stops
// them, by the signal of its own timeout, later by a failing write of an image. A kill, after
// which processes that it works on may be lost, is the last resort.

const (
	// idleLimit is for how long a dump may not come forward: neither its log nor its
	// images grow, nor does it use a processor.
	idleLimit = time.Minute
	// seizeLimit is the same while it stops the processes, which takes milliseconds.
	seizeLimit = time.Second
	// lenient is how long a dump that is to fail has for it.
	lenient = 8 * time.Second
	// closely is how often a dump is looked at that still stops the processes, seldom
	// afterwards.
	closely, seldom = 2 * time.Millisecond, 100 * time.Millisecond
)

// errIdle is why a dump is ended that does not come forward.
var errIdle = fmt.Errorf("%w: CRIU does not come forward", fault.ErrBusy)

// errDied is why a dump has failed whose CRIU got a signal that ends it.
var errDied = errors.New("CRIU was killed, by the kernel for lack of memory or by another process")

// overseer watches one dump.
type overseer struct {
	pid    int    // of the OCI runtime that runs CRIU
	log    string // CRIU's
	images string
	box    freezer.Container
	known  bool // box is

	criu   int
	mark   string // how far it is
	since  time.Time
	seizes bool // it still stops the processes
}

// oversee waits for a dump, and ends it when ctx ends or it does not come forward: then
// its error is *brokenOff. wait is what waits for the OCI runtime.
func (o *overseer) oversee(ctx context.Context, wait func() error) error {
	done := guard.Start(wait)
	o.seizes, o.since = true, time.Now()
	looked := time.Time{}
	for {
		pause := seldom
		if o.seizes {
			pause = closely
		}
		select {
		case err := <-done:
			if err != nil && o.vanished() {
				return &brokenOff{why: errDied, where: o.where(), seized: o.stage() != "", killed: true}
			}
			return err
		case <-ctx.Done():
			return o.breakOff(context.Cause(ctx), done)
		case <-time.After(pause):
		}
		if o.seizes {
			o.unstick()
		}
		if time.Since(looked) < seldom {
			continue
		}
		looked = time.Now()
		if o.criu != 0 && died(o.criu) { // the OCI runtime may still wait for it
			return &brokenOff{why: errDied, where: o.where(), seized: o.stage() != "", killed: true, left: o.kill(done)}
		}
		if why := o.idle(); why != nil {
			return o.breakOff(why, done)
		}
	}
}

// brokenOff is a dump that was ended.
type brokenOff struct {
	why    error
	where  string // it was
	seized bool   // it had stopped all processes
	killed bool
	left   error  // it has not even ended by that
	after  string // what came of its processes
}

func (b *brokenOff) Error() string { return fmt.Sprintf("the dump was ended: %v; %s", b.why, b.where) }

func (b *brokenOff) Unwrap() error { return errors.Join(b.why, b.left) }

// breakOff ends the dump.
func (o *overseer) breakOff(why error, done <-chan error) error {
	b := &brokenOff{why: why, where: o.where(), seized: o.stage() != ""}
	b.killed, b.left = o.end(done)
	return b
}

// explain is what a dump that was ended means for its caller.
func (b *brokenOff) explain(rt Runtime, log string) error {
	code, hint := "ended", "" // a caller whose time is up knows what to do
	switch {
	case errors.Is(b.why, errDied):
		code, hint = "killed", "Try again; dmesg tells whether the kernel has run out of memory."
	case errors.Is(b.why, errIdle) && !b.seized:
		code, hint = codeInstant, "Try again."
	case errors.Is(b.why, errIdle):
		hint = "Try again; " + log + " says what CRIU has done last."
	}
	text := b.why.Error() + ": " + b.where
	if b.killed && !errors.Is(b.why, errDied) {
		text += "; it had to be killed"
	}
	text += b.after
	return &DumpError{
		Diagnosis: Diagnosis{Code: code, Reason: text, Hint: hint}, Log: log, Err: fmt.Errorf("dump %s: %w", rt.ID, b),
	}
}

// survive freezes a container again whose dump was killed, and says what has become of its
// processes.
func (r Runtime) survive(members []int, initPid int) string {
	text := ""
	if err := unlockNetwork(initPid); err != nil {
		text = fmt.Sprintf("; its hold on the network may last: %v", err)
	}
	// CRIU's code that runs in them ends by itself, as long as they are not frozen.
	var gone []string
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		gone = nil
		for _, p := range members {
			if st, err := proc.Read(p); err != nil || st.Ended() {
				gone = append(gone, strconv.Itoa(p))
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), lenient)
	defer cancel()
	if err := r.Pause(ctx); err != nil {
		text += fmt.Sprintf("; %v", err)
	}
	if len(gone) > 0 {
		return fmt.Sprintf(", and %d of %d processes have ended with it (%s)", len(gone), len(members),
			strings.Join(gone, ", ")) + text
	}
	return fmt.Sprintf(", and all %d processes go on", len(members)) + text
}

// unstick helps CRIU over stopped processes. It has none to stop any more once it lets
// the cgroup go on, with all of them in its hands.
func (o *overseer) unstick() {
	if !o.known || o.find() == 0 {
		return
	}
	if _, err := o.box.Unstick(o.criu); err != nil {
		return // it stands then, and that is seen
	}
	if frozen, err := o.box.Frozen(); err == nil && !frozen {
		o.seizes = false
	}
}

// find is CRIU's process; 0: there is none (yet).
func (o *overseer) find() int {
	if o.criu != 0 && comm(o.criu) == "criu" {
		return o.criu
	}
	o.criu = 0
	for _, p := range descendants(o.pid) {
		if comm(p) == "criu" {
			o.criu = p
			break
		}
	}
	return o.criu
}

// idle returns why the dump is to be ended for not coming forward; nil: it does.
func (o *overseer) idle() error {
	stage := o.stage()
	o.seizes = o.seizes && stage == ""
	mark := fmt.Sprint(o.seizes, o.log, sizeOf(o.log), sizes(o.images), used(o.pid), used(o.find()))
	limit := idleLimit
	if o.seizes && o.begun() && !asleep(o.criu) {
		limit = seizeLimit
	}
	if mark != o.mark {
		o.mark, o.since = mark, time.Now()
		return nil
	}
	if time.Since(o.since) > limit {
		return errIdle
	}
	return nil
}

// begun reports whether CRIU has begun to stop the processes: from then on it has a
// handler for the signal of its timeout.
func (o *overseer) begun() bool {
	tail := o.tail()
	return strings.Contains(tail, "freezing ") || strings.Contains(tail, "freezer.state") ||
		strings.Contains(tail, "Detected cgroup")
}

// died reports whether a signal has ended a process that its parent has not waited for yet.
func died(pid int) bool {
	st, err := proc.Read(pid)
	return err == nil && st.State == 'Z' && st.Exit&0x7f != 0
}

// vanished reports whether a CRIU that failed has ended without a word of why.
func (o *overseer) vanished() bool {
	why, err := crlog.File(o.log)
	return err == nil && why.Reason == ""
}

// asleep reports whether a signal has stopped a process.
func asleep(pid int) bool {
	st, err := proc.Read(pid)
	return err == nil && st.State == 'T'
}

// end ends the dump. Not killed it has failed by itself, and its processes go on.
func (o *overseer) end(done <-chan error) (killed bool, err error) {
	for _, p := range append([]int{o.pid}, descendants(o.pid)...) {
		if asleep(p) {
			_ = syscall.Kill(p, syscall.SIGCONT)
		}
	}
	until := time.Now().Add(lenient)
	failed := false
	for asked := (time.Time{}); time.Now().Before(until); {
		select {
		case <-done:
			return false, nil
		case <-time.After(closely):
		}
		if o.find() == 0 {
			continue
		}
		o.unstick()
		if o.stage() != "" {
			failed = failed || failWrite(o.criu, o.images)
		} else if asked.IsZero() && o.begun() {
			// Its own handler breaks off what it waits for, and counts up to five.
			_ = syscall.Kill(o.criu, syscall.SIGALRM)
			asked = time.Now()
		}
	}
	return true, o.kill(done)
}

// kill ends a dump that nothing else ends.
func (o *overseer) kill(done <-chan error) error {
	for _, p := range slices.Backward(descendants(o.pid)) {
		if comm(p) == "criu" {
			_ = syscall.Kill(p, syscall.SIGKILL)
		}
	}
	select {
	case <-done:
	case <-time.After(time.Second):
		_ = syscall.Kill(o.pid, syscall.SIGKILL)
		select {
		case <-done:
		case <-time.After(lenient):
			return fmt.Errorf("%w: not even a kill has ended process %d, which waits in %q", fault.ErrBusy,
				o.pid, freezer.Waits(o.pid))
		}
	}
	return nil
}

// stage is what CRIU works on once it has stopped all processes; empty: it stops them.
func (o *overseer) stage() string {
	tail := o.tail()
	at := strings.LastIndex(tail, "Dumping task (pid: ")
	if at < 0 {
		if sizeOf(o.log) > tailSize || strings.Contains(tail, "Collecting ") ||
			strings.Contains(tail, "Dumping pstree") {
			return "what the processes share"
		}
		return ""
	}
	text, _, _ := strings.Cut(tail[at+len("Dumping task ("):], ")")
	return text
}

// where says how far CRIU has come.
func (o *overseer) where() string {
	text := "CRIU was stopping the processes"
	if stage := o.stage(); stage != "" {
		text = "CRIU was dumping " + stage
	} else if !o.begun() {
		text = "CRIU was starting"
	}
	if asleep(o.pid) || o.criu != 0 && asleep(o.criu) {
		text += ", and was itself stopped by a signal"
	} else if where := freezer.Waits(o.criu); o.criu != 0 && where != "" {
		text += fmt.Sprintf(", in the kernel's %s", where)
	}
	return text
}

const tailSize = 64 << 10

// tail is the end of CRIU's log.
func (o *overseer) tail() string {
	f, err := os.Open(o.log)
	if err != nil {
		return ""
	}
	defer f.Close()
	buf := make([]byte, tailSize)
	n, _ := f.ReadAt(buf, max(0, sizeOf(o.log)-tailSize))
	return string(bytes.ToValidUTF8(buf[:n], nil))
}

func sizeOf(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// sizes is how much the files of a directory have.
func sizes(dir string) (n int64) {
	list, _ := os.ReadDir(dir)
	for _, f := range list {
		n += sizeOf(filepath.Join(dir, f.Name()))
	}
	return n
}

// used is how much a process has used of a processor; 0: there is none.
func used(pid int) uint64 {
	st, _ := proc.Read(pid)
	return st.Used
}

func comm(pid int) string {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(data))
}

// descendants lists those of a process.
func descendants(pid int) (list []int) {
	for next := []int{pid}; len(next) > 0; next = next[1:] {
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", next[0]))
		for _, t := range tasks {
			children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", next[0], t.Name()))
			for _, field := range strings.Fields(string(children)) {
				if p, err := strconv.Atoi(field); err == nil {
					list, next = append(list, p), append(next, p)
				}
			}
		}
	}
	return list
}
