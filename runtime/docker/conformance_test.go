package docker_test

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/agentbox/agentbox/images/build"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/enginetest"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
	"github.com/agentbox/agentbox/runtime/docker"
)

func TestMain(m *testing.M) { os.Exit(enginetest.Main(m)) }

// engine is the daemon that the tests of this package share.
type engine struct {
	*enginetest.Dockerd
	digest string
	store  bool // its images are containerd's
}

const imageName = "bt"

func start(t *testing.T, config map[string]any) *engine {
	t.Helper()
	wrapper := filepath.Join(enginetest.Build(t, "", "agentbox-runtime"), "agentbox-runtime")
	d := enginetest.StartDockerd(t, enginetest.DockerdOptions{Wrapper: wrapper, Config: config})
	return &engine{d, d.Import(t, imageName, backendtest.BusyboxLower(t)[0]), config["features"] != nil}
}

func (e *engine) open(t *testing.T, root string) *docker.Backend {
	t.Helper()
	b, err := docker.Open(docker.Options{
		Host: e.Host, Root: root, Run: filepath.Join(root, "run"), StageRun: e.StageRun,
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestConformance needs root, docker.io, criu and a static busybox.
func TestConformance(t *testing.T) {
	conforms(t, start(t, nil))
}

// TestConformanceImageStore needs what TestConformance does, and Docker Engine 27.
func TestConformanceImageStore(t *testing.T) {
	conforms(t, start(t, enginetest.ImageStore(t)))
}

func conforms(t *testing.T, e *engine) {
	backendtest.Run(t, backendtest.Factory{
		Lower:   backendtest.BusyboxLower,
		Image:   func(*testing.T) (string, string) { return imageName, e.digest },
		New:     func(t *testing.T, root string) runtime.Backend { return e.open(t, root) },
		Restart: func(t *testing.T) { e.Restart(t) },
		Down:    func(t *testing.T, fn func()) { e.Kill(t); defer e.Start(t); fn() },
		Leaks:   e.leaks,
		Cannot:  backendtest.NoWorkspaces(),
	})
}

// TestPauseMeetsExec: an exec that a pause meets half-way, such as a health
// check, comes in or is refused. Caught, it would hold up its shim, and that the
// end of the pause. It needs what TestConformance does.
func TestPauseMeetsExec(t *testing.T) {
	e := start(t, nil)
	b := e.open(t, enginetest.Dir(t))
	theirs := e.Docker(t, "run", "-d", "--runtime", "agentbox", imageName, "sleep", "1000")
	defer e.Docker(t, "rm", "-f", theirs)
	s, err := b.Adopt(t.Context(), theirs)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer stop()
	for range 4 {
		all.Go(func() {
			for ctx.Err() == nil {
				_, _ = e.Try("exec", "-d", theirs, "true") // refused while it is paused
			}
		})
	}
	entering := func() bool {
		lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		return slices.ContainsFunc(lines, func(path string) bool {
			line, _ := os.ReadFile(path)
			return strings.Contains(string(line), "\x00exec\x00--process\x00") && strings.Contains(string(line), theirs)
		})
	}
	for range 6 {
		if err := b.Pause(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		// A process that came too late is being refused.
		for end := time.Now().Add(time.Minute); entering(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("a process stands half-way into a paused container")
			}
		}
		if c, err := b.Inspect(t.Context(), s.ID); err != nil || c.Status != runtime.Paused {
			t.Fatalf("it is %s, %v", c.Status, err)
		}
		if err := b.Unpause(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// leaks names what of the daemon's is left of removed containers.
func (e *engine) leaks(t *testing.T, ids []string) (found []string) {
	t.Helper()
	type object struct {
		Id, Name string
		Labels   map[string]string
	}
	var containers, networks []object
	var volumes struct{ Volumes []object }
	err := errors.Join(e.Get("/containers/json?all=1", &containers), e.Get("/networks", &networks),
		e.Get("/volumes", &volumes))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range containers {
		if slices.Contains(ids, c.Labels["agentbox.sandbox"]) {
			found = append(found, "container "+c.Id)
		}
	}
	if len(containers) > 0 {
		return found // of others', which are not over yet
	}
	for _, n := range networks {
		if _, ours := n.Labels["agentbox.root"]; ours {
			found = append(found, "network "+n.Name)
		}
	}
	for _, v := range volumes.Volumes {
		found = append(found, "volume "+v.Name)
	}
	for _, dir := range []string{
		filepath.Join(e.StageRun, "restore"), filepath.Join(e.StageRun, "files"),
		filepath.Join(e.StageRun, "reap", "made"), filepath.Join(e.StageRun, "reap", "due"),
		filepath.Join(e.Root, "containers"),
	} {
		entries, _ := os.ReadDir(dir)
		for _, x := range entries {
			found = append(found, "file "+filepath.Join(dir, x.Name()))
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, e.Dir) && strings.Contains(line, "overlay") {
			found = append(found, "mount "+strings.TrimSpace(line))
		}
	}
	return found
}

// TestImages needs what TestConformance does.
func TestImages(t *testing.T) {
	imagesOf(t, start(t, nil))
}

// TestImagesImageStore needs what TestConformanceImageStore does.
func TestImagesImageStore(t *testing.T) {
	imagesOf(t, start(t, enginetest.ImageStore(t)))
}

func imagesOf(t *testing.T, e *engine) {
	b := e.open(t, enginetest.Dir(t))
	ctx := t.Context()
	img, err := b.Images().Resolve(ctx, imageName)
	if err != nil || img.Digest != e.digest || img.Name != imageName || len(img.Lower) != 0 ||
		len(img.Config.Cmd) != 1 {
		t.Fatalf("Resolve: %+v, %v", img, err)
	}
	if img, err = b.Images().ResolveDigest(ctx, e.digest); err != nil || img.Name != imageName {
		t.Errorf("ResolveDigest: %+v, %v", img, err)
	}
	// As files, as a directory, and as `docker save` writes it.
	dir := backendtest.BusyboxLower(t)[0]
	tarball := filepath.Join(e.Dir, "save.tar")
	e.Docker(t, "save", "-o", tarball, imageName)
	for name, source := range map[string]string{"from-dir": dir, "from-save": tarball} {
		img, err := b.Images().Import(ctx, name, source)
		if err != nil || img.Name != name || img.Digest == "" {
			t.Errorf("Import of %s: %+v, %v", source, img, err)
		}
		if out := e.Docker(t, "run", "--rm", "--runtime", "agentbox", name, "sh", "-c",
			"cat /etc/base; stat -c %a /tmp"); out != "base\n777" {
			t.Errorf("%s: %q", name, out)
		}
	}
	if img, err := b.Images().Resolve(ctx, "from-save"); err != nil || img.Digest != e.digest {
		t.Errorf("a loaded image is another one: %+v, %v", img, err)
	}
	list, err := b.Images().List(ctx)
	if err != nil || len(list) != 3 {
		t.Errorf("List: %+v, %v", list, err)
	}
	if _, err := b.Images().Import(ctx, "gone", "/no/such/file"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("Import of nothing: %v", err)
	}
	if err := b.Images().Remove(ctx, "from-dir", func(string) bool { return true }); !errors.Is(err, runtime.ErrBusy) {
		t.Errorf("Remove of one in use: %v", err)
	}
	for _, name := range []string{"from-dir", "from-save"} {
		if err := b.Images().Remove(ctx, name, func(digest string) bool { return digest == e.digest }); err != nil {
			t.Errorf("Remove of %s: %v", name, err)
		}
	}
	if err := b.Images().Remove(ctx, "from-dir", nil); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("Remove of one that is gone: %v", err)
	}
	if _, err := b.Images().Pull(ctx, "127.0.0.1:1/no/such:1", image.PullOptions{}); !errors.Is(err,
		runtime.ErrNotFound) || len(fault.Hint(err)) == 0 {
		t.Errorf("Pull of what cannot be pulled: %v", err)
	}
	if _, err := b.Images().Pull(ctx, "oci:/x", image.PullOptions{}); !errors.Is(err, runtime.ErrUnsupported) {
		t.Errorf("Pull of a directory: %v", err)
	}
	travels(t, e, b.Images())
}

// travels has an image go to a registry and come back, with one layer more.
func travels(t *testing.T, e *engine, i docker.Images) {
	ctx := t.Context()
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer s.Close()
	ref := s.Listener.Addr().String() + "/team/bt:1"
	base, err := i.V1(ctx, e.digest)
	if err != nil {
		t.Fatal(err)
	}
	layer, err := build.Write(ctx, filepath.Join(t.TempDir(), "layer"), func(_ context.Context, w io.Writer) error {
		tw := tar.NewWriter(w)
		return errors.Join(tw.WriteHeader(&tar.Header{Name: "more", Mode: 0o600, Size: 5, Typeflag: tar.TypeReg}),
			second(tw.Write([]byte("more\n"))), tw.Close())
	})
	if err != nil {
		t.Fatal(err)
	}
	img, err := build.New(base, layer, build.Options{Changes: []string{`CMD ["cat", "/more", "/etc/base"]`}})
	if err != nil {
		t.Fatal(err)
	}
	// By the daemon's own copy of the layer below, and by the whole of it.
	added, err := i.Add(ctx, "added:1", img)
	if err != nil || added.Name != "added:1" || len(added.Layers) != 2 {
		t.Fatalf("Add: %+v, %v", added, err)
	}
	if out := e.Docker(t, "run", "--rm", "added:1"); out != "more\nbase" {
		t.Errorf("the image says %q", out)
	}
	to, err := reference.Parse("docker://"+ref, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := source.Write(ctx, to, img, image.SourceOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := i.Remove(ctx, "added:1", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := i.Pull(ctx, ref, image.PullOptions{Policy: image.PullNever}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("it was removed: %v", err)
	}
	stages := map[image.Stage]bool{}
	got, err := i.Pull(ctx, ref, image.PullOptions{Progress: func(p image.Progress) { stages[p.Stage] = true }})
	// Add's output has no manifest; containerd makes one, and goes by that.
	same := got.Digest == added.Digest || e.store && slices.Equal(got.Layers, added.Layers)
	if err != nil || len(got.RepoDigests) != 1 || !same || !stages[image.StageDone] {
		t.Fatalf("Pull: %+v, %v, %v", got, stages, err)
	}
	if err := i.Tag(ctx, ref, "tagged:2"); err != nil {
		t.Fatal(err)
	}
	d, err := i.Inspect(ctx, "tagged:2")
	if err != nil || len(d.Names) != 2 || len(d.LayerList) != 2 || d.Config.Cmd[0] != "cat" || len(d.History) == 0 {
		t.Errorf("Inspect: %+v, %v", d, err)
	}
	removed, freed, err := i.Prune(ctx, true, func(digest string) bool { return digest == e.digest })
	if err != nil || len(removed) != 1 || removed[0].Digest != got.Digest || freed == 0 {
		t.Errorf("Prune: %+v, %d, %v", removed, freed, err)
	}
}

func second[T any](_ T, err error) error { return err }
