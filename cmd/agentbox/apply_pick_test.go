package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

const twoHunks = `@@ -1,7 +1,7 @@
 1
-2
+two
 3
-4
 5
+five and a half
 6
 7
@@ -16,3 +16,3 @@
 16
-17
+seventeen
\ No newline at end of file
`

func TestShownHunks(t *testing.T) {
	list := parseHunks(twoHunks)
	if len(list) != 2 || list[0].runs != 3 || list[1].runs != 1 || list[1].first != 3 {
		t.Fatalf("%+v", list)
	}
	if got := strings.TrimSuffix(list[0].text()+list[1].text(), "\n"); got+"\n" !=
		strings.Replace(twoHunks, "-16,3 +16,3", "-16,2 +16,2", 1) {
		t.Errorf("shown as\n%s", got)
	}
	var texts []string
	for _, h := range list[0].split() {
		texts = append(texts, h.text())
	}
	want := []string{
		"@@ -1,3 +1,3 @@\n 1\n-2\n+two\n 3\n", "@@ -3,3 +3,2 @@\n 3\n-4\n 5\n",
		"@@ -5,3 +4,4 @@\n 5\n+five and a half\n 6\n 7\n",
	}
	if strings.Join(texts, "") != strings.Join(want, "") {
		t.Errorf("split into\n%s", strings.Join(texts, ""))
	}
}

// manyChanges is a plan with something of every kind.
func manyChanges() runtime.Applied {
	state := func(kind, mode string) *runtime.FileState { return &runtime.FileState{Type: kind, Mode: mode} }
	list := []runtime.Change{
		{Path: "/work/dir", Change: "A", Type: "dir", New: state("dir", "0755")},
		{Path: "/work/dir/new", Change: "A", Type: "file", New: state("file", "0644"), Patch: "@@ -0,0 +1 @@\n+n\x1b[31m\n"},
		{Path: "/work/empty", Change: "A", Type: "dir", New: state("dir", "0755")},
		{Path: "/work/file", Change: "T", Type: "dir", New: state("dir", "0755")},
		{Path: "/work/file/in", Change: "A", Type: "file", New: state("file", "0644")},
		{Path: "/work/gone", Change: "D", Type: "dir"},
		{Path: "/work/gone/a", Change: "D", Type: "file"},
		{Path: "/work/text", Change: "M", Type: "file", What: []string{"content", "mode"}, Old: state("file", "0644"),
			New: state("file", "0755"), Patch: twoHunks, Hunks: 4},
		{Path: "/work/was", Change: "T", Type: "file", New: state("file", "0644")},
		{Path: "/work/was/below", Change: "D", Type: "file"},
	}
	for i := range list {
		list[i].Seen = fmt.Sprint("s", i)
	}
	return runtime.Applied{
		Checkpoint: "5abc", Original: "/srv/repo", Changes: list,
		Workspaces: []runtime.AppliedWorkspace{{Path: "/work", Original: "/srv/repo"}},
	}
}

