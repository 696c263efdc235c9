package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

var errorsIs = errors.Is

func TestOpenMakesOwnerOnlyState(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	root := filepath.Join(t.TempDir(), "a b", "100%25?x#y", "root")
	s := open(t, root)
	put(t, s, "c")
	for path, mode := range map[string]os.FileMode{
		"": 0o700, "locks": 0o700, "packs": 0o700, "memory": 0o700, "checkpoints": 0o700, "checkpoints/failed": 0o700,
		"state.db": 0o600, "state.db-wal": 0o600, "state.db-shm": 0o600,
	} {
		info, err := os.Stat(filepath.Join(root, path))
		must(t, err)
		if info.Mode().Perm() != mode {
			t.Errorf("%q has mode %o, want %o", path, info.Mode().Perm(), mode)
		}
	}
	var sync int
	must(t, s.db.QueryRow("PRAGMA synchronous").Scan(&sync))
	if sync != 2 {
		t.Errorf("synchronous is %d, want 2 (FULL)", sync)
	}
	must(t, s.Close())
	s = open(t, root)
	if list, err := s.Sandboxes(context.Background()); err != nil || len(list) != 1 {
		t.Fatalf("after reopening: %v, %v", list, err)
	}
}

// TestOpenExisting: a store that is not there is not made.
func TestOpenExisting(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	for range 2 { // then an empty directory is there
		if s, err := OpenExisting(t.Context(), root); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%v, %v", s, err)
		}
		if list, _ := os.ReadDir(root); len(list) > 0 {
			t.Errorf("it has made %v", list)
		}
		if _, err := os.Lstat(root); err == nil {
			continue
		}
		must(t, os.Mkdir(root, 0o700))
	}
	for _, open := range []func(context.Context, string) (*Store, error){Open, OpenExisting} {
		s, err := open(t.Context(), root)
		must(t, err)
		must(t, s.Close())
	}
}

func TestOpenRefuses(t *testing.T) {
	ctx := context.Background()
	try := func(root string) error {
		s, err := Open(ctx, root)
		if err == nil {
			_ = s.Close()
		}
		return err
	}
	edit := func(root, q string) {
		db, err := sql.Open("sqlite", filepath.Join(root, "state.db"))
		must(t, err)
		_, err = db.Exec(q)
		must(t, err)
		must(t, db.Close())
	}
	fresh := func() string {
		root := t.TempDir()
		must(t, open(t, root).Close())
		edit(root, "PRAGMA wal_checkpoint") // all is in state.db
		return root
	}

	t.Run("newer schema", func(t *testing.T) {
		root := fresh()
		edit(root, "PRAGMA user_version = 999")
		err := try(root)
		wantErr(t, err, fault.ErrUnsupported, "999")
		if len(fault.Hint(err)) == 0 {
			t.Error("no remedy")
		}
	})
	t.Run("another program's database", func(t *testing.T) {
		root := fresh()
		edit(root, "PRAGMA application_id = 1")
		wantErr(t, try(root), fault.ErrCorrupt)
	})
	t.Run("garbage", func(t *testing.T) {
		root := fresh()
		must(t, os.WriteFile(filepath.Join(root, "state.db"), []byte(strings.Repeat("garbage!", 4096)), 0o600))
		wantErr(t, try(root), fault.ErrCorrupt)
	})
	t.Run("schema page overwritten", func(t *testing.T) {
		root := fresh()
		f, err := os.OpenFile(filepath.Join(root, "state.db"), os.O_WRONLY, 0)
		must(t, err)
		_, err = f.WriteAt(make([]byte, 3900), 100)
		must(t, err)
		must(t, f.Close())
		wantErr(t, try(root), fault.ErrCorrupt)
	})
	t.Run("everybody may write", func(t *testing.T) {
		root := t.TempDir()
		must(t, os.Chmod(root, 0o777))
		wantErr(t, try(root), fault.ErrDenied)
	})
	t.Run("planted symlink", func(t *testing.T) {
		root, other := t.TempDir(), t.TempDir()
		must(t, os.Symlink(other, filepath.Join(root, "checkpoints")))
		wantErr(t, try(root), fault.ErrDenied)
	})
	t.Run("somebody else's directory", func(t *testing.T) {
		root := t.TempDir()
		must(t, os.Mkdir(filepath.Join(root, "locks"), 0o700))
		must(t, os.Chown(filepath.Join(root, "locks"), 1000, 1000))
		wantErr(t, try(root), fault.ErrDenied)
	})
	t.Run("read-only disk", func(t *testing.T) {
		root := t.TempDir()
		must(t, unix.Mount("none", root, "tmpfs", unix.MS_RDONLY, "size=1m"))
		defer func() { must(t, unix.Unmount(root, 0)) }()
		wantErr(t, try(root), fault.ErrDenied)
	})
	t.Run("root is a file", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "f")
		must(t, os.WriteFile(path, nil, 0o600))
		if err := try(path); err == nil {
			t.Fatal("opened a file")
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := Open(ctx, t.TempDir()); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	})
	t.Run("empty database of an interrupted first start", func(t *testing.T) {
		root := t.TempDir()
		must(t, os.WriteFile(filepath.Join(root, "state.db"), nil, 0o600))
		must(t, try(root))
	})
}

