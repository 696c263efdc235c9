package engine

import (
	"errors"
	"os"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestCallerLists: the service's callers have as workspaces what they could list themselves, by
// their user, their group and their further groups.
func TestCallerLists(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("run it as root: it takes the rights of other users")
	}
	top, err := os.MkdirTemp("/dev/shm", "caller")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(top)
	dir := top + "/team"
	err = errors.Join(os.Chmod(top, 0o755), os.Mkdir(dir, 0o700), os.Chown(dir, 0, 1002), os.Chmod(dir, 0o750))
	if err != nil {
		t.Fatal(err)
	}
	mounts := []runtime.Mount{
		{Type: "bind", Source: "/root", Target: "/r"}, {Type: runtime.MountWorkspace, Source: dir, Target: "/w"},
	}
	for _, c := range []struct {
		who    string
		caller *runtime.Caller
		want   error
	}{
		{"this process", nil, nil},
		{"root", &runtime.Caller{}, nil},
		{"one of the group", &runtime.Caller{UID: 1000, GID: 1002}, nil},
		{"one with the group", &runtime.Caller{UID: 1000, GID: 1000, Groups: []uint32{7, 1002}}, nil},
		{"another", &runtime.Caller{UID: 1000, GID: 1000, Groups: []uint32{7}}, runtime.ErrDenied},
		{"a client by TLS", &runtime.Caller{Client: "CN=c", Address: "192.0.2.1:1"}, nil},
	} {
		ctx := t.Context()
		if c.caller != nil {
			ctx = runtime.WithCaller(ctx, *c.caller)
		}
		if err := callerLists(ctx, mounts); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.who, err, c.want)
		}
	}
}
