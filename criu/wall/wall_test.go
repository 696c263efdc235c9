package wall_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/wall"
	"github.com/agentbox/agentbox/criu/wall/walltest"
	"github.com/agentbox/agentbox/internal/fault"
)

// archived is a checkpoint that Podman 4.3.1 wrote: its images, and the spec of its container.
func archived(t testing.TB) (images string, spec *wall.Spec) {
	t.Helper()
	return unpacked(t, "../../runtime/portable/testdata/podman-4.3.1.tar.zst")
}

// unpacked is a checkpoint's archive.
func unpacked(t testing.TB, path string) (images string, spec *wall.Spec) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	z, err := zstd.NewReader(f)
	must(t, err)
	defer z.Close()
	dir := t.TempDir()
	for in := tar.NewReader(z); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		name := filepath.Base(h.Name)
		switch {
		case h.Typeflag != tar.TypeReg:
			continue
		case h.Name == "spec.dump":
			name = "../config.json"
		case filepath.Dir(h.Name) != "checkpoint":
			continue
		}
		data, err := io.ReadAll(in)
		must(t, err)
		images = filepath.Join(dir, "images")
		must(t, os.MkdirAll(images, 0o700))
		must(t, os.WriteFile(filepath.Join(images, name), data, 0o600))
	}
	spec, err = wall.Read(dir)
	must(t, err)
	return images, spec
}

// dumped is a container of ours with what Podman's has not: threads that share a filter, no
// new privileges, a read-only bind mount.
func dumped(t testing.TB) (images string, spec *wall.Spec) {
	t.Helper()
	bound := t.TempDir()
	b := criutest.New(t, []string{
		"sh", "-c", "exec 7</bin/busybox; sleep 1000 & echo up > /up; while :; do sleep 60; done",
	}, func(s *specs.Spec) {
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/bound", Type: "bind", Source: bound, Options: []string{"rbind", "ro", "rprivate"},
		})
		s.Process.NoNewPrivileges = true
		s.Linux.Seccomp = &specs.LinuxSeccomp{
			DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32},
			Syscalls: []specs.LinuxSyscall{{Names: []string{"mount", "unshare", "bpf"}, Action: specs.ActErrno}},
		}
	})
	b.Start(nil)
	b.Until("it is up", func() bool {
		_, err := os.Stat(filepath.Join(b.Files, "up"))
		return err == nil
	})
	if out, err := b.Do("checkpoint", "--leave-running", "--file-locks", "--image-path", b.Images, "--work-path",
		b.Work, b.ID); err != nil {
		t.Fatalf("checkpoint: %v: %s", err, out)
	}
	spec, err := wall.Read(b.Bundle)
	must(t, err)
	return b.Images, spec
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestJudge(t *testing.T) {
	left := map[string]bool{} // forgeries of images that no container has had
	for _, f := range walltest.Forgeries(walltest.Victims{
		File: "/victim/file", Dir: "/victim", Cgroup: "/victim", Bound: "/bound",
	}) {
		left[f.Name] = true
	}
	for name, take := range map[string]func(testing.TB) (string, *wall.Spec){"podman": archived, "runc": dumped} {
		t.Run(name, func(t *testing.T) {
			images, spec := take(t)
			clean := filepath.Join(t.TempDir(), "clean")
			must(t, os.CopyFS(clean, os.DirFS(images)))
			must(t, wall.Judge(clean, spec, ""))
			before := read(t, clean)
			must(t, wall.Judge(clean, spec, "")) // twice is as once
			if after := read(t, clean); !slices.Equal(before, after) {
				t.Error("it was written anew twice")
			}
			v := walltest.Victims{File: "/victim/file", Dir: "/victim", Cgroup: "/victim"}
			for _, m := range spec.Mounts {
				if slices.Contains(m.Options, "ro") && m.Type == "bind" {
					v.Bound = m.Destination
				}
			}
			for _, f := range walltest.Forgeries(v) {
				t.Run(f.Name, func(t *testing.T) {
					if forged(t, images, spec, v, f) {
						delete(left, f.Name)
					}
				})
			}
		})
	}
	for name := range left {
		t.Errorf("%s: neither container has such an image", name)
	}
}

// forged judges forged images. It reports whether there was an image to forge.
func forged(t *testing.T, images string, spec *wall.Spec, v walltest.Victims, f walltest.Forgery) bool {
	dir := filepath.Join(t.TempDir(), "images")
	must(t, os.CopyFS(dir, os.DirFS(images)))
	if err := f.Forge(dir, v); errors.Is(err, fs.ErrNotExist) {
		return false
	} else if err != nil {
		t.Fatal(err)
	}
	err := wall.Judge(dir, spec, "")
	refused := (*wall.Refusal)(nil)
	switch {
	case f.Image == "":
		if err != nil {
			t.Errorf("it is not for this wall: %v", err)
		}
	case f.Damage:
		if !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%v", err)
		}
	case !errors.As(err, &refused) || !errors.Is(err, fault.ErrDenied) || !strings.HasPrefix(refused.Image, f.Image):
		t.Errorf("not refused, or for another thing: %v", err)
	}
	return true
}

// read returns the image of cgroups.
func read(t testing.TB, dir string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.img"))
	must(t, err)
	return data
}