func TestOpenConcurrently(t *testing.T) {
	root := filepath.Join(t.TempDir(), "new")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s, err := Open(context.Background(), root)
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			if err := s.PutSandbox(context.Background(), sandbox(fmt.Sprint("s", i))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	list, err := open(t, root).Sandboxes(context.Background())
	if err != nil || len(list) != 8 {
		t.Fatalf("%d sandboxes, %v", len(list), err)
	}
}

func TestValidName(t *testing.T) {
	for _, good := range []string{"a", "A9_.-", "0", strings.Repeat("x", 128), "deadbeef"} {
		must(t, ValidName(good))
	}
	for _, bad := range []string{
		"", "..", ".", "a/b", "../x", "-a", "_a", ".a", "a b", "a\n", "ä", "a@b", "a\x00", strings.Repeat("x", 129),
		NewID(), strings.Repeat("ä", 200),
	} {
		wantErr(t, ValidName(bad), fault.ErrInvalid)
	}
}

func TestValidLabels(t *testing.T) {
	must(t, ValidLabels(nil))
	must(t, ValidLabels(map[string]string{"a.b/c": "", "k": "many\nlines = ok"}))
	many := map[string]string{}
	for i := range 257 {
		many[fmt.Sprint(i)] = ""
	}
	for _, bad := range []map[string]string{
		many, {"": "v"}, {"a=b": ""}, {"a\n": ""}, {"\xff": ""}, {"k": "\xff"}, {"k": strings.Repeat("x", 4097)},
		{strings.Repeat("k", 257): ""},
	} {
		wantErr(t, ValidLabels(bad), fault.ErrInvalid)
	}
}

func TestSandboxes(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	a := sandbox("a")
	a.ID = "aaaa" + NewID()[4:]
	a.Head, a.Attempt = NewID(), 3
	must(t, s.PutSandbox(ctx, a))
	b := sandbox("b")
	b.ID = a.ID[:6] + NewID()[6:]
	b.Labels, b.Lower = map[string]string{}, nil
	b.Created = a.Created.Add(-time.Hour) // a clock that stepped back
	must(t, s.PutSandbox(ctx, b))

	for ref, want := range map[string]Sandbox{"a": a, "b": b, a.ID: a, b.ID: b, a.ID[:20]: a, b.ID[:31]: b} {
		got, err := s.Sandbox(ctx, ref)
		must(t, err)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", ref, d)
		}
	}
	_, err := s.Sandbox(ctx, a.ID[:5])
	wantErr(t, err, fault.ErrInvalid, a.ID, b.ID, "ambiguous")
	for _, ref := range []string{"nobody", a.ID[:3], "ffff", "%", "_", "a%", NewID(), "g", "a' OR 1=1 --"} {
		_, err := s.Sandbox(ctx, ref)
		wantErr(t, err, fault.ErrNotFound, ref)
	}
	_, err = s.Sandbox(ctx, "")
	wantErr(t, err, fault.ErrInvalid)

	// A name wins over a prefix.
	c := sandbox(a.ID[:5])
	must(t, s.PutSandbox(ctx, c))
	got, err := s.Sandbox(ctx, a.ID[:5])
	if err != nil || got.ID != c.ID {
		t.Fatalf("%v, %v", got.ID, err)
	}

	list, err := s.Sandboxes(ctx)
	must(t, err)
	if ids := []string{list[0].ID, list[1].ID, list[2].ID}; !slices.Equal(ids, []string{c.ID, b.ID, a.ID}) {
		t.Fatalf("order %v", ids)
	}

	dup := sandbox("a")
	wantErr(t, s.PutSandbox(ctx, dup), fault.ErrExists, `"a"`, a.ID[:12])
	dup = sandbox("z")
	dup.ID = a.ID
	wantErr(t, s.PutSandbox(ctx, dup), fault.ErrExists, a.ID)

	for _, change := range []func(*Sandbox){
		func(b *Sandbox) { b.ID = "xyz" }, func(b *Sandbox) { b.Name = "a/b" }, func(b *Sandbox) {
			b.Name = ""
		}, func(b *Sandbox) { b.Name = a.ID },
		func(b *Sandbox) { b.Spec = []byte("{") }, func(b *Sandbox) { b.Labels = map[string]string{"": ""} },
		func(b *Sandbox) { b.Spec = []byte(`"` + strings.Repeat("x", 5<<20) + `"`) },
	} {
		bad := sandbox("bad")
		change(&bad)
		wantErr(t, s.PutSandbox(ctx, bad), fault.ErrInvalid)
	}

	head := NewID()
	must(t, s.SetHead(ctx, a.ID, head, 9))
	got, err = s.Sandbox(ctx, a.ID)
	if err != nil || got.Head != head || got.Attempt != 9 {
		t.Fatalf("%+v, %v", got, err)
	}
	wantErr(t, s.SetHead(ctx, NewID(), "", 1), fault.ErrNotFound)

	must(t, s.DeleteSandbox(ctx, a.ID))
	must(t, s.DeleteSandbox(ctx, a.ID))
	_, err = s.Sandbox(ctx, a.ID)
	wantErr(t, err, fault.ErrNotFound)
	must(t, s.PutSandbox(ctx, sandbox("a")))
}

