package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/audit"
)

// audited is what the audit log has of some entries. It ends no lease, and holds no
// sandbox to its limits.
func (b *box) audited(args ...string) []audit.Entry {
	b.Helper()
	return decode[[]audit.Entry](b, b.ok(append([]string{"audit", "ls", "--format", "json"}, args...)...))
}

// alone waits until there is one such entry that has ended, and returns it.
func (b *box) alone(by string, args ...string) (e audit.Entry) {
	b.Helper()
	b.eventually(fmt.Sprintf("%q is on record", args), func() bool {
		n := 0
		for _, one := range b.audited(args...) {
			if one.Who.By == by && one.Outcome != audit.Unfinished {
				e, n = one, n+1
			}
		}
		if n > 1 {
			b.Fatalf("%q is on record %d times", args, n)
		}
		return n == 1
	})
	if r := decode[audit.Report](b, b.ok("audit", "verify", "--format", "json")); !r.OK {
		b.Errorf("verify: %+v", r)
	}
	return e
}

// TestAuditOfItself has agentbox end, stop, kill, start and restore sandboxes by
// itself: each is on record, with the part that did it and why.
func TestAuditOfItself(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	expect := func(e audit.Entry, id, outcome, why string) {
		t.Helper()
		if e.Sandbox != id || e.Outcome != outcome || !strings.HasPrefix(e.Why, why) || e.EndSeq <= e.Seq ||
			e.Who.Pid == 0 || e.Who.UID == nil || int(*e.Who.UID) != os.Getuid() {
			t.Errorf("%s of %s: %+v; want %s, because of %q", e.Verb, id, e, outcome, why)
		}
	}

	who := owner(t)
	l := b.ok("lease", "create", "--name", "l", "--pid", fmt.Sprint(who.Process.Pid))
	b.start("c", "--lease", "l", "--network", "none", "busybox", "sleep", "1000")
	id, ck := b.inspect("c").ID, b.checkpoint("--temporary", "c")
	b.awaitSupervisor(true)
	killOwner(t, who)
	end := b.alone("keeper", "--verb", "lease end")
	why := fmt.Sprintf("its owner, process %d, has ended", who.Process.Pid)
	expect(end, "", "ok", why)
	if end.To != l || end.Ref != "l" {
		t.Errorf("%+v", end)
	}
	why = fmt.Sprintf("lease %s (l): %s", l[:12], why)
	gone := b.alone("keeper", "--verb", "rm", "--sandbox", "c")
	expect(gone, id, "ok", why)
	equal(b, "the supervisor", gone.Who.Pid, end.Who.Pid)
	lost := b.alone("keeper", "--verb", "checkpoint rm", "--sandbox", id[:8])
	expect(lost, id, "ok", why)
	equal(b, "the checkpoint", lost.Checkpoint, ck)

	b.start("t", "--ttl", "1s", "--stop-signal", "KILL", "--network", "none", "busybox", "sleep", "1000")
	b.start("i", "--idle", "1s", "--stop-signal", "KILL", "--network", "none", "busybox", "sleep", "1000")
	b.start("d", "--storage-size", "10m", "--network", "none", "busybox", "sh", "-c",
		"dd if=/dev/zero of=/much bs=1M count=20; sleep 1000")
	b.start("r", "--restart", "on-failure:1", "--network", "none", "busybox", "sh", "-c", "exit 3")
	b.start("rm", "--rm", "--ttl", "1s", "--stop-signal", "KILL", "--network", "none", "busybox", "sleep", "1000")
	expect(b.alone("watch", "--verb", "stop", "--sandbox", "t"), b.inspect("t").ID, "ok", "ttl: its time of 1s is over")
	expect(b.alone("watch", "--verb", "stop", "--sandbox", "i"), b.inspect("i").ID, "ok",
		"idle: nothing went on for 1s")
	killed := b.alone("watch", "--verb", "kill", "--sandbox", "d")
	expect(killed, b.inspect("d").ID, "ok", "storage: its files take ")
	equal(b, "the signal", killed.Signal, "KILL")
	expect(b.alone("watch", "--verb", "start", "--sandbox", "r"), b.inspect("r").ID, "ok",
		"restart policy on-failure: it had ended with exit code 3")
	end = b.alone("watch", "--verb", "stop", "--sandbox", "rm")
	expect(b.alone("watch", "--verb", "rm", "--sandbox", "rm"), end.Sandbox, "ok", "ttl: ")
	b.start("e", "--rm", "--network", "none", "busybox", "sleep", "0.1")
	ended := b.alone("reap", "--verb", "rm", "--sandbox", "e")
	expect(ended, ended.Sandbox, "ok", "rm: it has ended")
	b.start("f", "--rm", "--network", "none", "busybox", "sleep", "1000")
	b.ok("rm", "-f", "f")
	b.alone("command", "--verb", "rm", "--sandbox", "f")

	// Actions that a restart from the head undoes are marked.
	b.start("h", "--restart", "always", "--restart-from", "head", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("h", 3)
	ck = b.checkpoint("h")
	b.sh("h", "echo lost > /work")
	b.crash("h")
	back := b.alone("watch", "--verb", "restore", "--sandbox", "h")
	expect(back, b.inspect("h").ID, "ok", "restart policy always: it had ended with exit code 137")
	equal(b, "the checkpoint", back.Checkpoint, ck)
	for _, e := range b.audited("--verb", "exec", "--sandbox", "h") {
		equal(b, "what has undone the exec", e.UndoneBy, back.Seq)
	}
	if text := b.ok("audit", "ls", "--verb", "stop"); !strings.Contains(text,
		fmt.Sprintf(" watch[%d] ", end.Who.Pid)) || !strings.Contains(text, "ttl: its time of 1s is over") {
		t.Errorf("for people: %s", text)
	}

	// A removal at the end of a connection to the service is its caller's.
	_, socket := b.serve()
	svc := api.Dial(socket)
	defer svc.Close()
	ctx, cancel := context.WithCancel(t.Context())
	err := svc.HoldLease(ctx, runtime.LeaseRequest{}, func(_ context.Context, l runtime.Lease) error {
		b.start("held", "--lease", l.ID, "--network", "none", "busybox", "sleep", "1000")
		why = fmt.Sprintf("lease %s: the connection that held it has ended", l.ID[:12])
		cancel()
		return nil
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	gone = b.alone("service", "--verb", "rm", "--sandbox", "held")
	expect(gone, gone.Sandbox, "ok", why)
	equal(b, "the caller", gone.Who.Pid, os.Getpid())

	for _, name := range []string{"c", "rm", "e", "f", "held"} { // not recorded by any other process, which only found it gone
		equal(b, "removals of "+name, len(b.audited("--verb", "rm", "--sandbox", name)), 1)
	}
}

// TestAuditOfItselfKilled kills what agentbox does by itself in its midst: it is on record as
// unfinished, and the next process that comes by does it.
func TestAuditOfItselfKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	// unfinished has a command come by that is killed at a point, and returns the
	// sandbox that is on record then, and no more.
	unfinished := func(point, by string, args ...string) string {
		t.Helper()
		b.eventually("somebody comes by", func() bool { return b.try(failpoint(point, "kill"), "ps").killed })
		list := b.audited(args...)
		if len(list) != 1 || list[0].Outcome != audit.Unfinished || list[0].Who.By != by || list[0].Why == "" {
			t.Fatalf("%+v", list)
		}
		return list[0].Sandbox
	}

	who := owner(t)
	b.ok("lease", "create", "--name", "l", "--pid", fmt.Sprint(who.Process.Pid))
	b.start("c", "--lease", "l", "--network", "none", "busybox", "sleep", "1000")
	b.awaitSupervisor(true)
	b.killSupervisor()
	killOwner(t, who)
	id := unfinished("remove.before-backend", "keeper", "--verb", "rm", "--sandbox", "c")
	equal(b, "left", b.ok("ps", "-aq"), "")
	if list := b.audited("--verb", "recover"); len(list) == 0 ||
		!strings.Contains(strings.Join(list[0].Text, "\n"), id[:12]) {
		t.Errorf("recovered: %+v", list)
	}
	b.alone("keeper", "--verb", "lease end")

	b.start("t", "--ttl", "3s", "--stop-signal", "KILL", "--network", "none", "busybox", "sleep", "1000")
	b.killSupervisor()
	time.Sleep(3100 * time.Millisecond) // its time is over then; earlier, a command would start another supervisor
	unfinished("audit.after-begin", "watch", "--verb", "stop", "--sandbox", "t")
	equal(b, "status after the kill", b.inspect("t").Status, "exited")
	b.alone("watch", "--verb", "stop", "--sandbox", "t")
	equal(b, "records of the stop", len(b.audited("--verb", "stop", "--sandbox", "t")), 2)
}
