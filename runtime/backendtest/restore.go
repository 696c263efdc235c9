package backendtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/runtime"
)

// counting counts in memory; the log has every number, the file the last.
const counting = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /count.new; mv /count.new /count; sleep 0.02; done"

// dump checkpoints a running container the plain way, by its OCI runtime, and
// returns its process images and a copy of its upperdir. It stays paused.
func (e *bench) dump(id string) (images, upper string) {
	e.Helper()
	e.pause(id)
	c := e.is(id, runtime.Paused)
	images, upper = filepath.Join(e.root, "images"), filepath.Join(e.root, "upper")
	if c.Runtime.Binary == "" || c.Runtime.Root == "" || c.Runtime.ID == "" {
		e.Fatalf("Inspect: the OCI runtime of a running container is %+v", c.Runtime)
	}
	checkpoint := []string{
		c.Runtime.Binary, "--root", c.Runtime.Root, "checkpoint", "--leave-running", "--image-path", images,
		"--work-path", images + ".work",
	}
	for _, cmd := range [][]string{
		append(append(checkpoint, e.flags(id)...), c.Runtime.ID),
		{"cp", "-a", c.Upper, upper},
	} {
		if out, err := exec.CommandContext(e.ctx, cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
			e.Fatalf("%q: %v: %s", cmd, err, out)
		}
	}
	e.is(id, runtime.Paused)
	return images, upper
}

// flags are the OCI runtime's at a dump and at its restore.
func (e *bench) flags(id string) []string {
	return criu.Options{EmptyNetwork: e.inspect(id).EmptyNetwork}.RuntimeFlags()
}

// putBack stops a container and gives it another upperdir.
func (e *bench) putBack(id, upper string) {
	e.Helper()
	if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Silent: true}); err != nil {
		e.Fatal(err)
	}
	own := e.is(id, runtime.Exited).Upper
	if err := os.RemoveAll(own); err != nil {
		e.Fatal(err)
	}
	if out, err := exec.CommandContext(e.ctx, "cp", "-a", upper, own).CombinedOutput(); err != nil {
		e.Fatalf("%v: %s", err, out)
	}
}

func (e *bench) stage(id, images string) {
	e.Helper()
	if ids := e.f.IDs; ids != nil { // CRIU reads them with the ids of the sandbox
		for _, cmd := range [][]string{
			{"chown", "-R", fmt.Sprintf("%d:0", ids.Base), images}, {"chmod", "-R", "u=rwX,g=rX,o=", images},
		} {
			if out, err := exec.CommandContext(e.ctx, cmd[0], cmd[1:]...).CombinedOutput(); err != nil {
				e.Fatalf("%q: %v: %s", cmd, err, out)
			}
		}
	}
	at := e.inspect(id).Stage
	err := at.Put(stage.Restore{Images: images, Work: images + ".restore", Flags: e.flags(id)})
	if err != nil {
		e.Fatal(err)
	}
}

func (e *bench) count(id string) int {
	e.Helper()
	n, _ := strconv.Atoi(strings.TrimSpace(e.file(id, "count")))
	return n
}

// goesOnFrom checks, by the log, which held before at the checkpoint, that a restored container
// counts on from where its file was at the checkpoint.
func (e *bench) goesOnFrom(id string, saved int, before string) {
	e.Helper()
	e.eventually("it counts again", func() bool { return e.count(id) > saved })
	first, whole := "", false
	e.eventually("its log goes on", func() bool {
		now, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		fresh, ok := strings.CutPrefix(now, before)
		if !ok {
			e.Fatal("the log did not go on where it was")
		}
		first, _, whole = strings.Cut(fresh, "\n")
		return whole
	})
	// In the instant of the dump the number may have been printed and not
	// written yet.
	if n, _ := strconv.Atoi(first); n < saved || n > saved+2 {
		e.Errorf("the restored process printed %q, its file at the checkpoint said %d", first, saved)
	}
}

func restoreGoesOn(e *bench) {
	s := e.spec(sh("trap 'exit 17' TERM; " + counting)...)
	id := e.startSpec(s)
	e.eventually("it counts", func() bool { return e.count(id) >= 10 })
	images, upper := e.dump(id)
	saved := e.count(id)
	e.resume(id)
	e.eventually("it counts on", func() bool { return e.count(id) >= saved+10 })
	// The same checkpoint twice, the second time onto one that runs again.
	for range 2 {
		e.putBack(id, upper)
		before, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		e.stage(id, images)
		e.restart(id)
		e.goesOnFrom(id, saved, before)
		if out, exit := e.exec(id, "cat", "/count"); exit != 0 || out == "" {
			e.Errorf("Exec in a restored container: %q, %d", out, exit)
		}
		out, exit := e.exec(id, sh("readlink /proc/1/ns/time; readlink /proc/self/ns/time")...)
		if first, own, _ := strings.Cut(strings.TrimSpace(out), "\n"); exit != 0 || first == "" || first != own {
			e.Errorf("time namespaces of a restored container and of Exec in it: %q, %d", out, exit)
		}
	}
	if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Timeout: patience}); err != nil {
		e.Fatal(err)
	}
	equal(e, "exit of a restored one, by its own trap", e.wait(id), 17)
	before, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	// Nothing is staged any more: this is a fresh start.
	e.restart(id)
	e.eventually("a later start begins anew", func() bool {
		now, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		return strings.HasPrefix(strings.TrimPrefix(now, before), "1\n")
	})
}

func restoreFails(e *bench) {
	id := e.start(sh(counting)...)
	e.eventually("it counts", func() bool { return e.count(id) >= 10 })
	images, upper := e.dump(id)
	e.putBack(id, upper)
	if err := os.WriteFile(filepath.Join(images, "inventory.img"), []byte("not an image"), 0o600); err != nil {
		e.Fatal(err)
	}
	e.stage(id, images)
	if _, err := e.b.Start(e.ctx, id, runtime.StartOptions{}); err == nil {
		e.Error("Start with a staged restore from damaged images succeeded")
	}
	c := e.is(id, runtime.Exited)
	equal(e, "pid", c.Pid, 0)
	if err := c.Stage.Clear(); err != nil {
		e.Error(err)
	}
	e.restart(id)
	e.eventually("it starts afresh once nothing is staged", func() bool { return e.count(id) > 0 })
}
