package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// asked is the one approval that is asked for.
func asked(b *box) runtime.Approval {
	b.Helper()
	list := decode[[]runtime.Approval](b, b.ok("approve", "--list", "--format", "json"))
	if len(list) != 1 {
		b.Fatalf("approvals: %+v", list)
	}
	return list[0]
}

// TestApplyApproval: an apply of more risk than the rules allow waits for a person, whose approval is good
// for just that apply, once.
func TestApplyApproval(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	rules(t, dir, "  approve: {at: 5, paths: ['*.lock', src/deep]}\n")
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)

	// What is of less risk needs none.
	b.sh("s", "rm /work/README")
	dry := decode[runtime.Applied](b, b.ok("apply", "--dry-run", "--format", "json", "s"))
	if dry.Risk == nil || dry.Risk.Score != 1 || dry.Approval != nil || dry.Risk.Reasons[0].Text != "deletes /work/README" {
		t.Errorf("a dry run: %+v, %+v", dry.Risk, dry.Approval)
	}
	b.ok("apply", "s")
	equal(b, "approvals", b.ok("approve", "--list", "--format", "json"), "[]")

	b.sh("s", "mkdir /work/.github; echo on >/work/.github/ci.yml; rm /work/README.too")
	before := onHost(t, dir)
	said := b.fails(9, "apply", "s")
	one := asked(b)
	for _, want := range []string{"needs approval: its risk is 5, and from 5 on", "agentbox approve " + one.ID} {
		if !strings.Contains(said, want) {
			t.Errorf("apply: %s, want %q", said, want)
		}
	}
	equal(b, "the directory", onHost(t, dir), before)
	said = b.fails(2, "approve", one.ID)
	for _, want := range []string{
		"  A /work/.github/ci.yml\n", "  D /work/README.too\n",
		"risk 5: deletes /work/README.too (+1), changes CI: /work/.github/ci.yml (+4)", "needs --yes",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("approve: %s, want %q", said, want)
		}
	}
	b.fails(9, "apply", "--yes", "s") // it is no approval
	b.ok("approve", "--yes", one.ID[:8])

	// Another plan is not approved: of the sandbox, or of the directory.
	b.sh("s", "echo more >>/work/.github/ci.yml")
	b.fails(9, "apply", "s")
	b.sh("s", "echo on >/work/.github/ci.yml") // also its time has changed
	b.fails(9, "apply", "s")
	b.ok("restore", "s", one.Checkpoint[:12])
	put(t, dir, "README.too", "read me\n")
	if err := os.Chown(dir+"/README.too", 1000, 1000); err != nil {
		t.Fatal(err)
	}
	b.fails(9, "apply", "--theirs", "s")
	equal(b, "the state of the first", fmt.Sprint(len(decode[[]runtime.Approval](b,
		b.ok("approve", "--list", "--format", "json")))), "4")

	// The last of these passes once it is approved, and uses that up.
	list := decode[[]runtime.Approval](b, b.ok("approve", "--list", "--format", "json"))
	b.ok("approve", "-y", list[0].ID)
	b.killedAt("approve.after-use=kill", "apply", "--theirs", "s")
	b.ok("ps")
	if text := readFile(t, dir+"/README.too"); text != "read me\n" {
		t.Errorf("README.too after a kill: %q", text)
	}
	b.fails(9, "apply", "--theirs", "s")
	b.ok("approve", "-y", list[0].ID)
	b.ok("apply", "--theirs", "s")
	equal(b, "the CI", readFile(t, dir+"/.github/ci.yml"), "on\n")
	b.ok("apply", "--undo", "s") // needs none
	b.fails(9, "apply", "--theirs", "s")

	// Who approved what is on record.
	for _, r := range b.audited("--verb", "approve") {
		if r.Outcome == "ok" && (r.To == "" || r.Sandbox != b.inspect("s").ID || r.Who.UID == nil) {
			t.Errorf("on record: %+v", r)
		}
	}

	// Paths that the rules name, also in a directory that goes, and an approval that expires.
	rules(t, dir, "  approve: {paths: ['*.lock', src/deep], expires: 1s}\n")
	b.fails(3, "approve", "-y", "0123456789abcdef")
	b.sh("s", "rm -r /work/src /work/.github; cp /bin/true /work/a.lock")
	said = b.fails(9, "apply", "--theirs", "s")
	if !strings.Contains(said, "it changes /work/src/deep/er/file, which apply.approve.paths has (src/deep)") {
		t.Errorf("a path that the rules name: %s", said)
	}
	last := decode[[]runtime.Approval](b, b.ok("approve", "--list", "--format", "json"))[0]
	if last.Lasts != time.Second {
		t.Errorf("%+v", last)
	}
	b.ok("approve", "-y", last.ID)
	b.eventually("the approval has expired", func() bool {
		return !strings.Contains(b.ok("approve", "--list"), last.ID)
	})
	b.fails(9, "apply", "--theirs", "s")
	b.fails(9, "apply", "--theirs", "s", "--", "/work/a.lock")
	b.ok("apply", "--theirs", "s", "--", "/work/src/main.c")

	// With a symlink all comes that is below it.
	rules(t, dir, "  approve: {paths: ['infra/*.tf']}\n")
	b.sh("s", "mkdir /work/other; echo more >/work/other/x.tf; ln -s other /work/infra")
	said = b.fails(9, "apply", "s", "--", "/work/other", "/work/infra")
	if !strings.Contains(said, "it changes /work/infra, which apply.approve.paths has (infra/*.tf)") {
		t.Errorf("a symlink where the rules name what is below: %s", said)
	}
	b.ok("apply", "s", "--", "/work/other")
}

// TestApplyApprovalTerminal: on a terminal apply asks the person itself; through the service it is the
// same, and a client is told by its own error.
func TestApplyApprovalTerminal(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	policy := filepath.Join(t.TempDir(), "careful.yaml")
	put(t, filepath.Dir(policy), "careful.yaml", "apply: {approve: {at: 1}, validators: ['test ! -e README']}\n")
	b.start("s", "--network", "none", "--policy", policy, "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", "rm /work/README")
	before := onHost(t, dir)
	for _, answer := range []string{"y", "yes"} {
		term := b.terminal("apply", "s")
		term.shows("risk 1: deletes /work/README (+1)")
		term.shows("Write yes to approve 1 change of s to " + dir + ": ")
		term.enter(answer + "\r")
		if answer == "y" {
			term.shows("nothing was approved")
			equal(b, "exit code", term.ends(), 1)
			equal(b, "the directory", onHost(t, dir), before)
			continue
		}
		term.shows("1 change in " + dir)
		equal(b, "exit code", term.ends(), 0)
	}
	if _, err := os.Lstat(dir + "/README"); err == nil {
		t.Error("README is there after the apply")
	}
	equal(b, "approvals", b.ok("approve", "--list", "--format", "json"), "[]")
	b.ok("apply", "--undo", "s")

	b.serve() // the commands use it from here on
	if said := b.fails(9, "apply", "s"); !strings.Contains(said, "agentbox approve "+asked(b).ID) {
		t.Errorf("apply through the service: %s", said)
	}
	b.ok("approve", "-y", asked(b).ID)
	r := b.try(nil, "apply", "s")
	if r.code != 0 || !strings.Contains(r.err, `validator "test ! -e README" of policy careful passed`) {
		t.Errorf("apply that is approved: %s", r)
	}
}
