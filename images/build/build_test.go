package build

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestNew(t *testing.T) {
	base, err := random.Image(1000, 3) // of Docker's media types
	if err != nil {
		t.Fatal(err)
	}
	build := func() v1.Image {
		l, err := Write(t.Context(), filepath.Join(t.TempDir(), "layer"), func(_ context.Context, w io.Writer) error {
			_, err := w.Write(make([]byte, 10240)) // an empty archive
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		img, err := New(base, l, Options{
			Created: time.Unix(1000, 5), By: "me", Message: "why", Changes: []string{`CMD ["a"]`},
		})
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	img := build()
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range m.Layers {
		if l.MediaType != types.OCILayer {
			t.Errorf("a layer of type %s", l.MediaType)
		}
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if len(cfg.RootFS.DiffIDs) != 4 || len(cfg.History) != 4 || cfg.History[3].CreatedBy != "me" ||
		cfg.Created.Unix() != 1000 || cfg.Config.Cmd[0] != "a" {
		t.Errorf("%+v", cfg)
	}
	one, _ := img.Digest()
	if two, err := build().Digest(); err != nil || one != two {
		t.Errorf("%v and %v, %v", one, two, err)
	}
}

func TestWriteFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "layer")
	_, err := Write(t.Context(), path, func(context.Context, io.Writer) error { return os.ErrClosed })
	if _, there := os.Stat(path); !errors.Is(err, os.ErrClosed) || !errors.Is(there, os.ErrNotExist) {
		t.Errorf("%v, %v", err, there)
	}
}

func TestChange(t *testing.T) {
	base := v1.Config{
		Cmd: []string{"old"}, Entrypoint: []string{"/e"}, Env: []string{"PATH=/bin", "A=1"}, WorkingDir: "/w",
	}
	for line, want := range map[string]func(*v1.Config){
		`CMD ["a", "b c"]`:     func(c *v1.Config) { c.Cmd = []string{"a", "b c"} },
		`cmd echo "$HOME" 'x'`: func(c *v1.Config) { c.Cmd = []string{"/bin/sh", "-c", `echo "$HOME" 'x'`} },
		`CMD []`:               func(c *v1.Config) { c.Cmd = []string{} },
		`ENTRYPOINT ["/x"]`:    func(c *v1.Config) { c.Entrypoint, c.Cmd = []string{"/x"}, nil },
		`ENV A=2 B="x y" C='$Z' D=a\ b=`: func(c *v1.Config) {
			c.Env = []string{"PATH=/bin", "A=2", "B=x y", "C=$Z", "D=a b="}
		},
		`ENV A two words`:     func(c *v1.Config) { c.Env = []string{"PATH=/bin", "A=two words"} },
		`LABEL a.b=c d=`:      func(c *v1.Config) { c.Labels = map[string]string{"a.b": "c", "d": ""} },
		`USER 1000:staff`:     func(c *v1.Config) { c.User = "1000:staff" },
		`WORKDIR sub/../../x`: func(c *v1.Config) { c.WorkingDir = "/x" },
		`WORKDIR "/a b"`:      func(c *v1.Config) { c.WorkingDir = "/a b" },
		`EXPOSE 80 53/udp`: func(c *v1.Config) {
			c.ExposedPorts = map[string]struct{}{"80/tcp": {}, "53/udp": {}}
		},
		`VOLUME ["/a", "/b/"]`: func(c *v1.Config) { c.Volumes = map[string]struct{}{"/a": {}, "/b": {}} },
		`VOLUME /a /b`:         func(c *v1.Config) { c.Volumes = map[string]struct{}{"/a": {}, "/b": {}} },
		`STOPSIGNAL SIGQUIT`:   func(c *v1.Config) { c.StopSignal = "SIGQUIT" },
	} {
		got, exp := *base.DeepCopy(), *base.DeepCopy()
		want(&exp)
		if err := Change(&got, []string{line}); err != nil {
			t.Errorf("%s: %v", line, err)
		}
		if d := cmp.Diff(exp, got); d != "" {
			t.Errorf("%s: %s", line, d)
		}
	}
	both := *base.DeepCopy()
	if err := Change(&both, []string{`CMD ["new"]`, `ENTRYPOINT ["/x"]`}); err != nil ||
		len(both.Cmd) != 1 || both.Cmd[0] != "new" {
		t.Errorf("%v, %v", both.Cmd, err)
	}
	for _, line := range []string{
		"", "RUN x", "FROM x", "CMD", "ENV A", "ENV =x", `ENV A="x`, "LABEL x", "USER a b", "WORKDIR /a /b", "EXPOSE x",
		"EXPOSE 1/icmp", "VOLUME a", "VOLUME /", "STOPSIGNAL NO",
	} {
		cfg := base
		if err := Change(&cfg, []string{line}); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", line, err)
		}
	}
}
