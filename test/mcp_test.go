package test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// agent is a client of `agentbox mcp`, as an agent's program has one.
type agent struct {
	*box
	session *mcp.ClientSession
	server  *exec.Cmd
	called  map[string]bool
}

// args are those of a tool.
type args = map[string]any

// agent starts `agentbox mcp` and speaks with it over its stdin and stdout.
func (b *box) agent(flags ...string) *agent {
	b.Helper()
	cmd := b.command(context.Background(), append([]string{"mcp"}, flags...)...)
	cmd.Stderr = os.Stderr
	return b.connect(cmd, &mcp.CommandTransport{Command: cmd, TerminateDuration: time.Minute})
}

func (b *box) connect(server *exec.Cmd, t mcp.Transport) *agent {
	b.Helper()
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(b.Context(), t, nil)
	if err != nil {
		b.Fatal(err)
	}
	a := &agent{box: b, session: session, server: server, called: map[string]bool{}}
	b.Cleanup(a.close)
	return a
}

// overHTTP starts `agentbox mcp --listen` and speaks with it over HTTP.
func (b *box) overHTTP(flags ...string) *agent {
	b.Helper()
	cmd, url, token := b.listen(append([]string{"--listen", "127.0.0.1:0"}, flags...)...)
	client := &http.Client{Transport: bearer{token, http.DefaultTransport}}
	return b.connect(cmd, &mcp.StreamableClientTransport{Endpoint: url, HTTPClient: client})
}

// listen starts a server over HTTP, which the end of the test stops by SIGTERM,
// and returns what it says of itself.
func (b *box) listen(flags ...string) (cmd *exec.Cmd, url, token string) {
	b.Helper()
	cmd = b.command(context.Background(), append([]string{"mcp"}, flags...)...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			b.Errorf("the server: %v", err)
		}
	})
	said := bufio.NewScanner(stderr)
	for said.Scan() {
		line := said.Text()
		if _, after, ok := strings.Cut(line, "listening on "); ok {
			url = after
			if strings.HasPrefix(url, "unix:") || slices.Contains(flags, "--no-token") {
				return cmd, url, ""
			}
		} else if _, after, ok := strings.Cut(line, "Bearer "); ok {
			return cmd, url, after
		} else {
			b.Fatalf("the server says %q", line)
		}
	}
	b.Fatal("the server ended")
	return nil, "", ""
}

type bearer struct {
	token string
	next  http.RoundTripper
}

func (t bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+t.token)
	return t.next.RoundTrip(r)
}

func (a *agent) close() {
	if a.session == nil {
		return
	}
	if err := a.session.Close(); err != nil {
		a.Errorf("the end of the session: %v", err)
	}
	a.session = nil
}

// call calls a tool and returns all that it says.
func (a *agent) call(ctx context.Context, tool string, in args) (text string, failed bool, err error) {
	a.called[tool] = true
	res, err := a.session.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: in})
	if err != nil {
		return "", false, err
	}
	for _, c := range res.Content {
		text += c.(*mcp.TextContent).Text
	}
	return text, res.IsError, nil
}

// does calls a tool, whose answer has to match want.
func (a *agent) does(want, tool string, in args) string {
	a.Helper()
	text, failed, err := a.call(a.Context(), tool, in)
	if err != nil || failed || !regexp.MustCompile(want).MatchString(text) {
		a.Fatalf("%s %v: %v, failed %v: %s\nwant %s", tool, in, err, failed, text, want)
	}
	return text
}

// refuses calls a tool, which has to fail with an error that matches want.
func (a *agent) refuses(want, tool string, in args) string {
	a.Helper()
	begun := time.Now()
	text, failed, err := a.call(a.Context(), tool, in)
	if err != nil || !failed || !regexp.MustCompile(want).MatchString(text) {
		a.Errorf("%s %v: %v, failed %v: %s\nwant %s", tool, in, err, failed, text, want)
	}
	if took := time.Since(begun); took > time.Minute {
		a.Errorf("%s %v: refused after %s", tool, in, took)
	}
	return text
}

