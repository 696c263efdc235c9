package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Rows that agentbox would not have written lead to nothing outside of the root: what
// they name is not removed, and they are not returned.
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
		"removal under way": {
			"UPDATE checkpoints SET id = '" + outside + "', status = 'failed', removing = 1",
			[]func(*Store) error{sweep, list},
		},
		"pending": {
			"UPDATE checkpoints SET id = '" + outside + "', status = 'pending'", []func(*Store) error{sweep, list},
		},
		"scratch": {
			"UPDATE checkpoints SET id = '/../../../outside', status = 'failed', removing = 1",
			[]func(*Store) error{sweep, list},
		},
		"sandbox of one": {
			"UPDATE checkpoints SET sandbox_id = '../../outside', status = 'pending'",
			[]func(*Store) error{sweep, list},
		},
		"lease of one":   {"UPDATE checkpoints SET lease = '../x'", []func(*Store) error{list}},
		"name of one":    {"UPDATE checkpoints SET name = '../x'", []func(*Store) error{list}},
		"name, terminal": {"UPDATE checkpoints SET sandbox_name = char(27) || '[2J'", []func(*Store) error{list}},
		"tag": {
			"INSERT INTO tags SELECT sandbox_id, 'a/b', id FROM checkpoints", []func(*Store) error{list},
		},
		"sandbox":          {"UPDATE sandboxes SET id = '../../outside'", []func(*Store) error{boxes, sweep}},
		"sandbox, name":    {"UPDATE sandboxes SET name = '../x'", []func(*Store) error{boxes}},
		"sandbox, backend": {"UPDATE sandboxes SET backend = '../x'", []func(*Store) error{boxes}},
		"sandbox, group":   {"UPDATE sandboxes SET member_of = '../x'", []func(*Store) error{boxes}},
		"sandbox, spec":    {"UPDATE sandboxes SET spec = printf('%.5000000c', 'x')", []func(*Store) error{boxes}},
		"journal":          {"UPDATE journal SET sandbox = '../../outside'", []func(*Store) error{intents}},
		// of a directory in RUN
		"journal, a name": {"UPDATE journal SET sandbox = 'restore'", []func(*Store) error{intents}},
		"journal, id":     {"UPDATE journal SET checkpoint = '../../outside'", []func(*Store) error{intents}},
		"journal, all":    {"UPDATE journal SET pid = -1", []func(*Store) error{intents}},
		"journal, length": {"UPDATE journal SET data = printf('%.5000000c', 'x')", []func(*Store) error{intents}},
		"lease":           {"UPDATE leases SET id = '../x'", []func(*Store) error{leases}},
		"lease, name":     {"UPDATE leases SET name = 'a/b'", []func(*Store) error{leases}},
		"effect": {
			"UPDATE effects SET id = '../x'", []func(*Store) error{func(s *Store) error {
				_, err := s.Effects(ctx, must1(s.Sandbox(ctx, "c")).ID)
				return err
			}},
		},
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

// Files in the root are root's alone, and lead nowhere else.
func TestForgedParts(t *testing.T) {
	ctx := context.Background()
	lead := func(from, to string) error { return errors.Join(os.RemoveAll(from), os.Symlink(to, from)) }
	for name, c := range map[string]struct {
		forge func(root, outside string) error
		says  string
	}{
		"owner of the root": {func(root, _ string) error { return os.Chown(root, 1000, 0) }, "belongs to user 1000"},
		"group of the root": {func(root, _ string) error {
			return errors.Join(os.Chown(root, 0, 1000), os.Chmod(root, 0o770))
		}, "others may write"},
		"owner of state.db": {func(root, _ string) error {
			return os.Chown(root+"/state.db", 1000, 0)
		}, "belongs to user 1000"},
		"mode of state.db": {func(root, _ string) error {
			return os.Chmod(root+"/state.db", 0o666)
		}, "others may write"},
		"state.db-wal, link": {func(root, outside string) error {
			return lead(root+"/state.db-wal", outside+"/kept")
		}, "symbolic link"},
		"state.db-shm, link": {func(root, outside string) error {
			return lead(root+"/state.db-shm", outside+"/kept")
		}, "symbolic link"},
		"sandboxes, link": {func(root, outside string) error {
			return lead(root+"/sandboxes", outside)
		}, "symbolic link"},
		"checkpoints, link": {func(root, outside string) error {
			return lead(root+"/checkpoints", outside)
		}, "symbolic link"},
		"network.json, link": {func(root, outside string) error {
			return lead(root+"/network.json", outside+"/kept")
		}, "symbolic link"},
		"run/restore, link": {func(root, outside string) error {
			return errors.Join(os.Mkdir(root+"/run", 0o700), os.Symlink(outside, root+"/run/restore"))
		}, "symbolic link"},
		"volumes, of another": {func(root, _ string) error {
			return errors.Join(os.Mkdir(root+"/volumes", 0o700), os.Chown(root+"/volumes", 1000, 1000))
		}, "belongs to user 1000"},
		"images, of others": {func(root, _ string) error {
			return errors.Join(os.Mkdir(root+"/images", 0o700), os.Chmod(root+"/images", 0o777))
		}, "others may write"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			root, outside := filepath.Join(dir, "root"), filepath.Join(dir, "outside")
			must(t, os.Mkdir(outside, 0o700))
			must(t, os.WriteFile(outside+"/kept", []byte("x"), 0o600))
			s := open(t, root)
			put(t, s, "c")
			must(t, s.Close())
			must(t, c.forge(root, outside))
			_, err := Open(ctx, root)
			wantErr(t, err, fault.ErrDenied, c.says)
			if got := must1(os.ReadFile(outside + "/kept")); string(got) != "x" {
				t.Errorf("%q", got)
			}
			if entries := must1(os.ReadDir(outside)); len(entries) != 1 {
				t.Error(entries)
			}
		})
	}
	// A root by another name, and one of a group that is root's, are all right.
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/disk", 0o700))
	must(t, os.Chmod(dir+"/disk", 0o770))
	must(t, os.Symlink(dir+"/disk", dir+"/root"))
	put(t, open(t, dir+"/root"), "c")

	// So is a socket that others may connect to.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	must(t, err)
	defer unix.Close(fd)
	must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: dir + "/disk/s"}))
	must(t, os.Chmod(dir+"/disk/s", 0o777))
	open(t, dir+"/root")
}
