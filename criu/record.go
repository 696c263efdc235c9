package criu

import (
	"slices"

	"github.com/agentbox/agentbox/criu/proof"
)

// recordOf records the processes that a dump has: those of the container's members
// that descend from its first process.
func recordOf(initPid int, members []int) (proof.Record, error) {
	strays, err := Strays(initPid, members)
	if err != nil {
		return proof.Record{}, err
	}
	dumped := slices.DeleteFunc(slices.Clone(members), func(pid int) bool {
		return slices.ContainsFunc(strays, func(s Stray) bool { return s.Pid == pid })
	})
	record, err := proof.Take(initPid, dumped)
	if err == nil {
		record.Queues, err = proof.TakeQueues(initPid, record)
	}
	return record, err
}