func (a *agent) tools() (names []string) {
	a.Helper()
	for tool, err := range a.session.Tools(a.Context(), nil) {
		if err != nil {
			a.Fatal(err)
		}
		names = append(names, tool.Name)
	}
	return names
}

// Every tool, against a real sandbox, over both transports.
func TestMCPTools(t *testing.T) {
	t.Parallel()
	for name, connect := range map[string]func(*box, ...string) *agent{"stdio": (*box).agent, "http": (*box).overHTTP} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := memoryBox(t)
			b.start("c", "-w", "/work", "busybox", "sleep", "1000")
			a := connect(b, "--allow-create", "--image", "busybox", "c")
			for tool, err := range a.session.Tools(t.Context(), nil) {
				if err != nil || !strings.Contains(tool.Description, "working directory is /work") ||
					!strings.Contains(tool.Description, "omitted path means the working directory") {
					t.Fatalf("%v: the description does not tell where it acts: %s", err, tool.Description)
				}
			}
			everyTool(a)
			for _, name := range a.tools() {
				if !a.called[name] {
					t.Errorf("%s was not tried", name)
				}
			}
			a.close()
			if name == "http" {
				return // there the session ends with the server
			}
			if left := b.ok("ps", "-a", "-q"); len(strings.Fields(left)) != 1 {
				t.Errorf("the session left sandboxes: %s", left)
			}
		})
	}
}

