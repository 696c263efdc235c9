package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
)

// Pin excludes a checkpoint from retention, or includes it again. It returns ErrState for one
// that is not ready.
func (r *records) Pin(ctx context.Context, id string, pinned bool) error {
	return r.write(ctx, "pin a checkpoint", func(tx *sql.Tx) error {
		if _, err := readyIn(ctx, tx, id); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "UPDATE checkpoints SET pinned = ? WHERE id = ?", pinned, id)
		return err
	})
}

// Tag gives a checkpoint one more name in its sandbox, which retention
// respects. A tag that another checkpoint of the sandbox has moves. The name of
// a checkpoint of the sandbox is ErrExists: references would not find the tag.
func (r *records) Tag(ctx context.Context, id, tag string) error {
	if err := ValidCheckpointName(tag); err != nil {
		return err
	}
	return r.write(ctx, "tag a checkpoint", func(tx *sql.Tx) error {
		sandbox, err := readyIn(ctx, tx, id)
		if err != nil {
			return err
		}
		var taken string
		err = tx.QueryRowContext(ctx,
			"SELECT id FROM checkpoints WHERE sandbox_id = ? AND name = ? AND status = 'ready'",
			sandbox, tag).Scan(&taken)
		switch {
		case err == nil:
			return &fault.Error{
				Op: "tag", ID: tag, Hint: "Choose another tag.",
				Err: fmt.Errorf("a checkpoint (id %.12s) has this name: %w", taken, fault.ErrExists),
			}
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO tags (sandbox_id, tag, checkpoint_id) VALUES (?,?,?)
			ON CONFLICT (sandbox_id, tag) DO UPDATE SET checkpoint_id = excluded.checkpoint_id`, sandbox, tag, id)
		return err
	})
}

// Untag takes a tag away; one that is not there is ErrNotFound.
func (r *records) Untag(ctx context.Context, sandboxID, tag string) error {
	return r.write(ctx, "untag a checkpoint", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "DELETE FROM tags WHERE sandbox_id = ? AND tag = ?", sandboxID, tag)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("tag %q: %w", tag, fault.ErrNotFound))
		}
		return nil
	})
}

// readyIn returns the sandbox of a ready checkpoint.
func readyIn(ctx context.Context, tx *sql.Tx, id string) (sandbox string, err error) {
	var status string
	err = tx.QueryRowContext(ctx, "SELECT sandbox_id, status FROM checkpoints WHERE id = ?", id).Scan(&sandbox, &status)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return "", fmt.Errorf("checkpoint %q: %w", id, fault.ErrNotFound)
	case err == nil && status != Ready:
		return "", fmt.Errorf("checkpoint %s is %s: %w", id, status, fault.ErrState)
	}
	return sandbox, err
}
