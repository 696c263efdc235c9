package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// States of a lease. An ending lease accepts nothing more; it has ended when all that belonged
// to it is gone.
const (
	LeaseActive = "active"
	LeaseEnding = "ending"
	LeaseEnded  = "ended"
)

// keepLeases is how many ended leases are kept.
const keepLeases = 100

// Lease is the record of one lease. Its data is the engine's; the store only
// keeps it.
type Lease struct {
	ID      string
	Name    string // may be empty; unique among those that have not ended
	State   string
	Data    json.RawMessage
	Created time.Time
}

// LeaseMembers are the members of a lease.
type LeaseMembers struct {
	Sandboxes   []Sandbox
	Checkpoints []Checkpoint // of any status
}

const leaseColumns = "id, name, state, data, created"

// PutLease adds an active lease. A name that another has is ErrExists.
func (r *records) PutLease(ctx context.Context, l Lease) error {
	if err := errors.Join(checkID("lease", l.ID), validSpec(l.Data)); err != nil {
		return err
	}
	if l.Name != "" {
		if err := ValidName(l.Name); err != nil {
			return err
		}
	}
	return r.write(ctx, "add a lease", func(tx *sql.Tx) error {
		var id string
		err := tx.QueryRowContext(ctx,
			"SELECT id FROM leases WHERE name = ? AND name <> '' AND state <> 'ended'", l.Name).Scan(&id)
		if err == nil {
			return fmt.Errorf("lease name %q (id %.12s): %w", l.Name, id, fault.ErrExists)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO leases ("+leaseColumns+") VALUES (?,?,?,?,?)", l.ID, l.Name,
			LeaseActive, string(l.Data), l.Created.UnixNano())
		return err
	})
}

// Lease finds one by the name of one that has not ended, by exact id, by a unique
// prefix of an id, or by the name that the newest ended one had, in this order.
func (r *records) Lease(ctx context.Context, ref string) (Lease, error) {
	if ref == "" {
		return Lease{}, fmt.Errorf("no lease named: %w", fault.ErrInvalid)
	}
	found, err := r.leases(ctx, "WHERE name = ?1 AND state <> 'ended' OR id = ?1 ORDER BY name = ?1 DESC", ref)
	if err == nil && len(found) == 0 && isPrefix(ref) {
		found, err = r.leases(ctx, "WHERE id >= ?1 AND id < ?1 || 'g' ORDER BY seq DESC LIMIT 11", ref)
		if len(found) > 1 {
			var which []string
			for _, l := range found {
				which = append(which, l.ID)
			}
			return Lease{}, ambiguous("lease", ref, which)
		}
	}
	if err == nil && len(found) == 0 {
		found, err = r.leases(ctx, "WHERE name = ? ORDER BY seq DESC LIMIT 1", ref)
	}
	if err != nil {
		return Lease{}, err
	}
	if len(found) == 0 {
		return Lease{}, fmt.Errorf("lease %q: %w", ref, fault.ErrNotFound)
	}
	return found[0], nil
}

// Leases lists those that have not ended, or all, newest first.
func (r *records) Leases(ctx context.Context, all bool) ([]Lease, error) {
	where := "WHERE state <> 'ended' "
	if all {
		where = ""
	}
	return r.leases(ctx, where+"ORDER BY seq DESC")
}

func (r *records) leases(ctx context.Context, where string, args ...any) (list []Lease, err error) {
	rows, err := r.read.QueryContext(ctx, "SELECT "+leaseColumns+" FROM leases "+where, args...)
	if err != nil {
		return nil, cancelled(ctx, dbError("read leases", err))
	}
	defer rows.Close()
	for rows.Next() {
		var l Lease
		var data string
		var created int64
		if err := rows.Scan(&l.ID, &l.Name, &l.State, &data, &created); err != nil {
			return nil, dbError("read leases", err)
		}
		l.Data, l.Created = raw(data), time.Unix(0, created).UTC()
		if err := l.checkRow(); err != nil {
			return nil, err
		}
		list = append(list, l)
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("read leases", err))
	}
	return list, nil
}

// ChangeLease lets fn read a lease and change its state and data in one transaction. An
// error from fn leaves the lease as it was. Set lazy for a change that need not survive
// a power failure.
func (r *records) ChangeLease(ctx context.Context, id string, lazy bool, fn func(*Lease) error) error {
	write := r.release
	if lazy {
		write = r.lazily
	}
	return write(ctx, "change a lease", func(tx *sql.Tx) error {
		var l Lease
		var data string
		var created int64
		err := tx.QueryRowContext(ctx, "SELECT "+leaseColumns+" FROM leases WHERE id = ?", id).Scan(&l.ID, &l.Name,
			&l.State, &data, &created)
		if errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("lease %q: %w", id, fault.ErrNotFound)
		}
		if err != nil {
			return err
		}
		l.Data, l.Created = raw(data), time.Unix(0, created).UTC()
		if err := fn(&l); err != nil {
			return err
		}
		if err := validSpec(l.Data); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE leases SET state = ?, data = ? WHERE id = ?", l.State, string(l.Data),
			id); err != nil || l.State != LeaseEnded {
			return err
		}
		for _, q := range []string{
			"UPDATE checkpoints SET lease = '' WHERE lease = ?1", // those that stay
			"DELETE FROM leases WHERE state = 'ended' AND seq NOT IN (SELECT seq FROM leases WHERE state = 'ended' ORDER BY seq DESC LIMIT ?2)",
		} {
			if _, err := tx.ExecContext(ctx, q, id, keepLeases); err != nil {
				return err
			}
		}
		return nil
	})
}

// LeaseMembers returns the current members of a lease.
func (r *records) LeaseMembers(ctx context.Context, id string) (m LeaseMembers, err error) {
	if m.Sandboxes, err = r.sandboxes(ctx, "WHERE lease = ? ORDER BY seq", id); err != nil {
		return m, err
	}
	m.Checkpoints, err = r.checkpoints(ctx, "WHERE lease = ? ORDER BY seq", id)
	return m, err
}

// joinLease refuses a lease that is not active, in the transaction that adds what
// is to belong to it.
func joinLease(ctx context.Context, tx *sql.Tx, id string) error {
	if id == "" {
		return nil
	}
	var name, state string
	err := tx.QueryRowContext(ctx, "SELECT name, state FROM leases WHERE id = ?", id).Scan(&name, &state)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("lease %q: %w", id, fault.ErrNotFound)
	}
	if err == nil && state != LeaseActive {
		if name == "" {
			name = id[:12]
		}
		err = fmt.Errorf("%w: lease %s has ended", fault.ErrState, name)
	}
	return err
}
