package store

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// The test binary is also the other process that some tests need: roles are
// what it does when it is started with helperEnv set.
const helperEnv = "AGENTBOX_STORE_TEST_ROLE"

var roles = map[string]func(ctx context.Context, root string, args []string) error{
	"churn":      churn,
	"mix":        mix,
	"hold":       hold,
	"checkpoint": checkpointOnce,
	"remove":     removeOnce,
	"sweep":      sweepOnce,
	"put":        putOnce,
	"delete":     deleteOnce,
	"journal":    journalOnce,
	"abort":      abortOnce,
}

func TestMain(m *testing.M) {
	if role := os.Getenv(helperEnv); role != "" {
		if err := roles[role](context.Background(), os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of the store need root: it keeps root's files")
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// helper starts the test binary in a role.
func helper(t testing.TB, role, root string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, append([]string{root}, args...)...)
	cmd.Env = append(os.Environ(), helperEnv+"="+role)
	cmd.Stderr = os.Stderr
	return cmd
}

func open(t testing.TB, root string) *Store {
	t.Helper()
	s, err := Open(context.Background(), root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantErr wants a sentinel and words that must be in the message.
func wantErr(t testing.TB, err, sentinel error, words ...string) {
	t.Helper()
	if err == nil || (sentinel != nil && !isErr(err, sentinel)) {
		t.Fatalf("error %v, want %v", err, sentinel)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Fatalf("error %q does not say %q", err, w)
		}
	}
}

func sandbox(name string) Sandbox {
	return Sandbox{ID: NewID(), Name: name, Backend: "oci",
		Spec: json.RawMessage(`{"id":"x","cpus":1.5}`), Image: "busybox",
		ImageDigest: "sha256:1", Lower: []string{"/a", "/b"}, Created: time.Unix(1700000000, 123456789).UTC(),
		Labels: map[string]string{"k": "v"}}
}

func put(t testing.TB, s *Store, name string) Sandbox {
	t.Helper()
	b := sandbox(name)
	must(t, s.PutSandbox(context.Background(), b))
	return b
}

// content is what a test checkpoint holds.
type content struct {
	files  map[string][]byte
	volume map[string][]byte // nil: none
	images map[string][]byte
}

func block(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32()) & 0x3f // compresses to three quarters
	}
	return b
}

func sample(seed uint64, size int) content {
	r := rand.New(rand.NewPCG(seed, 1))
	return content{
		files: map[string][]byte{
			"dir": nil, "dir/big": block(r, size), "dir/empty": {}, "small": block(r, size/10+1),
			"twin": []byte("always the same"),
		},
		images: map[string][]byte{
			"pages-1.img": block(r, size), "pages-2.img": block(r, size/2), "core-1.img": block(r, 100),
			"inventory.img": block(r, 40), "empty.img": nil,
		},
	}
}

// entriesOf gives the files to the sink and returns their entries; nil data is a directory.
func entriesOf(ctx context.Context, sink overlay.Sink, files map[string][]byte) ([]overlay.Entry, error) {
	list := []overlay.Entry{{Path: ".", Type: overlay.TypeDir, Mode: 0o755}}
	for _, path := range slices.SortedFunc(maps.Keys(files), overlay.ComparePaths) {
		data := files[path]
		if data == nil {
			list = append(list, overlay.Entry{Path: path, Type: overlay.TypeDir, Mode: 0o700})
			continue
		}
		e := overlay.Entry{Path: path, Type: overlay.TypeFile, Mode: 0o644, Size: int64(len(data))}
		var err error
		if e.Digest, e.Chunks, err = sink.Data(ctx, e.Size, bytes.NewReader(data)); err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	return list, nil
}

func putFiles(ctx context.Context, d *Draft, n int, files map[string][]byte) error {
	list, err := entriesOf(ctx, d.Sink(), files)
	if err != nil {
		return err
	}
	return d.PutTree(ctx, n, func(fn func(overlay.Entry) error) error {
		for _, e := range list {
			if err := fn(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// fill writes a content into a draft.
func fill(d *Draft, c content) error {
	ctx := context.Background()
	if err := putFiles(ctx, d, 0, c.files); err != nil {
		return err
	}
	if c.volume != nil {
		if err := putFiles(ctx, d, 1, c.volume); err != nil {
			return err
		}
	}
	if d.row.Kind != KindFull {
		return nil
	}
	for name, data := range c.images {
		if err := os.WriteFile(filepath.Join(d.CRIUDir(), name), data, 0o644); err != nil {
			return err
		}
	}
	return d.PutImages(ctx)
}

func describe() Manifest {
	return Manifest{TCP: "established", Versions: Versions{CRIU: "4.1", Runtime: "runc 1.1", Kernel: "6.1"},
		Processes: &Processes{Count: 2, List: []Process{
			{Pid: 1, Command: "sh"}, {Pid: 5, Parent: 1, Command: "sleep"},
		}}}
}

// take makes a ready checkpoint.
func take(ctx context.Context, s *Store, c Checkpoint, data content) (Checkpoint, error) {
	d, err := s.BeginCheckpoint(ctx, c)
	if err != nil {
		return Checkpoint{}, err
	}
	err = fill(d, data)
	var done Checkpoint
	if err == nil {
		m := describe()
		if data.volume != nil {
			m.Volumes = []Volume{{Name: "vol"}}
		}
		done, err = d.Commit(ctx, m)
	}
	if err == nil {
		err = d.Close()
	}
	if err != nil {
		if undo := d.Abort(ctx, err); undo != nil {
			err = fmt.Errorf("%w; and %w", err, undo)
		}
		return Checkpoint{}, err
	}
	return done, nil
}

func of(b Sandbox, name, kind string) Checkpoint {
	return Checkpoint{
		Name: name, SandboxID: b.ID, SandboxName: b.Name, Kind: kind, Trigger: "manual",
		ImageDigest: b.ImageDigest, Spec: b.Spec,
	}
}

func taken(t testing.TB, s *Store, c Checkpoint, data content) Checkpoint {
	t.Helper()
	done, err := take(context.Background(), s, c, data)
	must(t, err)
	return done
}

// filesOf reads back what entriesOf gave.
func filesOf(ctx context.Context, r *Reader, n int) (map[string][]byte, error) {
	t, err := r.Tree(ctx, n)
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	err = overlay.ReadTree(t, func(e overlay.Entry) error {
		if e.Path == "." {
			return nil
		}
		if files[e.Path] = nil; e.Type != overlay.TypeFile {
			return nil
		}
		f, err := r.Source().Data(ctx, e)
		if err != nil {
			return err
		}
		files[e.Path], err = io.ReadAll(f)
		return errors.Join(err, f.Close())
	})
	return files, errors.Join(err, t.Close())
}

func equalFiles(a, b map[string][]byte) bool {
	return maps.EqualFunc(a, b, func(x, y []byte) bool { return (x == nil) == (y == nil) && bytes.Equal(x, y) })
}

// same wants a checkpoint to hold exactly a content.
func same(t testing.TB, s *Store, id string, want content) {
	t.Helper()
	ctx := context.Background()
	r, err := s.OpenCheckpoint(ctx, id)
	must(t, err)
	defer r.Close()
	must(t, r.Verify(ctx, true))
	for n, files := range []map[string][]byte{want.files, want.volume} {
		if n > 0 && files == nil {
			continue
		}
		got, err := filesOf(ctx, r, n)
		must(t, err)
		if !equalFiles(got, files) {
			t.Fatalf("checkpoint %s: tree %d came back as %d files, not the %d written", id, n, len(got), len(files))
		}
	}
	if r.Manifest().Processes == nil {
		return
	}
	dir := filepath.Join(t.TempDir(), "images")
	must(t, r.ExtractImages(ctx, dir))
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != len(want.images) {
		t.Fatalf("%d images came back, not the %d written", len(entries), len(want.images))
	}
	for name, data := range want.images {
		got, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		if !bytes.Equal(got, data) {
			t.Fatalf("image %s differs", name)
		}
	}
}

// drafts lists what is unpublished in the checkpoints directory.
func drafts(t testing.TB, s *Store) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(s.checkpointsDir(), "tmp-*"))
	must(t, err)
	packs, err := filepath.Glob(filepath.Join(s.packsDir(), "tmp-*"))
	must(t, err)
	return append(list, packs...)
}

// tidy wants every directory to have a ready row and the other way round,
// and every ready checkpoint to verify.
func tidy(t testing.TB, s *Store) {
	t.Helper()
	ctx := context.Background()
	if left := drafts(t, s); len(left) > 0 {
		t.Fatalf("left behind: %v", left)
	}
	entries, err := os.ReadDir(s.checkpointsDir())
	must(t, err)
	dirs := map[string]bool{}
	for _, e := range entries {
		if e.Name() != "failed" {
			dirs[e.Name()] = true
		}
	}
	list, err := s.Checkpoints(ctx, Filter{All: true})
	must(t, err)
	for _, c := range list {
		switch c.Status {
		case Ready:
			if !dirs[c.ID] {
				t.Fatalf("checkpoint %s is ready and has no files", c.ID)
			}
			delete(dirs, c.ID)
			must(t, s.VerifyCheckpoint(ctx, c.ID))
		case Failed:
			if c.Error == "" {
				t.Fatalf("checkpoint %s failed for no reason", c.ID)
			}
		default:
			t.Fatalf("checkpoint %s is still %s", c.ID, c.Status)
		}
	}
	if len(dirs) > 0 {
		t.Fatalf("published without a record: %v", dirs)
	}
	if stray, err := s.strayPacks(ctx); err != nil || len(stray) > 0 {
		t.Fatalf("packs without a record: %v, %v", stray, err)
	}
	var loose int
	must(t, s.db.QueryRow("SELECT count(*) FROM blobs WHERE pack NOT IN (SELECT num FROM packs)").Scan(&loose))
	if loose > 0 {
		t.Fatalf("%d chunks are in no pack", loose)
	}
}

func intact(t testing.TB, s *Store) {
	t.Helper()
	var said string
	must(t, s.db.QueryRow("PRAGMA integrity_check").Scan(&said))
	if said != "ok" {
		t.Fatalf("state.db: %s", said)
	}
}

func isErr(err, target error) bool {
	for _, s := range []error{
		fault.ErrNotFound, fault.ErrExists, fault.ErrState, fault.ErrDenied, fault.ErrUnsupported, fault.ErrCorrupt,
		fault.ErrBusy, fault.ErrInvalid,
	} {
		if s != target && errorsIs(err, s) {
			return false // one meaning per error: exit codes come from it
		}
	}
	return errorsIs(err, target)
}

// openOld opens a database without what Open does.
func openOld(root string) (*sql.DB, error) {
	return sql.Open("sqlite", filepath.Join(root, "state.db"))
}
