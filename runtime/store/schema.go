package store

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// applicationID marks a SQLite file as agentbox's ("agbx").
const applicationID = 0x61676278

// migrations bring state.db from user_version i to i+1. Released ones never
// change; a new one is added at the end.
var migrations = []string{
	// seq orders: clocks step back, inserts do not.
	`CREATE TABLE sandboxes (
		seq INTEGER PRIMARY KEY AUTOINCREMENT,
		id TEXT NOT NULL UNIQUE,
		name TEXT NOT NULL UNIQUE,
		backend TEXT NOT NULL,
		spec TEXT NOT NULL,
		image TEXT NOT NULL,
		image_digest TEXT NOT NULL,
		lower TEXT NOT NULL,
		head TEXT NOT NULL,
		attempt INTEGER NOT NULL,
		created INTEGER NOT NULL,
		labels TEXT NOT NULL,
		kept INTEGER NOT NULL DEFAULT 0
	) STRICT;
	CREATE TABLE checkpoints (
		seq INTEGER PRIMARY KEY AUTOINCREMENT,
		id TEXT NOT NULL UNIQUE,
		name TEXT NOT NULL,
		sandbox_id TEXT NOT NULL,
		sandbox_name TEXT NOT NULL,
		kind TEXT NOT NULL,
		status TEXT NOT NULL,
		error TEXT NOT NULL,
		parent TEXT NOT NULL,
		trigger_name TEXT NOT NULL,
		created INTEGER NOT NULL,
		files INTEGER NOT NULL,
		processes INTEGER NOT NULL,
		bytes INTEGER NOT NULL,
		digest TEXT NOT NULL,
		image_digest TEXT NOT NULL,
		labels TEXT NOT NULL,
		frozen INTEGER NOT NULL,
		warnings TEXT NOT NULL,
		spec TEXT NOT NULL,
		removing INTEGER NOT NULL DEFAULT 0
	) STRICT;
	CREATE UNIQUE INDEX checkpoint_names ON checkpoints (sandbox_id, name) WHERE status = 'ready' AND name <> '';
	CREATE INDEX checkpoint_sandbox_names ON checkpoints (sandbox_name);
	CREATE INDEX checkpoint_parents ON checkpoints (parent);
	CREATE INDEX checkpoint_unready ON checkpoints (status) WHERE status <> 'ready';
	CREATE TABLE journal (
		seq INTEGER PRIMARY KEY AUTOINCREMENT,
		op TEXT NOT NULL,
		sandbox TEXT NOT NULL,
		checkpoint TEXT NOT NULL,
		data TEXT NOT NULL,
		pid INTEGER NOT NULL,
		started INTEGER NOT NULL
	) STRICT;`,
	// The data of checkpoints lies in packs. The tables before this held archives and were
	// never released.
	`CREATE TABLE packs (
		num INTEGER PRIMARY KEY,
		name TEXT NOT NULL UNIQUE,
		bytes INTEGER NOT NULL,
		created INTEGER NOT NULL
	) STRICT;
	CREATE TABLE blobs (
		id BLOB PRIMARY KEY,
		pack INTEGER NOT NULL,
		off INTEGER NOT NULL,
		stored INTEGER NOT NULL,
		raw INTEGER NOT NULL,
		packed INTEGER NOT NULL,
		bad INTEGER NOT NULL DEFAULT 0
	) STRICT, WITHOUT ROWID;
	CREATE INDEX blob_packs ON blobs (pack);
	CREATE TABLE tags (
		sandbox_id TEXT NOT NULL,
		tag TEXT NOT NULL,
		checkpoint_id TEXT NOT NULL,
		PRIMARY KEY (sandbox_id, tag)
	) STRICT;
	CREATE INDEX tag_checkpoints ON tags (checkpoint_id);
	CREATE TABLE removed (bytes INTEGER NOT NULL) STRICT;
	INSERT INTO removed VALUES (0);
	ALTER TABLE checkpoints ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
	ALTER TABLE checkpoints ADD COLUMN damaged TEXT NOT NULL DEFAULT '';
	ALTER TABLE checkpoints ADD COLUMN added INTEGER NOT NULL DEFAULT 0;
	ALTER TABLE checkpoints ADD COLUMN unchanged INTEGER NOT NULL DEFAULT 0;
	ALTER TABLE checkpoints ADD COLUMN pulled INTEGER NOT NULL DEFAULT 0;
	UPDATE sandboxes SET head = '' WHERE head IN (SELECT id FROM checkpoints);
	UPDATE checkpoints SET status = 'failed', error = 'made by an older format', digest = '', bytes = 0 WHERE status <> 'failed';`,
	// Effects of sandboxes outside of themselves.
	`CREATE TABLE effects (
		seq INTEGER PRIMARY KEY AUTOINCREMENT,
		id TEXT NOT NULL UNIQUE,
		sandbox_id TEXT NOT NULL,
		head TEXT NOT NULL,
		status TEXT NOT NULL,
		created INTEGER NOT NULL,
		data TEXT NOT NULL
	) STRICT;
	CREATE INDEX effect_sandboxes ON effects (sandbox_id, seq);`,
	// Why a sandbox must not be used; empty: it may be.
	`ALTER TABLE sandboxes ADD COLUMN held TEXT NOT NULL DEFAULT '';`,
	// Leases and groups.
	`CREATE TABLE leases (
		seq INTEGER PRIMARY KEY AUTOINCREMENT,
		id TEXT NOT NULL UNIQUE,
		name TEXT NOT NULL,
		state TEXT NOT NULL,
		data TEXT NOT NULL,
		created INTEGER NOT NULL
	) STRICT;
	CREATE UNIQUE INDEX lease_names ON leases (name) WHERE state <> 'ended' AND name <> '';
	CREATE INDEX lease_states ON leases (state) WHERE state <> 'ended';
	ALTER TABLE sandboxes ADD COLUMN lease TEXT NOT NULL DEFAULT '';
	ALTER TABLE sandboxes ADD COLUMN member_of TEXT NOT NULL DEFAULT '';
	ALTER TABLE checkpoints ADD COLUMN lease TEXT NOT NULL DEFAULT '';
	CREATE INDEX checkpoint_leases ON checkpoints (lease) WHERE lease <> '';`,
	// Which files of the host belong to a checkpoint; empty: none.
	`ALTER TABLE checkpoints ADD COLUMN attached TEXT NOT NULL DEFAULT '';`,
	// Of memory written ahead, which nothing does any more.
	`ALTER TABLE checkpoints ADD COLUMN ahead INTEGER NOT NULL DEFAULT 0;`,
	`ALTER TABLE checkpoints DROP COLUMN ahead;`,
	// Automatic checkpoints are counted after each of them.
	`CREATE INDEX checkpoint_automatic ON checkpoints (sandbox_id) WHERE trigger_name IN ('exec', 'interval');`,
	// Which process has created a sandbox to start it next; empty: none.
	`ALTER TABLE sandboxes ADD COLUMN starter TEXT NOT NULL DEFAULT '';`,
	// Checkpoints that agents take are counted as well.
	`DROP INDEX checkpoint_automatic;
	CREATE INDEX checkpoint_automatic ON checkpoints (sandbox_id) WHERE trigger_name IN ('exec', 'interval', 'tool', 'mcp');`,
	// Archives of other engines were not recorded as foreign.
	`UPDATE checkpoints SET pulled = 1 WHERE trigger_name = 'import';`,
	// What a checkpoint is, in its maker's words.
	`ALTER TABLE checkpoints ADD COLUMN message TEXT NOT NULL DEFAULT '';`,
	// Where redo leads: ids with a space between them.
	`ALTER TABLE sandboxes ADD COLUMN redo TEXT NOT NULL DEFAULT '';`,
	// How many paths have changed since the parent; empty: not counted yet.
	`ALTER TABLE checkpoints ADD COLUMN changes TEXT NOT NULL DEFAULT '';`,
	// Checkpoints at the prompts of shells are counted as well.
	`DROP INDEX checkpoint_automatic;
	CREATE INDEX checkpoint_automatic ON checkpoints (sandbox_id)
	WHERE trigger_name IN ('exec', 'interval', 'tool', 'mcp', 'prompt');`,
}

