package store

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/internal/fault"
)

// The test binary is also the other process that some tests need: roles are
// what it does when it is started with helperEnv set.
const helperEnv = "AGENTBOX_STORE_TEST_ROLE"

var roles = map[string]func(ctx context.Context, root string, args []string) error{
	"churn":      churn,
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
	return Sandbox{ID: NewID(), Name: name, Backend: "oci", Spec: json.RawMessage(`{"id":"x","cpus":1.5}`), Image: "busybox",
		ImageDigest: "sha256:1", Lower: []string{"/a", "/b"}, Created: time.Unix(1700000000, 123456789).UTC(), Labels: map[string]string{"k": "v"}}
}

func put(t testing.TB, s *Store, name string) Sandbox {
	t.Helper()
	b := sandbox(name)
	must(t, s.PutSandbox(context.Background(), b))
	return b
}

// content is what a test checkpoint holds.
type content struct {
	files, tree []byte
	images      map[string][]byte
}

func sample(seed uint64, size int) content {
	r := rand.New(rand.NewPCG(seed, 1))
	block := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(r.Uint32()) & 0x3f // compresses to three quarters
		}
		return b
	}
	return content{files: block(size), tree: block(size/10 + 1),
		images: map[string][]byte{"pages-1.img": block(size), "core-1.img": block(100), "inventory.img": block(40), "empty.img": nil}}
}

// fill writes a content into a draft.
func fill(d *Draft, c content) error {
	for _, part := range []struct {
		open func() (io.WriteCloser, error)
		data []byte
	}{{d.FilesWriter, c.files}, {d.TreeWriter, c.tree}} {
		w, err := part.open()
		if err != nil {
			return err
		}
		for data := part.data; len(data) > 0; {
			n := min(len(data), 70_001)
			if _, err := w.Write(data[:n]); err != nil {
				return err
			}
			data = data[n:]
		}
		if err := w.Close(); err != nil {
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
	return nil
}

func describe() Manifest {
	return Manifest{Files: Files{Entries: 7}, TCP: "established", Versions: Versions{CRIU: "4.1", Runtime: "runc 1.1", Kernel: "6.1"},
		Processes: &Processes{Count: 2, List: []Process{{Pid: 1, Command: "sh"}, {Pid: 5, Parent: 1, Command: "sleep"}}}}
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
		done, err = d.Commit(ctx, describe())
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
	return Checkpoint{Name: name, SandboxID: b.ID, SandboxName: b.Name, Kind: kind, Trigger: "manual", ImageDigest: b.ImageDigest, Spec: b.Spec}
}

func taken(t testing.TB, s *Store, c Checkpoint, data content) Checkpoint {
	t.Helper()
	done, err := take(context.Background(), s, c, data)
	must(t, err)
	return done
}

// same wants a checkpoint to hold exactly a content.
func same(t testing.TB, s *Store, id string, want content) {
	t.Helper()
	ctx := context.Background()
	r, err := s.OpenCheckpoint(ctx, id)
	must(t, err)
	defer r.Close()
	for _, part := range []struct {
		open func(context.Context) (io.ReadCloser, error)
		data []byte
	}{{r.Files, want.files}, {r.Tree, want.tree}} {
		f, err := part.open(ctx)
		must(t, err)
		got, err := io.ReadAll(f)
		must(t, err)
		must(t, f.Close())
		if !bytes.Equal(got, part.data) {
			t.Fatalf("checkpoint %s: %d bytes came back, not the %d written", id, len(got), len(part.data))
		}
	}
	must(t, r.VerifyImages(ctx))
	if r.CRIUDir() == "" {
		return
	}
	for name, data := range want.images {
		got, err := os.ReadFile(filepath.Join(r.CRIUDir(), name))
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
	return list
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
	for _, s := range []error{fault.ErrNotFound, fault.ErrExists, fault.ErrState, fault.ErrDenied, fault.ErrUnsupported, fault.ErrCorrupt, fault.ErrBusy, fault.ErrInvalid} {
		if s != target && errorsIs(err, s) {
			return false // one meaning per error: exit codes come from it
		}
	}
	return errorsIs(err, target)
}
