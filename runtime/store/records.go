package store

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
)

// A state.db can come from elsewhere: from a backup, a disk, an archive. Its ids and names
// become parts of paths that are renamed and removed, so that each row is held against the
// form that it was written in before anything goes by it.

// recordError is the error of a row that agentbox would not have written.
func recordError(what string, err error) error {
	if err == nil {
		return nil
	}
	return &fault.Error{Op: "state.db", ID: what,
		Hint: "agentbox has not written this. Do not use a state directory that others could write to; take its checkpoints out where it was made: agentbox checkpoint export",
		Err:  fmt.Errorf("%w: record of a %s: %v", fault.ErrCorrupt, what, err)}
}

// checkMaybe is checkID for one that may be left out.
func checkMaybe(what, id string) error {
	if id == "" {
		return nil
	}
	return checkID(what, id)
}

// checkMaybeName is plainName for one that may be left out.
func checkMaybeName(name string) error {
	if name == "" {
		return nil
	}
	return plainName(name)
}

// checkLength bounds what is decoded.
func checkLength(data json.RawMessage) error {
	if len(data) > maxSpec {
		return fmt.Errorf("%d bytes, %d are allowed", len(data), maxSpec)
	}
	return nil
}

func (b Sandbox) checkRow() error {
	errs := []error{checkID("sandbox", b.ID), validSandboxName(b.Name),
		checkMaybeName(b.Backend),
		checkMaybeName(b.Head), checkMaybe("lease", b.Lease), checkMaybeName(b.Group), checkLength(b.Spec)}
	for _, id := range b.Redo {
		errs = append(errs, checkID("checkpoint", id))
	}
	return recordError("sandbox", errors.Join(errs...))
}

func (c Checkpoint) checkRow() error {
	errs := []error{checkID("checkpoint", c.ID), checkID("sandbox", c.SandboxID), validSandboxName(c.SandboxName),
		checkMaybeName(c.Name),
		checkMaybeName(c.Parent), checkMaybe("lease", c.Lease), checkLength(c.Spec)}
	for _, tag := range c.Tags {
		errs = append(errs, plainName(tag))
	}
	return recordError("checkpoint", errors.Join(errs...))
}

func (in Intent) checkRow() error {
	err := errors.Join(checkID("sandbox", in.Sandbox), checkMaybe("checkpoint", in.Checkpoint),
		plainName(in.Op), checkLength(in.Data))
	if in.Pid <= 0 {
		err = errors.Join(err, fmt.Errorf("process %d", in.Pid))
	}
	return recordError("verb under way", err)
}

func (l Lease) checkRow() error {
	return recordError("lease", errors.Join(checkID("lease", l.ID), checkMaybeName(l.Name), checkLength(l.Data)))
}

func (e Effect) checkRow() error {
	return recordError("effect", errors.Join(checkID("effect", e.ID), checkID("sandbox", e.Sandbox),
		checkMaybeName(e.Head), checkLength(e.Data)))
}
