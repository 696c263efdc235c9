package test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Tess is a user of this host, who is in no account file of it.
const tess, tessGroup, tessTeam = 1234, 1235, 1236

// publicDir returns a directory that each user of the host may enter.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "abshell")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// tessHome makes a home directory with a git repository in it, all of them Tess's.
func tessHome(t *testing.T, top string) (home, repo string) {
	t.Helper()
	home = filepath.Join(top, "home")
	repo = filepath.Join(home, "src", "my project")
	put(t, repo, "file", "one\n")
	put(t, home, ".gitconfig", "[user]\n\tname = Tess Ter\n\temail = tess@example.com\n")
	put(t, home, "private", "of the home directory\n")
	script := `git init -q . && git add . && git -c user.name=x -c user.email=x@example.com commit -qm one &&
git config user.name Stranger && git config user.email stranger@example.com && git config --unset user.name &&
git config --unset user.email`
	cmd := exec.Command("sh", "-c", script)
	cmd.Dir = repo
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	err := filepath.WalkDir(home, func(p string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(p, tess, tessGroup))
	})
	if err != nil {
		t.Fatal(err)
	}
	return home, repo
}

// bySudo is the environment of a command that Tess runs by sudo.
func bySudo(home string) []string {
	return []string{
		fmt.Sprintf("SUDO_UID=%d", tess), fmt.Sprintf("SUDO_GID=%d", tessGroup), "SUDO_USER=tess", "SUDO_HOME=" + home,
		"AGENTBOX_IMAGE=host", "TERM=xterm",
	}
}

// TestShell has a user work on a repository by sudo, in a shell with the host's programs: it is
// the same user, its commits are its own, the repository stays as it is, and the shell itself is
// in checkpoints.
func TestShell(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	home, repo := tessHome(t, publicDir(t))
	had := onHost(t, home)
	b.env = bySudo(home)

	m := b.terminal("shell", repo)
	m.shows("my-project: ~/src/my project stays as it is until 'agentbox apply'; see agentbox diff, undo")
	m.enter("echo who: $(id -u):$(id -g) $(id -un) $HOME; pwd\r")
	m.shows(fmt.Sprintf("who: %d:%d tess %s\r\n%s", tess, tessGroup, home, repo))
	m.enter("stat -c 'owner: %u:%g' . .git file ..\r")
	m.shows(strings.Repeat(fmt.Sprintf("owner: %d:%d\r\n", tess, tessGroup), 4))
	m.enter("git status --short && echo two > new && git add new && git commit -qm two && echo comm''itted\r")
	m.shows("committed")
	m.enter("git log -1 --format='by: %an <%ae> %cn <%ce>' | cat\r")
	m.shows("by: Tess Ter <tess@example.com> Tess Ter <tess@example.com>")
	m.enter("ls -A ~; touch /usr/x 2>&1; ls /etc/shadow /root; COLOUR=blue; echo li''sted\r")
	m.shows("listed")
	if s := m.screen(); strings.Contains(s, "private") || !strings.Contains(s, "cannot touch '/usr/x'") ||
		!strings.Contains(s, "'/etc/shadow': No such file") || !strings.Contains(s, "directory '/root': Permission denied") {
		t.Errorf("the screen: %s", s)
	}

	// A second shell joins it.
	m2 := b.terminal("shell", repo)
	m2.enter("echo second: $(git log --oneline | wc -l) $(cat new); exit 7\r")
	m2.shows("second: 2 two")
	equal(b, "exit of the second shell", m2.ends(), 7)

	// In a user namespace the files are the user's, on disk, too.
	if ids := idsOf(b, "my-project"); ids.Size != 65536 {
		t.Errorf("ids: %+v", ids)
	}
	made := filepath.Join(b.root, "sandboxes", b.inspect("my-project").ID, "workspaces", "0", "upper", "new")
	st, err := os.Lstat(made)
	if err != nil {
		t.Fatal(err)
	}
	if sys := st.Sys().(*syscall.Stat_t); sys.Uid != tess || sys.Gid != tessGroup {
		t.Errorf("the new file belongs to %d:%d", sys.Uid, sys.Gid)
	}

	// Processes and files come back, those of a fork and of an undone restore, too.
	m.enter("\x10\x11")
	equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	b.checkpoint("--name", "one", "my-project")
	m = b.terminal("attach", "my-project")
	m.enter("COLOUR=red; rm new; echo cha''nged\r")
	m.shows("changed")
	m.enter("\x10\x11")
	equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	shows := func(name, want string) {
		b.Helper()
		m := b.terminal("attach", name)
		m.enter("echo now: $COLOUR $(ls)\r")
		m.shows(want)
		m.enter("\x10\x11")
		equal(b, "exit after ctrl-p ctrl-q", m.ends(), 0)
	}
	b.ok("restore", "my-project", "one")
	shows("my-project", "now: blue file new")
	b.ok("fork", "--name", "copy", "my-project@one")
	shows("copy", "now: blue file new")
	b.ok("restore", "--undo", "my-project")
	shows("my-project", "now: red file")

	// It is left and comes back as it was left.
	m = b.terminal("attach", "my-project")
	m.enter("git checkout -q new; exit\r")
	_ = m.ends()
	m = b.terminal("shell", repo)
	m.enter("echo again: $COLOUR. $(ls) $(git log --oneline | wc -l); exit 5\r")
	m.shows("again: . file new 2")
	equal(b, "exit", m.ends(), 5)

	// Without a terminal it is a command of the same sandbox.
	r := b.input([]byte("typed"), nil, "shell", filepath.Join(repo, ".git"), "--", "true")
	if r.code != 0 {
		t.Errorf("a directory in it: %s", r)
	}
	b.ok("rm", "git")
	r = b.input([]byte("typed\n"), nil, "shell", repo, "--", "sh", "-c", "cat; tty; ls; exit 3")
	if r.code != 3 || r.out != "typed\nnot a tty\nfile\nnew\n" {
		t.Errorf("%s", r)
	}
	equal(b, "status", b.inspect("my-project").Status, "exited")
	if now := onHost(t, home); now != had {
		t.Errorf("the home directory was:\n%s\nnow:\n%s", had, now)
	}
}

