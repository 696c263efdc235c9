package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// Sandbox is the record of one sandbox. Its spec is the engine's; the store
// only keeps it.
type Sandbox struct {
	ID, Name    string
	Backend     string
	Spec        json.RawMessage
	Image       string
	ImageDigest string
	Lower       []string // the image's directories, top first
	Head        string   // id of the checkpoint it was last at
	Redo        []string // ids of the checkpoints that redo leads to, the next first; some may be gone
	Attempt     int
	Created     time.Time // zero: now
	Labels      map[string]string
	Starter     string // the process that is to start it first; empty: none waits for that
	Kept        bool   // stays when it exits, whatever its spec says; see Keep
	Held        string // why it must not be used; empty: it may be; see Hold
	Lease       string // id of the lease that it belongs to; may be empty
	Group       string // may be empty
}

const sandboxColumns = "id, name, backend, spec, image, image_digest, lower, head, attempt, created, labels, kept, held, lease, member_of, starter, redo"

// records are the rows of the database that are what a caller reads and writes: sandboxes,
// checkpoints, tags, leases, effects and the journal.
type records struct {
	*database
}

// PutSandbox adds a sandbox. A name or an id that is taken is ErrExists.
func (r *records) PutSandbox(ctx context.Context, b Sandbox) error {
	if err := checkID("sandbox", b.ID); err != nil {
		return err
	}
	if b.Name != b.ID {
		if err := validSandboxName(b.Name); err != nil {
			return err
		}
		if isID(b.Name) {
			return ValidName(b.Name)
		}
	}
	if err := errors.Join(ValidLabels(b.Labels), validSpec(b.Spec)); err != nil {
		return err
	}
	if b.Group != "" {
		if err := plainName(b.Group); err != nil {
			return fmt.Errorf("group: %w", err)
		}
	}
	if b.Created.IsZero() {
		b.Created = time.Now()
	}
	if err := failpoint.Hit("store.sandbox.before-row"); err != nil {
		return err
	}
	return r.write(ctx, "add a sandbox", func(tx *sql.Tx) error {
		var id, name string
		err := tx.QueryRowContext(ctx, "SELECT id, name FROM sandboxes WHERE id = ? OR name = ?", b.ID,
			b.Name).Scan(&id, &name)
		switch {
		case err == nil && name == b.Name:
			return fmt.Errorf("sandbox name %q (id %.12s): %w", name, id, fault.ErrExists)
		case err == nil:
			return fmt.Errorf("sandbox id %s (name %q): %w", id, name, fault.ErrExists)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if err := joinLease(ctx, tx, b.Lease); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO sandboxes ("+sandboxColumns+
			") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
			b.ID, b.Name, b.Backend, string(b.Spec), b.Image, b.ImageDigest, encode(b.Lower), b.Head, b.Attempt,
			b.Created.UnixNano(), encode(b.Labels), b.Kept, b.Held, b.Lease, b.Group, b.Starter,
			strings.Join(b.Redo, " "))
		return err
	})
}

// Sandbox finds one by exact name, exact id or unique prefix of an id, of minPrefix
// digits or more, in this order. A prefix of several is ErrInvalid and the error lists them.
func (r *records) Sandbox(ctx context.Context, ref string) (Sandbox, error) {
	if ref == "" {
		return Sandbox{}, fmt.Errorf("no sandbox named: %w", fault.ErrInvalid)
	}
	found, err := r.sandboxes(ctx, "WHERE name = ?1 OR id = ?1 ORDER BY name = ?1 DESC", ref)
	if err != nil {
		return Sandbox{}, err
	}
	if len(found) == 0 && isPrefix(ref) {
		found, err = r.sandboxes(ctx, "WHERE id >= ?1 AND id < ?1 || 'g' ORDER BY seq DESC LIMIT 11", ref)
		if err != nil {
			return Sandbox{}, err
		}
		if len(found) > 1 {
			var which []string
			for _, b := range found {
				which = append(which, fmt.Sprintf("%s (%s)", b.ID, b.Name))
			}
			return Sandbox{}, ambiguous("sandbox", ref, which)
		}
	}
	if len(found) == 0 {
		return Sandbox{}, fmt.Errorf("sandbox %q: %w", ref, fault.ErrNotFound)
	}
	return found[0], nil
}

// Sandboxes lists all, newest first.
func (r *records) Sandboxes(ctx context.Context) ([]Sandbox, error) {
	return r.sandboxes(ctx, "ORDER BY seq DESC")
}

// Unstarted lists those that their caller has yet to start, or has left so.
func (r *records) Unstarted(ctx context.Context) ([]Sandbox, error) {
	return r.sandboxes(ctx, "WHERE starter <> '' ORDER BY seq")
}

// Started records that a sandbox has no starter any more.
func (r *records) Started(ctx context.Context, id string) error {
	return r.release(ctx, "note a start", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE sandboxes SET starter = '' WHERE id = ?", id)
		return err
	})
}