func TestCheckpointRefs(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	data := sample(1, 100)
	a, b := put(t, s, "a"), put(t, s, "b")
	id := func(prefix string) string { return prefix + NewID()[len(prefix):] }
	mk := func(b Sandbox, id, name string) Checkpoint {
		c := of(b, name, KindFiles)
		c.ID = id
		return taken(t, s, c, data)
	}
	a1 := mk(a, id("abcd1"), "first")
	a2 := mk(a, id("abcd2"), "second")
	b1 := mk(b, id("abcd3"), "first")
	b2 := mk(b, id("dddd"), "")
	old := put(t, s, "old")
	o1 := mk(old, id("ee"), "keep")
	must(t, s.DeleteSandbox(ctx, old.ID))
	old2 := put(t, s, "old")
	o2 := mk(old2, id("ef"), "newer")

	for ref, want := range map[string]Checkpoint{
		a1.ID: a1, "abcd1": a1, "a@first": a1, "b@first": b1, a.ID + "@first": a1,
		a.ID[:20] + "@second": a2, "second": a2,
		"b@" + b2.ID[:4]: b2, "b@abcd": b1, "dddd": b2, "old@keep": o1, "old@newer": o2, "keep": o1,
		old.ID + "@keep": o1, old.ID[:20] + "@keep": o1, "old@" + o1.ID[:8]: o1,
	} {
		got, err := s.Checkpoint(ctx, ref)
		must(t, err)
		if got.ID != want.ID {
			t.Errorf("%s leads to %s (%s), want %s (%s)", ref, got.ID, got.Name, want.ID, want.Name)
		}
	}
	for ref, words := range map[string][]string{
		"first": {a1.ID, b1.ID, "a@first", "b@first"}, "abcd": {a1.ID, a2.ID, b1.ID}, "a@abcd": {a1.ID, a2.ID},
	} {
		_, err := s.Checkpoint(ctx, ref)
		wantErr(t, err, fault.ErrInvalid, words...)
	}
	for _, ref := range []string{
		"none", "a@none", "none@first", "abc", "ddd", "b@ddd", "a@dddd", "b@second", NewID(), "%", "a@%",
	} {
		_, err := s.Checkpoint(ctx, ref)
		wantErr(t, err, fault.ErrNotFound, ref)
	}
	for _, ref := range []string{"", "@", "a@", "@first"} {
		_, err := s.Checkpoint(ctx, ref)
		wantErr(t, err, fault.ErrInvalid)
	}

	got, err := s.NewestOfName(ctx, "old", false)
	if err != nil || got.ID != o1.ID {
		t.Fatalf("newest of the removed one: %v, %v", got.ID, err)
	}
	must(t, s.DeleteSandbox(ctx, old2.ID))
	if got, err = s.NewestOfName(ctx, "old", false); err != nil || got.ID != o2.ID {
		t.Fatalf("newest of the removed ones: %v, %v", got.ID, err)
	}
	_, err = s.NewestOfName(ctx, "a", false)
	wantErr(t, err, fault.ErrNotFound)

	// Two removed sandboxes of one name and one checkpoint name: say which.
	old3 := put(t, s, "old")
	mk(old3, id("f0"), "keep")
	must(t, s.DeleteSandbox(ctx, old3.ID))
	_, err = s.Checkpoint(ctx, "old@keep")
	wantErr(t, err, fault.ErrInvalid, o1.ID)
}