func (d *database) migrate(ctx context.Context) error {
	var version, tables, others, app int
	var mode string
	err := d.db.QueryRowContext(ctx, `SELECT
		(SELECT user_version FROM pragma_user_version),
		(SELECT application_id FROM pragma_application_id),
		(SELECT journal_mode FROM pragma_journal_mode),
		(SELECT count(*) FROM sqlite_schema WHERE name IN ('sandboxes', 'checkpoints', 'journal')),
		(SELECT count(*) FROM sqlite_schema WHERE type NOT IN ('table', 'index') OR sql LIKE 'create%virtual%')`).
		Scan(&version, &app, &mode, &tables, &others)
	switch {
	case err != nil:
		return cancelled(ctx, dbError("open", err))
	case mode != "wal":
		return &fault.Error{Op: "open state", ID: d.dbPath(), Hint: "Put the root on a local filesystem.",
			Err: fmt.Errorf("this filesystem has no shared memory for SQLite's WAL (journal mode %q): %w",
				mode, fault.ErrUnsupported)}
	case version > len(migrations):
		return &fault.Error{Op: "open state", ID: d.dbPath(), Hint: "Use that newer agentbox, or another --root.",
			Err: fmt.Errorf("a newer agentbox wrote it (schema %d, this one knows %d): %w", version,
				len(migrations), fault.ErrUnsupported)}
	case others > 0:
		return d.foreignSchema("it has views, triggers or virtual tables")
	case version > 0 && (app != applicationID || tables != 3), version == 0 && tables != 0, version < 0:
		return &fault.Error{Op: "open state", ID: d.dbPath(), Hint: "Move it aside, or use another --root.",
			Err: fmt.Errorf("not a database of agentbox: %w", fault.ErrCorrupt)}
	case version == len(migrations):
		return d.checkSchema(ctx, d.db)
	}
	err = d.write(ctx, "migrate", func(tx *sql.Tx) error {
		for _, m := range migrations[version:] {
			if _, err := tx.ExecContext(ctx, m); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d; PRAGMA application_id = %d",
			len(migrations), applicationID))
		if err != nil {
			return err
		}
		return d.checkSchema(ctx, tx)
	})
	if err != nil {
		return err
	}
	return fsx.SyncDir(d.root)
}

