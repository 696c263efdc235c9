package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

// failing is a backend that removes and starts nothing while it has an error.
type failing struct {
	runtime.Backend
	err error
}

func (b *failing) Start(ctx context.Context, id string, opts runtime.StartOptions) (func() error, error) {
	if b.err != nil {
		return nil, b.err
	}
	return b.Backend.Start(ctx, id, opts)
}

func (b *failing) Remove(ctx context.Context, id string) error {
	if b.err != nil {
		return b.err
	}
	return b.Backend.Remove(ctx, id)
}

// host is an engine over the backend in memory, on record in a log.
type host struct {
	*testing.T
	*engine.Engine
	log     *Log
	backend *failing
	store   *store.Store
	root    string
	seen    uint64 // the last record that was looked at
}

func newHost(t *testing.T) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it keeps owners and xattrs")
	}
	root, err := os.MkdirTemp("/dev/shm", "audit")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	st, err := store.Open(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	img, err := images.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(root, "tree", "bin")
	if err := os.MkdirAll(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := img.Import(t.Context(), "base", filepath.Dir(tree)); err != nil {
		t.Fatal(err)
	}
	h := &host{
		T: t, store: st, root: root, backend: &failing{Backend: backendtest.NewMemory(filepath.Join(root, "memory"))},
	}
	h.log = Open(root)
	h.Engine = engine.New(engine.Options{Run: filepath.Join(root, "run"), Store: st, Backend: "memory",
		Observers:  []runtime.Observer{h.log.Observer("test")},
		Supervisor: func(*os.File) error { return nil },
		Open:       func(string) (engine.Host, error) { return engine.Host{Backend: h.backend, Images: img}, nil }})
	t.Cleanup(func() { h.Engine.Close() })
	return h
}

// withoutLog does something while nothing can be written to the log.
func (h *host) withoutLog(do func()) {
	h.Helper()
	h.must(errors.Join(os.Rename(h.log.dir, h.log.dir+".aside"), os.WriteFile(h.log.dir, nil, 0o600)))
	do()
	h.must(errors.Join(os.Remove(h.log.dir), os.Rename(h.log.dir+".aside", h.log.dir)))
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

func (h *host) create(req runtime.CreateRequest) runtime.Sandbox {
	h.Helper()
	req.Spec.Image, req.Spec.Args, req.Spec.Network.Mode = "base", []string{"sleep", "1000"}, runtime.NetworkNone
	sb, err := h.Create(h.Context(), req)
	h.must(err)
	return sb
}

func (h *host) start(sandbox string) {
	h.Helper()
	_, err := h.Start(h.Context(), sandbox, nil)
	h.must(err)
}

// run is create and start.
func (h *host) run(req runtime.CreateRequest) runtime.Sandbox {
	h.Helper()
	sb := h.create(req)
	h.start(sb.ID)
	return sb
}

func (h *host) checkpoint(sandbox string, opts runtime.CheckpointOptions) runtime.Checkpoint {
	h.Helper()
	c, err := h.Checkpoint(h.Context(), sandbox, opts)
	h.must(err)
	return c
}

// news are the entries since the last look.
func (h *host) news() (list []Entry) {
	h.Helper()
	all, err := h.log.List(h.Context(), Filter{})
	h.must(err)
	was := h.seen
	for _, e := range all {
		if e.Seq > was {
			list = append(list, e)
		}
		h.seen = max(h.seen, e.Seq, e.EndSeq)
	}
	return list
}

// text is what an entry says, its kind first.
func (h *host) text(e Entry) string {
	kind := "verb"
	if e.EndSeq == 0 && e.Outcome != Unfinished {
		kind = "note"
	}
	for _, s := range []string{e.Who.By, e.Verb, e.Name, e.Outcome, e.Why} {
		kind += " | " + s
	}
	if e.Who.By != "service" && (e.Who.Pid != os.Getpid() || e.Who.UID == nil) {
		h.Errorf("who: %+v", e.Who)
	}
	if e.Name != "" && len(e.Sandbox) != 32 {
		h.Errorf("%s: the sandbox is %q", kind, e.Sandbox)
	}
	return kind
}

func (h *host) expect(list []Entry, want ...string) {
	h.Helper()
	var got []string
	for _, e := range list {
		got = append(got, h.text(e))
	}
	if !slices.Equal(got, want) {
		h.Errorf("on record is\n%s\nand not\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if r := verify(h.T, h.log, ""); !r.OK || len(r.Notes) > 0 {
		h.Errorf("verify: %+v", r)
	}
}

// over lets the deadline of a lease be one that has passed.
func (h *host) over(lease string) {
	h.Helper()
	h.must(h.store.ChangeLease(h.Context(), lease, false, func(row *store.Lease) (err error) {
		var l runtime.Lease
		if err := json.Unmarshal(row.Data, &l); err != nil {
			return err
		}
		l.For, l.Since = time.Minute, runtime.Moment{Time: time.Now().Add(-time.Hour), Boot: "another"}
		row.Data, err = json.Marshal(l)
		return err
	}))
}

func (h *host) lease(name string) runtime.Lease {
	h.Helper()
	l, err := h.CreateLease(h.Context(), runtime.LeaseRequest{
		Name: name, LeaseTerms: runtime.LeaseTerms{For: time.Hour},
	})
	h.must(err)
	return l
}

// A removal with a lease is recorded with the lease, in whichever call it happens; with a
// released lease it is the caller's.
func TestOwnLease(t *testing.T) {
	h := newHost(t)
	l := h.lease("l")
	sb := h.run(runtime.CreateRequest{Lease: "l", Spec: runtime.Spec{Name: "a"}})
	other := h.create(runtime.CreateRequest{Spec: runtime.Spec{Name: "b"}})
	gone := h.checkpoint("b", runtime.CheckpointOptions{Lease: "l"})
	pinned := h.checkpoint("b", runtime.CheckpointOptions{Lease: "l"})
	h.must(h.PinCheckpoint(t.Context(), pinned.ID, true))
	h.over(l.ID)
	h.news()
	// Not attributed to the caller in whose call it happens.
	ctx := runtime.WithCaller(t.Context(), runtime.Caller{UID: 1234, Pid: 1})
	_, err := h.EndLeases(ctx)
	h.must(err)
	why := "lease " + l.ID[:12] + " (l): its deadline, after 1m0s, has passed"
	list := h.news()
	h.expect(list, "verb | keeper | rm | a | ok | "+why, "verb | keeper | checkpoint rm | b | ok | "+why,
		"verb | keeper | lease end |  | ok | its deadline, after 1m0s, has passed")
	if len(list) != 3 || list[0].Sandbox != sb.ID || list[1].Sandbox != other.ID || list[1].Checkpoint != gone.ID ||
		list[2].To != l.ID || list[2].Ref != "l" {
		t.Errorf("%+v", list)
	}
	for filter, n := range map[Filter]int{
		{Sandbox: "a", Verb: "rm"}: 1, {Sandbox: sb.ID[:8], Verb: "rm"}: 1, {Verb: "lease end"}: 1,
		{Verb: "rm", Since: time.Now()}: 0,
	} {
		if got, err := h.log.List(t.Context(), filter); err != nil || len(got) != n {
			t.Errorf("%+v: %+v, %v", filter, got, err)
		}
	}

	l = h.lease("")
	h.run(runtime.CreateRequest{Lease: l.ID, Spec: runtime.Spec{Name: "c"}})
	h.news()
	_, err = h.ReleaseLease(ctx, l.ID)
	h.must(err)
	list = h.news()
	h.expect(list, "verb | service | lease release |  | ok | ",
		"verb | service | rm | c | ok | lease "+l.ID[:12]+": it was released")
	if len(list) != 2 || *list[1].Who.UID != 1234 {
		t.Errorf("%+v", list)
	}

	l = h.lease("")
	h.run(runtime.CreateRequest{Lease: l.ID, Spec: runtime.Spec{Name: "d"}})
	h.over(l.ID)
	h.news()
	h.withoutLog(func() {
		_, err := h.EndLeases(ctx)
		h.must(err)
	})
	h.expect(h.news())
	if l, err = h.Lease(ctx, l.ID); err != nil || l.State != store.LeaseEnded {
		t.Errorf("without the log: %+v, %v", l, err)
	}
}

// A removal that fails is tried again all the time, which is on record once, and so is
// that it has succeeded.
func TestOwnTriedAgain(t *testing.T) {
	h := newHost(t)
	l := h.lease("l")
	h.run(runtime.CreateRequest{Lease: "l", Spec: runtime.Spec{Name: "a"}})
	h.over(l.ID)
	h.news()
	h.backend.err = errors.New("no")
	for range 3 {
		if _, err := h.EndLeases(t.Context()); err == nil {
			t.Fatal("it is removed")
		}
	}
	why := "lease " + l.ID[:12] + " (l): its deadline, after 1m0s, has passed"
	h.expect(h.news(), "verb | keeper | rm | a | internal | "+why) // recovery has done nothing
	h.backend.err = nil
	_, err := h.EndLeases(t.Context())
	h.must(err)
	h.expect(h.news(), "note | keeper | recover | a | ok | its rm was interrupted",
		"verb | keeper | lease end |  | ok | its deadline, after 1m0s, has passed")
}

// age makes a sandbox one that was made so long ago, before the last boot.
func (h *host) age(sb runtime.Sandbox, by time.Duration) {
	h.Helper()
	row, err := h.store.Sandbox(h.Context(), sb.ID)
	h.must(err)
	var s runtime.Spec
	h.must(json.Unmarshal(row.Spec, &s))
	s.Lifetime.Begun = runtime.Moment{Time: time.Now().Add(-by), Boot: "another"}
	data, err := json.Marshal(s)
	h.must(err)
	h.must(h.store.SetSpec(h.Context(), sb.ID, data))
	h.must(os.WriteFile(filepath.Join(h.root, "supervised", sb.ID), []byte("another 1"), 0o600))
}

// Whose time is over is stopped, and removed if it is to go with that, as by the supervisor,
// whichever process does what that has missed; without the log, too.
func TestOwnTTL(t *testing.T) {
	h := newHost(t)
	for i, name := range []string{"a", "b", "c"} {
		sb := h.run(runtime.CreateRequest{Spec: runtime.Spec{
			Name: name, AutoRemove: name == "b", Lifetime: runtime.Lifetime{TTL: time.Hour},
		}})
		h.age(sb, 2*time.Hour)
		h.news()
		do := func() { h.must(h.ReviveOfBoot(t.Context())) }
		if name == "c" {
			h.withoutLog(do)
		} else {
			do()
		}
		if now, err := h.Sandbox(t.Context(), name); name == "b" && !errors.Is(err, runtime.ErrNotFound) ||
			name != "b" && (err != nil || now.Status != runtime.Exited) {
			t.Errorf("%s is %s: %v", name, now.Status, err)
		}
		tail := fmt.Sprintf(" | %s | ok | ttl: its time of 1h0m0s is over", name)
		h.expect(h.news(), [][]string{
			{"verb | watch | stop" + tail}, {"verb | watch | stop" + tail, "verb | watch | rm" + tail}, nil,
		}[i]...)
	}
}

// A restart by policy is a start, or a restore that says what it has undone. It waits
// for the log.
func TestOwnRestart(t *testing.T) {
	h := newHost(t)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it would give up locks that are forgotten
	// restart has a supervisor at work until something is so.
	restart := func(sb runtime.Sandbox, so func() bool) {
		t.Helper()
		h.must(h.backend.Stop(t.Context(), sb.ID, runtime.StopOptions{})) // it ends by itself
		ctx, end := context.WithTimeout(t.Context(), 20*time.Second)
		defer end()
		var looks sync.WaitGroup
		defer looks.Wait()
		looks.Go(func() {
			for ctx.Err() == nil && !so() {
				time.Sleep(time.Millisecond)
			}
			end()
		})
		own, err := engine.TakeSupervision(filepath.Join(h.root, "run"))
		h.must(err)
		if err := h.Supervise(ctx, own); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	// started reports whether the end of a start by the supervisor is on record.
	started := func(sb runtime.Sandbox, outcome string) func() bool {
		return func() bool {
			list, err := h.log.List(t.Context(), Filter{Sandbox: sb.ID, Verb: "start", Outcome: outcome})
			return err == nil && slices.ContainsFunc(list, func(e Entry) bool { return e.Who.By == "watch" })
		}
	}
	why := "restart policy always: it had ended with exit code 137"
	a := h.run(runtime.CreateRequest{Spec: runtime.Spec{
		Name: "a", Restart: runtime.Restart{Policy: runtime.RestartAlways},
	}})
	h.news()
	restart(a, started(a, "ok"))
	h.expect(h.news(), "verb | watch | start | a | ok | "+why)

	b := h.create(runtime.CreateRequest{Spec: runtime.Spec{
		Name: "b", Restart: runtime.Restart{Policy: runtime.RestartAlways, From: runtime.RestartFromHead},
	}})
	ck := h.checkpoint("b", runtime.CheckpointOptions{})
	h.start("b")
	h.news()
	restart(b, started(b, "ok"))
	list := h.news()
	if len(list) == 0 || list[0].Undid == nil || list[0].Checkpoint != ck.ID || list[0].Sandbox != b.ID {
		t.Fatalf("%+v", list)
	}
	// it did not run then
	h.expect(list, "verb | watch | restore | b | ok | "+why, "verb | watch | start | b | ok | "+why)
	if got, err := h.log.List(t.Context(), Filter{Sandbox: "b", Verb: "start"}); err != nil || len(got) != 2 ||
		got[0].UndoneBy != list[0].Seq {
		t.Errorf("what it has undone: %+v, %v", got, err)
	}

	c := h.run(runtime.CreateRequest{Spec: runtime.Spec{
		Name: "c", Restart: runtime.Restart{Policy: runtime.RestartAlways},
	}})
	h.withoutLog(func() {
		restart(c, func() bool {
			now, err := h.Sandbox(t.Context(), "c")
			return err == nil && now.Restarts.Error != ""
		})
	})
	if now, err := h.Sandbox(t.Context(), "c"); err != nil || now.Status != runtime.Exited ||
		!strings.Contains(now.Restarts.Error, "nothing was done, as it cannot be put on record") {
		t.Errorf("without the log: %s, %+v, %v", now.Status, now.Restarts, err)
	}
	// A failing one frees nothing: each try is recorded.
	h.news()
	h.backend.err = errors.New("no")
	restart(c, started(c, "internal"))
	h.backend.err = nil
	restart(c, started(c, "ok"))
	h.expect(h.news(), "verb | watch | start | c | internal | "+why, "verb | watch | start | c | ok | "+why)
}

// A removal that a checkpoint makes by the sandbox's policy is recorded with it.
func TestOwnPolicy(t *testing.T) {
	h := newHost(t)
	p, err := (policy.Finder{}).Resolve("p", []byte("images: {references: ['*']}\ncheckpoints: {keep_last: 1}\n"))
	h.must(err)
	h.create(runtime.CreateRequest{Policy: p, Spec: runtime.Spec{Name: "a"}})
	first := h.checkpoint("a", runtime.CheckpointOptions{})
	h.news()
	h.checkpoint("a", runtime.CheckpointOptions{})
	list := h.news()
	h.expect(list, "verb | test | checkpoint | a | ok | ", "note | test | prune | a | ok | retention of policy p")
	if len(list) != 2 || !slices.Equal(list[1].Made, []string{first.ID}) {
		t.Errorf("%+v", list)
	}
}

// byName sorts what is on record by the names of the sandboxes.
func byName(list []Entry) []Entry {
	slices.SortStableFunc(list, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// The service's own prunes and findings are found by the sandbox: each thing has a record of its
// own, up to a bound.
func TestOwnUpkeep(t *testing.T) {
	h := newHost(t)
	// upkeep has a service do something by itself until so much is on record.
	upkeep := func(u engine.Upkeep, verb string, n int) {
		t.Helper()
		ctx, end := context.WithTimeout(t.Context(), 20*time.Second)
		var all sync.WaitGroup
		defer all.Wait()
		defer end()
		all.Go(func() { h.Upkeep(ctx, u) })
		for got := 0; got < n; time.Sleep(time.Millisecond) {
			list, err := h.log.List(ctx, Filter{Verb: verb})
			h.must(err)
			got = len(list)
		}
	}
	retention, err := (policy.Finder{}).Resolve("p",
		[]byte("images: {references: ['*']}\ncheckpoints: {keep_last: 1}\n"))
	h.must(err)
	for _, name := range []string{"a", "b"} {
		sb := h.create(runtime.CreateRequest{Policy: retention, Spec: runtime.Spec{Name: name}})
		c := h.checkpoint(sb.ID, runtime.CheckpointOptions{FilesOnly: true})
		h.must(h.PinCheckpoint(t.Context(), c.ID, true))
		h.checkpoint(sb.ID, runtime.CheckpointOptions{FilesOnly: true})
		h.must(h.PinCheckpoint(t.Context(), c.ID, false))
	}
	h.news()
	upkeep(engine.Upkeep{Prune: time.Millisecond}, "prune", 2)
	h.expect(byName(h.news()), "note | test | prune | a | ok | retention", "note | test | prune | b | ok | retention")

	// Its removals are recorded even if their space cannot be freed, each time.
	t.Setenv("AGENTBOX_FAILPOINT", "prune.before-reclaim=error")
	for n := range 3 {
		sb, err := h.Sandbox(t.Context(), "a")
		h.must(err)
		h.must(h.PinCheckpoint(t.Context(), sb.Head, true))
		h.checkpoint("a", runtime.CheckpointOptions{FilesOnly: true})
		h.must(h.PinCheckpoint(t.Context(), sb.Head, false))
		h.news()
		upkeep(engine.Upkeep{Prune: time.Millisecond}, "prune", 3+n)
		list := h.news()
		h.expect(list, "note | test | prune | a | ok | retention")
		if !slices.Equal(list[0].Made, []string{sb.Head}) {
			t.Errorf("%v, want %s", list[0].Made, sb.Head)
		}
	}
	t.Setenv("AGENTBOX_FAILPOINT", "")

	// Abandoned restores: more than have records of their own.
	old := time.Now().Add(-time.Hour)
	var want []string
	for i := range 66 {
		staged := filepath.Join(h.root, "run", "restore", fmt.Sprintf("none%02d", i))
		h.must(os.MkdirAll(staged, 0o700))
		h.must(os.Chtimes(staged, old, old))
		want = append(want, "note | test | recover |  | ok | found: staged")
	}
	upkeep(engine.Upkeep{Reconcile: time.Hour}, "recover", 65)
	found := h.news()
	h.expect(found, append(want[:64:64], "note | test | recover |  | ok | found: more than 64 things")...)
	if last := found[len(found)-1]; len(last.Text) != 2 {
		t.Errorf("%+v", last.Record)
	}

	// A sandbox known only by its absence is removed on explicit request.
	for _, name := range []string{"a", "b"} {
		sb, err := h.Sandbox(t.Context(), name)
		h.must(err)
		h.must(h.backend.Remove(t.Context(), sb.ID))
	}
	h.news()
	_, err = h.Reconcile(t.Context())
	h.must(err)
	list := byName(h.news())
	h.expect(list, "verb | test | recover |  | ok | ", "note | test | recover | a | ok | found: gone",
		"note | test | recover | b | ok | found: gone")
	for _, e := range list[1:] {
		if len(e.Text) != 1 || !strings.Contains(e.Text[0], "removed sandbox "+e.Name+", ") {
			t.Errorf("%+v", e.Record)
		}
	}
}

// A verb that was cut off is on record by its sandbox when it is brought to its end.
func TestOwnRecovery(t *testing.T) {
	h := newHost(t)
	sb := h.create(runtime.CreateRequest{Spec: runtime.Spec{Name: "a"}})
	for range 2 {
		_, err := h.store.Begin(t.Context(), store.Intent{
			Op: "rm", Sandbox: sb.ID, Data: []byte(`{"backend": "memory"}`),
		})
		h.must(err)
	}
	h.news()
	_, err := h.RecoverInterrupted(t.Context())
	h.must(err)
	h.expect(h.news(), "note | test | recover | a | ok | its rm was interrupted")
}

// The leftovers of a verb that panics are recovered by its process, which goes on.
func TestPanicIsRecovered(t *testing.T) {
	h := newHost(t)
	sb := h.create(runtime.CreateRequest{Spec: runtime.Spec{Name: "a"}})
	h.news()
	t.Setenv("AGENTBOX_FAILPOINT", "start.after-backend=panic")
	_, err := h.Start(t.Context(), sb.ID, nil)
	if p := (*guard.Panic)(nil); !errors.As(err, &p) {
		t.Fatal(err)
	}
	h.expect(h.news(), "verb | test | start | a | internal | ",
		"note | test | recover | a | ok | its start was interrupted")
	if left, err := h.store.Intents(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left in the journal: %+v, %v", left, err)
	}
}