func (r *records) sandboxes(ctx context.Context, where string, args ...any) (list []Sandbox, err error) {
	rows, err := r.read.QueryContext(ctx, "SELECT "+sandboxColumns+" FROM sandboxes "+where, args...)
	if err != nil {
		return nil, cancelled(ctx, dbError("read sandboxes", err))
	}
	defer rows.Close()
	for rows.Next() {
		var b Sandbox
		var spec, lower, labels, redo string
		var created int64
		err := rows.Scan(&b.ID, &b.Name, &b.Backend, &spec, &b.Image, &b.ImageDigest, &lower, &b.Head, &b.Attempt,
			&created, &labels, &b.Kept, &b.Held, &b.Lease, &b.Group, &b.Starter, &redo)
		if err != nil {
			return nil, dbError("read sandboxes", err)
		}
		b.Spec = raw(spec)
		if redo != "" {
			b.Redo = strings.Fields(redo)
		}
		b.Created = time.Unix(0, created).UTC()
		if err := errors.Join(json.Unmarshal([]byte(lower), &b.Lower),
			json.Unmarshal([]byte(labels), &b.Labels)); err != nil {
			return nil, fmt.Errorf("record of sandbox %s: %w: %w", b.ID, fault.ErrCorrupt, err)
		}
		if b.Labels == nil {
			b.Labels = map[string]string{}
		}
		if err := b.checkRow(); err != nil {
			return nil, err
		}
		list = append(list, b)
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("read sandboxes", err))
	}
	return list, nil
}

// Position is where a sandbox stands in its history.
type Position struct {
	Head string   // id of the checkpoint it was last at; empty: none
	Redo []string // ids of the checkpoints that redo leads to
}

// Positions returns where each sandbox stands.
func (r *records) Positions(ctx context.Context) (map[string]Position, error) {
	all := map[string]Position{}
	err := r.query(ctx, "SELECT id, head, redo FROM sandboxes", nil, func(row *sql.Rows) error {
		var id, head, redo string
		err := row.Scan(&id, &head, &redo)
		all[id] = Position{head, strings.Fields(redo)}
		return err
	})
	return all, err
}

// SetHead records which checkpoint a sandbox is at, where redo leads from there, and which attempt it
// is on. It is durable with the end of the intent that it is part of.
func (r *records) SetHead(ctx context.Context, id, head string, attempt int, redo ...string) error {
	for _, c := range redo {
		if err := checkID("checkpoint", c); err != nil {
			return err
		}
	}
	return r.lazily(ctx, "set head", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE sandboxes SET head = ?, attempt = ?, redo = ? WHERE id = ?", head, attempt,
			strings.Join(redo, " "), id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("sandbox %q: %w", id, fault.ErrNotFound))
		}
		return nil
	})
}

// SetSpec changes a sandbox's spec, for good.
func (r *records) SetSpec(ctx context.Context, id string, spec json.RawMessage) error {
	if err := validSpec(spec); err != nil {
		return err
	}
	return r.write(ctx, "change a spec", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE sandboxes SET spec = ? WHERE id = ?", string(spec), id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("sandbox %q: %w", id, fault.ErrNotFound))
		}
		return nil
	})
}

// Keep records that a sandbox stays when it exits, or that it need not.
func (r *records) Keep(ctx context.Context, id string, keep bool) error {
	return r.release(ctx, "keep a sandbox", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE sandboxes SET kept = ? WHERE id = ?", keep, id)
		return err
	})
}

// Hold records why a sandbox must not be used; an empty why releases it.
func (r *records) Hold(ctx context.Context, id, why string) error {
	if len(why) > maxError {
		why = why[:maxError]
	}
	return r.release(ctx, "hold a sandbox", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE sandboxes SET held = ? WHERE id = ?",
			strings.ToValidUTF8(why, "\uFFFD"), id)
		return err
	})
}

// DeleteSandbox removes a sandbox, its intents, its caches and its lock files, of which the caller
// holds the main one; its checkpoints stay. Idempotent.
func (s *Store) DeleteSandbox(ctx context.Context, id string) error {
	if err := failpoint.Hit("store.sandbox.before-delete"); err != nil {
		return err
	}
	err := s.release(ctx, "delete a sandbox", func(tx *sql.Tx) error {
		for _, q := range []string{"DELETE FROM sandboxes WHERE id = ?", "DELETE FROM journal WHERE sandbox = ?"} {
			if _, err := tx.ExecContext(ctx, q, id); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, forgetEffects)
		return err
	})
	if err == nil {
		s.dropCaches(id)
		s.dropLocks(id)
	}
	return err
}

func ambiguous(what, ref string, which []string) error {
	if len(which) > 10 {
		which = append(which[:10:10], "...")
	}
	return fmt.Errorf("%s %q is ambiguous: %s: %w", what, ref, strings.Join(which, ", "), fault.ErrInvalid)
}

// encode writes a label map or a list of strings; neither can fail.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func raw(s string) json.RawMessage {
	if s == "" {
		return nil
	}
	return json.RawMessage(s)
}