func picksText(list []runtime.ApplyPick) string {
	var out []string
	for _, p := range list {
		s := strings.TrimPrefix(p.Path, "/work/") + ":" + p.Seen
		if p.Hunks != nil {
			s += fmt.Sprint(p.Hunks, p.Mode)
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func TestApplyPick(t *testing.T) {
	for _, c := range []struct {
		interactive    bool
		answers, picks string
		says           []string
	}{
		{false, "y\ny\ny\ny\ny\ny\ny\ny\n",
			"dir/new:s1 empty:s2 file:s3 file/in:s4 gone/a:s6 text:s7 was:s8", nil},
		{false, "n\nn\nn\nn\nn\ns\ny\nn\ny\nn\nn\n", "text:s7[0 2] false", []string{
			"A dir/new (file 0644 0:0)", "+n\ufffd[31m", "  A file/in", "mode 0644 -> 0755", "Apply the new mode [y,n,q,a,d,?]?",
			"(1/2) Apply this hunk [y,n,q,a,d,s,?]?", "Split into 3 hunks.", "(4/4) Apply this hunk [y,n,q,a,d,?]?",
		}},
		{false, "n\nn\nn\nn\ny\nd\nn\n", "text:s7[] true", nil},
		{false, "n\nn\nn\nn\nn\nn\na\nn\n", "text:s7[3] false", nil},
		{false, "n\nn\nn\nn\ny\na\nn\n", "text:s7", nil},
		{false, "what\ny\nq\n", "dir/new:s1", []string{"y - apply this", "? - print this help"}},
		{false, "y\n", "dir/new:s1", nil},
		{false, "", "", nil},
		{false, "n\nn\nn\nn\nn\nn\nn\nn\n", "", nil},
		{true, "1 3-4\n-4\n\n", "dir/new:s1 file:s3 file/in:s4", []string{"*   1  A dir/new", "    2  A empty"}},
		{true, "*\n-2,-3\n\n", "dir/new:s1 gone/a:s6 text:s7 was:s8", nil},
		{true, "d 5\np 5\ny\nn\ny\nx\n9\np\n\n", "text:s7[3] true", []string{
			"+   5  M text", `"x" is neither a number from 1 to 6 nor`, `"9" is neither a number`, `"p" needs one number`, "q         quit",
		}},
		{true, "1\nq\n", "", nil},
		{true, "1\n", "", nil},
	} {
		var out strings.Builder
		opts := applyOptions{Interactive: c.interactive}
		got, err := opts.pick(t.Context(), manyChanges(), strings.NewReader(c.answers), &out)
		if (c.picks == "") != errors.Is(err, errNothingPicked) || c.picks != "" && err != nil {
			t.Errorf("%q: %v", c.answers, err)
		}
		if text := picksText(got); text != c.picks {
			t.Errorf("%q picks %s, want %s\n%s", c.answers, text, c.picks, out.String())
		}
		for _, s := range c.says {
			if !strings.Contains(out.String(), s) {
				t.Errorf("%q: not said: %q in\n%s", c.answers, s, out.String())
			}
		}
		if strings.Contains(out.String(), "\x1b") {
			t.Errorf("%q: what is in a file drives the terminal", c.answers)
		}
	}
}

// What must not come, and conflicts, are named and left out.
func TestApplyPickLeavesOut(t *testing.T) {
	plan := manyChanges()
	plan.Refused = []runtime.Refusal{
		{Path: "/work/file/in", Reason: "it is a device"}, {Path: "/work/gone/a", Reason: "git", MayAllow: true},
	}
	plan.Conflicts = []string{"/work/both"}
	var out strings.Builder
	list, err := applyOptions{}.pick(t.Context(), plan, strings.NewReader("y\ny\ny\na\ny\n"), &out)
	if got := picksText(list); err != nil || got != "dir/new:s1 empty:s2 text:s7 was:s8" {
		t.Errorf("%s %v", got, err)
	}
	for _, s := range []string{
		"/work/both was changed on both sides: apply needs --markers, --ours or --theirs",
		"/work/gone/a: git: apply needs --allow /work/gone/a",
	} {
		if !strings.Contains(out.String(), s) {
			t.Errorf("not said: %q in\n%s", s, out.String())
		}
	}
}

// What is picked is applied, of the very checkpoint that was shown.
func TestApplyPicksOnTerminal(t *testing.T) {
	f := newFake()
	f.applied = manyChanges()
	try(t, f, "n\nn\ny\nq\n", "apply", "-p", "c").want(t, 0,
		"A dir\nA dir/new\nA empty\nT file\nA file/in\nD gone\nD gone/a\nM text\nT was\nD was/below\n",
		"Apply this change")
	if got := picksText(f.applyOpts.Picks); got != "file:s3 file/in:s4" || f.applyOpts.DryRun || f.applyOpts.Patch {
		t.Errorf("%s %+v", got, f.applyOpts)
	}
	if got := strings.Join(f.calls, "; "); !strings.Contains(got, "Apply c@5abc false") {
		t.Errorf("calls: %s", got)
	}
	for args, says := range map[string]string{
		"-p -i c": "exclude each other", "-p --dry-run c": "cannot be combined", "-i --undo c": "cannot be combined",
	} {
		try(t, newFake(), "", append([]string{"apply"}, strings.Fields(args)...)...).want(t, exitUsage, "", says)
	}
	try(t, f, "q\n", "apply", "-p", "c").want(t, exitFailure, "", "nothing was applied")
	p := onPty(t, "apply", "-i", "c")
	p.expect("Apply which (")
	p.write("1\n")
	p.expect("*   1  A a b")
	p.write("\n")
	p.expect("take it back with: agentbox apply --undo c")
	p.end(0)
}

func TestApplyHunks(t *testing.T) {
	const text = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n16\n17\n"
	got, err := applyHunks(text, twoHunks)
	want := "1\ntwo\n3\n5\nfive and a half\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n16\nseventeen"
	if got != want || err != nil {
		t.Errorf("%q %v", got, err)
	}
	for patch, want := range map[string]string{
		"@@ -0,0 +1,2 @@\n+a\n+b\n":            "a\nb\n" + text,
		"@@ -2,0 +3 @@\n+between\n":            strings.Replace(text, "2\n", "2\nbetween\n", 1),
		"@@ -17 +16,0 @@\n-17\n":               strings.TrimSuffix(text, "17\n"),
		"@@ -1 +1 @@\n-one\n+1\n":              "",
		"@@ -18 +18 @@\n-18\n":                 "",
		"@@ -3 +2,0 @@\n-3\n@@ -1 +1 @@\n-1\n": "",
	} {
		if got, err := applyHunks(text, patch); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q %v", patch, got, err)
		}
	}
	for args, says := range map[string]string{
		"--branch b c": "--branch is for --git-commit", "--git-commit --branch b --undo c": "cannot be combined",
	} {
		try(t, newFake(), "", append([]string{"apply"}, strings.Fields(args)...)...).want(t, exitUsage, "", says)
	}
}
