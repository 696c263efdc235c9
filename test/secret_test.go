package test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime/store/pack"
)

// The values that must be nowhere, and where one of them comes from.
const (
	fileValue = "s3cret-of-a-file-"
	envValue  = "s3cret-of-a-variable-"
)

// nowhere fails when a secret's value, or its source, is in any of texts.
func nowhere(b *box, where string, texts ...[]byte) {
	b.Helper()
	for _, text := range texts {
		for _, value := range []string{fileValue, envValue} {
			if bytes.Contains(text, []byte(value)) {
				b.Errorf("%s has the secret %s", where, value)
			}
		}
	}
}

// nowhereAtRest searches all that is kept of a root: its files as they are, and
// what is in its packs.
func nowhereAtRest(b *box) {
	b.Helper()
	pieces := 0
	err := filepath.WalkDir(b.root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || path == filepath.Join(b.root, "run"): // which is no record, and searched by itself
			return fs.SkipDir
		case !d.Type().IsRegular():
			return nil
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the database's own, for as long as it is open
		}
		if err != nil {
			return err
		}
		defer f.Close()
		text, err := io.ReadAll(f)
		if err != nil {
			return err
		}
		nowhere(b, path, text)
		if filepath.Base(filepath.Dir(filepath.Dir(path))) != "packs" {
			return nil
		}
		r, err := pack.Open(f)
		if err != nil {
			return err
		}
		return r.Each(func(blob pack.Blob) error {
			raw, err := r.Read(blob, nil)
			nowhere(b, "a piece of "+path, raw)
			pieces++
			return err
		})
	})
	if err != nil || pieces == 0 {
		b.Fatalf("searched %d pieces: %v", pieces, err)
	}
	// The files that a start leaves beside the secrets themselves.
	err = filepath.WalkDir(filepath.Join(b.root, "run"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() == "secrets" && d.IsDir() {
			return fs.SkipDir
		}
		if d.Type().IsRegular() && d.Name() != "netns" {
			nowhere(b, path, []byte(b.read(path)))
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// nowhereInProcesses searches what processes were started with.
func nowhereInProcesses(b *box) {
	b.Helper()
	for _, what := range []string{"environ", "cmdline"} {
		files, _ := filepath.Glob("/proc/[0-9]*/" + what)
		for _, f := range files {
			text, _ := os.ReadFile(f)
			if f != "/proc/self/"+what && bytes.Contains(text, []byte(b.root)) ||
				bytes.Contains(text, []byte("AGENTBOX_SANDBOX=")) {
				nowhere(b, f, text)
			}
		}
	}
}

// secretive is a root whose sandboxes have two secrets: tok, of a file, and
// var, of a variable.
type secretive struct {
	*box
	file string
}

func newSecretive(t *testing.T) secretive {
	return secretive{memoryBox(t), filepath.Join(t.TempDir(), "token")}
}

// write changes the file.
func (s secretive) write(n int) {
	s.Helper()
	if err := os.WriteFile(s.file, []byte(fileValue+strconv.Itoa(n)), 0o600); err != nil {
		s.Fatal(err)
	}
}

// with is an environment that has the variable.
func with(n int) []string { return []string{"THE_TOKEN=" + envValue + strconv.Itoa(n)} }

// do runs a command in it.
func (s secretive) do(n int, args ...string) string {
	s.Helper()
	r := s.try(with(n), args...)
	if r.code != 0 {
		s.Fatalf("%s", r)
	}
	return r.out + r.err
}

// has fails unless a sandbox has those values.
func (s secretive) has(name string, file, variable int) {
	s.Helper()
	equal(s.box, "the secrets of "+name, s.sh(name, "cat /run/secrets/tok; echo; cat /run/secrets/var"),
		fileValue+strconv.Itoa(file)+"\n"+envValue+strconv.Itoa(variable))
}

// Secrets are in a sandbox while it runs, and in no record of it.
func TestSecrets(t *testing.T) {
	t.Parallel()
	s := newSecretive(t)
	b, file, write, do, has := s.box, s.file, s.write, s.do, s.has
	write(1)
	// The tmpfs comes first: the secrets are not hidden by it.
	do(1, "run", "-d", "--name", "s", "--network", "none", "--user", "1000", "--tmpfs", "/run",
		"--checkpoint-every", "1h",
		"--secret", "tok=file:"+file, "--secret", "id=var,env=THE_TOKEN", "busybox", "sh", "-c",
		"exec 3</run/secrets/tok; while :; do sleep 1; done")
	has("s", 1, 1)
	if got := b.ok("exec", "--user", "0", "s", "sh", "-c",
		"stat -c '%a %u' /run/secrets /run/secrets/*; grep ' /run/secrets ' /proc/mounts; mount -o remount,rw /run/secrets; cp /bin/true /run/secrets"+` 2>&1; true`); !strings.HasPrefix(got, "755 0\n400 1000\n400 1000\ntmpfs /run/secrets tmpfs ro,nosuid,nodev,noexec,") ||
		!strings.Contains(got, "Read-only file system") {
		t.Errorf("the secrets: %s", got)
	}
	b.fails(1, "exec", "--user", "1001", "s", "cat", "/run/secrets/tok")
	nowhereInProcesses(b)

	b.ok("checkpoint", "--files-only", "--name", "files", "s")
	id := b.inspect("s").ID
	nowhere(b, "what is told of it", []byte(b.ok("inspect", "s")), []byte(b.ok("ps", "-a", "--format", "json")),
		[]byte(b.ok("logs", "s")), []byte(b.ok("checkpoint", "inspect", "s@files")), []byte(b.ok("log", "s")))
	nowhereAtRest(b)
	archive := filepath.Join(t.TempDir(), "x.tar")
	b.ok("checkpoint", "export", "s@files", archive)
	text, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("zstd", "-dcq", archive).Output(); err == nil {
		text = append(text, out...)
	}
	nowhere(b, "the archive", text)
	if manifest := b.read(filepath.Join(b.root, "checkpoints", b.checkpoints("s")[0].ID,
		"manifest.json")); strings.Contains(manifest, file) || strings.Contains(manifest, "THE_TOKEN") ||
		!strings.Contains(manifest, `"var"`) {
		t.Errorf("the checkpoint's manifest names where secrets come from, or not their names: %s", manifest)
	}

	// Stopped, they are gone; started, they are read again, or nothing starts.
	b.ok("stop", "-t", "0", "s")
	if left := mountsUnder(filepath.Join(b.root, "run", id)); len(left) > 0 {
		t.Errorf("stopped, it has %q", left)
	}
	nowhereAtRest(b)
	write(2)
	if said := b.fails(3, "start", "s"); !strings.Contains(said, "secret var: the variable THE_TOKEN") {
		t.Errorf("started without its variable: %s", said)
	}
	equal(b, "its state", b.inspect("s").Status, "exited")
	if err := os.Rename(file, file+".away"); err != nil {
		t.Fatal(err)
	}
	if r := b.try(with(2), "start", "s"); r.code == 0 || !strings.Contains(r.err, "the secret's file "+file) {
		t.Errorf("started without its file: %s", r)
	}
	write(2)
	do(2, "start", "s")
	has("s", 2, 2)

	// Killed on its way, it leaves nothing mounted.
	b.ok("stop", "-t", "0", "s")
	if r := b.try(append(with(2), failpoint("oci.start.after-bundle", "kill")...), "start", "s"); !r.killed {
		t.Fatalf("not killed: %s", r)
	}
	b.ok("recover")
	if left := mountsUnder(filepath.Join(b.root, "run", id)); len(left) > 0 {
		t.Errorf("killed in its start, it left %q", left)
	}
	b.ok("rm", "-f", "s")
	b.secretsRefused(file)
}

// A full checkpoint goes on with the secrets that there are then.
func TestSecretsRestored(t *testing.T) {
	t.Parallel()
	s := newSecretive(t)
	b, file, write, do, has := s.box, s.file, s.write, s.do, s.has
	write(1)
	do(1, "run", "-d", "--name", "s", "--network", "none", "--secret", "tok=file:"+file,
		"--secret", "var=env:THE_TOKEN",
		"busybox", "sh", "-c", "exec 3</run/secrets/tok; while :; do sleep 1; done")
	b.ok("checkpoint", "--files-only", "--name", "files", "s")
	if said := do(2, "checkpoint", "--name", "full", "s"); !strings.Contains(said,
		"/run/secrets is part of their memory") {
		t.Errorf("the full checkpoint does not say what it may hold: %s", said)
	}
	b.fails(3, "restore", "s", "full")
	equal(b, "after a restore without its variable", b.inspect("s").Status, "running")
	write(3)
	do(3, "restore", "s", "full")
	has("s", 3, 3)
	equal(b, "its open file", b.ok("exec", "s", "cat", "/proc/1/fd/3"), fileValue+"3")
	write(1000)
	if r := b.try(with(3), "restore", "s", "full"); r.code == 0 ||
		!strings.Contains(r.err, "the secret tok open, which had 18 bytes then and has 21 now") {
		t.Errorf("restored with a longer secret open: %s", r)
	}
	do(3, "restore", "s", "files")
	has("s", 1000, 3)
	write(4)
	do(4, "fork", "--name", "f", "s@full")
	has("f", 4, 4)
	b.ok("rm", "-f", "f")

	// Removed, only the names of its secrets are left.
	b.ok("rm", "-f", "s")
	if r := b.try(with(4), "restore", "s", "full"); r.code == 0 ||
		!strings.Contains(r.err, "where the secret tok comes from is not known") {
		t.Errorf("made again without the sources: %s", r)
	}
	do(4, "restore", "s", "files", "--secret", "tok=file:"+file, "--secret", "var=env:THE_TOKEN")
	has("s", 4, 4)
}

func (b *box) secretsRefused(file string) {
	b.Helper()
	empty := filepath.Join(filepath.Dir(file), "empty")
	large := filepath.Join(filepath.Dir(file), "large")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(large, make([]byte, 600<<10), 0o600); err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct{ why, args string }{
		{"it is empty", "--secret a=file:" + empty},
		{"larger than", "--secret a=file:" + large},
		{"is not a regular file", "--secret a=file:/dev/zero"},
		{"not found", "--secret a=file:" + file + ".missing"},
		{"the variable NOT_SET: not found", "--secret a=env:NOT_SET"},
		{"a name is", "--secret ../a=file:" + file},
		{"given twice", "--secret a=file:" + file + " --secret a=file:" + empty},
		{"nothing can be mounted at /run/secrets/b", "--secret a=file:" + file + " -v /tmp:/run/secrets/b"},
		{"secret of " + file, "--policy strict --secret a=file:" + file},
	} {
		r := b.try(nil, append(append([]string{"create"}, strings.Fields(c.args)...), "busybox", "true")...)
		if r.code == 0 || !strings.Contains(r.err, c.why) {
			b.Errorf("wanted %q: %s", c.why, r)
		}
	}
	equal(b, "sandboxes that were refused", b.ok("ps", "-a", "-q"), "")
}
