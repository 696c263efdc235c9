package containerd

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/containers"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// theirs is what container.json says of an adopted container.
type theirs struct {
	Namespace   string       `json:"namespace"`
	ID          string       `json:"id"`
	Created     time.Time    `json:"created"` // ids are used again
	Snapshotter string       `json:"snapshotter"`
	Snapshot    string       `json:"snapshot"`
	Runtime     criu.Runtime `json:"runtime"`
	Wrapped     bool         `json:"wrapped"` // its runtime is agentbox-runtime
	Stage       string       `json:"stage"`   // AGENTBOX_RUN of the daemon, when it answered last
	Pod         bool         `json:"pod,omitempty"`
	Hooks       bool         `json:"hooks,omitempty"` // its network is filled by hooks
}

// searched are the namespaces, after our own, that are searched for a container named without
// one.
var searched = []string{"default", "k8s.io"}

// mobySpace is where dockerd keeps its containers.
const mobySpace = "moby"

// Adopt describes a container that was made through containerd: NAMESPACE/ID, or ID alone, which
// is searched for in our namespace, in "default" and in "k8s.io". A name that nerdctl gave, and
// the beginning of a long id, will do for ID.
func (b *Backend) Adopt(ctx context.Context, ref string) (runtime.Spec, error) {
	spaces := append([]string{b.namespace}, searched...)
	id := ref
	if ns, name, ok := strings.Cut(ref, "/"); ok {
		spaces, id = []string{ns}, name
	}
	for _, ns := range spaces {
		found, err := b.named(ctx, ns, id)
		if errors.Is(err, fault.ErrNotFound) {
			continue
		}
		if err != nil {
			return runtime.Spec{}, err
		}
		// Elsewhere the label is an image's, of which containers take them over.
		if root := found.Labels[rootLabel]; root != "" && ns == b.namespace {
			return b.own(found, root)
		}
		return b.adopt(ctx, ns, found)
	}
	return runtime.Spec{}, fmt.Errorf("container %s: %w in namespace %s of containerd", ref, fault.ErrNotFound,
		strings.Join(spaces, ", "))
}

// own is a container that Create made, of this root or of another one.
func (b *Backend) own(found containers.Container, root string) (runtime.Spec, error) {
	if root == b.box.Base {
		c, err := b.box.Load(found.ID)
		return c.Spec, err
	}
	return runtime.Spec{ID: found.ID, Name: found.Labels[nameLabel]}, nil
}

