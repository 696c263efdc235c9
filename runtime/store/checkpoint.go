package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Checkpoint is the record of one checkpoint.
type Checkpoint struct {
	ID          string // empty in BeginCheckpoint: one is made
	Name        string // may be empty; unique among the ready ones of a sandbox
	SandboxID   string
	SandboxName string // at the time of the checkpoint
	Kind        string // KindFiles or KindFull
	Status      string // Pending, Ready or Failed
	Error       string // why it failed
	Parent      string // the nearest ancestor that still exists; may be empty
	Trigger     string
	Message     string    // what it is, in its maker's words; may be empty
	Created     time.Time // zero in BeginCheckpoint: now
	Files       int64     // entries in the upperdir
	Processes   int
	Bytes       int64  // at rest, of all that it needs, what others need too included
	Digest      string // of the manifest
	ImageDigest string
	Labels      map[string]string
	Frozen      time.Duration // how long the sandbox stood still
	Warnings    []string
	Spec        json.RawMessage // of the sandbox
	Added       int64           // bytes of the pack that it brought
	Unchanged   bool            // every chunk was there already: it brought none
	Damaged     string          // what the last verification found; empty: nothing
	Pinned      bool
	Lease       string    // id of the lease that it is removed with; empty: none
	Tags        []string  // sorted
	Foreign     bool      // it came from elsewhere, or where it was made is not known
	Origin      string    // for BeginCheckpoint, of a foreign one: the digest of the manifest that it came with
	Attached    *Attached // of the host, without their tree; nil: none
	Changes     *Changes  // since its parent; nil: not counted yet
}

// Changes counts the paths that differ between two checkpoints.
type Changes struct {
	Added    int64 `json:"added"`
	Modified int64 `json:"modified"`
	Deleted  int64 `json:"deleted"`
}

// Filter selects checkpoints; the zero value selects all ready ones.
type Filter struct {
	SandboxID string
	All       bool              // pending and failed ones too
	Labels    map[string]string // each must be there with this value
	Trigger   string
	// Automatic leaves those only that are taken without being asked for, or by agents.
	Automatic bool
}

const checkpointColumns = "id, name, sandbox_id, sandbox_name, kind, status, error, parent, trigger_name, created, files, processes, bytes, digest, image_digest, labels, frozen, warnings, spec, added, unchanged, damaged, pinned, lease, message"

const checkpointTags = "(SELECT json_group_array(tag) FROM (SELECT tag FROM tags WHERE checkpoint_id = checkpoints.id ORDER BY tag))"

func (r *records) checkpoints(ctx context.Context, where string, args ...any) (list []Checkpoint, err error) {
	rows, err := r.read.QueryContext(ctx, "SELECT "+checkpointColumns+", "+checkpointTags+
		", pulled, attached, changes FROM checkpoints "+where, args...)
	if err != nil {
		return nil, cancelled(ctx, dbError("read checkpoints", err))
	}
	defer rows.Close()
	for rows.Next() {
		var c Checkpoint
		var labels, warnings, spec, tags, attached, changes string
		var created, frozen int64
		err := rows.Scan(&c.ID, &c.Name, &c.SandboxID, &c.SandboxName, &c.Kind, &c.Status, &c.Error,
			&c.Parent, &c.Trigger, &created,
			&c.Files, &c.Processes, &c.Bytes, &c.Digest, &c.ImageDigest, &labels, &frozen, &warnings, &spec, &c.Added,
			&c.Unchanged, &c.Damaged, &c.Pinned, &c.Lease, &c.Message, &tags, &c.Foreign, &attached, &changes)
		if err != nil {
			return nil, dbError("read checkpoints", err)
		}
		c.Created = time.Unix(0, created).UTC()
		c.Frozen = time.Duration(frozen)
		c.Spec = raw(spec)
		if err := errors.Join(json.Unmarshal([]byte(labels), &c.Labels), json.Unmarshal([]byte(warnings), &c.Warnings),
			json.Unmarshal([]byte(tags), &c.Tags)); err != nil {
			return nil, fmt.Errorf("record of checkpoint %s: %w: %w", c.ID, fault.ErrCorrupt, err)
		}
		if attached != "" {
			if err := json.Unmarshal([]byte(attached), &c.Attached); err != nil {
				return nil, fmt.Errorf("record of checkpoint %s: %w: %w", c.ID, fault.ErrCorrupt, err)
			}
		}
		if changes != "" {
			if err := json.Unmarshal([]byte(changes), &c.Changes); err != nil {
				return nil, fmt.Errorf("record of checkpoint %s: %w: %w", c.ID, fault.ErrCorrupt, err)
			}
		}
		if c.Labels == nil {
			c.Labels = map[string]string{}
		}
		if len(c.Tags) == 0 {
			c.Tags = nil
		}
		if err := c.checkRow(); err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("read checkpoints", err))
	}
	return list, nil
}

