package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/internal/fault"
)

// heldFile is the journal of connections that were accepted for a dump. It lies with the
// OCI runtime's record of the container and goes with it.
const heldFile = "agentbox-unaccepted.json"

func (r Runtime) heldPath() string { return filepath.Join(r.stateRoot(), r.ID, heldFile) }

// accept accepts the connections that wait in backlogs of a frozen container and that
// CRIU does not dump. They are to be put back; nil: there are none.
// left names those that stay where they are.
func (r Runtime) accept(
	ctx context.Context, record *proof.Record, members []int,
) (held *proof.Held, left []string, err error) {
	list, err := backlogs(members, false)
	if err != nil || len(list) == 0 {
		return nil, nil, err
	}
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err != nil {
		return nil, nil, err
	}
	held, left, err = proof.Accept(ctx, c, record, members, list, r.heldPath())
	record.Queues.Lost = append(record.Queues.Lost, left...)
	return held, left, err
}

// explainLeft has the error of a dump that CRIU refused for a connection which is not
// accepted yet say why that could not be kept.
func explainLeft(err error, left []string) {
	var d *DumpError
	if errors.As(err, &d) && d.Code == "unix-in-flight" && len(left) > 0 {
		d.Reason = left[0]
	}
}

// backlogs lists those of unix sockets with connections that CRIU refuses, or would restore
// in another order; all of them if asked for.
func backlogs(members []int, every bool) (list []proof.Backlog, err error) {
	var all []unixSocket
	networks := map[string]bool{}
	for _, p := range members {
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p))
		if err != nil || networks[ns] {
			continue
		}
		networks[ns] = true
		some, err := unixSockets(p)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	known := map[uint32]unixSocket{}
	for _, u := range all {
		known[u.ino] = u
	}
	own := map[uint32]bool{}
	for _, u := range all {
		if len(u.waiting) == 0 {
			continue
		}
		if len(own) == 0 {
			for _, p := range members {
				for _, ino := range sockets(p) {
					own[ino] = true
				}
			}
		}
		if !own[u.ino] {
			continue // another sandbox of the network has it
		}
		b := proof.Backlog{Listener: u.ino, Name: u.address()}
		needed := every || len(u.waiting) > 1
		for _, client := range u.waiting {
			c := known[client]
			b.Clients = append(b.Clients, proof.Waiter{Inode: client, Shut: int(c.shut)})
			needed = needed || client == 0 || c.sent > 0 || c.shut != 0
		}
		if needed {
			list = append(list, b)
		}
	}
	return list, nil
}

// putBack puts back connections that were accepted for a dump of a frozen container. It names
// those that cannot be.
func (r Runtime) putBack(ctx context.Context, held *proof.Held) (lost []string, err error) {
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if errors.Is(err, fault.ErrNotFound) || err == nil && !c.Alive() {
		return nil, held.Forget() // it has ended
	}
	if err != nil {
		return nil, err
	}
	return putBackAll(ctx, c, held)
}

// putBackAll puts connections back, behind none that waits in the same backlog still.
func putBackAll(ctx context.Context, c freezer.Container, held *proof.Held) (lost []string, err error) {
	members, err := c.Processes()
	if err != nil {
		return nil, err
	}
	list, err := backlogs(members, true)
	if err == nil {
		err = held.Rest(ctx, c, members, list)
	}
	if err != nil {
		return nil, err
	}
	return held.PutBack(ctx, c)
}

// PutBack brings to its end what a dump that was killed has done with connections which
// nothing has accepted yet, and names those that are lost. Such a dump may have left the
// container thawed: if it was paused before, it is frozen again, and otherwise stays as it is.
func (r Runtime) PutBack(ctx context.Context, paused bool) (lost []string, err error) {
	held, err := proof.ReadHeld(r.heldPath())
	if err != nil || held == nil {
		return nil, err
	}
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err != nil {
		return nil, err
	}
	if !c.Alive() {
		return nil, held.Forget()
	}
	frozen, err := c.Frozen()
	if err != nil {
		return nil, err
	}
	if !frozen {
		if err := c.Freeze(ctx); err != nil {
			return nil, err
		}
	}
	lost, err = putBackAll(ctx, c, held)
	if !frozen && !paused {
		err = errors.Join(err, c.Thaw())
	}
	return lost, err
}
