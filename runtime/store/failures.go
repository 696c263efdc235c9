package store

import (
	"context"
	"database/sql"
	"time"
)

// Failures lists the records of failed checkpoints, of one sandbox or of all, that were begun
// before a time or, with superseded, before a ready one of the same sandbox: they are of no
// more use. The first condition of its query is that of an index: SQLite does not find the
// index by the second.
func (r *records) Failures(ctx context.Context, sandbox string, before time.Time, superseded bool) ([]Checkpoint, error) {
	return r.checkpoints(ctx, `WHERE status <> 'ready' AND status = 'failed' AND NOT removing AND (?1 = '' OR sandbox_id = ?1) AND (created < ?2 OR ?3 AND EXISTS
		(SELECT 1 FROM checkpoints AS later WHERE later.sandbox_id = checkpoints.sandbox_id AND later.status = 'ready' AND later.seq > checkpoints.seq))
		ORDER BY seq DESC`, sandbox, before.UnixNano(), superseded)
}

// pruneFailures bounds how many records of failures there are.
func (r *records) pruneFailures(ctx context.Context) error {
	var n int
	err := r.read.QueryRowContext(ctx, "SELECT count(*) FROM checkpoints WHERE status = 'failed'").Scan(&n)
	if err != nil || n <= keptRows {
		return dbError("sweep", err)
	}
	return r.release(ctx, "sweep", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM checkpoints WHERE status = 'failed' AND NOT removing AND seq NOT IN
			(SELECT seq FROM checkpoints WHERE status = 'failed' ORDER BY seq DESC LIMIT ?)`, keptRows)
		return err
	})
}
