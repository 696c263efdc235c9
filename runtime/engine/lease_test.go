package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// process starts a process that does nothing.
func process(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	return cmd
}

func (r *rig) leaseOf(t *testing.T, req runtime.LeaseRequest) runtime.Lease {
	t.Helper()
	l, err := r.CreateLease(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func ofPid(pid int) runtime.LeaseTerms {
	return runtime.LeaseTerms{Owner: runtime.OwnerPid, Pid: pid}
}

func (r *rig) leased(t *testing.T, name, lease string) runtime.Sandbox {
	t.Helper()
	sb, err := r.Create(ctx, runtime.CreateRequest{
		Lease: lease, Group: "g", Spec: runtime.Spec{
			Name: name, Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// endLeases does what the next command would, and returns the names of the remaining
// sandboxes.
func (r *rig) endLeases(t *testing.T) (names []string) {
	t.Helper()
	if _, err := r.EndLeases(ctx); err != nil {
		t.Fatal(err)
	}
	list, err := r.Sandboxes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		names = append(names, sb.Name)
	}
	slices.Sort(names)
	return names
}

// edit changes the record of a lease.
func (r *rig) edit(t *testing.T, id string, fn func(*runtime.Lease)) {
	t.Helper()
	err := r.store.ChangeLease(ctx, id, false, func(row *store.Lease) error {
		var l runtime.Lease
		if err := json.Unmarshal(row.Data, &l); err != nil {
			return err
		}
		fn(&l)
		var err error
		row.Data, err = json.Marshal(l)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestLeaseEndsWithOwner: a lease ends with its owner, even if that is a zombie. Its sandboxes
// and temporary checkpoints are removed; kept, pinned and unrelated ones stay.
func TestLeaseEndsWithOwner(t *testing.T) {
	r := newRig(t, nil)
	owner := process(t)
	l := r.leaseOf(t, runtime.LeaseRequest{Name: "l", LeaseTerms: ofPid(owner.Process.Pid)})
	if _, err := r.CreateLease(ctx, runtime.LeaseRequest{
		Name: "l", LeaseTerms: ofPid(1),
	}); !errors.Is(err, runtime.ErrExists) {
		t.Errorf("its name once more: %v", err)
	}
	r.leased(t, "a", "l")
	r.leased(t, "b", l.ID[:8])
	r.create(t, "other")
	ids := map[string]string{}
	for name, c := range map[string]struct {
		sandbox string
		opts    runtime.CheckpointOptions
	}{
		"temporary": {"a", runtime.CheckpointOptions{Temporary: true}},
		"before":    {"a", runtime.CheckpointOptions{Trigger: runtime.TriggerExec}},
		"lasting":   {"a", runtime.CheckpointOptions{}},
		"pinned":    {"b", runtime.CheckpointOptions{Temporary: true}},
		"of other":  {"other", runtime.CheckpointOptions{Lease: "l"}},
		"other's":   {"other", runtime.CheckpointOptions{}},
	} {
		ck, err := r.Checkpoint(ctx, c.sandbox, c.opts)
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = ck.ID
	}
	if err := r.PinCheckpoint(ctx, ids["pinned"], true); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Checkpoint(ctx, "other",
		runtime.CheckpointOptions{Temporary: true}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("a temporary checkpoint without a lease: %v", err)
	}
	// A fork has the lease that it is given, not its origin's.
	if _, err := r.Fork(ctx, "a", runtime.ForkOptions{
		Names: []string{"free"}, Checkpoint: ids["lasting"], NoStart: true,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Fork(ctx, "other", runtime.ForkOptions{
		Names: []string{"c"}, Checkpoint: ids["other's"], NoStart: true, Lease: "l", Group: "h",
	}); err != nil {
		t.Fatal(err)
	}
	if sb, err := r.Sandbox(ctx, "c"); err != nil || sb.Lease != l.ID || sb.Group != "h" {
		t.Errorf("the fork: lease %q, group %q, %v", sb.Lease, sb.Group, err)
	}
	if got := r.endLeases(t); !slices.Equal(got, []string{"a", "b", "c", "free", "other"}) {
		t.Errorf("while it is held: %v", got)
	}
	if err := owner.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	awaitZombie(t, owner.Process.Pid)
	for range 2 {
		if got := r.endLeases(t); !slices.Equal(got, []string{"free", "other"}) {
			t.Errorf("after its owner's end: %v", got)
		}
	}
	for name, id := range ids {
		ck, err := r.CheckpointInfo(ctx, id)
		gone := slices.Contains([]string{"temporary", "before", "of other"}, name)
		if gone != errors.Is(err, runtime.ErrNotFound) || !gone && (err != nil || ck.Lease != "") {
			t.Errorf("checkpoint %s: %+v, %v", name, ck, err)
		}
	}
	if l, err := r.Lease(ctx, "l"); err != nil || l.State != "ended" ||
		!strings.Contains(l.Reason, "process "+strconv.Itoa(owner.Process.Pid)) ||
		!slices.Equal(l.Sandboxes, []string{"a", "b", "c"}) || len(l.Checkpoints) != 4 || l.Over.IsZero() {
		t.Errorf("on record: %+v, %v", l, err)
	}
	for what, err := range map[string]error{
		"create": func() error {
			_, err := r.Create(ctx, runtime.CreateRequest{
				Lease: "l", Spec: runtime.Spec{Image: "base", Args: []string{"true"}},
			})
			return err
		}(),
		"renew":    func() error { _, err := r.RenewLease(ctx, "l", time.Hour); return err }(),
		"transfer": func() error { _, err := r.TransferLease(ctx, "l", ofPid(1)); return err }(),
		"release":  func() error { _, err := r.ReleaseLease(ctx, "l"); return err }(),
	} {
		if !errors.Is(err, runtime.ErrState) || !strings.Contains(err.Error(), "has ended") {
			t.Errorf("%s after its end: %v", what, err)
		}
	}
	r.leaseOf(t, runtime.LeaseRequest{Name: "l", LeaseTerms: runtime.LeaseTerms{For: time.Hour}})
}

func awaitZombie(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(data), ") Z ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s", data)
		}
	}
}

// TestLeasePidReuse: another process with the owner's pid does not count as the owner.
func TestLeasePidReuse(t *testing.T) {
	r := newRig(t, nil)
	owner := process(t)
	pid := owner.Process.Pid
	r.leaseOf(t, runtime.LeaseRequest{Name: "l", LeaseTerms: ofPid(pid)})
	r.leased(t, "a", "l")
	_, _ = owner.Process.Kill(), owner.Wait()
	time.Sleep(20 * time.Millisecond) // the kernel tells processes' starts by the hundredth of a second
	for try := 0; ; try++ {
		if try == 1000 {
			t.Fatal("the number was not given again")
		}
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.Fatal(err)
		}
		next := process(t)
		if next.Process.Pid == pid {
			break
		}
		_, _ = next.Process.Kill(), next.Wait()
	}
	if got := r.endLeases(t); got != nil {
		t.Errorf("left: %v", got)
	}
}

// TestLeaseTransfer: a lease can be transferred, but not once it is over by its old terms.
func TestLeaseTransfer(t *testing.T) {
	r := newRig(t, nil)
	owner := process(t)
	l := r.leaseOf(t, runtime.LeaseRequest{Name: "l", LeaseTerms: ofPid(owner.Process.Pid)})
	r.leased(t, "a", "l")
	if _, err := r.RenewLease(ctx, "l", 0); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("a beat of what is no heart: %v", err)
	}
	got, err := r.TransferLease(ctx, "l", runtime.LeaseTerms{For: time.Hour})
	if err != nil || got.Owner.Kind != runtime.OwnerNone || time.Until(got.Expires).Round(time.Minute) != time.Hour {
		t.Errorf("%+v, %v", got, err)
	}
	_, _ = owner.Process.Kill(), owner.Wait()
	if got := r.endLeases(t); !slices.Equal(got, []string{"a"}) {
		t.Errorf("kept for scoring: %v", got)
	}
	if _, err = r.TransferLease(ctx, "l", runtime.LeaseTerms{
		Owner: runtime.OwnerHeartbeat, Interval: time.Minute, For: 2 * time.Hour,
	}); err != nil {
		t.Fatal(err)
	}
	// A minute without a beat; then it is too late for one.
	r.edit(t, l.ID, func(l *runtime.Lease) { l.Owner.Beat.Awake -= 59 * time.Second })
	if _, err := r.RenewLease(ctx, "l", 0); err != nil {
		t.Errorf("a beat in time: %v", err)
	}
	r.edit(t, l.ID, func(l *runtime.Lease) { l.Owner.Beat.Awake -= time.Minute })
	if _, err := r.RenewLease(ctx, "l", 0); !errors.Is(err, runtime.ErrState) ||
		!strings.Contains(err.Error(), "not renewed within 1m0s") {
		t.Errorf("a beat too late: %v", err)
	}
	if _, err := r.Create(ctx, runtime.CreateRequest{
		Lease: "l", Spec: runtime.Spec{Name: "b", Image: "base", Args: []string{"true"}},
	}); !errors.Is(err, runtime.ErrState) {
		t.Errorf("a sandbox of a lease that ends: %v", err)
	}
	if got := r.endLeases(t); got != nil {
		t.Errorf("left: %v", got)
	}
}

// TestLeaseRefused requests leases that could not be held.
func TestLeaseRefused(t *testing.T) {
	r := newRig(t, nil)
	for name, c := range map[string]struct {
		req  runtime.LeaseRequest
		want error
	}{
		"nobody": {runtime.LeaseRequest{}, runtime.ErrInvalid},
		"a short deadline": {
			runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{For: time.Millisecond}}, runtime.ErrInvalid,
		},
		"a negative one": {runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{For: -1}}, runtime.ErrInvalid},
		"a short interval": {runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{
			Owner: runtime.OwnerHeartbeat, Interval: 1,
		}}, runtime.ErrInvalid},
		"two owners": {runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{
			Owner: runtime.OwnerHeartbeat, Interval: time.Minute, Pid: 1,
		}}, runtime.ErrInvalid},
		"a kind of no owner": {runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{Owner: "moon"}}, runtime.ErrInvalid},
		"a connection": {
			runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{Owner: runtime.OwnerConnection}}, runtime.ErrInvalid,
		},
		"no process": {runtime.LeaseRequest{LeaseTerms: ofPid(1 << 30)}, runtime.ErrNotFound},
		"a name":     {runtime.LeaseRequest{Name: "a/b", LeaseTerms: ofPid(1)}, runtime.ErrInvalid},
	} {
		if l, err := r.CreateLease(ctx, c.req); !errors.Is(err, c.want) {
			t.Errorf("%s: %+v, %v", name, l, err)
		}
	}
	if list, err := r.Leases(ctx, true); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}

