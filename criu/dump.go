package criu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/criu/crlog"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Diagnosis says why a dump or restore failed.
type Diagnosis = crlog.Diagnosis

// Diagnose reads a log of CRIU.
func Diagnose(r io.Reader) Diagnosis { return crlog.Diagnose(r) }

// DumpOptions say where a dump goes and what it does.
type DumpOptions struct {
	ImageDir     string // made when missing, 0700; takes stats-dump, too
	WorkDir      string // takes dump.log; made when missing, 0700
	LeaveRunning bool   // the container lives on, paused; otherwise it is gone
	Upper        string // the upperdir of its root filesystem; empty: it is none
	Options
	// Hold, if set, is kept open by the dumping processes. A flock on it outlives this process,
	// so that nothing touches the container while an orphaned dump still runs.
	Hold *os.File

	// Start, when given, starts the OCI runtime, as cmd.Start does.
	Start func(cmd *exec.Cmd) error
}

// DumpResult reports a dump.
type DumpResult struct {
	Processes []Process
	Took      time.Duration
	// Interrupted is why threads of the container, which lives on, may see
	// EINTR from calls that nothing but the dump has interrupted.
	Interrupted error
	Warnings    []string // what a restore will not bring back
	// Lost is what the container, which lives on, has lost by the dump. It is set on error, too.
	Lost []string
}

// DumpError is a dump that CRIU refused or that failed. The container is as
// it was before.
type DumpError struct {
	Diagnosis
	Log string // CRIU's log; empty when CRIU was not reached
	Err error

	waited bool // for an instant that does not pass
}

func (e *DumpError) Error() string {
	if e.Reason == "" {
		return e.Err.Error()
	}
	return e.Reason
}

// Unwrap hands on the hint and the log, for fault.Hint and fault.Logs.
func (e *DumpError) Unwrap() error { return &fault.Error{Hint: e.Hint, Log: e.Log, Err: e.Err} }

// RestoreError is a restore that the OCI runtime wrapper could not do.
type RestoreError struct {
	crlog.Failure
	Err error // what its caller made of it
}

func (e *RestoreError) Error() string { return e.Reason }

// Unwrap hands on the hint and the log, for fault.Hint and fault.Logs.
func (e *RestoreError) Unwrap() error { return &fault.Error{Hint: e.Hint, Log: e.Log, Err: e.Err} }

// RestoreFailure is err, the failure of a start that was to restore, in the words
// that the wrapper left in the restore's work directory; err itself when there are none.
func RestoreFailure(work string, err error) error {
	f, e := crlog.ReadFailure(work)
	if err == nil || e != nil || f.Reason == "" {
		return err
	}
	return &RestoreError{Failure: f, Err: err}
}

// ClearRestoreFailure forgets what an earlier restore has left in the work directory.
func ClearRestoreFailure(work string) error { return crlog.ClearFailure(work) }

