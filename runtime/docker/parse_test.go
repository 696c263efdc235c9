package docker

import (
	"errors"
	"slices"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/system"

	"github.com/agentbox/agentbox/runtime"
)

func TestOverlayOptions(t *testing.T) {
	for _, c := range []struct{ in, upper, lower string }{
		{"rw,lowerdir=/d/l/A:/d/l/B,upperdir=/d/x/diff,workdir=/d/x/work", "/d/x/diff", "/d/l/A:/d/l/B"},
		{`rw,lowerdir=l/A:l/B,upperdir=/a\,b/diff,workdir=/w`, `/a\,b/diff`, "l/A:l/B"},
		{`rw,lowerdir+=/a,lowerdir+=/b\:c,upperdir=/u,workdir=/w,uuid=on`, "/u", `/a:/b\\:c`},
	} {
		got := overlayOptions(c.in)
		if got["upperdir"] != c.upper || got["lowerdir"] != c.lower {
			t.Errorf("%s: %q, %q", c.in, got["upperdir"], got["lowerdir"])
		}
	}
	for in, want := range map[string]string{
		`/a\,b`: "/a,b", `/a\040b`: "/a b", `/a\\b`: `/a\b`, `/a\134\072b`: `/a\:b`, "/plain": "/plain",
	} {
		if got := unescape(in); got != want {
			t.Errorf("unescape(%s) = %s, want %s", in, got, want)
		}
	}
	if got := splitEscaped(`/a:/b\:c:/d`, ':'); !slices.Equal(got, []string{"/a", `/b\:c`, "/d"}) {
		t.Errorf("%q", got)
	}
}

func TestCommandError(t *testing.T) {
	for msg, want := range map[string]int{
		`OCI runtime create failed: container_linux.go:380: starting container process caused: exec: "nope": executable file not found in $PATH: unknown`:                                                            127,
		`failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: exec: "/x": stat /x: no such file or directory: unknown`: 127,
		`OCI runtime exec failed: exec failed: unable to start container process: exec: "/etc/passwd": permission denied: unknown`:                                                                                   126,
		`unable to start container process: exec: "/etc": is a directory: unknown`:                                                                                                                                   126,
		`runc create failed: unable to start container process: error during container init: exec: "/x": exec format error: unknown`:                                                                                 126,
		`OCI runtime create failed: unable to start container process: error mounting "/gone" to rootfs at "/mnt": mount /gone:/mnt: no such file or directory: unknown`:                                             0,
		`driver failed programming external connectivity on endpoint x: Bind for 0.0.0.0:80 failed: port is already allocated`:                                                                                       0,
	} {
		err := commandError([]string{"cmd"}, msg)
		var x *runtime.ExecError
		code := 0
		if errors.As(err, &x) {
			code = x.Code
		}
		if code != want {
			t.Errorf("%s: %d (%v), want %d", msg, code, err, want)
		}
	}
}

func TestRestoresItself(t *testing.T) {
	of := func(network string) (c box) {
		c.ContainerJSONBase = &container.ContainerJSONBase{HostConfig: &container.HostConfig{NetworkMode: container.NetworkMode(network)}}
		return c
	}
	for _, c := range []struct {
		version      string
		experimental bool
		network      string
		does         bool
	}{
		{"20.10.24+dfsg1", true, "bridge", true}, {"20.10.24+dfsg1", false, "bridge", false},
		{"27.5.1", true, "none", true},
		{"28.5.2+dfsg4", true, "bridge", false}, {"28.5.2+dfsg4", true, "none", false}, {"29.0.0", true, "own", false},
		{"dev", true, "bridge", false},
		{"28.5.2+dfsg4", true, "host", true}, {"28.5.2+dfsg4", false, "host", false},
	} {
		why := restoresItself(&system.Info{ServerVersion: c.version, ExperimentalBuild: c.experimental}, of(c.network))
		if does := why == ""; does != c.does {
			t.Errorf("%+v: %q", c, why)
		}
	}
}

func TestSavedImages(t *testing.T) {
	head := func(name string) []byte { return append([]byte(name), make([]byte, 512-len(name))...) }
	id := "fa28a273b47cc364220db776930e1775b1f92ae768ea6802fa5202d44f34d741"
	for name, want := range map[string]bool{
		id + "/": true, id + "/layer.tar": true, id + ".json": true, "manifest.json": true, "oci-layout": true,
		"blobs/": true, "./index.json": true,
		"./": false, "bin/": false, "etc/passwd": false, id: false, "./" + id[:63] + "/": false,
	} {
		if got := saved(head(name)); got != want {
			t.Errorf("saved(%s) = %v", name, got)
		}
	}
}
