package engine_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar"
	"github.com/agentbox/agentbox/runtime"
)

// listed are the paths that List finds, with what is mounted there.
func (r *rig) listed(t *testing.T, ref, path string, opts runtime.ListOptions) (list []string, err error) {
	t.Helper()
	err = r.List(ctx, ref, path, opts, func(f runtime.FileEntry) error {
		if f.Type == "" || len(f.Mode) != 4 || f.Mtime == "" {
			t.Errorf("%+v", f)
		}
		if f.Mount != "" {
			f.Path += ":" + f.Mount
		}
		list = append(list, f.Path)
		return nil
	})
	return list, err
}

// archive is what CopyFrom writes: names, with what is in files.
func (r *rig) archive(t *testing.T, ref, path string) (seen []string, err error) {
	t.Helper()
	var b bytes.Buffer
	err = r.CopyFrom(ctx, ref, path, &b)
	for in := tar.NewReader(&b); ; {
		h, e := in.Next()
		if e != nil {
			return seen, err
		}
		data, e := io.ReadAll(in)
		if e != nil {
			return seen, errors.Join(err, e)
		}
		seen = append(seen, strings.TrimSuffix(h.Name+"="+string(data)+h.Linkname, "="))
	}
}

func TestBrowse(t *testing.T) {
	r := newRig(t, nil)
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "box", Image: "base", Args: []string{"sleep", "1000"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Mounts: []runtime.Mount{
			{Type: "volume", Source: "one", Target: "/one"}, {Type: "volume", Source: "two", Target: "/d/two"},
			{Type: "tmpfs", Target: "/d/scratch"},
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	up := func(name string) string { return filepath.Join(sb.Upperdir, name) }
	volume := filepath.Join(r.root, "memory/volumes/one/data")
	for _, err := range []error{
		os.MkdirAll(up("d/two"), 0o755), os.MkdirAll(up("d/scratch"), 0o755), os.Mkdir(up("one"), 0o755),
		os.Mkdir(up("proc"), 0o755), os.WriteFile(up("proc/x"), nil, 0o600),
		os.WriteFile(up("d/f"), []byte("old"), 0o640), os.Link(up("d/f"), up("d/g")), os.Chown(up("d/f"), 7, 8),
		os.WriteFile(up("d/scratch/hidden"), nil, 0o600), os.Symlink("/d/f", up("l")), os.Symlink("..", up("d/up")),
		os.WriteFile(up("odd\xff\n"), nil, 0o600), unix.Mknod(up("d/sock"), unix.S_IFSOCK|0o600, 0),
		os.WriteFile(filepath.Join(volume, "v"), []byte("volume"), 0o600),
		unix.Mknod(up("bin"), unix.S_IFCHR, 0), // deleted
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	if err := r.Stop(ctx, "box", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "with", WithVolumes: true}); err != nil {
		t.Fatal(err)
	}
	// The volumes of the second are not in it.
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "plain"}); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.WriteFile(up("d/f"), []byte("newer"), 0o600), os.Remove(up("d/g")), os.Remove(up("bin")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}

	for _, c := range []struct {
		ref, path string
		opts      runtime.ListOptions
		want      string
	}{
		{"box@plain", "/d", runtime.ListOptions{}, "/d /d/f /d/g /d/scratch:tmpfs /d/sock /d/two:volume /d/up"},
		{"box@with", "d/", runtime.ListOptions{}, "/d /d/f /d/g /d/scratch:tmpfs /d/sock /d/two /d/up"},
		{"box@plain", "/d/up/d/../l", runtime.ListOptions{}, "/l"},
		{"box@plain", "/one", runtime.ListOptions{}, "/one:volume"},
		{"box@with", "/one", runtime.ListOptions{}, "/one /one/v"},
		{"box@with", "/one/v", runtime.ListOptions{}, "/one/v"},
		{"box@with", "/", runtime.ListOptions{Recursive: true},
			"/ /d /d/f /d/g /d/scratch:tmpfs /d/sock /d/two /d/up /l /odd\xff\n /one /one/v /proc:proc"},
		{"box@with", "/", runtime.ListOptions{Recursive: true, Name: "[fv]"},
			"/ /d/f /d/scratch:tmpfs /one/v /proc:proc"},
		{"box@with", "/d", runtime.ListOptions{Type: "symlink"}, "/d /d/scratch:tmpfs /d/up"},
		{"box@image", "/", runtime.ListOptions{Recursive: true}, "/ /bin"},
		{"box", "/d", runtime.ListOptions{Name: "f"}, "/d /d/f"},
	} {
		got, err := r.listed(t, c.ref, c.path, c.opts)
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%s %s %+v: %q, %v", c.ref, c.path, c.opts, got, err)
		}
	}
	// The list of the sandbox itself is the same, but for what is mounted.
	live, err := r.listed(t, "box", "/", runtime.ListOptions{Recursive: true})
	if err != nil || !slices.Contains(live, "/d/f") || slices.Contains(live, "/d/g") {
		t.Errorf("%q, %v", live, err)
	}

	if got, err := r.archive(t, "box@with", "/one/."); err != nil || strings.Join(got, " ") != "./ ./v=volume" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := r.archive(t, "box@with", "/d/f"); err != nil || strings.Join(got, " ") != "f=old" {
		t.Errorf("%q, %v", got, err)
	}
	got, err := r.archive(t, "box@plain", "/d")
	var part *cptar.Partial
	if !errors.As(err, &part) || len(part.Report.Skipped) != 3 ||
		strings.Join(got, " ") != "d/ d/f=old d/g=d/f d/scratch/ d/two/ d/up=.." {
		t.Errorf("%q, %v", got, err)
	}

	st, err := r.Stat(ctx, "box@plain", "/d/f")
	if err != nil || st.Name != "f" || st.Size != 3 || fs.FileMode(st.Mode) != 0o640 || st.Dir || st.Link != "" {
		t.Errorf("%+v, %v", st, err)
	}
	if st, err = r.Stat(ctx, "box@plain", "/l"); err != nil || st.Link != "/d/f" || st.Size != 4 ||
		fs.FileMode(st.Mode)&fs.ModeSymlink == 0 {
		t.Errorf("%+v, %v", st, err)
	}
	if st, err = r.Stat(ctx, "box@plain", "/d/up/"); err != nil || !st.Dir {
		t.Errorf("%+v, %v", st, err)
	}

	refused(t, r)
}