// TestShellDenied refuses directories that the user who calls sudo could not list, whatever is
// the way to them.
func TestShellDenied(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	top := publicDir(t)
	home, repo := tessHome(t, top)
	secret := filepath.Join(top, "secret")
	put(t, secret, "sub/file", "secret\n")
	link := filepath.Join(repo, "link")
	if err := errors.Join(os.Chmod(secret, 0o700), os.Symlink(secret+"/sub", link)); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{secret, secret + "/sub", link, "/root"} {
		for _, args := range [][]string{
			{"shell", dir, "--", "true"}, {"run", "--rm", "--workspace", dir, "busybox", "true"},
			{"run", "--rm", "--workspace", dir + ":/w:ro", "busybox", "true"},
		} {
			r := b.try(bySudo(home), args...)
			if r.code != 125 || !strings.Contains(r.err, "denied: you cannot list it") ||
				!strings.Contains(r.err, "hint: Name a directory that you can list yourself.") {
				t.Errorf("%s", r)
			}
		}
	}
	equal(b, "sandboxes", b.ok("ps", "-aq"), "")
	// Root itself may.
	equal(b, "as root", b.ok("run", "--rm", "--workspace", secret+":/w", "busybox", "cat", "/w/sub/file"), "secret")
}

// TestShellService has a user without root's rights use the service: it is itself in the sandbox,
// with its further groups, and cannot have a directory that it cannot list.
func TestShellService(t *testing.T) {
	t.Parallel()
	u := newBox(t).activate(tessTeam)
	b := u.box
	u.up()
	defer u.down()
	top := publicDir(t)
	home, repo := tessHome(t, top)
	secret := filepath.Join(top, "secret")
	put(t, secret, "file", "secret\n")
	team := filepath.Join(top, "team")
	put(t, team, "file", "of the team\n")
	if err := errors.Join(os.Chmod(secret, 0o700), os.Chown(team, 0, tessTeam), syscall.Chmod(team, 0o2770)); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(top, "agentbox")
	if out, err := exec.Command("cp", filepath.Join(bin, "agentbox"), program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	as := func(groups []uint32, args ...string) result {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), commandTimeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir = home
		cmd.Env = []string{
			"PATH=" + os.Getenv("PATH"), "HOME=" + home, "USER=tess", "AGENTBOX_IMAGE=host",
			"AGENTBOX_HOST=unix://" + u.listen.Addr().String(),
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tess, Gid: tessGroup, Groups: groups}}
		var out, errs strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &errs
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return result{args: args, out: out.String(), err: errs.String(), code: cmd.ProcessState.ExitCode()}
	}
	groups := []uint32{tessTeam}

	r := as(groups, "shell", repo, "--", "sh", "-c",
		"echo $(id -u):$(id -g) $(id -G) $HOME; echo two > new; git add new; git commit -qm two; "+
			"git log -1 --format=%ae; stat -c %u:%g new")
	want := fmt.Sprintf("%d:%d %[2]d %d %s\ntess@example.com\n%[1]d:%[2]d\n", tess, tessGroup, tessTeam, home)
	if r.code != 0 || r.out != want {
		t.Errorf("%s\nwant %s", r, want)
	}
	if r := as(groups, "shell", team, "--", "sh", "-c", "echo mine > new; cat file; stat -c %u:%g new"); r.code != 0 ||
		r.out != fmt.Sprintf("of the team\n%d:%d\n", tess, tessTeam) {
		t.Errorf("a directory of its group: %s", r)
	}
	for _, args := range [][]string{
		{"shell", secret, "--", "true"}, {"run", "--rm", "--workspace", secret, "busybox", "true"},
		{"run", "--rm", "--workspace", secret + ":/w", "busybox", "cat", "/w/file"},
	} {
		if r := as(groups, args...); r.code != 125 || !strings.Contains(r.err, "denied") ||
			!strings.Contains(r.err, "hint: Name a directory that you can list yourself.") || r.out != "" {
			t.Errorf("%s", r)
		}
	}
	equal(b, "sandboxes", len(strings.Fields(b.ok("ps", "-aq"))), 2)
}