func TestCheckpointFilters(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	a, b := put(t, s, "a"), put(t, s, "b")
	var made []Checkpoint
	for i, x := range []Sandbox{a, a, b} {
		c := of(x, "", KindFiles)
		c.Trigger = fmt.Sprint("t", i%2)
		c.Labels = map[string]string{"n": fmt.Sprint(i), "same": ""}
		made = append(made, taken(t, s, c, sample(uint64(i), 10)))
	}
	d, err := s.BeginCheckpoint(ctx, of(a, "", KindFiles))
	must(t, err)
	must(t, d.Abort(ctx, errors.New("no")))
	list := func(f Filter) (ids []string) {
		got, err := s.Checkpoints(ctx, f)
		must(t, err)
		for _, c := range got {
			ids = append(ids, c.ID)
		}
		return ids
	}
	for _, x := range []struct {
		f    Filter
		want []string
	}{
		{Filter{}, []string{made[2].ID, made[1].ID, made[0].ID}},
		{Filter{All: true}, []string{d.ID(), made[2].ID, made[1].ID, made[0].ID}},
		{Filter{SandboxID: a.ID}, []string{made[1].ID, made[0].ID}},
		{Filter{Trigger: "t0"}, []string{made[2].ID, made[0].ID}},
		{Filter{Trigger: "t0", SandboxID: b.ID}, []string{made[2].ID}},
		{Filter{Labels: map[string]string{"n": "1", "same": ""}}, []string{made[1].ID}},
		{Filter{Labels: map[string]string{"none": ""}}, nil},
		{Filter{SandboxID: NewID()}, nil},
	} {
		if got := list(x.f); !slices.Equal(got, x.want) {
			t.Errorf("%+v selects %v, want %v", x.f, got, x.want)
		}
	}
}

func TestJournal(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	one, err := s.Begin(ctx, Intent{Op: "restore", Sandbox: NewID(), Checkpoint: NewID(), Data: []byte(`{"step":1}`)})
	must(t, err)
	two, err := s.Begin(ctx, Intent{Op: "rm", Sandbox: NewID(), Pid: 42, Started: time.Unix(5, 6)})
	must(t, err)
	must(t, s.Update(ctx, one, []byte(`{"step":2}`), true))
	must(t, s.Close())

	s = open(t, root)
	list, err := s.Intents(ctx)
	must(t, err)
	if len(list) != 2 || list[0].Seq != one || list[1].Seq != two || string(list[0].Data) != `{"step":2}` ||
		list[0].Pid != os.Getpid() ||
		list[0].Op != "restore" || list[1].Pid != 42 || !list[1].Started.Equal(time.Unix(5, 6)) || list[1].Data != nil {
		t.Fatalf("%+v", list)
	}
	must(t, s.Done(ctx, two))
	must(t, s.Done(ctx, two))
	three, err := s.Begin(ctx, Intent{Op: "rm", Sandbox: NewID()})
	must(t, err)
	if three <= two {
		t.Fatalf("number %d was used again", two)
	}
	wantErr(t, s.Update(ctx, two, nil, false), fault.ErrNotFound)
	wantErr(t, s.Update(ctx, one, []byte("{"), false), fault.ErrInvalid)
	_, err = s.Begin(ctx, Intent{})
	wantErr(t, err, fault.ErrInvalid)
	_, err = s.Begin(ctx, Intent{Op: "x", Data: []byte("{")})
	wantErr(t, err, fault.ErrInvalid)
}

