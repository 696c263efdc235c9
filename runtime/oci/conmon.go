package oci

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// monitors is the cgroup of all conmons.
const monitors = box.CgroupRoot + "/conmon"

// launch is one conmon to start.
type launch struct {
	id      string // of the container
	session string // of the exec session; empty for the container itself
	bundle  string // where its files are
	dir     string // its working directory
	runtime string
	args    []string
	attach  bool // exec only: nothing runs before begin
}

// conmon is a monitor that was started and the pipes to it.
type conmon struct {
	cmd    *exec.Cmd
	bundle string
	sync   *bufio.Reader // its reports
	syncf  *os.File
	start  *os.File // we write, or close: it goes on
	attach *os.File // it reports that its attach socket is there
	done   chan error

	adopted chan struct{} // closed once it is in its cgroup
	allowed bool
}

// report is a line on the sync pipe: a pid, then, from an exec, an exit code;
// negative with a message if the runtime failed.
type report struct {
	Data    int    `json:"data"`
	Message string `json:"message"`
}

// launch starts a conmon, which does nothing before allow; the time it takes to
// start, and to be moved to its cgroup, is time to prepare what it will find.
// Should agentbox die meanwhile, each of conmon's reads from
// our pipes ends and each of its writes fails, so that it never waits for us.
func (b *Backend) launch(l launch) (c *conmon, err error) {
	unique := l.id
	if l.session != "" {
		unique = l.session
	}
	args := append([]string{
		"--api-version", "1", "-c", l.id, "-u", unique, "-r", l.runtime, "-b", l.bundle,
		"-p", filepath.Join(l.bundle, "pid"), "-P", filepath.Join(l.bundle, "conmon.pid"),
		"--full-attach", "--no-sync-log", "--log-level", "error",
		"--runtime-arg", "--root", "--runtime-arg", b.box.State,
		"--runtime-arg", "--log", "--runtime-arg", filepath.Join(l.bundle, "oci.log"),
		"--runtime-arg", "--log-format", "--runtime-arg", "json",
	}, l.args...)
	cmd := exec.Command(b.conmon, args...)
	cmd.Dir = l.dir
	cmd.Env = b.environ()
	if l.session != "" {
		// Conmon leaves the socket for a terminal behind when the runtime refuses the
		// process: in the session's own directory, which goes with the session.
		cmd.Env = append(cmd.Env, "TMPDIR=.")
	}
	// A session of its own: an interrupt typed at our terminal is not for it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stderr, err := os.Create(filepath.Join(l.bundle, "conmon.log"))
	if err != nil {
		return nil, err
	}
	defer stderr.Close()
	cmd.Stderr = stderr

	c = &conmon{cmd: cmd, bundle: l.bundle, done: make(chan error, 1), adopted: make(chan struct{})}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close()
		}
		if err != nil {
			c.close()
		}
	}()
	pipe := func(name string, weRead bool) (*os.File, error) {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		ours, their := r, w
		if !weRead {
			ours, their = w, r
		}
		cmd.Env = append(cmd.Env, name+"="+strconv.Itoa(3+len(theirs)))
		theirs = append(theirs, their)
		return ours, nil
	}
	if c.syncf, err = pipe("_OCI_SYNCPIPE", true); err != nil {
		return nil, err
	}
	if c.start, err = pipe("_OCI_STARTPIPE", false); err != nil {
		return nil, err
	}
	if l.attach {
		if c.attach, err = pipe("_OCI_ATTACHPIPE", true); err != nil {
			return nil, err
		}
	}
	cmd.ExtraFiles = theirs
	adopted, err := b.box.Cgroups.StartIn(cmd, monitors)
	if err != nil {
		return nil, fmt.Errorf("start conmon: %w", err)
	}
	c.sync = bufio.NewReaderSize(c.syncf, 64<<10)
	if adopted {
		close(c.adopted)
	}
	guard.Go(func() {
		if !adopted {
			defer close(c.adopted)
		}
		// A process born there is moved to where it is: that makes the kernel wait now for
		// what the runtime, which is about to move the container's process, then finds
		// done.
		if err := b.box.Cgroups.MoveTo(cmd.Process.Pid, monitors, adopted); err != nil {
			b.log.Debug("conmon left in the caller's cgroup", "error", err)
		}
	})
	guard.Go(func() { c.done <- cmd.Wait() })
	return c, nil
}

