package test

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/thorough"
)

// TestOneInstant takes checkpoints of a process that writes the same number to
// memory, a file and a mapped file as fast as it can, while it runs on, and
// restores every one: the process itself ends when the three are not the same.
func TestOneInstant(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	steadyImage(b)
	b.start("steady", "--network", "none", "steady", "/steady", "/")
	rounds := 8
	if thorough.Asked() {
		rounds = 200
	}
	oneInstant(b, "steady", rounds)
}

// steadyImage makes the image "steady".
func steadyImage(b *box) {
	b.Helper()
	b.ok("image", "import", "steady", programRoot(b.T, "steady"))
}

// programRoot returns a directory with nothing in it but a program of testdata.
func programRoot(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", filepath.Join(dir, name), "./testdata/"+name)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return dir
}

// oneInstant checkpoints a sandbox that runs steady and restores it, again and
// again.
func oneInstant(b *box, name string, rounds int) {
	b.Helper()
	number := func() uint64 {
		data, err := os.ReadFile(filepath.Join(b.upperdir(name), "file"))
		if err != nil || len(data) != 8 {
			b.Fatalf("the file has %q (%v); the log: %s", data, err, b.ok("logs", name))
		}
		return binary.LittleEndian.Uint64(data)
	}
	grows := func(what string) {
		b.Helper()
		last := number()
		b.eventually(what, func() bool {
			if number() > last {
				return true
			}
			if s := b.inspect(name); s.Status != "running" {
				b.Fatalf("%s: it is %s: %s", what, s.Status, b.ok("logs", name))
			}
			return false
		})
	}
	b.eventually("it has written its first number", func() bool {
		info, err := os.Stat(filepath.Join(b.upperdir(name), "file"))
		return err == nil && info.Size() == 8
	})
	grows("it counts")
	for i := range rounds {
		// An undo checkpoint is a checkpoint like the others.
		undo := "--no-undo"
		if i%10 == 0 {
			undo = "--no-undo=false"
		}
		ck := strings.TrimSpace(b.ok("checkpoint", name))
		grows("it counts after the checkpoint")
		b.ok("restore", undo, name, ck)
		grows("it counts after the restore")
		b.ok("checkpoint", "rm", ck)
	}
}