// The mounts of a container that may mount are judged as its own.
func TestMounter(t *testing.T) {
	b := criutest.New(t, []string{
		"sh", "-c", "mkdir /a /b /p; mount -t tmpfs none /a; mkdir /a/x; mount --bind /a/x /b; mount -t proc proc /p; echo up > /up; while :; do sleep 60; done",
	}, func(s *specs.Spec) {
		for _, set := range []*[]string{
			&s.Process.Capabilities.Bounding, &s.Process.Capabilities.Effective, &s.Process.Capabilities.Permitted,
		} {
			*set = append(*set, "CAP_SYS_ADMIN")
		}
		s.Linux.MaskedPaths, s.Linux.ReadonlyPaths = nil, nil
	})
	for _, a := range []string{"mkdir", "mount"} {
		must(t, os.Symlink("busybox", filepath.Join(b.Files, "bin", a)))
	}
	b.Start(nil)
	b.Until("it is up", func() bool {
		_, err := os.Stat(filepath.Join(b.Files, "up"))
		return err == nil
	})
	if out, err := b.Do("checkpoint", "--leave-running", "--file-locks", "--image-path", b.Images, "--work-path",
		b.Work, b.ID); err != nil {
		t.Fatalf("checkpoint: %v: %s", err, out)
	}
	spec, err := wall.Read(b.Bundle)
	must(t, err)
	must(t, wall.Judge(b.Images, spec, ""))
	allowed := []string{"a tmpfs that the container has not", "a second proc"}
	v := walltest.Victims{File: "/victim/file", Dir: "/victim", Cgroup: "/victim"}
	for _, f := range walltest.Forgeries(v) {
		switch {
		case f.Image != "mountpoints", strings.HasPrefix(f.Name, "what is"): // it masks nothing
		case slices.Contains(allowed, f.Name):
			f.Image = ""
			fallthrough
		default:
			t.Run(f.Name, func(t *testing.T) { forged(t, b.Images, spec, v, f) })
		}
	}
	spec.Process.Capabilities.Bounding = nil
	if err := wall.Judge(b.Images, spec, ""); err == nil {
		t.Error("a container that may not mount has them, too")
	}
}

// A cgroup.img's properties of the container's own cgroup are dropped; those of cgroups that
// processes have made below stay, and move to where the container's is now.
func TestCgroup(t *testing.T) {
	images, spec := archived(t)
	path := filepath.Join(images, "cgroup.img")
	change := func(fn func(*cgroup.CgroupEntry)) *cgroup.CgroupEntry {
		t.Helper()
		list, err := walltest.Entries(path)
		must(t, err)
		e := &cgroup.CgroupEntry{}
		must(t, proto.Unmarshal(list[0], e))
		if fn != nil {
			fn(e)
			data, err := proto.Marshal(e)
			must(t, err)
			must(t, walltest.WriteEntries(path, [][]byte{data}))
		}
		return e
	}
	at := ""
	was := change(func(e *cgroup.CgroupEntry) {
		for _, s := range e.GetSets() {
			for _, m := range s.GetCtls() {
				at = m.GetPath()
				m.Path = proto.String(at + "/below")
			}
		}
		for _, c := range e.GetControllers() {
			d := c.GetDirs()[0]
			d.DirPerms = &cgroup.CgroupPerms{Mode: proto.Uint32(0o40777), Uid: proto.Uint32(1), Gid: proto.Uint32(1)}
			d.Children = append(d.Children, &cgroup.CgroupDirEntry{DirName: proto.String("below"),
				Properties: []*cgroup.CgroupPropEntry{
					{Name: proto.String("memory.limit_in_bytes"), Value: proto.String("4096")},
					{Name: proto.String("release_agent"), Value: proto.String("/bin/true")},
					{Name: proto.String("cgroup.kill"), Value: proto.String("1")},
				}})
		}
	})
	must(t, wall.Judge(images, spec, "/own/place"))
	is := change(nil)
	if len(is.GetSets()) == 0 || len(is.GetSets()) > len(was.GetSets()) {
		t.Errorf("sets: %v", is.GetSets())
	}
	for _, s := range is.GetSets() {
		for _, m := range s.GetCtls() {
			if m.GetPath() != "/own/place/below" {
				t.Errorf("%s: %s", m.GetName(), m.GetPath())
			}
		}
	}
	for _, c := range is.GetControllers() {
		d := c.GetDirs()[0]
		if d.GetDirName() != "own/place" || d.DirPerms != nil || len(d.GetProperties()) != 0 {
			t.Errorf("%v: %v", c.GetCnames(), d)
		}
		if below := d.GetChildren()[0]; len(below.GetProperties()) != 1 ||
			below.GetProperties()[0].GetName() != "memory.limit_in_bytes" {
			t.Errorf("%v: below: %v", c.GetCnames(), below)
		}
	}
}

// Processes that may take new privileges may not in a container that says so.
func TestNoNewPrivileges(t *testing.T) {
	images, spec := dumped(t)
	path := filepath.Join(images, "core-1.img")
	whole, err := os.ReadFile(path)
	must(t, err)
	set := protowire.AppendVarint(protowire.AppendTag(nil, 18, protowire.VarintType), 1)
	if bytes.Count(whole, set) != 1 {
		t.Fatal("it does not say so once")
	}
	forged := bytes.Replace(whole, set, append(bytes.Clone(set[:len(set)-1]), 0), 1)
	must(t, os.WriteFile(path, forged, 0o600))
	must(t, wall.Judge(images, spec, ""))
	now, err := walltest.Entries(path)
	must(t, err)
	e := &criucore.CoreEntry{}
	must(t, proto.Unmarshal(now[0], e))
	if more := e.GetThreadCore().GetCreds().ProtoReflect().GetUnknown(); !bytes.Contains(more, set) {
		t.Errorf("no_new_privs: %x", more)
	}
}