// Checkpoints lists them newest first, in the order they were begun.
func (r *records) Checkpoints(ctx context.Context, f Filter) ([]Checkpoint, error) {
	where, args := []string{"1"}, []any(nil)
	if !f.All {
		where = append(where, "status = 'ready'")
	}
	if f.SandboxID != "" {
		where, args = append(where, "sandbox_id = ?"), append(args, f.SandboxID)
	}
	if f.Automatic {
		where = append(where, "trigger_name IN ('exec', 'interval', 'tool', 'mcp', 'prompt')") // as the index on them has it
	}
	if f.Trigger != "" {
		where, args = append(where, "trigger_name = ?"), append(args, f.Trigger)
	}
	list, err := r.checkpoints(ctx, "WHERE "+strings.Join(where, " AND ")+" ORDER BY seq DESC", args...)
	if err != nil || len(f.Labels) == 0 {
		return list, err
	}
	kept := list[:0]
next:
	for _, c := range list {
		for k, v := range f.Labels {
			if have, ok := c.Labels[k]; !ok || have != v {
				continue next
			}
		}
		kept = append(kept, c)
	}
	return kept, nil
}

// NewestCheckpoints tells, by sandbox, when the newest ready checkpoint was taken
// that is no undo one and was made here.
func (r *records) NewestCheckpoints(ctx context.Context) (map[string]time.Time, error) {
	newest := map[string]time.Time{}
	err := r.query(ctx, `SELECT sandbox_id, max(created) FROM checkpoints
		WHERE status = 'ready' AND trigger_name <> 'undo' AND pulled = 0 GROUP BY sandbox_id`, nil,
		func(row *sql.Rows) error {
			var id string
			var at int64
			err := row.Scan(&id, &at)
			newest[id] = time.Unix(0, at).UTC()
			return err
		})
	return newest, err
}

// Fork is a sandbox that began at a checkpoint of another.
type Fork struct{ ID, Name string }

// Forks lists the forks of a sandbox by its checkpoints that they came from, as
// far as they are there or have left checkpoints. Where that checkpoint is gone
// it is the nearest one before it.
func (r *records) Forks(ctx context.Context, sandbox string) (map[string][]Fork, error) {
	forks := map[string][]Fork{}
	// A fork without checkpoints has its head there, and later the first of
	// its checkpoints has its parent there.
	err := r.query(ctx, `SELECT at, id, coalesce((SELECT name FROM sandboxes WHERE sandboxes.id = found.id), min(name)) FROM (
		SELECT head AS at, id, name FROM sandboxes UNION ALL
		SELECT parent, sandbox_id, sandbox_name FROM checkpoints WHERE status = 'ready') AS found
		WHERE id <> ?1 AND at IN (SELECT id FROM checkpoints WHERE sandbox_id = ?1) GROUP BY at, id ORDER BY 3, id`,
		[]any{sandbox}, func(row *sql.Rows) error {
			var at string
			var f Fork
			err := row.Scan(&at, &f.ID, &f.Name)
			forks[at] = append(forks[at], f)
			return err
		})
	return forks, err
}

// NewestOfName returns the newest ready checkpoint of a REMOVED sandbox of this name.
// Unless foreign is set, a foreign one is returned only where there is no other.
func (r *records) NewestOfName(ctx context.Context, sandboxName string, foreign bool) (Checkpoint, error) {
	list, err := r.checkpoints(ctx, `WHERE status = 'ready' AND sandbox_name = ?1 AND sandbox_id NOT IN (SELECT id FROM sandboxes)
		ORDER BY pulled > ?2, trigger_name = 'undo', seq DESC LIMIT 1`, sandboxName, foreign)
	if err != nil {
		return Checkpoint{}, err
	}
	if len(list) == 0 {
		return Checkpoint{}, fmt.Errorf("a checkpoint of a removed sandbox %q: %w", sandboxName, fault.ErrNotFound)
	}
	return list[0], nil
}

