package store

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// Roots of earlier versions have been through these migrations, in this order: none may
// change, go or come in between. A new one is added at the end, and then here.
func TestReleasedMigrationsStay(t *testing.T) {
	const n, want = 16, "22a56b9d834ad6371c4f2b8fa210743721f4d07a99e5d6133bcadc91f686730c"
	if got := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(migrations[:n],
		"\x00")))); got != want || len(migrations) != n {
		t.Errorf("the first %d migrations of %d have sum %s, want %s", n, len(migrations), got, want)
	}
}

// A schema has nothing but what the migrations have made.
func TestForgedSchema(t *testing.T) {
	ctx := context.Background()
	for name, c := range map[string]struct{ forge, says string }{
		"trigger":  {"CREATE TRIGGER t AFTER INSERT ON sandboxes BEGIN INSERT INTO journal (op, sandbox, checkpoint, data, pid, started) VALUES ('rm', NEW.id, '', '', 1, 0); END", "views, triggers"},
		"view":     {"ALTER TABLE leases RENAME TO l; CREATE VIEW leases AS SELECT * FROM l", "views, triggers"},
		"virtual":  {"CREATE VIRTUAL TABLE x USING fts5(y)", "views, triggers"},
		"table":    {"CREATE TABLE x (y)", "its tables"},
		"computed": {"ALTER TABLE sandboxes ADD COLUMN x TEXT AS (hex(zeroblob(100000000)))", "its tables"},
		"index":    {"CREATE INDEX x ON sandboxes (upper(name))", "its tables"},
		"column":   {"ALTER TABLE journal DROP COLUMN started; ALTER TABLE journal ADD COLUMN started INTEGER NOT NULL DEFAULT 7", "its tables"},
		"missing":  {"DROP INDEX lease_names", "its tables"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			s := open(t, root)
			put(t, s, "c")
			must(t, s.Close())
			db := must1(openOld(root))
			_, err := db.Exec(c.forge)
			must(t, err)
			must(t, db.Close())
			_, err = Open(ctx, root)
			wantErr(t, err, fault.ErrCorrupt, c.says)
		})
	}
	root := t.TempDir()
	must(t, open(t, root).Close())
	db := must1(openOld(root))
	_, err := db.Exec("ANALYZE")
	must(t, err)
	must(t, db.Close())
	open(t, root)
}