func TestCancelledContext(t *testing.T) {
	s := open(t, t.TempDir())
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := s.Sandboxes(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := s.PutSandbox(ctx, sandbox("a")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if list, err := s.Sandboxes(context.Background()); err != nil || len(list) != 0 {
		t.Error(list, err)
	}
}

func TestWriterHeldUp(t *testing.T) {
	// A process that holds the write lock delays the others, and a cancelled
	// caller is let go long before the wait is over.
	root := t.TempDir()
	s := open(t, root)
	other := open(t, root)
	tx, err := other.db.Begin()
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	err = s.PutSandbox(ctx, sandbox("a"))
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 5*time.Second {
		t.Fatalf("%v after %v", err, time.Since(start))
	}
	done := make(chan error, 1)
	go func() { done <- s.PutSandbox(context.Background(), sandbox("b")) }()
	time.AfterFunc(busyTimeout+200*time.Millisecond, func() { _ = tx.Rollback() })
	must(t, <-done)
}

// A panic in a transaction blocks no other writer: it continues, and nothing is written.
func TestPanicInTransaction(t *testing.T) {
	root := t.TempDir()
	s, other := open(t, root), open(t, root)
	err := guard.Do(func() error {
		return s.write(context.Background(), "test", func(tx *sql.Tx) error {
			if _, err := tx.Exec("DELETE FROM journal"); err != nil {
				return err
			}
			panic("a defect")
		})
	})
	if p := (*guard.Panic)(nil); !errors.As(err, &p) {
		t.Fatal(err)
	}
	for i, s := range []*Store{s, other} {
		if err := s.PutSandbox(t.Context(), Sandbox{
			ID: NewID(), Name: fmt.Sprint("box", i), Spec: []byte("{}"),
		}); err != nil {
			t.Error(err)
		}
	}
}

// A short WAL stays for the next one to open the database, a long one does not. Closing one
// of two takes nothing from the other.
func TestCloseKeepsWAL(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	wal := filepath.Join(root, "state.db-wal")
	s, other := open(t, root), open(t, root)
	must(t, s.PutSandbox(ctx, sandbox("a")))
	must(t, s.Close())
	must(t, other.PutSandbox(ctx, sandbox("b")))
	must(t, other.Close())
	if _, err := os.Lstat(wal); err != nil {
		t.Error(err)
	}
	s = open(t, root)
	if list := must1(s.Sandboxes(ctx)); len(list) != 2 {
		t.Errorf("%d sandboxes after Close", len(list))
	}
	long := sandbox("c")
	long.Spec = json.RawMessage(`"` + strings.Repeat("x", keepWAL) + `"`)
	must(t, s.PutSandbox(ctx, long))
	must(t, s.Close())
	if _, err := os.Lstat(wal); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a long WAL: %v", err)
	}
	s = open(t, root)
	if list := must1(s.Sandboxes(ctx)); len(list) != 3 {
		t.Errorf("%d sandboxes after a checkpoint of the WAL", len(list))
	}
	must(t, s.Close())
}

// A durable write is durable, whatever was recorded before it.
func TestWriteIsDurable(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	const lazy, full = 1, 2
	for i, want := range []int{full, lazy, lazy, full, full, lazy, full} {
		write := s.write
		if want == lazy {
			write = s.lazily
		}
		var is int
		must(t, write(ctx, "test", func(tx *sql.Tx) error { return tx.QueryRow("PRAGMA synchronous").Scan(&is) }))
		if is != want {
			t.Errorf("transaction %d: synchronous is %d, want %d", i, is, want)
		}
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.lazily(gone, "test", func(*sql.Tx) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	var is int
	must(t, s.write(ctx, "test", func(tx *sql.Tx) error { return tx.QueryRow("PRAGMA synchronous").Scan(&is) }))
	if is != full {
		t.Errorf("after one that was cancelled synchronous is %d", is)
	}
}

// A reader does not wait for a writer, and sees what was committed before.
func TestReadBesideWrite(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "one")
	writes, end := make(chan struct{}), make(chan struct{})
	written := make(chan error, 1)
	go func() {
		written <- s.write(context.Background(), "test", func(tx *sql.Tx) error {
			if _, err := tx.Exec("UPDATE sandboxes SET head = 'new'"); err != nil {
				return err
			}
			close(writes)
			<-end
			return nil
		})
	}()
	<-writes
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	look := func(head string) {
		t.Helper()
		list, err := s.Sandboxes(soon)
		if err != nil || len(list) != 1 || list[0].Head != head {
			t.Errorf("want one at %q: %+v, %v", head, list, err)
		}
		one, err := s.Sandbox(soon, b.ID)
		if err != nil || one.Head != head {
			t.Errorf("want it at %q: %+v, %v", head, one, err)
		}
	}
	look(b.Head)
	close(end)
	must(t, <-written)
	// By every connection that reads: what is committed is seen from then on.
	for i := range 100 {
		head := fmt.Sprint(i)
		must(t, s.SetHead(t.Context(), b.ID, head, 1))
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() { look(head) })
		}
		all.Wait()
	}
	if _, err := s.read.Exec("DELETE FROM sandboxes"); err == nil {
		t.Error("a connection that reads has written")
	}
}