func everyTool(a *agent) {
	a.Helper()
	a.does(`(?s)^/work\n.*exit code 3`, "run_command", args{"command": "pwd; exit 3"})
	a.does(`^c 1 /work\n\[exit`, "run_command",
		args{"command": "echo $AGENTBOX_SANDBOX_NAME $AGENTBOX_ATTEMPT $AGENTBOX_WORKDIR"})
	a.does(`^/work/sub\n`, "run_command", args{"command": "mkdir -p /work/sub; cd /work/sub; pwd"})
	a.does(`^/work/sub\n`, "run_command", args{"command": "pwd", "cwd": "sub"})
	a.refuses(`ended after .*timeout of 1 s`, "run_command",
		args{"command": "echo x; sleep 500 & sleep 500", "timeout": 1})
	// nothing of it is left
	a.does(`^\[exit code 1`, "run_command", args{"command": "ps | grep -v grep | grep -q 'sleep 500'"})

	// More output than one answer takes.
	text := a.does(`left out here; job_output with job "\d+" and offset 10000`, "run_command",
		args{"command": "seq 1 20000"})
	job := regexp.MustCompile(`job "(\d+)"`).FindStringSubmatch(text)[1]
	if !strings.HasPrefix(text, "1\n2\n") || !strings.Contains(text, "\n20000\n") || len(text) > 32_000 {
		a.Errorf("%d bytes: %.100s", len(text), text)
	}
	a.does(`next offset 40000 of 108894`, "job_output", args{"job": job, "offset": 10000})
	a.does(`^20000\n\[job`, "job_output", args{"job": job, "offset": 108888})

	job = regexp.MustCompile(`\d+`).FindString(a.does(`^job \d+ runs`, "run_command",
		args{"command": "trap 'echo bye; exit 4' TERM; echo begun; while :; do sleep 0.1; done", "background": true}))
	a.does("", "run_command", args{"command": "until ps | grep -q 'sleep 0[.]1'; do :; done"})
	a.does(`^begun\n\[job \d+: running`, "job_output", args{"job": job, "wait": 60})
	a.does(`ended .*job_stop`, "job_stop", args{"job": job})
	a.does(`(?s)^begun\n.*bye\n`, "job_output", args{"job": job, "wait": 10})
	a.refuses(`not found`, "job_output", args{"job": "999"})

	a.does(`^made /work/src/a.go, 26 bytes`, "write_file",
		args{"path": "src/a.go", "content": "package a\n\nvar x, y = 1, 1"})
	a.does(`^package a\n\nvar x, y = 1, 1$`, "read_file", args{"path": "/work/src/a.go"})
	a.does(`^\n\[this is line 2 to 2 .* offset 3\]`, "read_file", args{"path": "src/a.go", "offset": 2, "limit": 1})
	a.refuses(`old is in the file 2 times, in line 3, 3.*\n.*unique`, "edit_file",
		args{"path": "src/a.go", "old": "1", "new": "2"})
	a.refuses(`not in the file`, "edit_file", args{"path": "src/a.go", "old": "z", "new": "2"})
	a.does(`1 occ`, "edit_file", args{"path": "src/a.go", "old": "x, y = 1", "new": "x, y = 2"})
	a.does(`4 occ`, "edit_file", args{"path": "src/a.go", "old": "a", "new": "b", "replace_all": true})
	a.does(`^pbckbge b\n\nvbr x, y = 2, 1\n\[exit code 0`, "run_command", args{"command": "cat src/a.go; echo"})

	a.does(`(?s)^/work has:\nsrc/\nsub/\n$`, "list_files", args{})
	a.does(`src/a.go \(26 bytes\)`, "list_files", args{"depth": 2})
	a.does(`^/work/src/a.go\n$`, "glob", args{"pattern": "**/*.{go,c}"})
	a.does(`^/work/src/a.go:3:vbr x`, "grep", args{"pattern": `VBR\s`, "ignore_case": true, "glob": "*.go"})
	a.does(`^/work/src/a.go\n$`, "grep", args{
		"pattern": `b$`, "path": "src", "files_only": true, "glob": "/work/**/a.go",
	})
	a.does(`^/work/src/a.go-1-pbckbge b\n/work/src/a.go-2-\n/work/src/a.go:3:vbr`, "grep",
		args{"pattern": `^vbr`, "path": "src/a.go", "context": 2})
	a.does(`nothing in /work matches`, "grep", args{"pattern": "nowhere"})
	a.refuses(`missing closing \)`, "grep", args{"pattern": "("})

	a.does(`^checkpoint [0-9a-f]+ \(one\), full, \d processes`, "checkpoint", args{"name": "one"})
	a.does("exit code 0", "run_command", args{"command": "rm -rf /work/src /bin/ls; echo new >new"})
	a.does(`(?s)D /work/src/\n.*D /work/src/a.go`, "diff", args{})
	a.does(`(?s)\+new.*-pbckbge b`, "diff", args{"from": "one", "patch": true})
	a.does(`^\* [0-9a-f]+ \(one\), full, .* by mcp`, "log", args{})
	job = regexp.MustCompile(`\d+`).FindString(a.does(`^job \d+ runs`, "run_command",
		args{"command": "sleep 999", "background": true}))
	a.does(`checkpoint [0-9a-f]+ \(one\).*attempt 2.*undo`, "restore", args{"checkpoint": "one"})
	a.does(`ended after .*: a restore`, "job_output", args{"job": job})
	a.does(`^src\nsub\n\[exit`, "run_command", args{"command": "ls"})
	a.does(`attempt 3`, "restore", args{"undo": true})
	a.does(`^new\nsub\n\[exit`, "run_command", args{"command": "cd /work; echo *|tr ' ' '\n'"})
	a.refuses(`no such checkpoint of sandbox c.*not found\nlog lists`, "restore", args{"checkpoint": "two"})

	fork := regexp.MustCompile(`c-fork-\w+`).FindString(a.does(`^forked into c-fork-`, "fork",
		args{"checkpoint": "one"}))
	a.does(`^/work/src/a.go\n$`, "glob", args{"pattern": "src/*", "sandbox": fork})
	a.does(`nothing`, "glob", args{"pattern": "src*"})
	made := regexp.MustCompile(`mcp-\w+`).FindString(a.does(`of image busybox runs; its working directory is /$`,
		"create_sandbox", args{}))
	a.refuses(`may not be used here`, "create_sandbox", args{"image": "debian"})
	a.does(`(?s)^c: running.*given\n`+fork+`: running.*made.*\n`+made, "list_sandboxes", args{})
	a.does(`^root\n`, "run_command", args{"sandbox": made, "command": "whoami"})
	a.does(`removed `+fork, "remove_sandbox", args{"sandbox": fork})
	a.refuses(`not made in this session`, "remove_sandbox", args{"sandbox": "c"})
	a.refuses(`no such sandbox in this session`, "read_file", args{"sandbox": fork, "path": "x"})
	a.refuses(`(?i)not found|no such`, "run_command", args{"command": "true", "cwd": "/none"})

	// By where it was last, and by steps back from there.
	a.does(`\(one\).*attempt 4`, "restore", args{"checkpoint": "one"})
	a.does(`\(two\)`, "checkpoint", args{"name": "two"})
	a.does(`\(one\).*attempt 5`, "restore", args{"checkpoint": "HEAD~1"})
	a.does(`\(one\).*attempt 6`, "restore", args{})
	a.refuses(`c@HEAD~1: the history of c has 1 checkpoint`, "restore", args{"checkpoint": "HEAD~1"})

	a.does("exit code 0", "run_command", args{"command": "echo more >more"})
	a.does(`\(one\).*redo can go 1`, "undo", args{})
	a.does(`nothing`, "glob", args{"pattern": "more"})
	a.refuses(`2 steps forward are more than there are`, "redo", args{"steps": 2})
	a.does(`redo can go 0`, "redo", args{})
	a.does(`^/work/more\n$`, "glob", args{"pattern": "more"})
	a.refuses(`nothing to redo`, "redo", args{})
}