// refused asks for what a recorded state does not have.
func refused(t *testing.T, r *rig) {
	t.Helper()
	for _, c := range []struct {
		ref, path string
		want      error
		text      string
	}{
		{"box@plain", "/none", runtime.ErrNotFound, `"/none"`},
		{"box@plain", "/bin", runtime.ErrNotFound, ""},
		{"box@plain", "/d/f/", runtime.ErrNotFound, "not a directory"},
		{"box@plain", "/one/v", runtime.ErrNotFound, `mount (volume) at "/one"`},
		{"box@plain", "/d/scratch/hidden", runtime.ErrNotFound, "mount (tmpfs)"},
		{"box@plain", "/proc/x", runtime.ErrNotFound, "mount (proc)"},
		{"box@", "/", runtime.ErrInvalid, "names no checkpoint"},
		{"box@nope", "/", runtime.ErrNotFound, "nope"},
		{"absent@plain", "/", runtime.ErrNotFound, "absent"},
	} {
		_, serr := r.Stat(ctx, c.ref, c.path)
		_, lerr := r.listed(t, c.ref, c.path, runtime.ListOptions{})
		cerr := r.CopyFrom(ctx, c.ref, c.path, io.Discard)
		for verb, err := range map[string]error{"stat": serr, "ls": lerr, "cp": cerr} {
			var own *runtime.Error
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || !errors.As(err, &own) ||
				own.Op != verb {
				t.Errorf("%s %s %s: %v", verb, c.ref, c.path, err)
			}
		}
	}
	for _, path := range []string{"/one", "/d/scratch", "/proc"} {
		if err := r.CopyFrom(ctx, "box@plain", path, io.Discard); !errors.Is(err, runtime.ErrNotFound) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if err := r.CopyFrom(ctx, "box@plain", "/d/sock", io.Discard); !errors.Is(err, runtime.ErrUnsupported) {
		t.Error(err)
	}
	if err := r.CopyTo(ctx, "box@plain", "/d", strings.NewReader("")); !errors.Is(err, runtime.ErrInvalid) {
		t.Error(err)
	}
	for _, opts := range []runtime.ListOptions{{Name: "[a"}, {Type: "whiteout"}} {
		if _, err := r.listed(t, "box@plain", "/", opts); !errors.Is(err, runtime.ErrInvalid) {
			t.Errorf("%+v: %v", opts, err)
		}
	}
	own := errors.New("own")
	if err := r.List(ctx, "box@plain", "/", runtime.ListOptions{}, func(runtime.FileEntry) error {
		return own
	}); !errors.Is(err, own) {
		t.Error(err)
	}
	ended, cancel := context.WithCancel(ctx)
	if err := r.List(ended, "box@plain", "/", runtime.ListOptions{Recursive: true}, func(runtime.FileEntry) error {
		cancel()
		return nil
	}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestBrowseDamage flips bits: what is read is right, or the error says that it is damaged.
func TestBrowseDamage(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	text := strings.Repeat("precious ", 1000)
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "one"}); err != nil {
		t.Fatal(err)
	}
	packs, err := filepath.Glob(filepath.Join(r.root, "packs/*/*"))
	if err != nil || len(packs) != 1 {
		t.Fatal(packs, err)
	}
	whole, err := os.ReadFile(packs[0])
	if err != nil {
		t.Fatal(err)
	}
	damaged := 0
	for i := 0; i < len(whole); i += len(whole)/30 + 1 {
		bad := slices.Clone(whole)
		bad[i] ^= 1
		if err := os.WriteFile(packs[0], bad, 0o600); err != nil {
			t.Fatal(err)
		}
		list, lerr := r.listed(t, "box@one", "/", runtime.ListOptions{})
		data, cerr := r.archive(t, "box@one", "/a")
		switch {
		case lerr == nil && strings.Join(list, " ") != "/ /a /bin":
			t.Errorf("byte %d: %q", i, list)
		case lerr != nil && !errors.Is(lerr, runtime.ErrCorrupt):
			t.Errorf("byte %d: %v", i, lerr)
		case cerr == nil && (len(data) != 1 || data[0] != "a="+text):
			t.Errorf("byte %d: %.100q", i, data)
		case cerr != nil && !errors.Is(cerr, runtime.ErrCorrupt):
			t.Errorf("byte %d: %v", i, cerr)
		}
		if lerr != nil || cerr != nil {
			damaged++
		}
	}
	if damaged == 0 {
		t.Error("no damage was found")
	}
}
