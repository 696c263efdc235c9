package api

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// readEvents calls each for the events of a stream until the last, whose data it returns. A
// problem is an error, and so is a stream without an end.
func readEvents(r io.Reader, each func(name string, data []byte) error) (last []byte, err error) {
	lines := bufio.NewReader(r)
	var name string
	var data []byte
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return nil, &cutShort{noEOF(err)}
		}
		line = line[:len(line)-1]
		field, value, _ := bytes.Cut(line, []byte(": "))
		switch {
		case len(line) > 0 && string(field) == "event":
			name = string(value)
		case len(line) > 0 && string(field) == "data":
			data = bytes.Clone(value)
		case len(line) > 0: // a comment, or a field of another version
		case name == wire.EventProblem:
			var p wire.Problem
			if err := json.Unmarshal(data, &p); err != nil {
				return nil, err
			}
			return p.Partial, p.Err()
		case name == wire.EventResult || name == wire.EventEnd:
			return data, nil
		case name != "":
			if err := each(name, data); err != nil {
				return nil, err
			}
			name, data = "", nil
		}
	}
}

// cutShort is the error of an answer that has no end.
type cutShort struct{ err error }

func (c *cutShort) Error() string { return c.err.Error() }
func (c *cutShort) Unwrap() error { return c.err }

// noEOF is an end of file where there must be none.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// progressOf hands the progress that a service reports to fn.
func progressOf(fn runtime.Progress) func([]byte) error {
	if fn == nil {
		return nil
	}
	return func(data []byte) error {
		var p wire.Progress
		err := json.Unmarshal(data, &p)
		if err == nil {
			fn(p.Done, p.Total)
		}
		return err
	}
}

// restored passes the progress of a restore to the callback for its phase.
func restored(opts runtime.RestoreOptions) func([]byte) error {
	if opts.Progress == nil && opts.Pull.Progress == nil {
		return nil
	}
	return decoded(func(p wire.RestoreProgress) {
		switch {
		case p.Phase == "" && opts.Pull.Progress != nil:
			opts.Pull.Progress(p.Progress)
		case p.Phase != "" && opts.Progress != nil:
			opts.Progress(runtime.Step{Phase: p.Phase, Done: p.Done, Total: p.Total})
		}
	})
}