func TestMCPModes(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "-w", "/work", "busybox", "sleep", "1000")
	b.sh("c", "echo text >f")
	a := b.agent("--read-only", "c")
	if got := a.tools(); !slices.Equal(got, []string{
		"diff", "glob", "grep", "list_files", "list_sandboxes", "log", "read_file",
	}) {
		t.Errorf("read-only: %v", got)
	}
	a.does(`^text\n$`, "read_file", args{"path": "f"})
	if _, _, err := a.call(t.Context(), "write_file", args{"path": "f", "content": "x"}); err == nil {
		t.Error("read-only: a file was written")
	}

	a = b.agent("--no-restore", "--checkpoint-every", "tool", "c")
	if slices.Contains(a.tools(), "restore") || !slices.Contains(a.tools(), "checkpoint") {
		t.Errorf("--no-restore: %v", a.tools())
	}
	a.does("replaced", "write_file", args{"path": "f", "content": "new"})
	a.does("exit code 0", "run_command", args{"command": "rm f"})
	a.does("nothing", "glob", args{"pattern": "*"})
	if log := a.does("by tool", "log", args{}); strings.Count(log, "by tool") != 2 {
		t.Errorf("log: %s", log)
	}
	b.ok("restore", "c")
	a.does("^new$", "read_file", args{"path": "f"})
	b.ok("restore", "c", strings.Fields(b.ok("checkpoint", "ls", "-q", "c"))[1])
	a.does(`^text\n$`, "read_file", args{"path": "f"})

	b.fails(3, "mcp", "none")
}

