package main

import (
	"errors"

	"github.com/agentbox/agentbox/criu/crlog"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/criu/wall"
)

// judge holds the images of a restore against the bundle before CRIU reads them.
func judge(c call, r stage.Restore) (*wall.Spec, error) {
	spec, err := wall.Read(c.bundle())
	if err != nil {
		return nil, err
	}
	cgroup, err := ownPath(c)
	if err != nil {
		return nil, err
	}
	return spec, damaged(wall.Judge(r.Images, spec, cgroup))
}

// walled holds the restored processes against the bundle.
func walled(c call, spec *wall.Spec) error {
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return err
	}
	pids, err := box.Processes()
	if err != nil {
		return err
	}
	cgroups, err := freezer.Cgroups(c.root, c.id)
	if err != nil {
		return err
	}
	return wall.Inspect(wall.Restored{Pid: box.Pid, Pids: pids, Cgroups: cgroups}, spec)
}

// reason says why a restore failed of an error of our own.
func reason(err error) crlog.Failure {
	d := crlog.Diagnosis{Code: crlog.Unknown, Reason: err.Error()}
	if refused := (*wall.Refusal)(nil); errors.As(err, &refused) {
		d.Code, d.Hint = "refused", wall.Hint
	}
	return crlog.Failure{Diagnosis: d}
}