// TestLeaseEndWaits: a verb that is at work on a member is not disturbed. The other members are
// removed at once, and this one when the verb is done. In the meantime nothing joins.
func TestLeaseEndWaits(t *testing.T) {
	r := newRig(t, nil)
	owner := process(t)
	r.leaseOf(t, runtime.LeaseRequest{Name: "l", LeaseTerms: ofPid(owner.Process.Pid)})
	busy := r.leased(t, "busy", "l")
	r.leased(t, "idle", "l")
	_, _ = owner.Process.Kill(), owner.Wait()
	lock, err := r.store.Lock(ctx, busy.ID, "checkpoint", 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.endLeases(t); !slices.Equal(got, []string{"busy"}) {
		t.Errorf("left while a verb is at work: %v", got)
	}
	if l, err := r.Lease(ctx, "l"); err != nil || l.State != "ending" ||
		!slices.Equal(l.Sandboxes, []string{"busy", "idle"}) {
		t.Errorf("%+v, %v", l, err)
	}
	err = r.store.PutSandbox(ctx, store.Sandbox{ID: store.NewID(), Name: "late", Lease: busy.Lease})
	if !errors.Is(err, runtime.ErrState) {
		t.Errorf("one that joins: %v", err)
	}
	lock.Unlock()
	if got := r.endLeases(t); got != nil {
		t.Errorf("left: %v", got)
	}
}

// TestHoldLease: HoldLease holds a lease while its function runs, cancels the function if the
// lease ends early, and leaves a transferred lease alone.
func TestHoldLease(t *testing.T) {
	r := newRig(t, nil)
	broken := errors.New("broken")
	for _, want := range []error{nil, broken} {
		err := r.HoldLease(ctx, runtime.LeaseRequest{Name: "l"}, func(_ context.Context, l runtime.Lease) error {
			r.leased(t, "a", l.ID)
			return want
		})
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		if got := r.endLeases(t); got != nil {
			t.Errorf("left: %v", got)
		}
	}
	err := r.HoldLease(ctx, runtime.LeaseRequest{Name: "l"}, func(c context.Context, l runtime.Lease) error {
		r.leased(t, "a", l.ID)
		if _, err := r.ReleaseLease(ctx, l.ID); err != nil {
			return err
		}
		<-c.Done()
		return c.Err()
	})
	if !errors.Is(err, runtime.ErrState) || !strings.Contains(err.Error(), "it was released") {
		t.Errorf("one that somebody else ended: %v", err)
	}
	err = r.HoldLease(ctx, runtime.LeaseRequest{Name: "l"}, func(_ context.Context, l runtime.Lease) error {
		r.leased(t, "a", l.ID)
		_, err := r.TransferLease(ctx, l.ID, runtime.LeaseTerms{For: time.Hour})
		return err
	})
	if got := r.endLeases(t); err != nil || !slices.Equal(got, []string{"a"}) {
		t.Errorf("transferred: %v, %v", got, err)
	}
}
