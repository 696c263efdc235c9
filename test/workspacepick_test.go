package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// picking is a repository with a sandbox over it in which something of every kind has changed.
func picking(t *testing.T, b *box) (dir string) {
	t.Helper()
	dir = repository(t)
	put(t, dir, "text", "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n16\n17\n18\n19\n20\n")
	put(t, dir, "bin", "\x00\x01")
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "--name", "first", "s")
	b.sh("s", `cd /work; sed -i 's/^2$/two/; s/^4$/four/; s/^18$/eighteen/' text; chmod 755 text
printf '\0\2' > bin; echo new > added; rm README; ln -s text symlink`)
	return dir
}

const twentyLines = "1\n%2\n3\n%4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n16\n17\n%18\n19\n20\n"

func twenty(two, four, eighteen string) string {
	s := strings.Replace(twentyLines, "%2", two, 1)
	return strings.Replace(strings.Replace(s, "%4", four, 1), "%18", eighteen, 1)
}

// TestWorkspacePick takes hunks, then more, and then the rest, while the owner edits other lines:
// nothing conflicts with what has come, what is left shows in the next diff, and an undo takes back
// just what was chosen.
func TestWorkspacePick(t *testing.T) {
	t.Parallel()
	bothWays(t, workspacePick)
}

// bothWays runs a test with the engine in the command, and in a service.
func bothWays(t *testing.T, test func(*testing.T, *box)) {
	t.Helper()
	for _, service := range []bool{false, true} {
		t.Run(map[bool]string{false: "embedded", true: "service"}[service], func(t *testing.T) {
			b := memoryBox(t)
			if service {
				_, socket := b.serve()
				b.env = append(b.env, "AGENTBOX_HOST=unix://"+socket)
			}
			test(t, b)
		})
	}
}

func workspacePick(t *testing.T, b *box) {
	dir := picking(t, b)
	clean := kept(t, dir)
	text := func(want string) { t.Helper(); equal(b, "text", readFile(t, filepath.Join(dir, "text")), want) }

	m := b.terminal("apply", "-p", "s")
	for _, step := range []struct{ shows, enter string }{
		{"D README", ""}, {"Apply this deletion [y,n,q,a,d,?]?", "?"}, {"y - apply this", "n"},
		{"A added", ""}, {"+new", ""}, {"Apply this addition", "y"},
		{"M bin", ""}, {"Apply this change (content", "n"},
		{"A symlink", ""}, {"-> text", ""}, {"Apply this addition", "n"},
		{"M text", ""}, {"mode 0644 -> 0755", ""}, {"Apply the new mode", "n"},
		{"-2", ""}, {"+four", ""}, {"(1/2) Apply this hunk [y,n,q,a,d,s,?]?", "s"}, {"Split into 2 hunks.", ""},
		{"(1/3) Apply this hunk [y,n,q,a,d,?]?", "y"}, {"(2/3) Apply this hunk", "n"},
		{"+eighteen", ""}, {"(3/3) Apply this hunk", "q"},
	} {
		m.shows(step.shows)
		if step.enter != "" {
			m.enter(step.enter + "\n")
		}
	}
	m.shows("2 changes in " + dir)
	equal(b, "the exit code", m.ends(), 0)
	text(twenty("two", "4", "18"))
	equal(b, "what the owner's git says", git(t, dir, "status", "--porcelain", "added", "README", "symlink"), "?? added")
	equal(b, "what is left", b.ok("diff", "--no-renames", "s"), "D README\nM bin\nA symlink\nM text")
	if patch := b.ok("diff", "--patch", "s", "--", "/work/text"); strings.Contains(patch, "two\n+") ||
		!strings.Contains(patch, "+four") || !strings.Contains(patch, "new mode 100755") {
		t.Errorf("the rest of text: %s", patch)
	}
	b.ok("apply", "--undo", "s")
	equal(b, "the directory after the undo", kept(t, dir), clean)

	in := func(answers string, args ...string) {
		t.Helper()
		if r := b.input([]byte(answers), nil, append([]string{"apply"}, args...)...); r.code != 0 {
			t.Fatalf("%s", r)
		}
	}
	in("n\ns\nn\ny\nd\n", "-p", "s", "--", "/work/text")
	text(twenty("2", "four", "18"))
	// The owner changes the line that has come, and another; the sandbox changes what has come.
	put(t, dir, "text", strings.Replace(twenty("2", "four", "18"), "10\n", "ten\n", 1))
	b.sh("s", "sed -i 's/^four$/FOUR/' /work/text")
	in("n\nn\ny\n", "-p", "s", "--", "/work/text")
	text(strings.Replace(twenty("2", "four", "eighteen"), "10\n", "ten\n", 1))
	in("d 5\n1 3-5\n-3\n\n", "--interactive", "s")
	text(strings.Replace(twenty("two", "FOUR", "eighteen"), "10\n", "ten\n", 1))
	// The owner's line is what is left of text.
	equal(b, "what is left at last", b.ok("diff", "--no-renames", "s"), "A added\nM bin\nM text")
	b.ok("apply", "s")
	if st, err := os.Stat(filepath.Join(dir, "text")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("text: %v %v", st.Mode(), err)
	}
	equal(b, "bin", readFile(t, filepath.Join(dir, "bin")), "\x00\x02")
	equal(b, "one more apply", b.ok("apply", "s"), "")
}

// TestUndoPick chooses a step on a terminal, by what has changed since, and goes there.
func TestUndoPick(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	for _, n := range []string{"one", "two", "three"} {
		b.ok("exec", "s", "sh", "-c", "echo "+n+" > /work/step")
	}
	before := b.ok("undo", "--list", "--format", "json", "s")
	m := b.terminal("undo", "--list", "s")
	m.shows("-two\x1b[m") // what the last step has changed
	m.shows("+three")
	m.enter("\x1b[B")
	m.shows("-one")
	m.enter("q")
	equal(b, "the exit code", m.ends(), 0)
	equal(b, "the steps after a look", b.ok("undo", "--list", "--format", "json", "s"), before)

	m = b.terminal("undo", "--list", "s")
	m.shows("+three")
	m.enter("j\r")
	m.shows("Undo 2 steps in s? [y/N]")
	m.enter("y")
	m.shows("redo with: agentbox redo s")
	equal(b, "the exit code", m.ends(), 0)
	equal(b, "the file", b.ok("exec", "s", "cat", "/work/step"), "one")
	m = b.terminal("undo", "--list", "s")
	m.shows("up/down choose")
	m.enter("g")
	m.shows("What redo to here brings:")
	m.shows("+three")
	m.enter("\r")
	m.shows("Redo 2 steps in s? [y/N]")
	m.enter("y")
	equal(b, "the exit code", m.ends(), 0)
	equal(b, "the file again", b.ok("exec", "s", "cat", "/work/step"), "three")
}
