package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// rules writes a .agentbox.yaml with rules of an apply, as the owner of the directory.
func rules(t *testing.T, dir, text string) {
	t.Helper()
	put(t, dir, ".agentbox.yaml", "apply:\n"+text)
	if err := os.Lchown(filepath.Join(dir, ".agentbox.yaml"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
}

// onlySandboxes proves that no sandbox but these is left.
func onlySandboxes(b *box, want ...string) {
	b.Helper()
	b.ok("ps") // recovers
	var got []string
	for _, sb := range decode[[]struct{ Name string }](b, b.ok("ps", "-a", "--format", "json")) {
		got = append(got, sb.Name)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		b.Errorf("sandboxes %q, want %q", got, want)
	}
}

// TestApplyValidators: a validator that fails keeps all of an apply from the directory, one that passes
// lets just what it has seen come; and neither the sandbox nor the validator has a say in the rules.
func TestApplyValidators(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := repository(t)
	rules(t, dir, `  validators:
    - {name: env, run: 'test $(pwd) = /work; id -u; grep -c : /proc/net/dev; test ! -e /run/secrets/s'}
    - {name: shows, run: 'cat src/main.c; ls; ls src/deep; echo wreck | tee README junk >src/main.c; rm -r new'}
    - {name: online, run: 'grep -c : /proc/net/dev', network: sandbox}
    - {name: again, run: [grep, -q, more, src/main.c]}
    - 'test -f fixed || { echo it is not fixed; exit 3; }'
`)
	b.start("s", "--network", "bridge", "--user", "0", "--secret", "s=file:/etc/hostname", "--workspace", dir+":/work",
		"busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	pid := b.inspect("s").Pid
	// An agent that wants to be rid of the rules changes its own copy.
	b.sh("s", works+"; chmod u-s built/out; echo 'image: none' > .agentbox.yaml")
	clean := kept(t, dir)

	dry := decode[runtime.Applied](b, b.ok("apply", "--dry-run", "--format", "json", "s"))
	if n := len(dry.Validators); n != 5 || dry.Validators[0].Exit != nil || dry.Validators[3].Name != "again" ||
		dry.Validators[0].From != dir+"/.agentbox.yaml" {
		t.Errorf("a dry run: %+v", dry.Validators)
	}
	said := b.fails(7, "apply", "s")
	for _, want := range []string{
		`validator "test -f fixed || { echo it is not fixed; exit 3; }" of ` + dir + "/.agentbox.yaml ended with exit code 3",
		"nothing was applied", "\n  | it is not fixed\n",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("a validator that fails: %s, want %q", said, want)
		}
	}
	equal(b, "the directory after a failure", kept(t, dir), clean)
	onlySandboxes(b, "s")
	list := b.audited("--verb", "apply")
	last := list[len(list)-1]
	if last.Outcome != "denied" || len(last.Text) != 6 || last.Text[5] != "validator test -f fixed || { echo it is not "+
		"fixed; exit 3; }: exit code 3" || last.Text[4] != "validator again: exit code 0" {
		t.Errorf("on record: %+v", last)
	}

	b.sh("s", "touch /work/fixed")
	inside := b.inside("s")
	out := decode[runtime.Applied](b, b.ok("apply", "--format", "json", "s"))
	if len(out.Validators) != 5 {
		t.Fatalf("%+v", out.Validators)
	}
	for _, v := range out.Validators {
		if !v.OK() || v.Took <= 0 {
			t.Errorf("%+v", v)
		}
	}
	equal(b, "what the first one saw", out.Validators[0].Output, "0\n1\n") // only lo
	equal(b, "what the second one saw", out.Validators[1].Output, "int main() { return 0; }\nmore\nREADME.too\n"+
		"built\ndangling\nfixed\nlink\nlink target\nnew\nsrc\nother\n")
	equal(b, "what the third one saw", out.Validators[2].Output, "2\n")
	equal(b, "the file", readFile(t, dir+"/src/main.c"), "int main() { return 0; }\nmore\n")
	if _, err := os.Lstat(dir + "/junk"); err == nil {
		t.Error("what a validator writes gets into the directory")
	}
	equal(b, "the rules, which the apply has brought", readFile(t, dir+"/.agentbox.yaml"), "image: none\n")
	equal(b, "what the sandbox sees", b.inside("s"), inside)
	equal(b, "its process", b.inspect("s").Pid, pid)
	b.ok("apply", "--undo", "s")
	equal(b, "the directory after an undo", kept(t, dir), clean)
}

// TestApplyValidatorsMerge: what a validator sees is the result, merged with what the owner has changed.
func TestApplyValidatorsMerge(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	text := strings.Repeat("line\n", 10)
	put(t, dir, "text", text)
	put(t, dir, "gone/one", "1\n")
	rules(t, dir, `  validators: ['cat text | tr "\n" .; ls -d gone mine src; test ! -e gone/one; exit 9']`+"\n")
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", "cd /work; echo sandbox >> text; rm -r gone; rm README")
	put(t, dir, "text", "owner\n"+text)
	put(t, dir, "mine", "the owner's\n")
	put(t, dir, "gone/two", "2\n")
	before := onHost(t, dir)
	said := b.fails(7, "apply", "s")
	for _, want := range []string{
		"  | owner." + strings.Repeat("line.", 10) + "sandbox.gone\n", "  | mine\n  | src\n", "exit code 9",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("the result: %s, want %q", said, want)
		}
	}
	equal(b, "the directory", onHost(t, dir), before)

	// Of a part of the changes only that is seen.
	rules(t, dir, `  validators: ['test -e README && ! grep owner README && tail -n 1 text | grep sandbox']`+"\n")
	b.ok("apply", "s", "--", "/work/text")
	equal(b, "the text", readFile(t, dir+"/text"), "owner\n"+text+"sandbox\n")
	if said := b.fails(7, "apply", "s"); !strings.Contains(said, "exit code 1") {
		t.Errorf("the rest: %s", said)
	}
}

// TestApplyValidatorsBounded: the time and the output of a validator are bounded, and a command that
// cannot be run is a failure.
func TestApplyValidatorsBounded(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", "rm /work/README")
	for command, want := range map[string]string{
		`{run: 'echo begun; sleep 1000', timeout: 1s}`: "did not end within 1s; nothing was applied:\n  | begun",
		`{run: [/bin/nosuch]}`:                         "ended with exit code 127",
		`'seq 100000; printf "\033[31m"; exit 1'`:      "\n  | 100000\n  | \ufffd[31m",
		`'exit 200'`: "ended with exit code 200",
		`'(sleep 1000 & sleep 1000 &); echo end; exit 1'`: "\n  | end",
	} {
		rules(t, dir, "  validators: ["+command+"]\n")
		before := onHost(t, dir)
		said := b.fails(7, "apply", "s")
		if !strings.Contains(said, want) || len(said) > 16<<10 {
			t.Errorf("%s: %d bytes, %.2000s", command, len(said), said)
		}
		equal(b, "the directory after "+command, onHost(t, dir), before)
	}
	onlySandboxes(b, "s")

	// What is wrong in the rules refuses an apply, but takes back one that was.
	rules(t, dir, "  validators: [true]\n")
	if said := b.fails(2, "apply", "s"); !strings.Contains(said, ".agentbox.yaml:2: apply.validators: not a text") {
		t.Errorf("rules that are wrong: %s", said)
	}
	rules(t, dir, "  validators: ['true']\n")
	for _, err := range []error{
		os.Rename(dir+"/.agentbox.yaml", dir+"/linked"), os.Symlink("linked", dir+"/.agentbox.yaml"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if said := b.fails(2, "apply", "s"); !strings.Contains(said, "a file with rules for apply must not be a symlink") {
		t.Errorf("rules behind a link: %s", said)
	}
	if err := os.Remove(dir + "/.agentbox.yaml"); err != nil {
		t.Fatal(err)
	}
	rules(t, dir, "  validators: ['true']\n")
	b.ok("apply", "s")
	rules(t, dir, "  validators: [true]\n")
	b.ok("apply", "--undo", "s")
	equal(b, "README", readFile(t, dir+"/README"), "read me\n")
}

// TestApplyValidatorsKilled: an apply that is killed before, in or after a validator leaves the
// directory as it was, and the next command frees what the validator had.
func TestApplyValidatorsKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", "rm /work/README")
	rules(t, dir, "  validators: ['true']\n")
	before := onHost(t, dir)
	for _, point := range []string{"validate.before-run", "validate.after-run"} {
		b.killedAt(point+"=kill", "apply", "s")
		onlySandboxes(b, "s")
		equal(b, "the directory after a kill at "+point, onHost(t, dir), before)
	}
	rules(t, dir, "  validators: ['sleep 1000']\n")
	before = onHost(t, dir)
	apply := b.begin("apply", "s")
	pid := 0
	b.eventually("the validator runs", func() bool {
		for _, sb := range decode[[]sandbox](b, b.ok("ps", "--format", "json")) {
			if sb.Name != "s" {
				pid = b.inspect(sb.Name).Pid
			}
		}
		return pid != 0
	})
	if err := apply.agentbox.Kill(); err != nil {
		t.Fatal(err)
	}
	<-apply.done
	onlySandboxes(b, "s")
	b.noProcess(pid)
	equal(b, "the directory after a kill", onHost(t, dir), before)
	rules(t, dir, "  validators: ['test ! -e README']\n")
	b.ok("apply", "s")
	if _, err := os.Lstat(dir + "/README"); err == nil {
		t.Error("README is there after an apply")
	}
}

// TestApplyValidatorsAll: of several workspaces all come or none, and what has been judged is what
// comes: an apply of a directory that was changed meanwhile is refused.
func TestApplyValidatorsAll(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	one, two := project(t), project(t)
	policy := filepath.Join(t.TempDir(), "careful.yaml")
	// Neither the network none nor a sandbox without the label is allowed: a validator has the one all the
	// same, and the other.
	put(t, filepath.Dir(policy), "careful.yaml", "labels: [team]\nnetwork: {modes: [filtered], default: filtered}\n"+
		"apply: {validators: ['test ! -e README; test -e /two/README']}\n")
	b.start("s", "--network", "filtered", "--label", "team=a", "--policy", policy, "--workspace", one+":/one",
		"--workspace", two+":/two", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", "rm /one/README /two/README")
	state := func() string { return onHost(t, one) + onHost(t, two) }
	rules(t, two, "  validators: ['true']\n")
	before := state()
	if said := b.fails(7, "apply", "s"); !strings.Contains(said, "of policy careful ended with exit code 1") {
		t.Errorf("the policy's: %s", said)
	}
	equal(b, "the directories", state(), before)
	b.ok("apply", "--workspace", "/one", "s") // /two shows what the directory has
	b.ok("apply", "--undo", "s")

	// The directory changes between its validator and the apply, at a place of which nothing comes.
	release := b.held("validate.after-run", "apply", "--workspace", "/one", "s")
	put(t, one, "src/new", "the owner's\n")
	if err := release(); err == nil || !strings.Contains(err.Error(), one+" was changed while") {
		t.Errorf("apply to a directory that has changed: %v", err)
	}
	equal(b, "README", readFile(t, one+"/README"), "read me\n")
	onlySandboxes(b, "s")
	b.ok("apply", "--workspace", "/one", "s")
	text, err := json.Marshal(b.inspect("s").Labels)
	if err != nil || strings.Contains(string(text), runtime.LabelValidates) {
		t.Errorf("labels of the sandbox: %s, %v", text, err)
	}
}
