package test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// shown is a command of a document, and what the document shows of its output.
type shown struct {
	line    int
	command string
	output  []string
}

// commandsOf returns the commands of a document that stand behind a $, in order.
func commandsOf(t *testing.T, path string) (list []shown) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(string(data), "\n") {
		text, ok := strings.CutPrefix(line, "    ")
		if command, is := strings.CutPrefix(text, "$ "); ok && is {
			list = append(list, shown{line: i + 1, command: command})
		} else if n := len(list); n > 0 && ok {
			list[n-1].output = append(list[n-1].output, text)
		} else if n > 0 && line == "" {
			list[n-1].output = append(list[n-1].output, "") // of the output, if more of it follows
		} else if n > 0 {
			list = append(list, shown{}) // prose ends it
		}
	}
	list = slices.DeleteFunc(list, func(s shown) bool { return s.command == "" })
	for i := range list {
		for n := len(list[i].output); n > 0 && list[i].output[n-1] == ""; n-- {
			list[i].output = list[i].output[:n-1]
		}
	}
	return list
}

// pattern matches the output that a document shows: … is any text, and alone on its line any lines.
func (s shown) pattern() *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`\A`)
	for _, line := range s.output {
		if line == "…" {
			b.WriteString(`(.*\n)+`)
			continue
		}
		line = strings.ReplaceAll(regexp.QuoteMeta(strings.TrimRight(line, " ")), "…", ".*")
		b.WriteString(line + ` *\n`)
	}
	return regexp.MustCompile(b.String() + `\z`)
}

// user is a shell in which the commands of a document are run.
type user struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Reader
	err *bytes.Buffer
	n   int
}

func (b *box) user(dir string) *user {
	b.Helper()
	u := &user{t: b.T, err: &bytes.Buffer{}}
	cmd := exec.Command("bash", "--norc", "-s")
	cmd.Dir, cmd.Env, cmd.Stderr = dir, b.userEnv(dir), u.err
	var err error
	if u.in, err = cmd.StdinPipe(); err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	u.out = bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = u.in.Close()
		_ = cmd.Wait()
	})
	return u
}

// userEnv is the environment of a user at home in dir.
func (b *box) userEnv(dir string) []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "AGENTBOX_") })
	return append(env, "HOME="+dir, "AGENTBOX_ROOT="+b.root, "PATH="+bin+":"+os.Getenv("PATH"),
		"AGENTBOX_IMAGE=host", "LC_ALL=C.UTF-8",
		"GIT_AUTHOR_NAME=u", "GIT_AUTHOR_EMAIL=u@localhost", "GIT_COMMITTER_NAME=u", "GIT_COMMITTER_EMAIL=u@localhost")
}

// run runs a command, which has to succeed, and returns what it prints.
func (u *user) run(command string) string {
	u.t.Helper()
	u.n++
	end := fmt.Sprintf("--- %d ends with ", u.n)
	if _, err := fmt.Fprintf(u.in, "%s </dev/null\necho '%s'$?\n", command, end); err != nil {
		u.t.Fatal(err)
	}
	var out strings.Builder
	for {
		line, err := u.out.ReadString('\n')
		if err != nil {
			u.t.Fatalf("%s: %v\n%s%s", command, err, out.String(), u.err)
		}
		if code, ok := strings.CutPrefix(line, end); ok {
			if code != "0\n" {
				u.t.Fatalf("%s: exit code %s%s%s", command, code, out.String(), u.err)
			}
			return out.String()
		}
		out.WriteString(line)
	}
}

// TestTutorial runs the commands of the tutorial: each prints what stands below it.
func TestTutorial(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	u := b.user(t.TempDir())
	list := commandsOf(t, "../docs/tutorial.md")
	if len(list) < 20 {
		t.Fatalf("the tutorial has %d commands", len(list))
	}
	for _, s := range list {
		if got := u.run(s.command); !s.pattern().MatchString(got) {
			t.Errorf("docs/tutorial.md:%d: %s printed\n%s\nwhere the tutorial shows\n%s", s.line, s.command, got,
				strings.Join(s.output, "\n"))
		}
	}
	b.empty()
}

// TestReadme runs the commands of the README's first screen, over a repository.
func TestReadme(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	data, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(data), "## Your own repository\n")
	part, _, _ = strings.Cut(part, "\n## ")
	var commands []string
	for line := range strings.Lines(part) {
		if text, ok := strings.CutPrefix(line, "    "); ok {
			text, _, _ = strings.Cut(text, "#")
			commands = append(commands, strings.TrimSpace(text))
		}
	}
	if want := []string{
		"make install", "cd ~/project && agentbox shell", "agentbox diff", "agentbox undo", "agentbox apply",
	}; !slices.Equal(commands, want) {
		t.Fatalf("the README has the commands %q, this test knows %q", commands, want)
	}
	home := t.TempDir()
	u := b.user(home)
	u.run("git init -q project && cd project && echo one > file && echo two > gone && git add . && git commit -qm first")

	// The first is what has made the programs of this test, elsewhere.
	cmd := exec.Command("make", "-n", "-C", "..", "install")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make install: %v\n%s", err, out)
	}
	shell := exec.Command("bash", "--norc", "-c", commands[1])
	shell.Env = append(b.userEnv(home), "TERM=xterm")
	m := b.onTerminal(shell)
	m.enter("pwd\r")
	m.shows("\r" + filepath.Join(home, "project") + "\r\n")
	m.enter("echo more >> file; rm gone; echo sta''te 1\r")
	m.shows("state 1")
	b.eventually("the change is there", func() bool { return u.run(commands[2]) == "M file\nD gone\n" })
	b.checkpoint("--name", "mine", "project")
	m.enter("rm -rf .git file; LOST=yes; echo sta''te 2\r")
	m.shows("state 2")
	equal(b, "the directory", u.run("ls -A; cat file"), ".git\nfile\ngone\none\n")
	u.run(commands[3])
	for strings.Contains(u.run(commands[2]), ".git") { // the prompt has made a step of it
		u.run(commands[3])
	}
	equal(b, "the diff after undo", u.run(commands[2]), "M file\nD gone\n")
	m.shows("was restored to checkpoint ")
	equal(b, "apply", u.run(commands[4]), "M file\nD gone\n")
	equal(b, "git", u.run("git status --short"), " M file\n D gone\n")
	m.enter("echo lost: $LOST.; exit\r")
	m.shows("lost: .")
	equal(b, "exit of the shell", m.ends(), 0)
	b.ok("rm", "--checkpoints", "project")
	b.empty()
}