// Dump writes the processes of a paused container to images.
//
// When ctx ends, or CRIU does not come forward, the dump is ended by what CRIU takes
// for a failure of its own, for a CRIU that is killed may take the processes with it
// that it works on; see bound.go. The container stays paused. Errors of CRIU are *DumpError.
func Dump(ctx context.Context, rt Runtime, opts DumpOptions) (res DumpResult, err error) {
	for _, d := range []string{opts.ImageDir, opts.WorkDir} {
		if !filepath.IsAbs(d) {
			return res, fmt.Errorf("dump %s: directory %q is not absolute: %w", rt.ID, d, fault.ErrInvalid)
		}
		if err := os.MkdirAll(d, 0o700); err != nil {
			return res, fmt.Errorf("dump %s: %w", rt.ID, err)
		}
	}
	state, err := rt.State(ctx)
	if err != nil {
		return res, err
	}
	if state.Status != "paused" {
		return res, fmt.Errorf("dump %s: it is %s, not paused: %w", rt.ID, state.Status, fault.ErrState)
	}
	members, err := Members(state.Pid)
	if err != nil {
		return res, err
	}
	if err := rt.ready(ctx, members); err != nil {
		return res, err
	}
	if len(opts.ScanPaths) == 0 {
		// Not fatal: CRIU may find the names itself, and says so when it cannot.
		opts.ScanPaths, _ = watches(state.Pid, members)
	}
	if opts.gone, err = findGone(state.Pid, members); err != nil {
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	if err := opts.gone.within(opts.GhostLimit); err != nil {
		return res, err
	}
	if res.Lost, err = rt.PutBack(ctx, true); err != nil { // of a dump before
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	start := time.Now()
	record, err := recordOf(state.Pid, members)
	if err != nil {
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	held, left, err := rt.accept(ctx, &record, members)
	defer func() {
		if held == nil {
			return
		}
		lost, e := rt.putBack(context.WithoutCancel(ctx), held)
		if e != nil { // it goes on where it was
			lost, e = rt.putBack(context.WithoutCancel(ctx), held)
		}
		if res.Lost = append(res.Lost, lost...); e != nil {
			res.Lost = append(res.Lost, fmt.Sprintf("connections that were not accepted yet are not put back: %v", e))
		}
	}()
	if err != nil {
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	dumped, show := rt.hideTerminals(ctx, record)
	defer func() { res.Warnings = append(res.Warnings, show()...) }()
	// Not fatal, either: CRIU refuses what it has not been told of.
	cut, _ := severed(state.Pid, members, opts.TCP)
	opts.severed = cut.inodes
	var extra extras
	config := state.Annotations[ConfigAnnotation]
	if config == "" {
		// The bundle is not ours.
		config = filepath.Join(opts.WorkDir, "criu.conf")
		extra.env = []string{configEnv + "=" + config}
		extra.flags = overruled(rt.Binary)
	}
	if err := WriteConfig(config, opts.Options); err != nil {
		return res, err
	}
	log := filepath.Join(opts.WorkDir, "dump.log")
	if err := os.Remove(log); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	// The last moment at which giving up is free.
	if err := ctx.Err(); err != nil {
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	res.Warnings = record.Lost()
	said, err := runDump(ctx, rt, opts, extra)
	var broken *brokenOff
	if errors.As(err, &broken) && broken.killed {
		broken.after = rt.survive(members, state.Pid)
	}
	var ours error // of what follows CRIU
	if err == nil {
		ours = errors.Join(dumped.Write(opts.ImageDir), mendTimers(opts.ImageDir, record),
			failpoint.Hit("checkpoint.before-waits"))
	}
	if err != nil || ours != nil || opts.LeaveRunning {
		// One that failed has stopped the threads all the same.
		res.Interrupted = rt.continueWaits(ctx, members)
	}
	res.Took = time.Since(start)
	if broken != nil {
		return res, broken.explain(rt, log)
	}
	if err != nil {
		err = explainDump(rt, log, said, err)
		explainLeft(err, left)
		return res, err
	}
	if ours != nil {
		return res, fmt.Errorf("dump %s: %w", rt.ID, ours)
	}
	// CRIU writes it beside its log; no restore needs it.
	_ = os.Rename(filepath.Join(opts.WorkDir, StatsName), filepath.Join(opts.ImageDir, StatsName))
	// CRIU has been seen to report nothing of a full disk; what cannot be
	// restored must not count as a checkpoint.
	if err := CheckImages(opts.ImageDir); err != nil {
		return res, &DumpError{Diagnosis: Diagnosis{Code: "image-damaged", Reason: err.Error()}, Log: log, Err: err}
	}
	if err := opts.gone.complete(opts.ImageDir, opts.Upper); err != nil {
		return res, fmt.Errorf("dump %s: %w", rt.ID, err)
	}
	if err := cut.sever(opts.ImageDir); err != nil {
		return res, &DumpError{Diagnosis: Diagnosis{Code: "unix-socket", Reason: err.Error()}, Log: log, Err: err}
	}
	res.Warnings = append(res.Warnings, cut.warnings...)
	if err := judged(opts.ImageDir, log); err != nil {
		return res, err
	}
	if res.Processes, err = Processes(opts.ImageDir); err != nil {
		return res, &DumpError{Diagnosis: Diagnosis{Code: "image-damaged", Reason: err.Error()}, Log: log, Err: err}
	}
	return res, nil
}

// ContinueWaits completes, for a container that was dumped and is still frozen, what a killed
// Dump has not reached: threads whose calls it has interrupted make them again. initPid is the
// container's first process. Idempotent.
func (r Runtime) ContinueWaits(ctx context.Context, initPid int) error {
	members, err := Members(initPid)
	if err != nil {
		return err
	}
	return r.continueWaits(ctx, members)
}

// hideTerminals has /dev/tty stand under the terminals' own names in a frozen container, until
// show is called, and returns the record of that. Where it cannot, CRIU refuses the dump, or does
// not. show returns a warning where a descriptor stays as it was for the dump.
func (r Runtime) hideTerminals(ctx context.Context, record proof.Record) (dumped proof.Record, show func() []string) {
	none := func() []string { return nil }
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err != nil {
		return record, none
	}
	ctx = context.WithoutCancel(ctx)
	show = func() []string {
		if is, err := c.Frozen(); err != nil || !is || !c.Alive() {
			return nil // they have ended, or go on with the duplicates
		}
		if err := record.ShowTerminals(ctx, c); err != nil {
			return []string{fmt.Sprintf("a descriptor of /dev/tty has become one of the terminal under its own name: %v", err)}
		}
		return nil
	}
	if dumped, err = record.HideTerminals(ctx, c); err != nil {
		_ = show()
		return record, none
	}
	return dumped, show
}

// StatsName is what CRIU measured of a dump. It is no image, but what shows
// checkpoints asks for it.
const StatsName = "stats-dump"

// extras are for a container whose bundle names no configuration file of CRIU.
type extras struct {
	env   []string
	flags []string
}

// configEnv names a configuration file for CRIU, which applies it before the
// runtime's own options. The runtime passes its environment on.
const configEnv = "CRIU_CONFIG_FILE"

// overruled returns the settings of our configuration that the runtime would revert when its own
// options come last, in the words of its command line: runc since 1.3 always says whether to skip
// connections in flight, and says no.
func overruled(binary string) []string {
	const flag = "--tcp-skip-in-flight"
	cmd := exec.Command(binary, "checkpoint", "--help")
	cmd.Env = host.Environ()
	help, err := cmd.Output()
	if err != nil || !strings.Contains(string(help), flag) {
		return nil // older, and has no opinion
	}
	return []string{flag}
}

// runDump runs `runc checkpoint`, cut off from whatever may end this process:
// its own session (no signals from the terminal), output to a file (no SIGPIPE).
func runDump(ctx context.Context, rt Runtime, opts DumpOptions, extra extras) (said string, err error) {
	out, err := os.CreateTemp(opts.WorkDir, "runtime-")
	if err != nil {
		return "", err
	}
	defer out.Close()
	defer os.Remove(out.Name())
	args := append(rt.globals(), "checkpoint", "--image-path", opts.ImageDir, "--work-path", opts.WorkDir)
	if opts.LeaveRunning {
		args = append(args, "--leave-running")
	}
	args = append(append(args, opts.RuntimeFlags()...), extra.flags...)
	cmd := exec.Command(rt.Binary, append(args, rt.ID)...)
	cmd.Env = append(host.Environ(), extra.env...) // of two of a name the last wins
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if opts.Hold != nil {
		// Past the descriptors that runc gives its own children, so that CRIU
		// inherits it as well.
		cmd.ExtraFiles = append(make([]*os.File, 16), opts.Hold)
	}
	start := cmd.Start
	if opts.Start != nil {
		start = func() error { return opts.Start(cmd) }
	}
	if err = start(); err == nil {
		o := overseer{pid: cmd.Process.Pid, log: filepath.Join(opts.WorkDir, "dump.log"), images: opts.ImageDir}
		o.box, err = freezer.Open(rt.stateRoot(), rt.ID)
		o.known = err == nil
		if err = o.oversee(ctx, cmd.Wait); err != nil {
			// They would hold what DumpOptions.Hold locks.
			if _, oerr := host.EndOrphans(); oerr != nil {
				err = errors.Join(err, oerr)
			}
		}
	}
	text := make([]byte, 64<<10)
	n, _ := out.ReadAt(text, 0)
	return string(text[:n]), err
}

func explainDump(rt Runtime, log, said string, err error) error {
	cause := rt.explain("checkpoint", err, said)
	if errors.Is(cause, fault.ErrNotFound) {
		return cause
	}
	why, lerr := crlog.File(log)
	if lerr != nil { // CRIU was not reached
		log = ""
		msg := lastMessage(said)
		if strings.Contains(msg, "unknown command") { // crun, as many distributions build it
			why = Diagnosis{
				Code:   "no-criu",
				Reason: fmt.Sprintf("the OCI runtime %s was built without support for CRIU: it has no command \"checkpoint\"", rt.Binary),
				Hint:   "Run the container under runc or agentbox-runtime, or checkpoint its files alone (--files-only).",
			}
			cause = fmt.Errorf("%w: %w", cause, fault.ErrUnsupported)
		}
		if strings.Contains(msg, "libcriu") { // which crun loads when it first needs it
			why = Diagnosis{
				Code:   "no-criu",
				Reason: fmt.Sprintf("the OCI runtime %s cannot load CRIU's library: %s", rt.Binary, msg),
				Hint: "Install it (Debian, Ubuntu: apt-get install libcriu2; Fedora: dnf install criu-libs), run the container under runc or agentbox-runtime, " +
					"or checkpoint its files alone (--files-only).",
			}
			cause = fmt.Errorf("%w: %w", cause, fault.ErrUnsupported)
		}
		if strings.Contains(msg, "executable file not found") || strings.Contains(msg, "version check failed") {
			why = Diagnosis{
				Code: "no-criu", Reason: "the OCI runtime cannot run CRIU: " + msg,
				Hint: "Install CRIU; `agentbox doctor` says how.",
			}
			cause = fmt.Errorf("%w: %w", cause, fault.ErrUnsupported)
		}
	}
	if why.Reason == "" && lerr == nil {
		why.Reason = "CRIU failed, and its log names no error"
	}
	if why.Code == crlog.Unknown && why.Hint == "" && lerr == nil {
		why.Hint = "Try again in a moment; if it fails again, end the process that CRIU's log names, or checkpoint the files alone (--files-only)."
	}
	return &DumpError{Diagnosis: why, Log: log, Err: cause}
}
