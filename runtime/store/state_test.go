package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestCaches(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	a, b := put(t, s, "a"), put(t, s, "b")
	write := func(path string, age time.Duration) string {
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, os.Chtimes(path, time.Now().Add(-age), time.Now().Add(-age)))
		return path
	}
	kept, gone, orphan := write(s.FileCachePath(a.ID, 0), 48*time.Hour), write(s.FileCachePath(b.ID, 12), 0),
		write(s.FileCachePath(NewID(), 3), 0)
	if filepath.Dir(kept) != filepath.Join(s.root, "memory") || filepath.Base(kept) != a.ID+".0" {
		t.Error(kept)
	}
	fresh, old := write(s.FileCachePath(a.ID, 0)+".tmp", 0), write(s.FileCachePath(a.ID, 1)+".tmp", 2*time.Hour)
	must(t, s.DeleteSandbox(ctx, b.ID))
	if must1(exists(gone)) {
		t.Error("it outlived its sandbox")
	}
	_, err := s.Sweep(ctx)
	must(t, err)
	for path, want := range map[string]bool{kept: true, fresh: true, old: false, orphan: false} {
		if there := must1(exists(path)); there != want {
			t.Errorf("%s: there %v, want %v", path, there, want)
		}
	}
}

func TestTagRefs(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	a, b := put(t, s, "a"), put(t, s, "b")
	tag := func(b Sandbox, c Checkpoint, tag string) {
		_, err := s.db.Exec("INSERT INTO tags VALUES (?,?,?)", b.ID, tag, c.ID)
		must(t, err)
	}
	one, two := taken(t, s, of(a, "name", KindFiles), sample(1, 10)), taken(t, s, of(a, "", KindFiles), sample(2, 10))
	three := taken(t, s, of(b, "", KindFiles), sample(3, 10))
	tag(a, one, "zz")
	tag(a, one, "good")
	tag(a, two, "name") // a name comes first
	tag(b, three, "good")
	for ref, want := range map[string]Checkpoint{
		"a@good": one, "a@name": one, "b@good": three, "a@zz": one, "zz": one,
	} {
		if got, err := s.Checkpoint(ctx, ref); err != nil || got.ID != want.ID {
			t.Errorf("%s leads to %s: %v", ref, got.ID, err)
		}
	}
	_, err := s.Checkpoint(ctx, "good")
	wantErr(t, err, fault.ErrInvalid, one.ID, three.ID)
	if c := must1(s.Checkpoint(ctx, one.ID)); !slices.Equal(c.Tags, []string{"good", "zz"}) {
		t.Error(c.Tags)
	}
	must(t, s.RemoveCheckpoint(ctx, one.ID))
	_, err = s.Checkpoint(ctx, "a@zz")
	wantErr(t, err, fault.ErrNotFound)
	if got := must1(s.Checkpoint(ctx, "a@name")); got.ID != two.ID {
		t.Error(got.ID)
	}
}

// Records of the first schema stay, as failures, and nothing of theirs is touched.
func TestMigration(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	must(t, newStore(root).makeDirs())
	first, err := openOld(root)
	must(t, err)
	_, err = first.Exec(migrations[0] +
		fmt.Sprintf("PRAGMA user_version = 1; PRAGMA application_id = %d", applicationID))
	must(t, err)
	must(t, first.Close())
	must(t, os.Chmod(filepath.Join(root, "state.db"), 0o600))
	id, box := NewID(), sandbox("c")
	must(t, os.MkdirAll(filepath.Join(root, "checkpoints", id), 0o700))
	must(t, os.WriteFile(filepath.Join(root, "checkpoints", id, "files.tar.zst"), []byte("x"), 0o600))
	old, err := openOld(root)
	must(t, err)
	_, err = old.Exec(`INSERT INTO checkpoints (id,name,sandbox_id,sandbox_name,kind,status,error,parent,trigger_name,created,files,processes,bytes,digest,image_digest,labels,frozen,warnings,spec)
		VALUES (?, 'n', ?, 'c', 'files', 'ready', '', '', '', 0, 0, 0, 5, 'x', '', '{}', 0, '[]', '')`, id, box.ID)
	must(t, err)
	must(t, old.Close())
	s := open(t, root)
	c, err := s.Checkpoint(ctx, id)
	must(t, err)
	if c.Status != Failed || c.Error != "made by an older format" {
		t.Errorf("%+v", c)
	}
	did, err := s.Sweep(ctx)
	if err != nil || len(did) > 0 || !must1(exists(filepath.Join(root, "checkpoints", id, "files.tar.zst"))) {
		t.Errorf("%v, %v", did, err)
	}
	must(t, s.RemoveCheckpoint(ctx, id))
	tidy(t, s)
}

// The store's lock: any number share it, one has it alone, in one process too.
func TestStoreLock(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	c := taken(t, s, of(b, "", KindFiles), sample(1, 10))
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
	must(t, err)
	r, err := s.OpenCheckpoint(ctx, c.ID)
	must(t, err)
	alone := func() error {
		l, err := s.exclude(ctx, "test", 0)
		if err == nil {
			l.Unlock()
		}
		return err
	}
	wantErr(t, alone(), fault.ErrBusy)
	must(t, r.Close())
	wantErr(t, alone(), fault.ErrBusy)
	must(t, d.Abort(ctx, nil))
	l, err := s.exclude(ctx, "test", 0)
	must(t, err)
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := s.OpenCheckpoint(short, c.ID); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if _, err := s.BeginCheckpoint(short, of(b, "", KindFiles)); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	got := make(chan error, 1)
	go func() {
		r, err := s.OpenCheckpoint(ctx, c.ID)
		if err == nil {
			err = r.Close()
		}
		got <- err
	}()
	l.Unlock()
	must(t, <-got)
	must(t, alone())
}
