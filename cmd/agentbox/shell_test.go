package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/project"
	"github.com/agentbox/agentbox/runtime"
)

func TestShellName(t *testing.T) {
	for dir, want := range map[string]string{
		"/home/u/project": "project", "/srv/my project": "my-project", "/srv/.dot.d": "dot.d", "/srv/_x-": "x",
		"/srv/日本": "shell", "/srv/a\nb": "a-b", "/srv/" + strings.Repeat("x", 80): strings.Repeat("x", 48),
		"/srv/" + strings.Repeat("x", 47) + "-y": strings.Repeat("x", 47),
	} {
		got := shellName(dir)
		if got != want || checkName("--name", got) != nil {
			t.Errorf("%q: %q, want %q", dir, got, want)
		}
	}
	for name, want := range map[string]string{
		"my_pro.ject": "my-pro-ject", "a-": "a", strings.Repeat("y", 70): strings.Repeat("y", 63),
	} {
		if got := hostName(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

// TestShellFlags: what shell leaves out of the flags of run are flags of run, and those that count
// for a sandbox that is there already are its own.
func TestShellFlags(t *testing.T) {
	var run createOptions
	var shell shellOptions
	all, have := pflag.NewFlagSet("", pflag.ContinueOnError), pflag.NewFlagSet("", pflag.ContinueOnError)
	run.addFlags(all)
	shell.addFlags(have)
	for _, name := range withoutShell {
		if all.Lookup(name) == nil || have.Lookup(name) != nil {
			t.Errorf("--%s: of run %v, of shell %v", name, all.Lookup(name) != nil, have.Lookup(name) != nil)
		}
	}
	for _, name := range []string{"image", "memory", "env", "rm", "policy", "egress"} {
		if have.Lookup(name) == nil || !shell.ofNew(name) {
			t.Errorf("--%s is not a flag for new sandboxes", name)
		}
	}
	if shell.ofNew("name") || shell.ofNew("trust") || shell.ofNew("detach-keys") {
		t.Error("a flag of each call is one for new sandboxes")
	}
}

func TestHomeLike(t *testing.T) {
	for home, want := range map[string]bool{
		"/home/u": true, "/Users/u": true, "/srv/homes/u": true, "/": false, "/nonexistent": false, "/root": false,
		"/var/lib/x": false, "/usr/games": false, "": false, "home/u": false, "/home/u:x": false, "/home/a\nb": false,
	} {
		if homeLike(home) != want {
			t.Errorf("%q: %v", home, !want)
		}
	}
	for name, want := range map[string]string{
		"tess": "tess", "dom\\tess": "domtess", "": "user", "-x:y": "xy", "日": "user",
	} {
		if got := plainName(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

// TestCommandFile has a shell run what is written for the next start.
func TestCommandFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "it's here")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	f := commandFile(dir, []string{"TERM=x'y $(id)", "EMPTY="}, []string{"printf", `%s|`, "a b", "'", "$HOME", "\n", ""})
	if f.Path != "/etc/agentbox/run" || f.Mode != 0o755 {
		t.Errorf("%+v", f)
	}
	program := filepath.Join(t.TempDir(), "shell")
	if err := os.WriteFile(program, []byte(shellScript), 0o755); err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(f.Data), "exec "+shellProgram, `echo "$PWD $TERM"; exec `+shellQuote(program), 1)
	out, err := exec.Command("sh", "-c", text).Output()
	if want := dir + " x'y $(id)\na b|'|$HOME|\n||"; err != nil || string(out) != want {
		t.Errorf("%v: %q, want %q", err, out, want)
	}
}

func TestTerminalEnv(t *testing.T) {
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		t.Setenv(name, "") // the test's end puts it back
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	for name, value := range map[string]string{
		"TERM": "xterm", "COLORTERM": "truecolor", "LC_TIME": "C.UTF-8", "LANG": "bad\x1b", "EDITOR": "/opt/bin/vim -f",
		"VISUAL": " ", "TOKEN": "hush", "TZ": "Europe/Berlin",
	} {
		t.Setenv(name, value)
	}
	want := []string{"COLORTERM=truecolor", "EDITOR=vim -f", "LC_TIME=C.UTF-8", "TERM=xterm", "TZ=Europe/Berlin"}
	got := shellUser{}.terminalEnv(true)
	slices.Sort(got)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got := (shellUser{}).terminalEnv(false); slices.Contains(got, "TERM=xterm") || len(got) != 4 {
		t.Errorf("without a terminal: %q", got)
	}
}

func TestGitElsewhere(t *testing.T) {
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, link := range map[string]string{
		"tree/.git":     "gitdir: ../repo/.git/worktrees/tree\n",
		"repo/sub/.git": "gitdir: ../.git/modules/sub", "own/.git": "gitdir: ./store", "odd/.git": "\x00\xff",
		"repo/.git/HEAD": "ref: refs/heads/main", "repo/src/x": "", "none/x": "",
	} {
		path := filepath.Join(top, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(link), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	for dir, want := range map[string]string{
		"tree": "repo/.git/worktrees/tree", "repo": "", "repo/src": "repo/.git", "repo/sub": "repo/.git/modules/sub",
		"own": "", "odd": "", "none": "",
	} {
		if want != "" {
			want = filepath.Join(top, want)
		}
		if got, err := gitElsewhere(filepath.Join(top, dir)); got != want || err != nil {
			t.Errorf("%s: %q, %v, want %q", dir, got, err, want)
		}
	}
}

func TestTakeOver(t *testing.T) {
	t.Setenv("AGENTBOX_IMAGE", "")
	file := project.File{
		Image: "i", Memory: "1g", CPUs: "2", Egress: []string{"pypi.org"}, Env: map[string]string{"A": "file", "B": "b"},
		Secrets: map[string]string{"s": "file:/etc/token", "t": "env:T", "u": "file:/etc/u"},
	}
	var o shellOptions
	if err := o.takeOver(file, "/dir"); err != nil {
		t.Fatal(err)
	}
	if o.Image != "i" || o.Memory != "1g" || o.CPUs != "2" || o.Network != runtime.NetworkFiltered ||
		!slices.Equal(o.Egress, file.Egress) || !slices.Equal(o.Env, []string{"A=file", "B=b"}) ||
		!slices.Equal(o.Secrets, secretOptions{"s=file:/etc/token", "t=env:T", "u=file:/etc/u"}) {
		t.Errorf("%+v", o)
	}
	for _, in := range []string{"file:token", "file:/dir/token", "file:../token"} {
		var o shellOptions
		err := o.takeOver(project.File{Secrets: map[string]string{"s": in}}, "/dir")
		if err == nil || !strings.Contains(err.Error(), "outside of the directory") {
			t.Errorf("%s: %v", in, err)
		}
	}

	// Flags beat the file, and so does the environment for the image.
	t.Setenv("AGENTBOX_IMAGE", "env")
	o = shellOptions{given: []string{"memory", "cpus", "network"}}
	o.Memory, o.CPUs, o.Network, o.Env, o.Secrets = "2g", "1", "none", []string{"A=flag"}, secretOptions{"s=env:S"}
	if err := o.takeOver(file, "/dir"); err != nil {
		t.Fatal(err)
	}
	env, err := parseEnv(nil, o.Env, os.LookupEnv)
	if err != nil || !slices.Equal(env, []string{"A=flag", "B=b"}) {
		t.Errorf("%q, %v", env, err)
	}
	if o.Image != "env" || o.Memory != "2g" || o.CPUs != "1" || o.Network != "none" || o.Egress != nil ||
		!slices.Equal(o.Secrets, secretOptions{"s=env:S", "t=env:T", "u=file:/etc/u"}) {
		t.Errorf("%+v", o)
	}

	// No host at all is not the same as nothing said of it.
	o = shellOptions{}
	if err := o.takeOver(project.File{Egress: []string{}}, "/dir"); err != nil || o.Egress == nil ||
		o.Network != runtime.NetworkFiltered {
		t.Errorf("%+v, %v", o, err)
	}
}

// TestHostImage: the image of the host's programs has what they need, root's, the same each time,
// and nothing that is secret.
func TestHostImage(t *testing.T) {
	mounts, links, err := hostMounts()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mounts {
		if m.Type != "bind" || !m.ReadOnly || m.Source != m.Target {
			t.Errorf("%+v", m)
		}
	}
	if !slices.ContainsFunc(mounts, func(m runtime.Mount) bool { return m.Target == "/usr" }) {
		t.Errorf("no /usr: %+v", mounts)
	}
	var one, two bytes.Buffer
	for _, b := range []*bytes.Buffer{&one, &two} {
		if err := writeHostImage(b, links, mounts); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(one.Bytes(), two.Bytes()) {
		t.Error("two images of the same host differ")
	}
	var names []string
	for r := tar.NewReader(&one); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
		if h.Uid != 0 || h.Gid != 0 || h.Typeflag == tar.TypeReg && h.Mode&0o004 == 0 {
			t.Errorf("%s: %d:%d %o", h.Name, h.Uid, h.Gid, h.Mode)
		}
		for _, secret := range []string{"shadow", "ssh", "private", "environment", "sudoers"} {
			if strings.HasPrefix(h.Name, "etc/") && strings.Contains(h.Name, secret) {
				t.Errorf("it has %s", h.Name)
			}
		}
	}
	for _, name := range []string{"etc/", "etc/passwd", "etc/ld.so.cache", "usr/", "tmp/", "home/", "var/tmp/"} {
		if !slices.Contains(names, name) {
			t.Errorf("it lacks %s", name)
		}
	}
	slices.Sort(names)
	if len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Error("a name is in it twice")
	}
}
