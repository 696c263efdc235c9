package portable

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// refusal reports whether an error is one that a hostile archive may be given.
func refusal(err error) bool {
	return errors.Is(err, fault.ErrCorrupt) || errors.Is(err, fault.ErrUnsupported) || errors.Is(err, fault.ErrDenied)
}

// FuzzArchive reads archives of every kind. Whatever they are, an import leaves
// plain files in the directory for images, nothing in its scratch directory,
// and trees that are trees.
func FuzzArchive(f *testing.F) {
	_, c := full(f)
	f.Add(exported(f, c, Options{Compress: None}))
	f.Add(exported(f, c, Options{}))
	_, other := listed(f)
	f.Add(exported(f, other, Options{Compress: None}))
	f.Add(exported(f, c, Options{Compress: Gzip}))
	f.Add(podmanArchive(f))
	for _, bad := range hostile(f) {
		if len(bad.archive) < 1<<20 {
			f.Add(bad.archive)
		}
	}
	parent := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		dir, err := os.MkdirTemp(parent, "x")
		must(t, err)
		defer os.RemoveAll(dir)
		m := &memory{data: map[string][]byte{}, images: map[string][]byte{}, dir: filepath.Join(dir, "criu")}
		scratch := filepath.Join(dir, "scratch")
		must(t, errors.Join(os.Mkdir(m.dir, 0o700), os.Mkdir(scratch, 0o700)))
		a, err := Open(t.Context(), bytes.NewReader(data), OpenOptions{Scratch: scratch, MaxBytes: 16 << 20})
		if err == nil {
			_, err = a.Import(t.Context(), m, ImportOptions{})
			must(t, a.Close())
		}
		if err != nil && !refusal(err) {
			t.Errorf("refused with %v", err)
		}
		if list, _ := os.ReadDir(scratch); len(list) > 0 {
			t.Errorf("scratch: %v", list)
		}
		images, readErr := os.ReadDir(m.dir)
		must(t, readErr)
		for _, e := range images {
			if !e.Type().IsRegular() {
				t.Errorf("%s is %v", e.Name(), e.Type())
			}
		}
		if list, _ := os.ReadDir(dir); len(list) != 2 {
			t.Errorf("beside them: %v", list)
		}
		if err != nil {
			return
		}
		for n := range m.trees {
			for _, e := range m.entries(t, n) {
				must(t, overlay.CheckEntry(e))
			}
		}
	})
}

func FuzzDeleted(f *testing.F) {
	for _, seed := range []string{
		`["/del","/dir"]`, `["/../../etc"]`, `["etc"]`, `["/"]`, `["/a/./b"]`, `["/a","/a"]`, `{"a":1}`, `null`,
		`["/\u0000"]`, "[]", `["/b","/a/x","/a"]`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := parseDeleted(data)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		for i, p := range list {
			if p == "" || p[0] == '/' || slices.ContainsFunc(strings.Split(p, "/"), func(s string) bool {
				return s == "" || s == "." || s == ".."
			}) {
				t.Errorf("%q leads elsewhere", p)
			}
			if i > 0 && overlay.ComparePaths(list[i-1], p) >= 0 {
				t.Errorf("%q after %q", p, list[i-1])
			}
		}
	})
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(plainConfig))
	f.Add([]byte(`{"id":"1","name":"n","namedVolumes":[{"volumeName":"../x","dest":"/d"}],"newPortMappings":[{"container_port":65535,"host_port":65535,"range":65535,"protocol":"tcp,udp"}]}`))
	_, c := full(f)
	_, content := members(f, exported(f, c, Options{Compress: None}))
	f.Add(content[configName])
	spec, err := parseSpec([]byte(plainSpec))
	must(f, err)
	f.Fuzz(func(t *testing.T, data []byte) {
		conf, err := parseConfig(data)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		for _, name := range facts(conf, spec).Volumes {
			if !plain(name) {
				t.Errorf("volume %q", name)
			}
		}
	})
}

func FuzzSpec(f *testing.F) {
	f.Add([]byte(plainSpec))
	f.Add([]byte(`{"process":{"args":["a\u0000"],"cwd":"/"}}`))
	f.Add([]byte(`{"process":{"args":["a"],"cwd":"/"},"linux":{"resources":{"cpu":{"quota":1,"period":0},"memory":{}}},"mounts":[{"destination":"x"}]}`))
	_, c := full(f)
	_, content := members(f, exported(f, c, Options{Compress: None}))
	f.Add(content[specName])
	conf, err := parseConfig([]byte(plainConfig))
	must(f, err)
	f.Fuzz(func(t *testing.T, data []byte) {
		spec, err := parseSpec(data)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		got := facts(conf, spec)
		if !filepath.IsAbs(got.Workdir) || len(got.Args) == 0 || strings.ContainsAny(got.Hostname, "/\x00\n") {
			t.Errorf("%+v", got)
		}
	})
}

func FuzzManifest(f *testing.F) {
	_, c := full(f)
	f.Add(c.Manifest)
	f.Add([]byte(`{"files":[{"digest":"x"}]}`))
	f.Add([]byte(`{"files":[{"entries":-1}],"volumes":[{"name":"../x"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseManifest(data)
		if err != nil {
			if !refusal(err) {
				t.Error(err)
			}
			return
		}
		if m.total() < 0 {
			t.Errorf("a total of %d", m.total())
		}
		for i := range m.trees() {
			if strings.Contains(m.archive(i), "..") && !strings.HasPrefix(m.archive(i), volumesDir+"/") ||
				strings.Count(m.archive(i), "/") > 1 {
				t.Errorf("archive %q", m.archive(i))
			}
		}
	})
}

// FuzzImages takes what Podman's archive has apart and together again.
func FuzzImages(f *testing.F) {
	m, _, _ := imported(f, podmanArchive(f), OpenOptions{}, ImportOptions{})
	for name, data := range m.images {
		switch {
		case strings.HasPrefix(name, "mountpoints-"):
			f.Add(data, byte(0))
		case strings.HasPrefix(name, "files.img"):
			f.Add(data, byte(1))
		case strings.HasPrefix(name, "core-1"):
			f.Add(data, byte(2))
		case strings.HasPrefix(name, "ids-1"):
			f.Add(data, byte(3))
		}
	}
	parent := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte, kind byte) {
		dir, err := os.MkdirTemp(parent, "x")
		must(t, err)
		defer os.RemoveAll(dir)
		name := []string{"mountpoints-1.img", "files.img", "core-1.img", "ids-1.img"}[kind%4]
		must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		if _, err := adaptImages(dir, nil, Facts{}); err != nil && !refusal(err) {
			t.Error(err)
		}
		if err := checkImages(dir); err != nil && !refusal(err) {
			t.Error(err)
		}
		if _, _, err := rootMode(dir); err != nil && !refusal(err) {
			t.Error(err)
		}
	})
}
