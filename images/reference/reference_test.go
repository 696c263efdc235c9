package reference

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agentbox/agentbox/internal/fault"
)

var same = cmpopts.IgnoreUnexported(Reference{})

const digestA = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func TestParse(t *testing.T) {
	for _, c := range []struct{ in, def, want, familiar string }{
		{"debian", "", "docker.io/library/debian:latest", "debian"},
		{"debian:12", "", "docker.io/library/debian:12", "debian:12"},
		{"docker://debian:12", "", "docker.io/library/debian:12", "debian:12"},
		{"index.docker.io/library/debian", "", "docker.io/library/debian:latest", "debian"},
		{"me/web", "", "docker.io/me/web:latest", "me/web"},
		{"ghcr.io/x/y@" + digestA, "", "ghcr.io/x/y@" + digestA, "ghcr.io/x/y@" + digestA},
		{"ghcr.io/x/y:1@" + digestA, "", "ghcr.io/x/y:1@" + digestA, "ghcr.io/x/y:1@" + digestA},
		{"localhost:5000/web:latest", "", "localhost:5000/web:latest", "localhost:5000/web"},
		{"debian", "reg.corp:5000/hub/", "reg.corp:5000/hub/debian:latest", "debian"},
		{"docker.io/debian", "reg.corp", "docker.io/library/debian:latest", "docker.io/library/debian"},
		{"reg.corp/a.b/c", "reg.corp", "reg.corp/a.b/c:latest", "reg.corp/a.b/c"},
		{"docker://oci:5000/web", "", "docker://oci:5000/web:latest", "docker://oci:5000/web"},
		{"docker-daemon:web:1", "", "docker-daemon:docker.io/library/web:1", "docker-daemon:docker.io/library/web:1"},
		{"docker-daemon:" + digestA, "", "docker-daemon:" + digestA, "docker-daemon:" + digestA},
		{"docker-archive:/tmp/a.tar", "", "docker-archive:/tmp/a.tar", "docker-archive:/tmp/a.tar"},
		{
			"docker-archive:/tmp/a.tar:web", "", "docker-archive:/tmp/a.tar:docker.io/library/web:latest",
			"docker-archive:/tmp/a.tar:docker.io/library/web:latest",
		},
		{"oci:/x/../y", "", "oci:/y", "oci:/y"},
		{"oci:/y:v1", "", "oci:/y:v1", "oci:/y:v1"},
		{"oci:/y:docker.io/library/web:v1", "", "oci:/y:docker.io/library/web:v1", "oci:/y:docker.io/library/web:v1"},
		{"oci:/y:@" + digestA, "", "oci:/y:@" + digestA, "oci:/y:@" + digestA},
		{"oci-archive:/y.tar:v1", "", "oci-archive:/y.tar:v1", "oci-archive:/y.tar:v1"},
		{"dir:/a:b", "", "dir:/a:b", "dir:/a:b"},
		{
			"containers-storage:debian", "", "containers-storage:docker.io/library/debian:latest",
			"containers-storage:docker.io/library/debian:latest",
		},
		{"bootstrap:debian/bookworm", "", "bootstrap:debian/bookworm", "bootstrap:debian/bookworm"},
		{
			"bootstrap:debian/bookworm?include=python3,git,git&include=apt&variant=minbase", "",
			"bootstrap:debian/bookworm?include=apt,git,python3&variant=minbase",
			"bootstrap:debian/bookworm?include=apt,git,python3&variant=minbase",
		},
		{
			"bootstrap:debian/sid?mirror=http://h:1/debian", "", "bootstrap:debian/sid?mirror=http://h:1/debian",
			"bootstrap:debian/sid?mirror=http://h:1/debian",
		},
	} {
		r, err := Parse(c.in, c.def)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		if got := r.String(); got != c.want {
			t.Errorf("%s is %s, want %s", c.in, got, c.want)
		}
		if got := r.Familiar(); got != c.familiar {
			t.Errorf("%s is shown as %s, want %s", c.in, got, c.familiar)
		}
		again, err := Parse(r.Familiar(), c.def)
		if err != nil || !cmp.Equal(again, r, same) {
			t.Errorf("%s is read again as %v, %v", r.Familiar(), again, err)
		}
	}
}

func TestParseBad(t *testing.T) {
	for _, in := range []string{
		"", ":", "Debian", "debian:", "a b", "docker://", "https://x/y", digestA, "web@sha256:1", "web@",
		"x\n", "/abs", "../up", "-x",
		"oci:", "oci:/x:", "oci:/x:@sha256:1", "oci:x\x00y", "dir:", "docker-archive:", "docker-archive:/x:Y",
		"docker-daemon:", "containers-storage:",
		"bootstrap:", "bootstrap:debian", "bootstrap:debian/x/y", "bootstrap:--x/y", "bootstrap:debian/x?inclde=a",
		"bootstrap:debian/x?include=--hook",
		"bootstrap:debian/x?variant=big", "bootstrap:debian/x?mirror=-x", "bootstrap:debian/x?mirror=/etc/passwd",
		"bootstrap:debian/x?epoch=-1", "bootstrap:debian/x?epoch=1&epoch=2",
		"bootstrap:debian/x?%zz", "bootstrap:debian/x?mirror=deb%20http://x/%20sid%0Adeb",
	} {
		r, err := Parse(in, "")
		if !errors.Is(err, fault.ErrInvalid) || len(fault.Hint(err)) == 0 {
			t.Errorf("%q: %v, %v", in, r, err)
		}
	}
	if _, err := Parse("web@sha512:"+digestA[7:]+digestA[7:], ""); !errors.Is(err, fault.ErrUnsupported) {
		t.Error(err)
	}
}

// A reference that was read is written so that it is read as the same.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"debian:12", "ghcr.io/x/y@" + digestA, "oci:/d:t", "docker-archive:a.tar:web:1",
		"bootstrap:debian/sid?include=a,b&mirror=http://x/", "docker://oci:5000/a", "dir:.", "docker-daemon:" + digestA,
	} {
		f.Add(s, "")
		f.Add(s, "reg.corp/hub")
	}
	f.Fuzz(func(t *testing.T, s, def string) {
		if _, err := Parse("probe", def); err != nil {
			return // no name of a registry
		}
		r, err := Parse(s, def)
		if err != nil {
			if len(fault.Hint(err)) == 0 {
				t.Fatalf("%q: %v has no hint", s, err)
			}
			return
		}
		for _, again := range []string{r.String(), r.Familiar()} {
			if got, err := Parse(again, def); err != nil || !cmp.Equal(got, r, same) {
				t.Fatalf("%q with default %q is %+v; %q is %+v, %v", s, def, r, again, got, err)
			}
		}
	})
}
