package test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/criu/wall/walltest"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/thorough"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestForgedArchive imports archives whose images of processes are forged, and restores them in
// each way that a user may: as they are imported by default, with --trust, and the files alone.
// Forgeries are refused, or harmless, and the host is as it was.
func TestForgedArchive(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := memoryBox(t), memoryBox(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	v, look := victims(b, dir)
	a.start("c", "-v", v.Dir+":"+v.Bound+":ro", "busybox", "sh", "-c", "while :; do sleep 60; done")
	one := a.checkpoint("c")
	a.ok("rm", "-f", "c")
	b.ok("image", "ls") // makes the built-in image, which is the same everywhere
	b.own("c")

	st, err := store.Open(t.Context(), a.root)
	must(err)
	defer st.Close()
	source, err := st.OpenCheckpoint(t.Context(), one)
	must(err)
	defer source.Close()
	row, err := st.Checkpoint(t.Context(), one)
	must(err)
	kept, forged := filepath.Join(dir, "kept"), filepath.Join(dir, "forged")
	must(source.ExtractImages(t.Context(), kept))
	archive := filepath.Join(dir, "archive.tar")
	// pack makes an archive of the checkpoint with other images, and returns its id; empty: no
	// archive can have them, for they are not files.
	pack := func(images string) string {
		t.Helper()
		c := store.Checkpoint{SandboxID: row.SandboxID, SandboxName: row.SandboxName, Kind: row.Kind,
			Trigger: row.Trigger, Files: row.Files,
			Processes: row.Processes, ImageDigest: row.ImageDigest, Spec: row.Spec}
		draft, err := st.BeginCheckpoint(t.Context(), c)
		must(err)
		must(exec.Command("cp", "-a", images+"/.", draft.CRIUDir()).Run())
		must(draft.PutTree(t.Context(), 0, func(fn func(overlay.Entry) error) error {
			tree, err := source.Tree(t.Context(), 0)
			if err != nil {
				return err
			}
			return errors.Join(overlay.ReadTree(tree, fn), tree.Close())
		}))
		if err := draft.PutImages(t.Context()); errors.Is(err, fault.ErrCorrupt) {
			must(errors.Join(draft.Abort(t.Context(), err), draft.Close()))
			a.ok("checkpoint", "rm", draft.ID())
			return ""
		} else if err != nil {
			t.Fatal(err)
		}
		_, err = draft.Commit(t.Context(), source.Manifest())
		must(errors.Join(err, draft.Close()))
		_ = os.Remove(archive)
		a.ok("checkpoint", "export", draft.ID(), archive)
		a.ok("checkpoint", "rm", draft.ID())
		return draft.ID()
	}
	restored := func(id string) result {
		return b.try(nil, "restore", "--mount", v.Dir+":"+v.Bound+":ro", "c", id)
	}
	forget := func(id string) {
		t.Helper()
		if _, there := b.find("c"); there {
			b.ok("rm", "-f", "c")
		}
		b.ok("checkpoint", "rm", id)
	}

	id := pack(kept)
	b.ok("checkpoint", "import", archive)
	if r := restored(id); r.code != 0 {
		t.Fatalf("what is not forged: %s", r)
	}
	masks := b.sh("c", tryMasks)
	forget(id)
	before := look()
	for i, f := range walltest.Forgeries(v) {
		must(os.RemoveAll(forged))
		must(exec.Command("cp", "-a", kept, forged).Run())
		if err := f.Forge(forged, v); errors.Is(err, fs.ErrNotExist) {
			continue // of another kind of container
		} else if err != nil {
			t.Fatalf("%s: %v", f.Name, err)
		}
		id := pack(forged)
		if id == "" {
			continue
		}
		for n, way := range []string{"by default", "with --trust", "--files-only"} {
			if !thorough.Asked() && n != i%3 {
				continue
			}
			what := f.Name + ", " + way
			args := []string{"checkpoint", "import", archive}
			if way == "with --trust" {
				args = append(args, "--trust")
			}
			r := b.try(nil, args...)
			imported := r.code == 0
			switch {
			case !imported: // refused before anything is restored of it
			case way == "--files-only":
				b.ok("restore", "--files-only", "c", id)
				equal(b, what+": its files", b.sh("c", tryMasks), masks)
			default:
				r = restored(id)
			}
			harmless := f.Image == "" && f.Late == ""
			switch {
			case way != "--files-only" && !harmless && r.code == 0:
				t.Errorf("%s: it is restored", what)
			case r.code != 0 && !f.Damage && !strings.Contains(r.err, refusal(imported)),
				!strings.Contains(r.err, f.Late) && imported && way != "--files-only":
				t.Errorf("%s: refused for another reason: %s", what, r)
			}
			if harmless && imported && r.code != 0 {
				t.Errorf("%s: %s", what, r)
			}
			if harmless && imported && r.code == 0 {
				equal(b, what, b.sh("c", tryMasks), masks)
			}
			equal(b, what+": the host", look(), before)
			if imported {
				if now, there := b.find("c"); there && r.code != 0 && now.Pid != 0 {
					t.Errorf("%s: process %d is there", what, now.Pid)
				}
				forget(id)
			}
		}
	}
}

// refusal is part of what is said of forged images by a restore, or by an import.
func refusal(imported bool) string {
	if imported {
		return "not what"
	}
	return "Processes of a sandbox have no such thing"
}