// The path jail, as mission.md has it: an agent stays in its working directory,
// and is told where that is.
func TestMCPJail(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "-w", "/work", "-u", "1000:1000", "--cap-add", "MKNOD", "busybox", "sleep", "1000")
	b.ok("exec", "-u", "0", "c", "sh", "-c",
		`chown 1000:1000 /work && chmod 777 /tmp && ln -s /work /alias && echo root >/work/roots && chmod 600 /work/roots && mknod /work/null c 1 3 && mkdir /work/shut && chmod 700 /work/shut`)
	b.sh("c", `mkdir src; echo a >src/a; ln -s /etc etc; ln -s /work/src/none dangling; ln -s / slash; mkfifo fifo; ln -s loop loop; printf 'a\0b' >binary; : >empty; seq 1 5000 >long; head -c 5000 /dev/zero | tr '\0' x >wide`)
	a := b.agent("c")
	where := `working directory /work(?s:.*)Use a path below /work`

	// Aliases and paths that do not exist yet both work.
	a.does(`^a\n$`, "read_file", args{"path": "/alias/src/a"})
	a.does(`^a\n$`, "read_file", args{"path": "slash/work/src/../src/a"})
	a.does(`^made /work/new/deep/f`, "write_file", args{"path": "/alias/new/deep/f", "content": "x"})
	a.does(`^made /work/src/none`, "write_file", args{"path": "dangling", "content": "x"})
	a.does(`^1000 1000 644\n`, "run_command", args{"command": "stat -c '%u %g %a' new/deep/f"})

	// Escapes: at once, with an error that names the working directory.
	for _, path := range []string{
		"/etc/passwd", "../etc/passwd", "etc/passwd", "slash/etc/passwd", "/", "/root/.ssh/id_rsa",
		"/home/user/project/main.go", "etc/new", "../../../../..",
	} {
		a.refuses(where, "read_file", args{"path": path})
		a.refuses(where, "write_file", args{"path": path, "content": "x"})
		a.refuses(where, "edit_file", args{"path": path, "old": "x", "new": "y"})
		a.refuses(where, "list_files", args{"path": path})
		a.refuses(where, "glob", args{"path": path, "pattern": "**"})
		a.refuses(where, "grep", args{"path": path, "pattern": "root"})
	}
	// A pattern's own rule.
	for _, pattern := range []string{"/**", "/etc/*", "../**/passwd", "../../*", "etc/*", "slash/etc/*"} {
		a.refuses(where, "glob", args{"pattern": pattern})
		a.refuses(where, "grep", args{"pattern": "root", "glob": pattern})
	}
	a.refuses(`\.\. cannot follow a wildcard`, "glob", args{"pattern": "*/../../etc/*"})
	a.does(`^/work/src/a\n/work/src/none\n$`, "glob", args{"pattern": "/alias/src/*"})
	a.does(`^/work/src/a\n/work/src/none\n$`, "glob", args{"path": "new/deep", "pattern": "../../src/*"})

	// Missing names, and names that are no file.
	a.refuses(`not found|no such file(?s:.*)its working directory is /work`, "read_file", args{"path": "nowhere"})
	for _, path := range []string{"fifo", "null"} {
		a.refuses(`denied: it is neither a file`, "read_file", args{"path": path})
		a.refuses(`denied: it is neither a file`, "write_file", args{"path": path, "content": "x"})
	}
	a.refuses(`too many levels`, "read_file", args{"path": "loop"})
	a.refuses(`it is a directory(?s:.*)list_files`, "read_file", args{"path": "src"})
	a.does(`binary file of 3 bytes`, "read_file", args{"path": "binary"})
	a.does(`empty`, "read_file", args{"path": "empty"})
	a.does(`(?s)^1\n.*\n2000\n\[this is line 1 to 2000 .*offset 2001\]$`, "read_file", args{"path": "long"})
	a.does(`has only 5000 lines`, "read_file", args{"path": "long", "offset": 6000})
	if text := a.does(`1 lines are cut off after 2000 bytes`, "read_file", args{"path": "wide"}); len(text) > 2200 {
		t.Errorf("%d bytes of a long line", len(text))
	}

	// With the rights of the sandbox's user.
	a.refuses(`permission denied`, "read_file", args{"path": "roots"})
	a.refuses(`permission denied`, "write_file", args{"path": "roots", "content": "mine"})
	a.refuses(`permission denied`, "read_file", args{"path": "shut/x"})
	a.does(`could not be read`, "grep", args{"pattern": "nowhere"})

	whole := b.agent("--whole-sandbox", "c")
	whole.does(`root`, "read_file", args{"path": "../etc/passwd"})
	whole.does(`made /tmp/f`, "write_file", args{"path": "/tmp/f", "content": "x"})
	whole.refuses(`permission denied`, "write_file", args{"path": "/etc/passwd", "content": "x"})
	whole.refuses(`denied: the kernel makes it up`, "read_file", args{"path": "/proc/version"})
	whole.refuses(`denied|permission|not a directory`, "write_file", args{"path": "/proc/self/mem", "content": "x"})
	whole.refuses(`(?i)denied|read-only|permission`, "write_file",
		args{"path": "/proc/sys/kernel/core_pattern", "content": "x"})
	if text := whole.does(`/etc/passwd`, "glob", args{"path": "/", "pattern": "**/passwd"}); strings.Contains(text,
		"/proc") || strings.Contains(text, "slash") {
		t.Errorf("the walk went astray: %s", text)
	}

	// The files of a stopped sandbox are there, too.
	b.ok("stop", "-t", "0", "c")
	a.does(`^a\n$`, "read_file", args{"path": "src/a"})
	a.does(`^made`, "write_file", args{"path": "src/b", "content": "x"})
	a.refuses(`exec c: .*it is exited(?s:.*)agentbox start c`, "run_command", args{"command": "true"})
}