// named finds a container of a namespace.
func (b *Backend) named(ctx context.Context, ns, id string) (containers.Container, error) {
	ctx = in(ctx, ns)
	svc := b.client.ContainerService()
	c, err := svc.Get(ctx, id)
	if err = plain(err); err == nil || isDown(err) {
		return c, err
	}
	filters := []string{fmt.Sprintf("labels.%q==%q", "nerdctl/name", id), fmt.Sprintf("labels.%q==%q", nameLabel, id)}
	if len(id) >= 6 && strings.Trim(id, "0123456789abcdef") == "" {
		filters = append(filters, "id~=^"+id)
	}
	list, err := svc.List(ctx, filters...)
	if err != nil {
		// A namespace, or an id, that containerd would not take.
		return c, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	switch len(list) {
	case 0:
		return c, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	case 1:
		return list[0], nil
	}
	return c, fmt.Errorf("%w: %s names %d containers", fault.ErrInvalid, id, len(list))
}

// identify derives our id of an adopted container.
func identify(ns string, c containers.Container) string {
	sum := sha256.Sum256([]byte(ns + "/" + c.ID + "@" + c.CreatedAt.UTC().Format(time.RFC3339Nano)))
	return hex.EncodeToString(sum[:16])
}

// adopt describes a container made by another program and records where it is.
func (b *Backend) adopt(ctx context.Context, ns string, found containers.Container) (s runtime.Spec, err error) {
	name := ns + "/" + found.ID
	if ns == mobySpace {
		return s, &fault.Error{
			Err:  fmt.Errorf("%w: container %s is Docker's", fault.ErrUnsupported, name),
			Hint: "Name it docker://" + found.ID[:min(12, len(found.ID))] + ".",
		}
	}
	t, err := describe(ns, found)
	if err != nil {
		return s, err
	}
	t.Stage = b.client.daemonEnv(stage.Env)
	spec, err := specOf(found)
	if err != nil {
		return s, fmt.Errorf("container %s: %w", name, err)
	}
	//lint:ignore SA1019 nerdctl still writes it
	t.Hooks = spec.Hooks != nil && len(spec.Hooks.Prestart)+len(spec.Hooks.CreateRuntime) > 0
	if found.SnapshotKey == "" {
		return s, fmt.Errorf("%w: container %s has no snapshot: its root filesystem is a directory that containerd does not manage", fault.ErrUnsupported, name)
	}
	ctx = in(ctx, ns)
	snapshots := b.client.SnapshotService(found.Snapshotter)
	mounts, err := snapshots.Mounts(ctx, found.SnapshotKey)
	if err != nil {
		return s, fmt.Errorf("snapshot of container %s: %w", name, plain(err))
	}
	info, err := snapshots.Stat(ctx, found.SnapshotKey)
	if err != nil {
		return s, fmt.Errorf("snapshot of container %s: %w", name, plain(err))
	}
	c := adoptedRecord{Theirs: &t}
	if err := layers(&c.Container, found.Snapshotter, mounts); err != nil {
		return s, fmt.Errorf("container %s: %w", name, err)
	}
	c.Spec = translate(spec, found)
	c.Spec.ID, c.Spec.Name, c.Spec.ImageDigest = identify(ns, found), name, info.Parent
	if img, err := b.client.ImageService().Get(ctx, found.Image); err == nil {
		c.Spec.ImageDigest = img.Target.Digest.String()
	}
	for _, dir := range []string{"merged", "runs"} {
		if err := os.MkdirAll(b.box.Dir(c.Spec.ID, dir), 0o700); err != nil {
			return s, err
		}
	}
	return c.Spec, record.WriteJSON(b.box.Dir(c.Spec.ID, "container.json"), c, true)
}

// describe reads how containerd runs a container.
func describe(ns string, found containers.Container) (theirs, error) {
	t := theirs{
		Namespace: ns, ID: found.ID, Created: found.CreatedAt, Snapshotter: found.Snapshotter,
		Snapshot: found.SnapshotKey,
		Pod:      found.Labels["io.cri-containerd.kind"] != "",
	}
	if !strings.HasPrefix(found.Runtime.Name, "io.containerd.runc.") {
		return t, fmt.Errorf("%w: container %s/%s runs by %s, and only runc's containers can be checkpointed",
			fault.ErrUnsupported, ns, found.ID, found.Runtime.Name)
	}
	var o options.Options
	if any := found.Runtime.Options; any != nil && any.GetTypeUrl() != "" {
		if err := typeurl.UnmarshalTo(any, &o); err != nil {
			return t, fmt.Errorf("container %s/%s: its runtime's options: %w", ns, found.ID, err)
		}
	}
	t.Runtime = criu.Runtime{
		Binary: cmp.Or(o.BinaryName, "runc"), Root: filepath.Join(
			cmp.Or(o.Root, "/run/containerd/runc"),
			ns), ID: found.ID,
	}
	t.Wrapped = isWrapper(t.Runtime.Binary)
	return t, nil
}

// isWrapper reports whether a runtime is agentbox-runtime, be it by a link.
func isWrapper(binary string) bool {
	if path, err := exec.LookPath(binary); err == nil {
		if real, err := filepath.EvalSymlinks(path); err == nil && filepath.Base(real) == "agentbox-runtime" {
			return true
		}
	}
	return filepath.Base(binary) == "agentbox-runtime"
}

// specOf decodes a container's OCI spec.
func specOf(found containers.Container) (*specs.Spec, error) {
	var spec specs.Spec
	if err := typeurl.UnmarshalTo(found.Spec, &spec); err != nil {
		return nil, fmt.Errorf("its spec: %w", err)
	}
	if spec.Process == nil {
		spec.Process = &specs.Process{Cwd: "/"}
	}
	if spec.Linux == nil {
		return nil, fmt.Errorf("%w: it is no Linux container", fault.ErrUnsupported)
	}
	return &spec, nil
}

// translate says in our words what an OCI spec asks for.
func translate(spec *specs.Spec, found containers.Container) runtime.Spec {
	p := spec.Process
	s := runtime.Spec{
		Image: found.Image, Args: p.Args, Env: p.Env, Workdir: p.Cwd,
		User:     fmt.Sprintf("%d:%d", p.User.UID, p.User.GID),
		Hostname: spec.Hostname, Terminal: p.Terminal, Labels: found.Labels, Adopted: true,
		Network: runtime.Network{Mode: runtime.NetworkHost},
	}
	if spec.Root != nil {
		s.ReadOnly = spec.Root.Readonly
	}
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace {
			s.Network.Mode = runtime.NetworkNone
			if ns.Path != "" {
				s.Network.Mode = runtime.NetworkBridge
			}
		}
	}
	for _, m := range spec.Mounts {
		read := slices.Contains(m.Options, "ro") || slices.Contains(m.Options, "rro")
		switch {
		case m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind"):
			s.Mounts = append(s.Mounts, runtime.Mount{
				Type: "bind", Source: m.Source, Target: m.Destination, ReadOnly: read,
			})
		case m.Type == "tmpfs" && !standard(m.Destination):
			s.Mounts = append(s.Mounts, runtime.Mount{Type: "tmpfs", Target: m.Destination, ReadOnly: read})
		}
	}
	if r := spec.Linux.Resources; r != nil {
		if r.Memory != nil && r.Memory.Limit != nil {
			s.Resources.Memory = max(*r.Memory.Limit, 0)
		}
		if r.CPU != nil && r.CPU.Quota != nil && r.CPU.Period != nil && *r.CPU.Period > 0 {
			s.Resources.CPUs = max(float64(*r.CPU.Quota)/float64(*r.CPU.Period), 0)
		}
		if r.Pids != nil {
			s.Resources.Pids = max(r.Pids.Limit, 0)
		}
	}
	return s
}

// standard reports whether a tmpfs is one that every container has.
func standard(target string) bool {
	return target == "/dev" || strings.HasPrefix(target, "/dev/") || target == "/run"
}