// environ is all that conmon and the runtime get to see. TMPDIR is where
// conmon puts the socket over which runc hands a terminal to it; the name must
// fit into a socket address.
func (b *Backend) environ() []string {
	tmp := filepath.Join(b.box.Run, "tmp")
	if len(tmp) > 80 {
		tmp = "/tmp"
	}
	path := cmp.Or(os.Getenv("PATH"), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	env := []string{"PATH=" + path, "TMPDIR=" + tmp, "AGENTBOX_RUN=" + b.box.Stage, "AGENTBOX_RUNTIME=" + b.box.OCI}
	return env
}

// allow lets a conmon that was launched detach itself and call the runtime.
func (c *conmon) allow() error {
	<-c.adopted // before its first child, which would stay behind
	c.allowed = true
	return c.proceed()
}

// proceed lets conmon pass a point where it waits for us.
func (c *conmon) proceed() error {
	if _, err := c.start.Write([]byte{0}); err != nil && !errors.Is(err, syscall.EPIPE) {
		return err
	}
	return nil
}

// begin lets an exec whose attach socket we are connected to run.
func (c *conmon) begin() error {
	err := c.proceed()
	return errors.Join(err, c.start.Close())
}

// ready waits until the attach socket of an exec is there.
func (c *conmon) ready(ctx context.Context) error {
	_, err := c.read(ctx, c.attach, bufio.NewReader(c.attach))
	return err
}

// report reads the next line of conmon's reports.
func (c *conmon) report(ctx context.Context) (report, error) {
	return c.read(ctx, c.syncf, c.sync)
}

func (c *conmon) read(ctx context.Context, f *os.File, r *bufio.Reader) (report, error) {
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var rep report
	line, err := r.ReadSlice('\n')
	if ctx.Err() != nil {
		return rep, ctx.Err()
	}
	if err != nil {
		return rep, c.failure(err)
	}
	// Conmon escapes most control characters, not all.
	line = bytes.Map(blankControl, line)
	if err := json.Unmarshal(line, &rep); err != nil {
		return rep, fmt.Errorf("report of conmon %q: %w", line, err)
	}
	return rep, nil
}

// blankControl leaves nothing that a terminal would obey.
func blankControl(r rune) rune {
	if unicode.IsControl(r) {
		return ' '
	}
	return r
}

// oneLine is a text as a log has it and as a terminal shows it.
func oneLine(text string) string {
	return strings.Join(strings.Fields(strings.Map(blankControl, text)), " ")
}

// failure explains why conmon hung up without a word.
func (c *conmon) failure(err error) error {
	said, _, _ := record.Read(filepath.Join(c.bundle, "conmon.log"))
	said = append(said, strings.Join(c.runtimeErrors(), "; ")...)
	if text := strings.TrimSpace(string(said)); text != "" {
		return fmt.Errorf("conmon failed: %s", text)
	}
	if errors.Is(err, io.EOF) {
		return errors.New("conmon ended without a report")
	}
	return fmt.Errorf("read from conmon: %w", err)
}

// explain adds to an error of the runtime's what its log says besides: why a first
// process died before it came to the command.
func (c *conmon) explain(err error) error {
	var command *runtime.ExecError
	if errors.As(err, &command) {
		return err
	}
	for _, msg := range c.runtimeErrors() {
		if msg = plain(msg); !strings.Contains(oneLine(err.Error()), msg) {
			err = fmt.Errorf("%w; %s", err, msg)
		}
	}
	return err
}

// close hangs up. Conmon goes on if it may start the container; if not, it would take the end of
// the pipe for permission, so it is killed.
func (c *conmon) close() {
	if c.cmd.Process != nil && !c.allowed {
		_ = c.cmd.Process.Kill()
		<-c.done
	}
	for _, f := range []*os.File{c.syncf, c.start, c.attach} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// runtimeErrors finds the errors in the runtime's JSON log, each on one line.
func (c *conmon) runtimeErrors() (msgs []string) {
	data, _, err := record.Read(filepath.Join(c.bundle, "oci.log"))
	if err != nil {
		return nil
	}
	for line := range bytes.Lines(data) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal(line, &entry) == nil && (entry.Level == "error" || entry.Level == "fatal") {
			msgs = append(msgs, oneLine(entry.Msg))
		}
	}
	return msgs
}

// commandError turns a runtime's complaint into an error: an *ExecError when
// the command cannot be executed.
func commandError(args []string, msg string) error {
	if err := bundle.CommandError(args, msg); err != nil {
		return err
	}
	return errors.New("the OCI runtime could not start it: " + plain(msg))
}

// plain returns the runtime's message without the words that are in every failure.
func plain(msg string) string {
	msg = strings.TrimSpace(msg)
	for _, frame := range []string{
		"runc create failed: ", "unable to start container process: ", "error during container init: ",
	} {
		if rest, ok := strings.CutPrefix(msg, frame); ok {
			msg = rest
		}
	}
	return msg
}

// callError is the runtime's message for a failure.
type callError struct{ verb, said string }

func (e *callError) Error() string { return e.verb + ": " + e.said }

// call runs the runtime itself: what conmon does not do for us.
func (b *Backend) call(ctx context.Context, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, append([]string{"--root", b.box.State}, args...)...)
	cmd.Env = b.environ()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = box.Grace
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(out) > 0 {
		return &callError{filepath.Base(program) + " " + args[0], strings.TrimSpace(string(out))}
	}
	return fmt.Errorf("%s %s: %w", filepath.Base(program), args[0], err)
}
