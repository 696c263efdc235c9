package engine_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// mapping is a backend whose sandboxes have user namespaces.
type mapping struct{ runtime.Backend }

func (mapping) MayMap(context.Context, runtime.Spec, []string, idmap.Map) (string, error) {
	return "", nil
}
func (mapping) IDsElsewhere() ([]uint32, error) { return nil, nil }

// forge makes an archive of a checkpoint, its manifest changed by fn.
func (r *rig) forge(t *testing.T, ref string, fn func(m map[string]any, spec map[string]any)) []byte {
	t.Helper()
	var archive, out bytes.Buffer
	if err := r.ExportCheckpoint(ctx, ref, &archive, runtime.ExportOptions{Compress: "none"}); err != nil {
		t.Fatal(err)
	}
	in, to := tar.NewReader(&archive), tar.NewWriter(&out)
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		if h.Name == "agentbox/manifest.json" && fn != nil {
			m := map[string]any{}
			if err := json.Unmarshal(data, &m); err != nil {
				t.Fatal(err)
			}
			fn(m, m["spec"].(map[string]any))
			if data, err = json.Marshal(m); err != nil {
				t.Fatal(err)
			}
			var canonical store.Manifest
			if err := json.Unmarshal(data, &canonical); err != nil {
				t.Fatal(err)
			}
			if data, err = canonical.Encode(); err != nil {
				t.Fatal(err)
			}
			h.Size = int64(len(data))
		}
		if err := to.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := to.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// foreign is a checkpoint whose author asks for the host.
type foreign struct {
	*rig
	archive []byte
	c       runtime.Checkpoint
	host    string // a directory of the host
}

func newForeign(t *testing.T) *foreign {
	there, here := newRig(t, nil), newRig(t, func(b runtime.Backend) runtime.Backend { return mapping{b} })
	there.create(t, "box")
	ck, err := there.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "wish"})
	if err != nil {
		t.Fatal(err)
	}
	// A policy that is known here.
	trusted, err := policy.Finder{}.Find("trusted")
	if err != nil {
		t.Fatal(err)
	}
	own, err := here.Create(ctx, runtime.CreateRequest{
		Policy: trusted, Spec: runtime.Spec{
			Name: "own", Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	f := &foreign{rig: here, host: t.TempDir()}
	f.archive = there.forge(t, ck.ID, func(m, s map[string]any) {
		m["warnings"], m["trigger"], m["created"] = []string{"all is well"}, "interval", "2040-01-01T00:00:00Z"
		m["labels"] = map[string]string{"agentbox.session": "x", "step": "1"}
		s["args"] = []string{"sh", "-c", "evil"}
		s["mounts"] = []runtime.Mount{
			{Type: "bind", Source: f.host, Target: "/host"}, {Type: "volume", Source: "v", Target: "/v"},
			{Type: "tmpfs", Target: "/t"},
		}
		s["network"] = runtime.Network{
			Mode: runtime.NetworkHost, Group: "friends",
			Ports: []runtime.Port{{Host: 80, Sandbox: 80, Protocol: "tcp"}},
		}
		s["restart"] = runtime.Restart{Policy: runtime.RestartAlways}
		s["labels"] = map[string]string{"agentbox.mcp": "somebody x", "team": "ops"}
		s["policy"] = own.Spec.Policy
		s["security"] = runtime.Security{
			Capabilities: []string{"CHOWN", "NET_RAW", "SYS_ADMIN"}, Seccomp: "unconfined", AppArmor: "unconfined",
			NewPrivileges: true, IOUring: true,
		}
		s["ids"] = idmap.Map{Base: 0, Size: 65536}
		s["auto_remove"], s["checkpoint_every"] = true, "1s"
		s["lifetime"] = runtime.Lifetime{TTL: time.Hour}
		s["id"], s["name"] = own.ID, own.Name
	})
	if f.c, err = here.ImportCheckpoint(ctx, bytes.NewReader(f.archive),
		runtime.ImportOptions{Image: "base"}); err != nil {
		t.Fatal(err)
	}
	return f
}

// modest says what a sandbox has of the host.
func (f *foreign) modest(t *testing.T, sb runtime.Sandbox) {
	t.Helper()
	s := sb.Spec
	sec := s.Security
	switch {
	case len(s.Mounts) != 1 || s.Mounts[0].Type != "tmpfs":
		t.Errorf("mounts %+v", s.Mounts)
	case s.Network.Mode != runtime.NetworkBridge || s.Network.Group != "" || len(s.Network.Ports) > 0:
		t.Errorf("network %+v", s.Network)
	case s.Restart != (runtime.Restart{}) || s.AutoRemove || s.CheckpointEvery != "" ||
		s.Lifetime != (runtime.Lifetime{}):
		t.Errorf("%+v, %v, %s, %+v", s.Restart, s.AutoRemove, s.CheckpointEvery, s.Lifetime)
	case len(s.Labels) > 0 || len(sb.Labels) > 0 || sb.Lease != "" || sb.Group != "":
		t.Errorf("labels %v, %v, lease %s, group %s", s.Labels, sb.Labels, sb.Lease, sb.Group)
	case s.Policy == nil || s.Policy.Name != policy.Default:
		t.Errorf("policy %+v", s.Policy)
	case !slices.Equal(sec.Capabilities, []string{"CHOWN"}) || sec.Seccomp != "" || sec.AppArmor != "" ||
		sec.NewPrivileges || sec.IOUring:
		t.Errorf("%+v", sec)
	case s.IDs == nil || s.IDs.Base < 524288 || s.HostIDs != "":
		t.Errorf("ids %+v, %s", s.IDs, s.HostIDs)
	case s.ID != sb.ID || s.Name != sb.Name:
		t.Errorf("the spec of %s names %s (%s)", sb.ID, s.ID, s.Name)
	}
}

// TestForeignGetsNothing forges a spec that asks for all of the host.
func TestForeignGetsNothing(t *testing.T) {
	f := newForeign(t)
	c := f.c
	if !c.Foreign || len(c.Warnings) > 0 || time.Since(c.Created) > time.Hour || c.Created.After(time.Now()) ||
		!slices.Equal(c.Command, []string{"sh", "-c", "evil"}) {
		t.Errorf("%+v", c)
	}
	if len(c.Labels) != 1 || c.Labels["step"] != "1" {
		t.Errorf("labels %v", c.Labels)
	}
	for _, want := range []string{"bind " + f.host + " at /host, read-write", "volume v at /v", "the host's network",
		"group friends", "port :80 of the host", "restart policy always",
		"capabilities NET_RAW, SYS_ADMIN", "seccomp: unconfined", "AppArmor: unconfined", "io_uring", "new privileges",
		"label agentbox.mcp=somebody x", "label team=ops", "1s", "--ttl 1h", "removal when it exits"} {
		if !slices.ContainsFunc(c.Asks, func(s string) bool { return strings.Contains(s, want) }) {
			t.Errorf("%q is not among what it asks for: %q", want, c.Asks)
		}
	}
	h, err := f.History(ctx, "box", runtime.HistoryOptions{})
	if err != nil || len(h) != 1 || !h[0].Foreign {
		t.Errorf("%+v, %v", h, err)
	}
	for _, opts := range []runtime.RestoreOptions{{}, {Trigger: "interval"}} {
		_, err = f.Restore(ctx, "box", opts)
		if !errors.Is(err, runtime.ErrNotFound) || !strings.Contains(fmt.Sprint(fault.Hint(err)), "--foreign") {
			t.Errorf("%+v: %v, hints %q", opts, err, fault.Hint(err))
		}
	}
	if _, err = f.Fork(ctx, "box", runtime.ForkOptions{}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("fork of the newest: %v", err)
	}
	plan, err := f.PlanRestore(ctx, "box", runtime.RestoreOptions{Foreign: true, FilesOnly: true})
	if text := strings.Join(plan.Effects, "\n"); err != nil || !strings.Contains(text, "sh -c evil") ||
		!strings.Contains(text, "/host") {
		t.Errorf("%s, %v", text, err)
	}
	for _, filesOnly := range []bool{true, false} {
		out, err := f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "wish", FilesOnly: filesOnly})
		if err != nil || !strings.Contains(fmt.Sprint(out.Warnings), "bind "+f.host) ||
			strings.Contains(fmt.Sprint(out.Warnings), "all is well") {
			t.Fatalf("%q, %v", out.Warnings, err)
		}
		f.modest(t, out.Sandbox)
		// What is taken of the sandbox is of this host, and of what it was given.
		mine, err := f.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: fmt.Sprint("mine", filesOnly)})
		if err != nil || mine.Foreign {
			t.Errorf("%+v, %v", mine, err)
		}
		if err := f.Remove(ctx, "box", runtime.RemoveOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
		again, err := f.Restore(ctx, "box", runtime.RestoreOptions{})
		if err != nil || again.Checkpoint.ID != mine.ID {
			t.Fatalf("%+v, %v", again.Checkpoint, err)
		}
		f.modest(t, again.Sandbox)
		if err := f.Remove(ctx, "box", runtime.RemoveOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
	}
	forks, err := f.Fork(ctx, "box", runtime.ForkOptions{Checkpoint: c.ID, FilesOnly: true})
	if err != nil || !strings.Contains(fmt.Sprint(forks[0].Warnings), "the host's network") {
		t.Fatalf("%+v, %v", forks, err)
	}
	f.modest(t, forks[0].Sandbox)
}

