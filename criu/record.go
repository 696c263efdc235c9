package criu

import (
	"slices"

	"golang.org/x/sys/unix"

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
	if err != nil {
		return record, err
	}
	if record.Queues, err = proof.TakeQueues(initPid, record); err != nil {
		return record, err
	}
	sockets, err := unixSockets(initPid)
	if err != nil {
		return record, err
	}
	senders := map[uint32]uint32{} // by the sockets that they send to
	for _, s := range sockets {
		if s.peer != 0 && (s.kind == unix.SOCK_DGRAM || s.kind == unix.SOCK_SEQPACKET) {
			senders[s.peer] = s.ino
		}
	}
	record.Queues.TakeMailboxes(record, senders)
	return record, nil
}