// Walks are bounded, and say that they were.
func TestMCPBounds(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "-w", "/work", "busybox", "sleep", "1000")
	b.sh("c", `mkdir many; cd many; for i in $(seq 1 1500); do : >f$i; done; d=/work; for i in $(seq 1 70); do d=$d/d; done; mkdir -p $d; touch $d/end; yes match | head -n 300 >$d/../../../../../../../../../m`)
	a := b.agent("c")
	if text := a.does(`only the first 1000 are shown`, "glob", args{"pattern": "**"}); len(text) > 60_000 {
		t.Errorf("%d bytes", len(text))
	}
	a.does(`the search ended 64 directories deep`, "glob", args{"pattern": "**/end"})
	if text := a.does(`only the first 200 are shown`, "grep",
		args{"pattern": "match"}); strings.Count(text, ":match") != 200 {
		t.Errorf("%s", text)
	}
	a.does(`only the first 1000`, "list_files", args{"path": "many"})
	a.refuses(`too many parts`, "glob", args{"pattern": strings.Repeat("*/", 100)})
	a.refuses(`1 to 3600`, "run_command", args{"command": "true", "timeout": 100000})
}

// An agent's checkpoints are bounded, those of earlier sessions among them, and no
// others go for them.
func TestMCPCheckpointsAreBounded(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "busybox", "sleep", "1000")
	own := b.checkpoint("c", "--files-only")
	names := func() (list []string) {
		for _, c := range b.checkpoints() {
			list = append(list, c.Name)
		}
		slices.Reverse(list)
		return list
	}
	a := b.agent("c", "--max-checkpoints", "3")
	for _, name := range []string{"one", "two", "three"} {
		a.does("checkpoint ", "checkpoint", args{"name": name, "files_only": true})
	}
	b.ok("checkpoint", "pin", "one")
	a = b.agent("c", "--max-checkpoints", "2")
	a.does("the 2 oldest checkpoints were removed", "checkpoint", args{"name": "four", "files_only": true})
	equal(b, "what is left", strings.Join(names(), " "), " one four")
	a.does("the 1 oldest", "checkpoint", args{"name": "five", "files_only": true})
	equal(b, "what is left", strings.Join(names(), " "), " one five")
	a = b.agent("c", "--max-checkpoint-bytes", "1", "--checkpoint-every", "tool")
	a.does("", "run_command", args{"command": "true"})
	equal(b, "what is left", strings.Join(names(), " "), " one ")
	b.ok("checkpoint", "inspect", own)
}

