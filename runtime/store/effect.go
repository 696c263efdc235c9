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

// Effect is one entry of a sandbox's ledger: what was done outside of it, and how
// that is compensated. Data and Status are the engine's. An entry stays on record
// until neither the sandbox nor any checkpoint of it is left, for checkpoints say
// by the newest entry there was which ones they come after.
type Effect struct {
	Seq     int64 // given by PutEffect; it orders, also across clock steps
	ID      string
	Sandbox string // its id
	Head    string // the checkpoint that the sandbox was at, or the nearest before it that is left
	Status  string
	Created time.Time
	Data    json.RawMessage
}

// PutEffect adds an entry. It is durable when PutEffect returns.
func (r *records) PutEffect(ctx context.Context, e Effect) error {
	if err := errors.Join(checkID("effect", e.ID), checkID("sandbox", e.Sandbox), validSpec(e.Data)); err != nil {
		return err
	}
	return r.write(ctx, "add an effect", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx,
			"INSERT INTO effects (id, sandbox_id, head, status, created, data) VALUES (?,?,?,?,?,?)",
			e.ID, e.Sandbox, e.Head, e.Status, e.Created.UnixNano(), string(e.Data))
		return err
	})
}

// SetEffect changes the status and the data of an entry, durably.
func (r *records) SetEffect(ctx context.Context, id, status string, data json.RawMessage) error {
	if err := validSpec(data); err != nil {
		return err
	}
	return r.release(ctx, "change an effect", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE effects SET status = ?, data = ? WHERE id = ?",
			status, string(data), id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("effect %s: %w", id, fault.ErrNotFound))
		}
		return nil
	})
}

// Effects lists the ledger of a sandbox, oldest first.
func (r *records) Effects(ctx context.Context, sandbox string) (list []Effect, err error) {
	rows, err := r.read.QueryContext(ctx,
		"SELECT seq, id, sandbox_id, head, status, created, data FROM effects WHERE sandbox_id = ? ORDER BY seq",
		sandbox)
	if err != nil {
		return nil, cancelled(ctx, dbError("read effects", err))
	}
	defer rows.Close()
	for rows.Next() {
		var e Effect
		var data string
		var created int64
		if err := rows.Scan(&e.Seq, &e.ID, &e.Sandbox, &e.Head, &e.Status, &created, &data); err != nil {
			return nil, dbError("read effects", err)
		}
		e.Data, e.Created = raw(data), time.Unix(0, created).UTC()
		if err := e.checkRow(); err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("read effects", err))
	}
	return list, nil
}

// NewestEffect returns the id of the newest effect of a sandbox, or "" if there is none.
func (r *records) NewestEffect(ctx context.Context, sandbox string) (id string, err error) {
	err = r.read.QueryRowContext(ctx,
		"SELECT id FROM effects WHERE sandbox_id = ? ORDER BY seq DESC LIMIT 1", sandbox).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		return "", nil
	}
	if err != nil {
		return "", cancelled(ctx, dbError("read effects", err))
	}
	return id, nil
}

// forgetEffects drops the ledgers of sandboxes of which nothing is left.
const forgetEffects = `DELETE FROM effects WHERE sandbox_id NOT IN (SELECT id FROM sandboxes) AND sandbox_id NOT IN (SELECT sandbox_id FROM checkpoints)`
