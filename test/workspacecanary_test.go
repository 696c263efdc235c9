package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestApplyCanary: a part of an apply comes first, its check sees the directories with just that, and
// the rest follows or all is taken back, also when the apply is killed.
func TestApplyCanary(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", works+"; chmod u-s built/out; echo bad > /work/config; touch /work/new/dir/more")
	rules(t, dir, `  canary: {paths: [config, new/dir/file], check: 'ls -A; ls new/dir; grep -q good config'}
`)
	clean := kept(t, dir)
	said := b.fails(7, "apply", "s")
	for _, want := range []string{
		`canary "ls -A; ls new/dir; grep -q good config" of ` + dir + "/.agentbox.yaml ended with exit code 1; all is taken back",
		// README is there, and built is not; new comes as a whole.
		".agentbox.yaml\n  | README\n  | README.too\n  | build\n  | config\n  | link\n  | link target\n  | new\n  | src\n  | file\n  | more\n",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("a canary that fails: %s, want %q", said, want)
		}
	}
	equal(b, "the directory", kept(t, dir), clean)

	b.sh("s", "echo good > /work/config")
	dry := decode[runtime.Applied](b, b.ok("apply", "--dry-run", "--format", "json", "s"))
	if len(dry.Canaries) != 1 || dry.Canaries[0].Exit != nil {
		t.Errorf("a dry run: %+v", dry.Canaries)
	}
	for _, point := range []string{"apply.before-canary", "apply.after-canary"} {
		b.killedAt(point+"=kill", "apply", "s")
		onlySandboxes(b, "s")
		equal(b, "the directory after a kill at "+point, kept(t, dir), clean)
	}
	out := decode[runtime.Applied](b, b.ok("apply", "--format", "json", "s"))
	if len(out.Canaries) != 1 || !out.Canaries[0].OK() {
		t.Errorf("apply: %+v", out.Canaries)
	}
	equal(b, "what came first", readFile(t, dir+"/config"), "good\n")
	equal(b, "what came later", readFile(t, dir+"/src/main.c"), "int main() { return 0; }\nmore\n")
	list := b.audited("--verb", "apply")
	if last := list[len(list)-1]; !strings.HasSuffix(strings.Join(last.Text, "\n"), "grep -q good config: exit code 0") {
		t.Errorf("on record: %+v", last)
	}
	b.ok("apply", "--undo", "s")
	equal(b, "the directory after an undo", kept(t, dir), clean)

	// Killed while the check runs.
	rules(t, dir, "  canary: {paths: [config], check: 'sleep 1000'}\n")
	clean = kept(t, dir)
	apply := b.begin("apply", "s")
	pid := 0
	b.eventually("the check runs", func() bool {
		for _, sb := range decode[[]sandbox](b, b.ok("ps", "--format", "json")) {
			if sb.Name != "s" {
				pid = b.inspect(sb.Name).Pid
			}
		}
		return pid != 0
	})
	equal(b, "what is there then", readFile(t, dir+"/config"), "good\n")
	if err := apply.agentbox.Kill(); err != nil {
		t.Fatal(err)
	}
	<-apply.done
	onlySandboxes(b, "s")
	b.noProcess(pid)
	equal(b, "the directory after a kill", kept(t, dir), clean)
}

// TestApplyCanaryWorkspace: one workspace of two is the canary of both, by the policy.
func TestApplyCanaryWorkspace(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	one, two := project(t), project(t)
	policy := filepath.Join(t.TempDir(), "careful.yaml")
	put(t, filepath.Dir(policy), "careful.yaml",
		"apply: {canary: {workspace: /two, name: first, check: 'cat /one/file /two/file'}}\n")
	put(t, one, "file", "1\n")
	put(t, two, "file", "2\n")
	b.start("s", "--network", "none", "--policy", policy, "--workspace", one+":/one", "--workspace", two+":/two",
		"busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", "echo one >/one/file; echo two >/two/file")
	out := decode[runtime.Applied](b, b.ok("apply", "--format", "json", "s"))
	if len(out.Canaries) != 1 || out.Canaries[0].Name != "first" || out.Canaries[0].Output != "1\ntwo\n" {
		t.Errorf("apply: %+v", out.Canaries)
	}
	equal(b, "both", readFile(t, one+"/file")+readFile(t, two+"/file"), "one\ntwo\n")
	b.ok("apply", "--undo", "s")

	// The rules of a directory are about that directory, and add to those of the policy.
	rules(t, one, "  canary: {paths: [file], name: second, check: 'cat /one/file /two/file; rm /two/file; exit 1'}\n")
	said := b.fails(7, "apply", "s")
	if !strings.Contains(said, `canary "second" of `+one) || !strings.Contains(said, "\n  | one\n  | two\n") {
		t.Errorf("apply: %s", said)
	}
	equal(b, "both", readFile(t, one+"/file")+readFile(t, two+"/file"), "1\n2\n")
	// Without anything of a canary there is none.
	b.ok("apply", "--workspace", "/one", "s", "--", "/one/src")
	if _, err := os.Lstat(one + "/src"); err != nil {
		t.Error(err)
	}
}
