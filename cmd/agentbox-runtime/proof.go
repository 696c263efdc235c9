package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/criu/wall"
	"github.com/agentbox/agentbox/internal/fault"
)

// prove makes the frozen processes of a restore what they were when they were dumped,
// as far as that can be done from outside, and reports what is different all the same.
// A process that is another one does not run.
func prove(c call, r stage.Restore, spec *wall.Spec) error {
	want, err := proof.Read(r.Images)
	if errors.Is(err, fault.ErrNotFound) {
		return proof.Report{}.Write(r.Work) // an earlier version has dumped them
	}
	if err != nil {
		return damaged(err)
	}
	want = want.Limited(spec.Limits())
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return err
	}
	take := func() (proof.Record, error) {
		pids, err := box.Processes()
		if err != nil {
			return proof.Record{}, err
		}
		return proof.Take(box.Pid, pids)
	}
	got, err := take()
	if err != nil {
		return err
	}
	lost, err := want.Queues.Requeue(context.Background(), box, got)
	if err != nil {
		return err
	}
	if len(want.Queues.Unaccepted) > 0 {
		if got, err = take(); err != nil {
			return err
		}
	}
	var report proof.Report
	if report.Mended, err = proof.Mend(context.Background(), box, want, got); err != nil {
		return err
	}
	if len(report.Mended) > 0 {
		if got, err = take(); err != nil {
			return err
		}
	}
	report.Different = append(lost, proof.Compare(want, got)...)
	if report.Fatal() == nil {
		report.Different = append(report.Different, want.Queues.Put(box.Pid, got)...)
	}
	if err := report.Write(r.Work); err != nil {
		return err
	}
	if d := report.Fatal(); d != nil {
		return fmt.Errorf("the restored processes are not as they were: %s", d)
	}
	return nil
}