// schemaSum is the sum of what all migrations leave in sqlite_schema.
const schemaSum = "a00eb9146ca5d6df620c7428943dcbc0d9f730b2ce19b79dadd1991eebe5fa9b"

// checkSchema refuses a database that the migrations would not have made: what else can be in a
// schema (triggers, views, columns that are computed) has SQLite do more than it is asked to.
func (d *database) checkSchema(ctx context.Context, db interface {
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}) error {
	// The tables of ANALYZE are SQLite's own.
	rows, err := db.QueryContext(ctx,
		`SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema WHERE name NOT IN ('sqlite_stat1', 'sqlite_stat4') ORDER BY type, name`)
	if err != nil {
		return cancelled(ctx, dbError("open", err))
	}
	defer rows.Close()
	sum := sha256.New()
	for rows.Next() {
		var kind, name, table, text string
		if err := rows.Scan(&kind, &name, &table, &text); err != nil {
			return dbError("open", err)
		}
		fmt.Fprintf(sum, "%s\x00%s\x00%s\x00%s\x00", kind, name, table, strings.Join(strings.Fields(text), " "))
	}
	if err := rows.Err(); err != nil {
		return cancelled(ctx, dbError("open", err))
	}
	if hex.EncodeToString(sum.Sum(nil)) != schemaSum {
		return d.foreignSchema("its tables are not those of schema " + strconv.Itoa(len(migrations)))
	}
	return nil
}

func (d *database) foreignSchema(why string) error {
	return &fault.Error{Op: "open state", ID: d.dbPath(),
		Hint: "agentbox has not written this. Do not use a state directory that others could write to; move it aside, or use another --root.",
		Err:  fmt.Errorf("%s: %w", why, fault.ErrCorrupt)}
}