// TestForeignRecreate restores an existing sandbox to a foreign checkpoint.
func TestForeignRecreate(t *testing.T) {
	f := newForeign(t)
	if _, err := f.Restore(ctx, "box", runtime.RestoreOptions{Foreign: true}); err != nil {
		t.Fatal(err)
	}
	out, err := f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "wish", Strategy: runtime.StrategyRecreate})
	if err != nil {
		t.Fatal(err)
	}
	f.modest(t, out.Sandbox)
	out, err = f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "wish"})
	if err != nil || !strings.Contains(fmt.Sprint(out.Warnings), "comes from elsewhere") {
		t.Errorf("%q, %v", out.Warnings, err)
	}
	for what, opts := range map[string]runtime.RestoreOptions{
		"there":     {Checkpoint: "wish", Grants: runtime.Grants{TrustSpec: true}},
		"made here": {Undo: true, Grants: runtime.Grants{Policy: "strict"}},
	} {
		if _, err := f.Restore(ctx, "box", opts); !errors.Is(err, runtime.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestForeignGrants grants the requests of a foreign spec, one by one.
func TestForeignGrants(t *testing.T) {
	f := newForeign(t)
	given := t.TempDir()
	with := func(g runtime.Grants) runtime.Spec {
		t.Helper()
		out, err := f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "wish", Grants: g})
		if err != nil {
			t.Fatalf("%+v: %v", g, err)
		}
		if err := f.Remove(ctx, "box", runtime.RemoveOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
		return out.Sandbox.Spec
	}
	s := with(runtime.Grants{Mounts: []runtime.Mount{{Type: "bind", Source: given, Target: "/host", ReadOnly: true}}})
	if len(s.Mounts) != 2 || s.Mounts[1].Source != given || !s.Mounts[1].ReadOnly || len(s.Network.Ports) > 0 ||
		s.Restart.Policy != "" {
		t.Errorf("%+v", s)
	}
	s = with(runtime.Grants{Ports: []runtime.Port{{HostIP: "127.0.0.1", Host: 8080, Sandbox: 80, Protocol: "tcp"}}})
	if len(s.Network.Ports) != 1 || s.Network.Ports[0].Host != 8080 ||
		s.Network.Mode != runtime.NetworkBridge || len(s.Mounts) != 1 {
		t.Errorf("%+v", s.Network)
	}
	s = with(runtime.Grants{Policy: "trusted"})
	if s.Policy.Name != "trusted" || len(s.Mounts) != 1 || s.Security.Seccomp != "" {
		t.Errorf("%+v", s)
	}
	_, err := f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "wish", Grants: runtime.Grants{TrustSpec: true}})
	if !errors.Is(err, runtime.ErrDenied) || !strings.Contains(fmt.Sprint(fault.Hint(err)), "--policy") {
		t.Errorf("its capabilities under the policy default: %v, hints %q", err, fault.Hint(err))
	}
	_, err = f.Restore(ctx, "box", runtime.RestoreOptions{
		Checkpoint: "wish", Grants: runtime.Grants{
			Policy: "strict", Mounts: []runtime.Mount{{Type: "bind", Source: given, Target: "/host"}},
		},
	})
	if !errors.Is(err, runtime.ErrDenied) {
		t.Errorf("a mount under the policy strict: %v", err)
	}
	s = with(runtime.Grants{TrustSpec: true, Policy: "trusted"})
	if len(s.Mounts) != 3 || s.Network.Mode != runtime.NetworkHost || s.Restart.Policy != runtime.RestartAlways ||
		s.Security.Seccomp != "unconfined" || s.Labels["team"] != "ops" || s.Policy.Name != "trusted" {
		t.Errorf("%+v", s)
	}
	if _, err = f.Fork(ctx, "box", runtime.ForkOptions{
		Checkpoint: "wish", Count: 2, Grants: runtime.Grants{Ports: []runtime.Port{{
			Host: 8080, Sandbox: 80, Protocol: "tcp",
		}}},
	}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("a port for two forks: %v", err)
	}
}

