package store

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// Rows that agentbox would not have written lead to nothing outside of the root: neither is
// what they name removed, nor are they handed to those who would go by them.
func TestForgedRows(t *testing.T) {
	ctx := context.Background()
	sweep := func(s *Store) error { _, err := s.Sweep(ctx); return err }
	list := func(s *Store) error { _, err := s.Checkpoints(ctx, Filter{All: true}); return err }
	boxes := func(s *Store) error { _, err := s.Sandboxes(ctx); return err }
	intents := func(s *Store) error { _, err := s.Intents(ctx); return err }
	leases := func(s *Store) error { _, err := s.Leases(ctx, true); return err }
	const outside = "../../outside" // from ROOT/checkpoints
	for name, c := range map[string]struct {
		forge string
		reads []func(*Store) error
	}{
		"removal under way": {"UPDATE checkpoints SET id = '" + outside + "', status = 'failed', removing = 1", []func(*Store) error{sweep, list}},
		"pending":           {"UPDATE checkpoints SET id = '" + outside + "', status = 'pending'", []func(*Store) error{sweep, list}},
		"scratch":           {"UPDATE checkpoints SET id = '/../../../outside', status = 'failed', removing = 1", []func(*Store) error{sweep, list}},
		"sandbox of one":    {"UPDATE checkpoints SET sandbox_id = '../../outside', status = 'pending'", []func(*Store) error{sweep, list}},
		"lease of one":      {"UPDATE checkpoints SET lease = '../x'", []func(*Store) error{list}},
		"name of one":       {"UPDATE checkpoints SET name = '../x'", []func(*Store) error{list}},
		"name, terminal":    {"UPDATE checkpoints SET sandbox_name = char(27) || '[2J'", []func(*Store) error{list}},
		"tag":               {"INSERT INTO tags SELECT sandbox_id, 'a/b', id FROM checkpoints", []func(*Store) error{list}},
		"sandbox":           {"UPDATE sandboxes SET id = '../../outside'", []func(*Store) error{boxes, sweep}},
		"sandbox, name":     {"UPDATE sandboxes SET name = '../x'", []func(*Store) error{boxes}},
		"sandbox, backend":  {"UPDATE sandboxes SET backend = '../x'", []func(*Store) error{boxes}},
		"sandbox, group":    {"UPDATE sandboxes SET member_of = '../x'", []func(*Store) error{boxes}},
		"sandbox, spec":     {"UPDATE sandboxes SET spec = printf('%.5000000c', 'x')", []func(*Store) error{boxes}},
		"journal":           {"UPDATE journal SET sandbox = '../../outside'", []func(*Store) error{intents}},
		"journal, a name":   {"UPDATE journal SET sandbox = 'restore'", []func(*Store) error{intents}}, // of a directory in RUN
		"journal, id":       {"UPDATE journal SET checkpoint = '../../outside'", []func(*Store) error{intents}},
		"journal, all":      {"UPDATE journal SET pid = -1", []func(*Store) error{intents}},
		"journal, length":   {"UPDATE journal SET data = printf('%.5000000c', 'x')", []func(*Store) error{intents}},
		"lease":             {"UPDATE leases SET id = '../x'", []func(*Store) error{leases}},
		"lease, name":       {"UPDATE leases SET name = 'a/b'", []func(*Store) error{leases}},
		"effect":            {"UPDATE effects SET id = '../x'", []func(*Store) error{func(s *Store) error { _, err := s.Effects(ctx, must1(s.Sandbox(ctx, "c")).ID); return err }}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			kept := filepath.Join(dir, "outside", "kept")
			must(t, os.Mkdir(filepath.Dir(kept), 0o700))
			must(t, os.WriteFile(kept, []byte("x"), 0o600))
			s := open(t, filepath.Join(dir, "root"))
			b := put(t, s, "c")
			ck := taken(t, s, of(b, "", KindFiles), sample(1, 10))
			_, err := s.Begin(ctx, Intent{Op: "restore", Sandbox: b.ID, Checkpoint: ck.ID})
			must(t, err)
			must(t, s.PutLease(ctx, Lease{ID: NewID(), Data: []byte("{}")}))
			must(t, s.PutEffect(ctx, Effect{ID: NewID(), Sandbox: b.ID, Data: []byte("{}")}))
			for _, read := range append(c.reads, intents, leases, boxes, list) {
				must(t, read(s)) // before it is forged
			}
			_, err = s.db.Exec(c.forge)
			must(t, err)
			for i, read := range c.reads {
				err := read(s)
				wantErr(t, err, fault.ErrCorrupt, "record of a ")
				if left, err := os.ReadFile(kept); err != nil || string(left) != "x" {
					t.Fatalf("read %d: %v: what lies outside is gone", i, err)
				}
			}
			if entries := must1(os.ReadDir(dir)); len(entries) != 2 {
				t.Error(fmt.Sprint(entries))
			}
		})
	}
}
