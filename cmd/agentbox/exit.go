package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/exitcode"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// The exit codes. They are part of the interface: scripts test them.
const (
	exitOK          = exitcode.OK
	exitFailure     = exitcode.Failure
	exitUsage       = exitcode.Usage
	exitNotFound    = exitcode.NotFound
	exitState       = exitcode.State
	exitBusy        = exitcode.Busy
	exitCorrupt     = exitcode.Corrupt
	exitDenied      = exitcode.Denied
	exitUnsupported = exitcode.Unsupported
	exitApproval    = exitcode.Approval

	// of run, exec, and of start and attach while attached
	exitAgentbox      = 125
	exitNotExecutable = 126
	exitNoCommand     = 127

	// rows of the help only
	exitCommand = -1
	exitSignal  = -2
)

var exitMeaning = map[int]string{
	exitOK:            "success",
	exitFailure:       "it failed",
	exitUsage:         "bad flags or arguments",
	exitNotFound:      "no such sandbox, checkpoint, image or path",
	exitState:         "it already exists, or the sandbox's state does not allow it",
	exitBusy:          "another verb is at work on the sandbox",
	exitCorrupt:       "stored data does not match its digest",
	exitDenied:        "not allowed; not root",
	exitUnsupported:   "this host or its runtime cannot do it",
	exitApproval:      "a person has to approve it first",
	exitAgentbox:      "agentbox itself failed",
	exitNotExecutable: "the command cannot be executed",
	exitNoCommand:     "the command was not found",
	exitCommand:       "run, exec: the command's own code, 125 to 127 as for Docker (see their help)",
	exitSignal:        "agentbox was interrupted by signal n",
}

// exits is the annotation that puts a verb's exit codes into its help.
func exits(codes ...int) map[string]string {
	var b strings.Builder
	for _, c := range append([]int{exitOK, exitFailure}, codes...) {
		code := fmt.Sprint(c)
		switch c {
		case exitCommand:
			code = "*"
		case exitSignal:
			code = "128+n"
		}
		fmt.Fprintf(&b, "  %-5s  %s\n", code, exitMeaning[c])
	}
	return map[string]string{"exit": strings.TrimRight(b.String(), "\n")}
}

// passes is the annotation of the verbs that end with a sandbox's command's
// code: everything that agentbox itself does wrong is then 125, as for Docker.
func passes() map[string]string {
	return map[string]string{
		"passes": "yes",
		"exit": `  125    agentbox itself failed, bad flags included
  126    the command cannot be executed
  127    the command was not found
  128+n  the command was killed by signal n
  *      otherwise the command's own code; 0 after detaching`,
	}
}

// An exitStatus ends agentbox with that code and no message: the code is a
// command's own, or the message is out already.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// status is nil for 0.
func status(code int) error {
	if code == 0 {
		return nil
	}
	return exitStatus(code)
}

// A usageError is a wrong command line.
type usageError struct {
	err error
	cmd string // whose help to read; may be empty
}

func (e *usageError) Error() string   { return e.err.Error() }
func (e *usageError) Unwrap() error   { return e.err }
func (e *usageError) ExitStatus() int { return exitUsage }

func usageErrorf(format string, args ...any) error {
	return &usageError{err: fmt.Errorf(format, args...)}
}

func errNotRoot() error {
	return &runtime.Error{
		Op:   "open",
		Err:  fmt.Errorf("only root can use sandboxes: %w", runtime.ErrDenied),
		Hint: "Run agentbox as root, for example with sudo.",
	}
}

// An errorList is what a verb with several arguments ends with: it went on
// after each error. The first one decides the exit code.
type errorList []error

func (l errorList) Error() string   { return errors.Join(l...).Error() }
func (l errorList) Unwrap() []error { return l }

// both is the first error and what went wrong while cleaning up after it.
func both(err, cleanup error) error {
	switch {
	case cleanup == nil:
		return err
	case err == nil:
		return cleanup
	}
	if l, ok := err.(errorList); ok {
		return append(l, cleanup)
	}
	return errorList{err, cleanup}
}

// reword tells the error of a step in the words of the command line: by the
// verb and the name that the user knows, where the step took an id.
func reword(err error, verb, name string) error {
	own, ok := err.(*runtime.Error)
	if !ok {
		return err
	}
	return &runtime.Error{Op: verb, ID: name, Hint: own.Hint, Err: own.Err}
}

// report prints err as the caller shall see it and returns the exit code.
// caught is the signal that interrupted the command, or nil.
func report(w io.Writer, cmd *cobra.Command, err error, caught os.Signal) int {
	if err == nil {
		return exitOK
	}
	list, ok := err.(errorList)
	if !ok {
		list = errorList{err}
	}
	var status exitStatus // 0: none among them
	for _, e := range list {
		if errors.As(e, &status) {
			continue
		}
		msg := e.Error()
		if caught != nil {
			// A cancelled call reports only that it was cancelled, or that the program it ran was
			// killed, not why.
			why := signalError{caught}.Error()
			msg = strings.ReplaceAll(msg, context.Canceled.Error(), why)
			if !strings.Contains(msg, why) {
				msg = fmt.Sprintf("%s (%s)", why, msg)
			}
		}
		fmt.Fprintf(w, "agentbox: %s\n", printable(msg))
		for _, h := range hints(cmd, e) {
			fmt.Fprintf(w, "hint: %s\n", printable(h))
		}
		for _, file := range fault.Logs(e) {
			fmt.Fprintf(w, "log: %s\n", printable(file))
		}
	}
	if status != 0 {
		return int(status)
	}
	if caught != nil {
		return int(signalError{caught}.status())
	}
	return exitCode(list[0], cmd != nil && cmd.Annotations["passes"] != "")
}

func hints(cmd *cobra.Command, err error) []string {
	h := fault.Hint(err)
	var u *usageError
	if errors.As(err, &u) {
		path := u.cmd
		if path == "" && cmd != nil {
			path = cmd.CommandPath()
		}
		if path != "" {
			h = append(h, fmt.Sprintf("See '%s --help'.", path))
		}
	}
	return h
}

// exitCode finds the code of the first sentinel in err's tree, depth first:
// of joined errors the first one is what the caller asked about.
func exitCode(err error, passes bool) int {
	var exec *runtime.ExecError
	if passes {
		if errors.As(err, &exec) && (exec.Code == exitNotExecutable || exec.Code == exitNoCommand) {
			return exec.Code
		}
		return exitAgentbox
	}
	return exitcode.Of(err)
}

// printable is for what came from inside a sandbox (file names, a log's line).
var printable = fault.Printable