// TestForeignNonsense forges specs that no sandbox could have.
func TestForeignNonsense(t *testing.T) {
	there, here := newRig(t, nil), newRig(t, nil)
	there.create(t, "box")
	ck, err := there.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for what, fn := range map[string]func(m, s map[string]any){
		"network":  func(_, s map[string]any) { s["network"] = runtime.Network{Mode: "container:x"} },
		"command":  func(_, s map[string]any) { s["args"] = []string{} },
		"text":     func(_, s map[string]any) { s["env"] = []string{"A=\x00"} },
		"hostname": func(_, s map[string]any) { s["hostname"] = strings.Repeat("x", 64) },
		"workdir":  func(_, s map[string]any) { s["workdir"] = "../.." },
		"signal":   func(_, s map[string]any) { s["stop_signal"] = "SIGNOT" },
		"memory":   func(_, s map[string]any) { s["resources"] = runtime.Resources{Memory: -1} },
		"volume":   func(_, s map[string]any) { s["volumes"] = []string{"../etc"} },
	} {
		c, err := here.ImportCheckpoint(ctx, bytes.NewReader(there.forge(t, ck.ID, fn)),
			runtime.ImportOptions{Name: what, Image: "base"})
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if _, err := here.Restore(ctx, what,
			runtime.RestoreOptions{Checkpoint: c.ID}); !errors.Is(err, runtime.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestForeignIdentity imports a checkpoint with the id of another one.
func TestForeignIdentity(t *testing.T) {
	f := newForeign(t)
	same, err := f.ImportCheckpoint(ctx, bytes.NewReader(f.archive), runtime.ImportOptions{})
	if err != nil || same.ID != f.c.ID {
		t.Errorf("the same once more: %+v, %v", same, err)
	}
	own := f.forge(t, f.c.ID, nil)
	if same, err = f.ImportCheckpoint(ctx, bytes.NewReader(own),
		runtime.ImportOptions{}); err != nil || same.ID != f.c.ID {
		t.Errorf("what was exported here: %+v, %v", same, err)
	}
	other := f.forge(t, f.c.ID, func(m, _ map[string]any) { m["labels"] = map[string]string{"x": "y"} })
	_, err = f.ImportCheckpoint(ctx, bytes.NewReader(other), runtime.ImportOptions{})
	if !errors.Is(err, runtime.ErrExists) || !strings.Contains(err.Error(), "is another one") {
		t.Errorf("another of that id: %v", err)
	}
	// One of this host, too.
	mine, err := f.Checkpoint(ctx, "own", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if same, err = f.ImportCheckpoint(ctx, bytes.NewReader(f.forge(t, mine.ID, nil)),
		runtime.ImportOptions{}); err != nil || same.Foreign {
		t.Errorf("one that was made here: %+v, %v", same, err)
	}
	other = f.forge(t, mine.ID, func(_, s map[string]any) { s["args"] = []string{"evil"} })
	if _, err = f.ImportCheckpoint(ctx, bytes.NewReader(other),
		runtime.ImportOptions{}); !errors.Is(err, runtime.ErrExists) {
		t.Errorf("another of the id of one that was made here: %v", err)
	}
}

// TestForeignStays: a checkpoint stays marked as foreign through every operation.
func TestForeignStays(t *testing.T) {
	f := newForeign(t)
	mine, err := f.Checkpoint(ctx, "own", runtime.CheckpointOptions{Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	copied, err := f.ImportCheckpoint(ctx, bytes.NewReader(f.forge(t, mine.ID, nil)),
		runtime.ImportOptions{Name: "copy"})
	if err != nil || !copied.Foreign {
		t.Errorf("of an archive of this host's own, under another name: %+v, %v", copied, err)
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref, plain := strings.TrimPrefix(server.URL, "http://")+"/x:y", runtime.RegistryOptions{PlainHTTP: true}
	other := newRig(t, nil)
	if _, err = f.PushCheckpoint(ctx, f.c.ID, ref, plain); err != nil {
		t.Fatal(err)
	}
	pulled, err := other.PullCheckpoint(ctx, ref, plain)
	if err != nil || !pulled.Foreign || strings.Contains(fmt.Sprint(pulled.Warnings), "all is well") ||
		time.Since(pulled.Created) > time.Hour {
		t.Errorf("%+v, %v", pulled, err)
	}
	if again, err := other.PullCheckpoint(ctx, ref, plain); err != nil || again.ID != pulled.ID {
		t.Errorf("once more: %+v, %v", again, err)
	}
	image, err := f.Commit(ctx, f.c.ID, "of-it", runtime.CommitOptions{})
	if err != nil {
		t.Fatal(err)
	}
	info, err := f.InspectImage(ctx, image.Reference)
	if err != nil || info.Config.Labels[runtime.LabelForeign] != "true" {
		t.Errorf("%+v, %v", info.Config, err)
	}

	reindexed := func(r *rig) map[string]runtime.Checkpoint {
		t.Helper()
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join(r.root, "state.db*"))
		for _, path := range files {
			err = errors.Join(err, os.Remove(path))
		}
		st, e2 := store.Open(ctx, r.root)
		if err := errors.Join(err, e2); err != nil {
			t.Fatal(err)
		}
		_, err = st.Reindex(ctx)
		if err := errors.Join(err, st.Close()); err != nil {
			t.Fatal(err)
		}
		list, err := newRigAt(t, r.root, nil).Checkpoints(ctx, runtime.CheckpointFilter{All: true})
		if err != nil {
			t.Fatal(err)
		}
		is := map[string]runtime.Checkpoint{}
		for _, c := range list {
			is[c.ID] = c
		}
		return is
	}
	is := reindexed(f.rig)
	if c := is[f.c.ID]; !c.Foreign || len(c.Warnings) > 0 || c.Created.Sub(f.c.Created).Abs() > time.Minute {
		t.Errorf("imported: %+v", c)
	}
	if !is[copied.ID].Foreign || is[mine.ID].Foreign || is[mine.ID].ID == "" {
		t.Errorf("copied: %+v, mine: %+v", is[copied.ID], is[mine.ID])
	}
	if c := reindexed(other)[pulled.ID]; !c.Foreign || c.Created.Sub(pulled.Created).Abs() > time.Minute {
		t.Errorf("pulled: %+v", c)
	}
}

// TestForeignRetention: the policy of a foreign spec prunes nothing on this host.
func TestForeignRetention(t *testing.T) {
	f := newForeign(t)
	mine, err := f.Checkpoint(ctx, "own", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stingy, err := policy.Finder{}.Resolve("./stingy.yaml", []byte("base: trusted\ncheckpoints: {keep_last: 1}\n"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := f.Checkpoint(ctx, "own", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	archive := f.forge(t, second.ID, func(m, s map[string]any) {
		m["id"] = strings.Repeat("ab", 16)
		s["policy"] = runtime.Policy{Name: "stingy", Digest: stingy.Rules.Digest(), Rules: stingy.Rules.Canonical()}
	})
	if err := f.Remove(ctx, "own", runtime.RemoveOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ImportCheckpoint(ctx, bytes.NewReader(archive), runtime.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Prune(ctx, runtime.PruneOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.CheckpointInfo(ctx, mine.ID); err != nil {
		t.Error(err)
	}
	// Of two of that name the newest is the one that was made here.
	out, err := f.Restore(ctx, "own", runtime.RestoreOptions{})
	if err != nil || out.Checkpoint.ID != second.ID {
		t.Errorf("%+v, %v", out.Checkpoint, err)
	}
}
