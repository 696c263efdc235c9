package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Intent records a verb of several steps before its first irreversible one. A process
// that finds it later rolls the verb forward or back; Data holds its progress, in the
// verb's own format.
type Intent struct {
	Seq        int64 // given by Begin
	Op         string
	Sandbox    string
	Checkpoint string
	Data       json.RawMessage
	Pid        int       // zero: this process
	Started    time.Time // zero: now

	// Lazy says that the verb makes nothing durable that has to be taken back
	// before something else that it records is. It is not recorded itself.
	Lazy bool
}

// Begin records an intent; unless that is Lazy, it is durable when Begin returns.
func (r *records) Begin(ctx context.Context, in Intent) (seq int64, err error) {
	if in.Op == "" {
		return 0, fmt.Errorf("an intent names its verb: %w", fault.ErrInvalid)
	}
	if err := validSpec(in.Data); err != nil {
		return 0, err
	}
	if in.Pid == 0 {
		in.Pid = os.Getpid()
	}
	if in.Started.IsZero() {
		in.Started = time.Now()
	}
	if err := failpoint.Hit("store.journal.before-begin"); err != nil {
		return 0, err
	}
	write := r.write
	if in.Lazy {
		write = r.lazily
	}
	err = write(ctx, "journal", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx,
			"INSERT INTO journal (op, sandbox, checkpoint, data, pid, started) VALUES (?,?,?,?,?,?)",
			in.Op, in.Sandbox, in.Checkpoint, string(in.Data), in.Pid, in.Started.UnixNano())
		if err != nil {
			return err
		}
		seq, err = res.LastInsertId()
		return err
	})
	if err != nil {
		return 0, err
	}
	return seq, failpoint.Hit("store.journal.after-begin")
}

// Update replaces an intent's data; lazy is as in Intent.
func (r *records) Update(ctx context.Context, seq int64, data json.RawMessage, lazy bool) error {
	if err := validSpec(data); err != nil {
		return err
	}
	write := r.write
	if lazy {
		write = r.lazily
	}
	return write(ctx, "journal", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE journal SET data = ? WHERE seq = ?", string(data), seq)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("intent %d: %w", seq, fault.ErrNotFound))
		}
		return nil
	})
}

// Done strikes an intent out. Idempotent.
func (r *records) Done(ctx context.Context, seq int64) error {
	if err := failpoint.Hit("store.journal.before-done"); err != nil {
		return err
	}
	return r.release(ctx, "journal", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM journal WHERE seq = ?", seq)
		return err
	})
}

// Intents lists verbs that are under way or were interrupted, oldest first. The sandbox's lock
// shows whether a process still works on one.
func (r *records) Intents(ctx context.Context) (list []Intent, err error) {
	rows, err := r.read.QueryContext(ctx,
		"SELECT seq, op, sandbox, checkpoint, data, pid, started FROM journal ORDER BY seq")
	if err != nil {
		return nil, cancelled(ctx, dbError("read the journal", err))
	}
	defer rows.Close()
	for rows.Next() {
		var in Intent
		var data string
		var started int64
		if err := rows.Scan(&in.Seq, &in.Op, &in.Sandbox, &in.Checkpoint, &data, &in.Pid, &started); err != nil {
			return nil, dbError("read the journal", err)
		}
		in.Data = raw(data)
		in.Started = time.Unix(0, started).UTC()
		if err := in.checkRow(); err != nil {
			return nil, err
		}
		list = append(list, in)
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("read the journal", err))
	}
	return list, nil
}