// Checkpoint finds one by its id, by SANDBOX@REF (see ref), by a name or a tag that only one
// ready checkpoint has, or by a unique prefix of its id, in this order. Names and tags lead
// to ready ones only; ids lead to failed ones too. Steps back (~N) may follow each of them.
// SANDBOX is a name, an id or a prefix, of a removed sandbox too. What SANDBOX@REF leads to
// is always a checkpoint of that sandbox.
func (r *records) Checkpoint(ctx context.Context, ref string) (Checkpoint, error) {
	sandbox, text, scoped := strings.Cut(ref, "@")
	if ref == "" || scoped && (sandbox == "" || text == "") {
		return Checkpoint{}, fmt.Errorf("checkpoint %q: give an id, a name or SANDBOX@NAME: %w", ref, fault.ErrInvalid)
	}
	if scoped {
		return r.scoped(ctx, ref, sandbox, text)
	}
	if isID(ref) {
		list, err := r.checkpoints(ctx, "WHERE id = ?", ref)
		return first(ref, list, err)
	}
	p, err := parseRef(ref)
	if err != nil {
		return Checkpoint{}, err
	}
	list, err := r.resolve(ctx, p, ref, scope{where: "?2", arg: true})
	return first(ref, list, err)
}

// scoped looks among the checkpoints of a living sandbox first, then of removed ones.
func (r *records) scoped(ctx context.Context, ref, sandbox, text string) (Checkpoint, error) {
	p, err := parseRef(text)
	if err != nil {
		return Checkpoint{}, err
	}
	b, err := r.Sandbox(ctx, sandbox)
	switch {
	case err == nil:
		list, err := r.resolve(ctx, p, text, scope{called: b.Name, where: "sandbox_id = ?2", arg: b.ID, head: b.Head})
		if err != nil || len(list) > 0 {
			return first(ref, list, err)
		}
	case !errors.Is(err, fault.ErrNotFound):
		return Checkpoint{}, err
	}
	const removed = " AND sandbox_id NOT IN (SELECT id FROM sandboxes)"
	in := scope{called: sandbox, where: "sandbox_name = ?2" + removed, arg: sandbox, gone: true}
	list, err := r.resolve(ctx, p, text, in)
	if err == nil && len(list) == 0 && isPrefix(sandbox) {
		in.where = "sandbox_id >= ?2 AND sandbox_id < ?2 || 'g'" + removed
		list, err = r.resolve(ctx, p, text, in)
	}
	return first(ref, list, err)
}

// named finds a name, else a tag, else a prefix of an id, among the checkpoints that a
// condition over ?2 selects.
func (r *records) named(ctx context.Context, name, where string, arg any) ([]Checkpoint, error) {
	list, err := r.checkpoints(ctx, "WHERE name = ?1 AND status = 'ready' AND "+where+
		" ORDER BY seq DESC LIMIT 11", name, arg)
	if err == nil && len(list) == 0 {
		list, err = r.checkpoints(ctx,
			"WHERE id IN (SELECT checkpoint_id FROM tags WHERE tag = ?1) AND status = 'ready' AND "+where+
				" ORDER BY seq DESC LIMIT 11", name, arg)
	}
	if err == nil && len(list) == 0 && isPrefix(name) {
		list, err = r.checkpoints(ctx, "WHERE id >= ?1 AND id < ?1 || 'g' AND "+where+
			" ORDER BY seq DESC LIMIT 11", name, arg)
	}
	return list, err
}

func first(ref string, list []Checkpoint, err error) (Checkpoint, error) {
	if err != nil {
		return Checkpoint{}, err
	}
	return only(ref, list)
}

func only(ref string, list []Checkpoint) (Checkpoint, error) {
	switch len(list) {
	case 0:
		return Checkpoint{}, fmt.Errorf("checkpoint %q: %w", ref, fault.ErrNotFound)
	case 1:
		return list[0], nil
	}
	var which []string
	for _, c := range list {
		at := c.SandboxName
		if c.Name != "" {
			at += "@" + c.Name
		}
		which = append(which, fmt.Sprintf("%s (%s)", c.ID, at))
	}
	return Checkpoint{}, ambiguous("checkpoint", ref, which)
}

// SetFrozen records how long the sandbox stood still for a checkpoint, which
// is only known once it runs again, after Commit.
func (r *records) SetFrozen(ctx context.Context, id string, d time.Duration) error {
	return r.lazily(ctx, "set frozen", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, "UPDATE checkpoints SET frozen = ? WHERE id = ?", int64(d), id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("checkpoint %q: %w", id, fault.ErrNotFound))
		}
		return nil
	})
}