// A hostile process inside swaps a directory for links that lead out of the
// working directory, and out of the sandbox, as fast as it can.
func TestMCPRace(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "-w", "/work", "busybox", "sleep", "1000")
	secret := filepath.Join(b.root, "secret")
	if err := os.Mkdir(secret, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(secret+"/f", []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.sh("c", fmt.Sprintf(`mkdir /work/d /out; echo inside >/work/d/f; echo outside >/out/f; cd /work; ln -s /out l; ln -s ../../../../../../../..%s h`, secret))
	a := b.agent("c")
	a.does("runs", "run_command", args{
		"background": true, "command": `while :; do mv d e; mv l d; mv d l; mv h d; mv d h; mv e d; done`,
	})
	inside, refused := 0, 0
	deadline := time.Now().Add(20 * time.Second)
	for i := 0; (i < 60 || inside == 0 || refused == 0) && time.Now().Before(deadline); i++ {
		for _, c := range []struct {
			tool string
			in   args
		}{
			{"read_file", args{"path": "d/f"}}, {"write_file", args{"path": "d/made", "content": "made"}},
			{"edit_file", args{"path": "d/f", "old": "side", "new": "side"}},
			{"glob", args{"pattern": "d/*"}}, {"grep", args{"pattern": "of the host|outside"}},
		} {
			text, failed, err := a.call(t.Context(), c.tool, c.in)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(text, "of the host") && c.tool != "grep" || strings.Contains(text, "outside\n") ||
				strings.Contains(text, "secret/f") {
				t.Fatalf("%s escaped: %s", c.tool, text)
			}
			switch {
			case failed:
				refused++
			case c.tool == "read_file":
				inside++
			}
		}
	}
	if inside == 0 || refused == 0 {
		t.Errorf("no race happened: %d inside, %d refused", inside, refused)
	}
	if names, err := os.ReadDir(secret); err != nil || len(names) != 1 {
		t.Errorf("the host's directory now holds %v, %v", names, err)
	}
	// Now and then the sandbox's own mv loses a race against write_file, which makes
	// the directory d where none is, and the next one moves that d to /out.
	if out := b.sh("c", "ls /out; cat /out/f"); strings.Replace(out, "d\n", "", 1) != "f\noutside" {
		t.Errorf("outside of the working directory there now is %q", out)
	}
}

// The sandboxes of a session end with it, however it ends.
func TestMCPSession(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	boxes := func() int { return len(strings.Fields(b.ok("ps", "-a", "-q"))) }
	a := b.agent("--allow-create", "--image", "busybox", "--max-sandboxes", "2", "--network", "none")
	a.refuses(`no sandbox yet(?s:.*)create_sandbox`, "run_command", args{"command": "true"})
	a.does("^sandbox one of", "create_sandbox", args{"name": "one"})
	a.does("exit code 0", "run_command", args{"command": "echo x >/f"}) // the only one there is
	a.does("forked", "fork", args{"files_only": true})
	a.refuses("a session may have made 2", "create_sandbox", args{})
	a.refuses("there are several sandboxes(?s:.*)one, ", "run_command", args{"command": "true"})
	a.close()
	if n := boxes(); n != 0 {
		t.Errorf("the session left %d sandboxes", n)
	}
	if left := b.ok("checkpoint", "ls", "-a", "-q"); left != "" {
		t.Errorf("the session left checkpoints: %s", left)
	}

	// A signal is an end like any other.
	cmd := b.command(t.Context(), "mcp", "--allow-create")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a = b.connect(cmd, &mcp.IOTransport{Reader: out, Writer: in})
	a.does("^sandbox two", "create_sandbox", args{"name": "two", "image": "busybox"})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	a.session = nil
	if n := boxes(); n != 0 {
		t.Errorf("a session that was stopped left %d sandboxes", n)
	}

	a = b.agent("--allow-create", "--keep")
	a.does("^sandbox kept", "create_sandbox", args{"name": "kept", "image": "busybox"})
	a.close()

	// Killed: the next session tidies up, except what was forked meanwhile.
	a = b.agent("--allow-create")
	a.does("^sandbox lost", "create_sandbox", args{"name": "lost", "image": "busybox"})
	b.ok("fork", "--files-only", "--name", "rescued", "lost")
	if err := a.server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = a.session.Close()
	a.session = nil
	a = b.agent("kept")
	names := b.ok("ps", "-a", "--format", "json")
	if strings.Contains(names, `"name": "lost"`) || !strings.Contains(names, `"name": "rescued"`) ||
		!strings.Contains(names, `"name": "kept"`) {
		t.Errorf("after a session that was killed there are: %s", names)
	}

	// Running work ends with the session.
	a.cancels("kept")
	a.does("runs", "run_command", args{"command": "sleep 888", "background": true})
	b.sh("kept", "until ps | grep -q 'sleep 88[8]'; do :; done")
	a.close()
	b.sh("kept", "! ps | grep -q 'sleep 88[8]'")
}

// cancels cancels a call: its command ends.
func (a *agent) cancels(sandbox string) {
	a.Helper()
	ctx, cancel := context.WithCancel(a.Context())
	began := make(chan struct{})
	go func() {
		defer close(began)
		a.sh(sandbox, "until ps | grep -q 'sleep 77[7]'; do :; done")
		cancel()
	}()
	if _, _, err := a.call(ctx, "run_command",
		args{"command": "sleep 777 & sleep 777"}); !errors.Is(err, context.Canceled) {
		a.Errorf("cancelled: %v", err)
	}
	<-began
	a.sh(sandbox, "while ps | grep -q 'sleep 77[7]'; do :; done")
}

// Over HTTP only authorized requests are let in.
func TestMCPDoor(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "busybox", "sleep", "1000")
	_, url, token := b.listen("--listen", "127.0.0.1:0", "--allow-origin", "https://good.example", "c")
	ask := func(change func(*http.Request)) int {
		t.Helper()
		body := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`
		r, err := http.NewRequest("POST", url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Accept", "application/json, text/event-stream")
		r.Header.Set("Authorization", "Bearer "+token)
		change(r)
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return res.StatusCode
	}
	for name, c := range map[string]struct {
		want   int
		change func(*http.Request)
	}{
		"the token":         {200, func(*http.Request) {}},
		"no token":          {401, func(r *http.Request) { r.Header.Del("Authorization") }},
		"a wrong token":     {401, func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token+"x") }},
		"another scheme":    {401, func(r *http.Request) { r.Header.Set("Authorization", "Basic "+token) }},
		"a web page":        {403, func(r *http.Request) { r.Header.Set("Origin", "https://evil.example") }},
		"a sandboxed page":  {403, func(r *http.Request) { r.Header.Set("Origin", "null") }},
		"a good page":       {200, func(r *http.Request) { r.Header.Set("Origin", "https://good.example") }},
		"a rebound name":    {403, func(r *http.Request) { r.Host = "evil.example" }},
		"another path":      {404, func(r *http.Request) { r.URL.Path = "/" }},
		"no token, no path": {404, func(r *http.Request) { r.URL.Path = "/x"; r.Header.Del("Authorization") }},
	} {
		if got := ask(c.change); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}

	// A socket is for its owner, and needs no token.
	socket := filepath.Join(b.root, "mcp.sock")
	cmd, _, _ := b.listen("--listen", "unix://"+socket, "c")
	if fi, err := os.Stat(socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", fi, err)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn,
		error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	a := b.connect(cmd, &mcp.StreamableClientTransport{Endpoint: "http://agentbox/mcp", HTTPClient: client})
	a.does(`exit code 0`, "run_command", args{"command": "true"})
	a.cancels("c")
	if text := b.fails(4, "mcp", "--listen", "unix://"+socket, "c"); !strings.Contains(text, "listens there") {
		t.Errorf("a second server: %s", text)
	}
}