// TestShellSteps: at each prompt at which files have changed there is a step, with the command line;
// undo takes back what the last one did, files and the shell itself, while the terminal stays. The
// first step of all is a sandbox in which the shell starts.
func TestShellSteps(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	home, repo := tessHome(t, publicDir(t))
	b.env = bySudo(home)
	steps := func() (list []string) {
		b.Helper()
		for _, c := range b.checkpoints("my-project") {
			list = append(list, c.Trigger+": "+c.Message)
		}
		return list
	}
	taken := func(want string) {
		b.Helper()
		b.eventually("a step: "+want, func() bool { return steps()[0] == want })
	}

	m := b.terminal("shell", repo)
	m.enter("COLOUR=blue; echo one > a; echo 100% do''ne\r")
	m.shows("100% done")
	taken("prompt: COLOUR=blue; echo one > a; echo 100% do''ne")
	// Each command waits for the step of the one before it: a step has what there is when it is taken.
	m.enter("echo two > c\r")
	taken("prompt: echo two > c")
	m.enter("COLOUR=red; rm -f a file; echo bro''ken\r")
	m.shows("broken")
	taken("prompt: COLOUR=red; rm -f a file; echo bro''ken")
	if n := len(steps()); n != 4 {
		t.Errorf("%d steps, want 4: %q", n, steps())
	}
	if s := m.screen(); strings.Contains(s, "\x1b]633;agentbox") {
		t.Errorf("the screen has marks: %q", s)
	}

	b.ok("undo", "my-project")
	m.shows("my-project was restored")
	m.enter("echo now: $COLOUR $(ls)\r")
	m.shows("now: blue a c file")

	// Without steps there are none.
	had := len(steps())
	m2 := b.terminal("shell", "--steps", "off", repo)
	m2.enter("echo un''seen > b; echo wri''tten; exit\r")
	m2.shows("written")
	equal(b, "exit", m2.ends(), 0)
	if n := len(steps()); n != had {
		t.Errorf("steps with --steps off: %q", steps())
	}

	// The end of the shell is no change, so that undo still takes back what the last command did.
	m.enter("rm -f file; echo go''ne\r")
	m.shows("gone")
	taken("prompt: rm -f file; echo go''ne")
	m.enter("exit\r")
	equal(b, "exit", m.ends(), 0)
	b.ok("undo", "my-project")
	equal(b, "after an undo of the last command", b.ok("ls", "my-project", repo), ".git\na\nc\nfile")

	base := b.checkpoints("my-project")
	b.ok("restore", "my-project", base[len(base)-1].ID)
	equal(b, "trigger of the first step", base[len(base)-1].Trigger, "base")
	m = b.terminal("shell", repo)
	m.enter("echo first: $(id -un) $(ls) $COLOUR.\r")
	m.shows("first: tess file .")

	// A mark of a program's own takes no step of nothing, and is not shown.
	had = len(steps())
	m.enter("printf '\\e]633;agentbox;mine\\a'; echo for''ged\r")
	m.shows("forged")
	m.enter("exit\r")
	equal(b, "exit", m.ends(), 0)
	if s := m.screen(); strings.Contains(s, "\x1b]633;agentbox") {
		t.Errorf("the screen has marks: %q", s)
	}
	if n := len(steps()); n != had {
		t.Errorf("a forged mark has made a step: %q", steps())
	}
}
