package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

func TestMain(m *testing.M) {
	if root := os.Getenv("AUDIT_TEST_ROOT"); root != "" {
		for i := range 50 {
			if _, err := Open(root).Append(Record{Phase: Note, Verb: "test", Ref: fmt.Sprint(os.Getpid(), " ", i)},
				i%10 == 0); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// filled is a log of n records of a sandbox.
func filled(t *testing.T, n int) *Log {
	t.Helper()
	l := Open(t.TempDir())
	for i := range n {
		if _, err := l.Append(Record{Phase: Note, Verb: "test", Ref: fmt.Sprint(i)}, true); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func verify(t *testing.T, l *Log, expect string) Report {
	t.Helper()
	r, err := l.Verify(t.Context(), expect)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func only(t *testing.T, l *Log) string {
	t.Helper()
	names, err := l.segments()
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	return filepath.Join(l.dir, names[0])
}

// Whatever byte of the log is another one, verify finds it.
func TestEveryByte(t *testing.T) {
	l := filled(t, 2)
	path := only(t, l)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if r := verify(t, l, ""); !r.OK || r.Records != 2 || r.Seq != 2 || len(r.Notes) != 0 {
		t.Fatalf("%+v", r)
	}
	for i := range good {
		for _, b := range []byte{good[i] ^ 1, '\n'} {
			if b == good[i] {
				continue
			}
			bad := bytes.Clone(good)
			bad[i] = b
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if r := verify(t, l, ""); r.OK {
				t.Fatalf("byte %d (%q, now %q) is missed:\n%s", i, good[i], b, bad)
			}
		}
	}
}

// A change to whole records is found, and reported by its kind.
func TestTampering(t *testing.T) {
	forge := func(lines [][]byte, i int) {
		r, _, err := unseal(bytes.TrimSuffix(lines[i], []byte("\n")))
		if err != nil {
			t.Fatal(err)
		}
		r.Ref = "forged"
		if lines[i], _, err = seal(r); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name string
		do   func(lines [][]byte) [][]byte
		want []string
	}{
		{"one changed", func(l [][]byte) [][]byte {
			l[4] = bytes.Replace(l[4], []byte(`"ref":"4"`), []byte(`"ref":"5"`), 1)
			return l
		}, []string{"record 5: this record was changed"}},
		{"one changed with its hash", func(l [][]byte) [][]byte {
			forge(l, 4)
			return l
		}, []string{"record 6: this record does not follow the 5"}},
		{"the last one changed with its hash", func(l [][]byte) [][]byte {
			forge(l, 9)
			return l
		}, []string{"record 10: another record than the one that was on the disk"}},
		{"one removed", func(l [][]byte) [][]byte {
			return slices.Delete(l, 4, 5)
		}, []string{"record 6: the records 5 to 5 are missing"}},
		{"the first removed", func(l [][]byte) [][]byte {
			return l[2:]
		}, []string{
			"record 3: the segment is named after another record",
			"record 3: the records up to 2 are missing, and no record tells",
		}},
		{"one repeated", func(l [][]byte) [][]byte {
			return slices.Insert(l, 5, l[4])
		}, []string{"record 5: this record is out of its place: it stands behind 5"}},
		{"two exchanged", func(l [][]byte) [][]byte {
			l[4], l[5] = l[5], l[4]
			return l
		}, []string{
			"record 6: the records 5 to 5 are missing", "record 5: this record is out of its place: it stands behind 6",
		}},
		{"the last ones cut off", func(l [][]byte) [][]byte {
			return l[:7]
		}, []string{"record 10: the records 8 to 10, which were on the disk, are missing at the end"}},
		{"the last one cut short", func(l [][]byte) [][]byte {
			l[9] = l[9][:40]
			return l
		}, []string{"record 10: the records 10 to 10, which were on the disk, are missing at the end"}},
		{"all gone", func([][]byte) [][]byte {
			return nil
		}, []string{"record 10: the records 1 to 10, which were on the disk, are missing at the end"}},
		{"something else put in", func(l [][]byte) [][]byte {
			return slices.Insert(l, 2, []byte("{}\n"))
		}, []string{"record 0: this line is no record"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := filled(t, 10)
			path := only(t, l)
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			before := verify(t, l, "")
			lines := c.do(slices.Collect(bytes.Lines(data)))
			if err := os.WriteFile(path, bytes.Join(lines, nil), 0o600); err != nil {
				t.Fatal(err)
			}
			r := verify(t, l, "")
			var got []string
			for _, f := range r.Findings {
				got = append(got, fmt.Sprintf("record %d: %s", f.Seq, f.What))
			}
			if len(got) != len(c.want) || !slices.EqualFunc(got, c.want, strings.HasPrefix) ||
				!errors.Is(r.Err(), fault.ErrCorrupt) {
				t.Errorf("%q, want %q", got, c.want)
			}
			// If all of it is forged, with its head, only the hash noted elsewhere shows it.
			again := filled(t, 10)
			if r := verify(t, again, ""); !r.OK {
				t.Errorf("%+v", r)
			}
			if r := verify(t, again, before.Head); r.OK {
				t.Error("another log has the head that was noted")
			}
		})
	}
}

// A crash cuts the last record short: that is no tampering, and the log goes on.
func TestTorn(t *testing.T) {
	l := filled(t, 2)
	if _, err := l.Append(Record{Phase: Begin, Verb: "test"}, false); err != nil { // not known to be on the disk
		t.Fatal(err)
	}
	path := only(t, l)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, info.Size()-30); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, l, ""); !r.OK || r.Records != 2 || len(r.Notes) != 1 ||
		!strings.Contains(r.Notes[0], "a crash has cut short") {
		t.Errorf("%+v", r)
	}
	if _, err := l.Append(Record{Phase: Note, Verb: "next"}, true); err != nil {
		t.Fatal(err)
	}
	r := verify(t, l, "")
	if !r.OK || r.Records != 3 || len(r.Notes) != 1 || r.Notes[0] != "before record 3 a crash has cut one short" {
		t.Errorf("%+v", r)
	}
	// Its very first record, too.
	l = Open(t.TempDir())
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.dir, segmentName(1)), []byte(`{"seq":1,"pr`), 0o600); err != nil {
		t.Fatal(err)
	}
	if seq, err := l.Append(Record{Phase: Note, Verb: "first"}, true); seq != 1 || err != nil {
		t.Fatal(seq, err)
	}
	if r := verify(t, l, ""); !r.OK || r.Records != 1 {
		t.Errorf("%+v", r)
	}
}

func TestClip(t *testing.T) {
	long := strings.Repeat("é", 200)
	for in, want := range map[string]string{
		"busybox:1@sha256:ab":               "busybox:1@sha256:ab",
		"https://user:secret@127.0.0.1:1/x": "https://…@127.0.0.1:1/x",
		"https://token@h/x and ftp://a:b@h": "https://…@h/x and ftp://…@h",
		"oci-archive:/a@b":                  "oci-archive:/a@b",
		"http://h/x@y":                      "http://h/x@y",
		"https://" + long + ":secret@h":     "https://…@h",
		long:                                long[:256] + "…",
	} {
		if got := Clip(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// Many processes write one chain, over several segments; old ones are pruned,
// which is on record; without that record it is a finding.
func TestProcesses(t *testing.T) {
	root := t.TempDir()
	l := Open(root)
	long := strings.Repeat("x", 16<<10)
	for range 150 {
		if _, err := l.Append(Record{Phase: Note, Verb: "test", Ref: long}, false); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now()
	var cmds []*exec.Cmd
	for range 6 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "AUDIT_TEST_ROOT="+root)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, cmd)
	}
	for _, cmd := range cmds {
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
	if r := verify(t, l, ""); !r.OK || r.Records != 450 || r.Segments < 3 || len(r.Notes) != 0 {
		t.Fatalf("%+v", r)
	}
	list, err := l.List(t.Context(), Filter{Since: old, Verb: "test"})
	if err != nil || len(list) != 300 {
		t.Errorf("%d since then: %v", len(list), err)
	}
	gone, err := l.Prune(Self("test"), old)
	if err != nil || gone == nil || gone.From != 1 || gone.To < 50 {
		t.Fatalf("%+v: %v", gone, err)
	}
	if r := verify(t, l, ""); !r.OK || r.First != gone.To+1 {
		t.Errorf("%+v", r)
	}
	left, _ := l.segments()
	if err := os.Remove(filepath.Join(l.dir, left[0])); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, l, ""); r.OK {
		t.Error("a segment is gone that nobody pruned")
	}
}

// newEngine makes the real one, over a store without sandboxes, on record in l.
func newEngine(t *testing.T, root string, l *Log) *engine.Engine {
	t.Helper()
	st, err := store.Open(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	e := engine.New(engine.Options{Run: filepath.Join(root, "run"), Store: st, Backend: "oci",
		Observers: []runtime.Observer{l.Observer("test")},
		Open: func(string) (engine.Host, error) {
			return engine.Host{}, fmt.Errorf("no engine: %w", runtime.ErrUnsupported)
		}})
	t.Cleanup(func() { e.Close() })
	return e
}

// reads are the verbs that change nothing.
type reads interface {
	Wait(ctx context.Context, sandbox string) (runtime.Exit, error)
	Logs(ctx context.Context, sandbox string, opts runtime.LogOptions, stdout, stderr io.Writer) error
	Sandbox(ctx context.Context, sandbox string) (runtime.Sandbox, error)
	Sandboxes(ctx context.Context) ([]runtime.Sandbox, error)
	CopyFrom(ctx context.Context, sandbox, path string, w io.Writer) error
	Stat(ctx context.Context, sandbox, path string) (runtime.PathStat, error)
	List(ctx context.Context, sandbox, path string, opts runtime.ListOptions, fn func(runtime.FileEntry) error) error
	Checkpoints(ctx context.Context, filter runtime.CheckpointFilter) ([]runtime.Checkpoint, error)
	CheckpointInfo(ctx context.Context, checkpoint string) (runtime.Checkpoint, error)
	Diff(ctx context.Context, req runtime.DiffRequest) (runtime.Diff, error)
	History(ctx context.Context, sandbox string, opts runtime.HistoryOptions) ([]runtime.HistoryEntry, error)
	PlanRestore(ctx context.Context, sandbox string, opts runtime.RestoreOptions) (runtime.RestorePlan, error)
	PlanUndo(ctx context.Context, sandbox string, opts runtime.UndoOptions) (runtime.RestorePlan, error)
	UndoList(ctx context.Context, sandbox string) (runtime.UndoList, error)
	Usage(ctx context.Context) (runtime.Usage, error)
	Stats(ctx context.Context, opts runtime.StatsOptions) ([]runtime.Stats, error)
	Images(ctx context.Context) ([]runtime.Image, error)
	InspectImage(ctx context.Context, ref string) (runtime.ImageDetails, error)
	Events(ctx context.Context, sandbox string, opts runtime.EventOptions, each func(runtime.Event) error) error
	Effects(ctx context.Context, sandbox string, all bool) ([]runtime.Effect, error)
	Lease(ctx context.Context, lease string) (runtime.Lease, error)
	Leases(ctx context.Context, all bool) ([]runtime.Lease, error)
	Approvals(ctx context.Context) ([]runtime.Approval, error)
	Policies(ctx context.Context) ([]runtime.PolicyEntry, error)
	Policy(ctx context.Context, name string) (*policy.Policy, error)
	Close() error
}

// Every method of a Service leaves two records, called with whatever, and those that
// change nothing leave none.
func TestEveryVerb(t *testing.T) {
	root := t.TempDir()
	log := Open(root)
	svc := newEngine(t, root, log)
	var _ reads = svc
	read := reflect.TypeFor[reads]()
	for i := range reflect.TypeFor[runtime.Local]().NumMethod() {
		m := reflect.TypeFor[runtime.Local]().Method(i)
		if m.Name == "Close" {
			continue
		}
		before, err := log.List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		ctx := runtime.WithCaller(t.Context(), runtime.Caller{UID: 1234, Pid: os.Getpid()})
		args := []reflect.Value{reflect.ValueOf(svc), reflect.ValueOf(ctx)}
		for j := 1; j < m.Type.NumIn(); j++ {
			switch in := m.Type.In(j); {
			case in == reflect.TypeFor[io.Reader]():
				args = append(args, reflect.ValueOf(strings.NewReader("")))
			case in == reflect.TypeFor[io.Writer]():
				args = append(args, reflect.ValueOf(io.Discard))
			case in == reflect.TypeFor[time.Duration]():
				args = append(args, reflect.ValueOf(time.Hour)) // a heartbeat alone is not on record
			case in.Kind() == reflect.Func:
				args = append(args, reflect.MakeFunc(in, func([]reflect.Value) []reflect.Value {
					return []reflect.Value{reflect.Zero(in.Out(0))}
				}))
			case in.Kind() == reflect.String:
				args = append(args, reflect.ValueOf("none-such"))
			default:
				args = append(args, reflect.Zero(in))
			}
		}
		own, ok := reflect.TypeFor[*engine.Engine]().MethodByName(m.Name)
		if !ok {
			t.Fatal(m.Name)
		}
		outs := own.Func.Call(args)
		failed, _ := outs[len(outs)-1].Interface().(error)
		after, err := log.List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		want := len(before) + 1
		_, reads := read.MethodByName(m.Name)
		if reads {
			want--
		}
		if len(after) != want {
			t.Errorf("%s leaves %d entries", m.Name, len(after)-len(before))
			continue
		}
		if reads {
			continue
		}
		e := after[len(after)-1]
		if e.EndSeq == 0 || e.Verb == "" || (e.Outcome == "ok") != (failed == nil) || e.Who.UID == nil ||
			*e.Who.UID != 1234 || e.Who.Pid != os.Getpid() || e.Who.By != "service" {
			t.Errorf("%s: %v leaves %+v", m.Name, failed, e)
		}
	}
	if r := verify(t, log, ""); !r.OK || r.Records < 50 {
		t.Errorf("%+v", r)
	}
}

// Without arguments, environments and contents.
func TestNoSecrets(t *testing.T) {
	root := t.TempDir()
	log := Open(root)
	svc := newEngine(t, root, log)
	secret := "hunter" + "2"
	_, _ = svc.Exec(t.Context(), "c", runtime.Process{
		Args: []string{"login", "--password", secret}, Env: []string{"P=" + secret},
	}, runtime.Streams{})
	_, _ = svc.Create(t.Context(), runtime.CreateRequest{Spec: runtime.Spec{
		Image: "i", Args: []string{secret}, Env: []string{"P=" + secret},
	}})
	_ = svc.CopyTo(t.Context(), "c", "/x", strings.NewReader(secret))
	data, err := os.ReadFile(only(t, log))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(data, []byte(secret)) || !bytes.Contains(data, []byte(`"program":"login"`)) {
		t.Errorf("%s", data)
	}
	for path, mode := range map[string]os.FileMode{log.dir: 0o700, only(t, log): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v: %v", path, info.Mode(), err)
		}
	}
}

// On a full disk nothing begins that cannot be put on record, but what frees space.
func TestFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts a small filesystem: run it as root")
	}
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=1536k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	})
	l := Open(small)
	svc := newEngine(t, t.TempDir(), l)
	if err := svc.Pause(t.Context(), "c"); !errors.Is(err, fault.ErrNotFound) {
		t.Fatal(err)
	}
	fill, err := os.Create(filepath.Join(small, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	defer fill.Close()
	for err == nil {
		_, err = fill.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	// The reserved room still serves.
	if err := svc.Unpause(t.Context(), "c"); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("with the room that was set aside: %v", err)
	}
	long := strings.Repeat("x", 16<<10)
	for err = nil; err == nil; {
		_, err = l.Append(Record{Phase: Note, Verb: "fill", Ref: long}, false)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	began := verify(t, l, "").Seq
	for err = nil; err == nil || !strings.Contains(err.Error(), "nothing was done"); {
		if err = svc.Unpause(t.Context(), "c"); verify(t, l, "").Seq > began+2000 {
			t.Fatal(err)
		}
	}
	if !errors.Is(err, unix.ENOSPC) || len(fault.Hint(err)) == 0 {
		t.Errorf("%v %q", err, fault.Hint(err))
	}
	if err := svc.Remove(t.Context(), "c", runtime.RemoveOptions{}); !errors.Is(err, fault.ErrNotFound) ||
		errors.Is(err, unix.ENOSPC) {
		t.Errorf("rm: %v", err)
	}
	if r := verify(t, l, ""); !r.OK {
		t.Errorf("%+v", r)
	}
	if err := errors.Join(fill.Truncate(0), svc.Unpause(t.Context(), "c")); !errors.Is(err, fault.ErrNotFound) ||
		errors.Is(err, unix.ENOSPC) {
		t.Errorf("with room again: %v", err)
	}
	if r := verify(t, l, ""); !r.OK {
		t.Errorf("%+v", r)
	}
}

// A restore marks what it undoes; one that is undone itself has undone nothing.
func TestUndone(t *testing.T) {
	l := Open(t.TempDir())
	verb := func(r Record) uint64 {
		t.Helper()
		r.Sandbox, r.Phase = "aaaa", Begin
		seq, err := l.Append(r, false)
		if err != nil {
			t.Fatal(err)
		}
		if r.Verb == "restore" {
			if r.Undid, err = l.undone("aaaa", r.Checkpoint, time.Time{}, seq); err != nil {
				t.Fatal(err)
			}
		}
		if r.Phase, r.Of = End, seq; r.Outcome == "" {
			r.Outcome = "ok"
		}
		if _, err := l.Append(r, true); err != nil {
			t.Fatal(err)
		}
		return seq
	}
	early := verb(Record{Verb: "exec"})
	verb(Record{Verb: "checkpoint", Checkpoint: "one"})
	mid := verb(Record{Verb: "restart"})
	verb(Record{Verb: "checkpoint", Checkpoint: "two"})
	late := verb(Record{Verb: "exec"})
	undone := func() map[uint64]uint64 {
		t.Helper()
		list, err := l.List(t.Context(), Filter{Sandbox: "aaaa"})
		if err != nil {
			t.Fatal(err)
		}
		out := map[uint64]uint64{}
		for _, e := range list {
			if e.UndoneBy > 0 {
				out[e.Seq] = e.UndoneBy
			}
		}
		return out
	}
	expect := func(want map[uint64]uint64) {
		t.Helper()
		if got := undone(); !reflect.DeepEqual(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	expect(map[uint64]uint64{})
	first := verb(Record{Verb: "restore", Checkpoint: "two", Undo: "u1"})
	expect(map[uint64]uint64{late: first})
	second := verb(Record{Verb: "restore", Checkpoint: "one", Undo: "u2"})
	// The first one's own effect is gone with the second; what it undid stays undone by the second.
	expect(map[uint64]uint64{mid: second, late: second, first: second})
	third := verb(Record{Verb: "restore", Checkpoint: "u2", Undo: "u3"})
	expect(map[uint64]uint64{late: first, second: third})
	// A restore whose host files could not be put back has restored the sandbox all the same.
	fourth := verb(Record{Verb: "restore", Checkpoint: "one", Undo: "u4", Outcome: "state"})
	expect(map[uint64]uint64{mid: fourth, late: fourth, first: fourth, second: fourth, third: fourth})
	fifth := verb(Record{Verb: "restore", Checkpoint: "u4", Undo: "u5"})
	expect(map[uint64]uint64{late: first, second: third, fourth: fifth})
	if early == 0 {
		t.Fatal()
	}
}

// The cost of a record.
func BenchmarkAppend(b *testing.B) {
	for _, durable := range []bool{false, true} {
		b.Run(fmt.Sprintf("durable=%v", durable), func(b *testing.B) {
			l := Open(b.TempDir())
			for b.Loop() {
				if _, err := l.Append(Record{
					Phase: Note, Verb: "test", Who: Self("test"), Sandbox: strings.Repeat("a", 32),
				}, durable); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