// SetChanges records what has changed between a checkpoint and its parent, if that still is its parent.
func (r *records) SetChanges(ctx context.Context, id, parent string, n Changes) error {
	return r.lazily(ctx, "count changes", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE checkpoints SET changes = ? WHERE id = ? AND parent = ?", encode(n), id, parent)
		return err
	})
}

// setFailed turns a row, whatever its state, into a failed one.
func (r *records) setFailed(ctx context.Context, id, reason string) error {
	if len(reason) > maxError {
		reason = reason[:maxError]
	}
	return r.release(ctx, "record the failure", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx,
			"UPDATE checkpoints SET status = 'failed', error = ?, digest = '', bytes = 0 WHERE id = ?",
			strings.ToValidUTF8(reason, "?"), id)
		return err
	})
}

// published describes a checkpoint once its files are durable.
type published struct {
	manifest Manifest
	digest   string
	bytes    int64       // at rest, of all that it needs
	packs    []pack.Info // that are not recorded yet
	lost     []int64     // recorded packs that are gone
	asIs     bool        // the manifest was made elsewhere
}

// Covers reports whether all files of b are among those of a; either may be nil.
func (a *Attached) Covers(b *Attached) bool {
	if a == nil || b == nil {
		return b == nil
	}
	return !slices.ContainsFunc(b.Paths, func(f AttachedFile) bool {
		return !slices.ContainsFunc(a.Paths, func(g AttachedFile) bool { return f.Path == g.Path })
	})
}

// And is the files of both.
func (a *Attached) And(b *Attached) *Attached {
	if a == nil {
		return b
	}
	if b == nil {
		return a
	}
	return &Attached{Paths: slices.Concat(a.Paths, b.Paths)}
}

// brief is without the tree, as a record has it.
func (a *Attached) brief() *Attached {
	if a == nil {
		return nil
	}
	return &Attached{Foreign: a.Foreign, Paths: a.Paths}
}

// record is that as text; empty: there are none.
func (a *Attached) record() string {
	if a == nil {
		return ""
	}
	return encode(a.brief())
}

// setReady records the chunks of a published checkpoint and makes it visible, in one
// step. It returns ErrState if the row is no longer pending, as after a removal.
// It returns the numbers of the packs, as addPack does.
func (s *Store) setReady(ctx context.Context, id string, p published) (nums []int64, err error) {
	m, processes, warnings := &p.manifest, 0, p.manifest.Warnings
	if p.asIs {
		warnings = nil // its author's words
	}
	if m.Processes != nil {
		processes = m.Processes.Count
	}
	var added int64
	for i := range p.packs {
		added += p.packs[i].Bytes
	}
	err = s.write(ctx, "make the checkpoint ready", func(tx *sql.Tx) error {
		nums = nums[:0]
		var name, sandbox string
		err := tx.QueryRowContext(ctx, "SELECT name, sandbox_id FROM checkpoints WHERE id = ? AND status = 'pending'",
			id).Scan(&name, &sandbox)
		if errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("checkpoint %s was removed meanwhile: %w", id, fault.ErrState)
		}
		if err != nil {
			return err
		}
		var taken string
		err = tx.QueryRowContext(ctx,
			"SELECT id FROM checkpoints WHERE sandbox_id = ? AND name = ? AND name <> '' AND status = 'ready'",
			sandbox, name).Scan(&taken)
		switch {
		case err == nil:
			return nameTaken(name, taken)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		for i := range p.packs {
			num, err := s.addPack(ctx, tx, p.packs[i], p.lost)
			if err != nil {
				return err
			}
			nums = append(nums, num)
		}
		if err := failpoint.Hit("store.commit.in-transaction"); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx,
			`UPDATE checkpoints SET status = 'ready', error = '', digest = ?, bytes = ?, files = ?, processes = ?, warnings = ?,
			added = ?, unchanged = ?, pulled = pulled OR ?, attached = ? WHERE id = ?`, p.digest, p.bytes,
			m.Files[0].Entries, processes, encode(warnings), added, added == 0, p.asIs, m.Attached.record(), id)
		return err
	})
	return nums, err
}

func nameTaken(name, id string) error {
	return &fault.Error{Op: "checkpoint name", ID: name, Hint: "Choose another name, or remove that checkpoint first.",
		Err: fmt.Errorf("%w (id %.12s)", fault.ErrExists, id)}
}
