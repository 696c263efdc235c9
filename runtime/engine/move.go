package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/portable"
	"github.com/agentbox/agentbox/runtime/registry"
	"github.com/agentbox/agentbox/runtime/store"
)

// transfers brings checkpoints out of a root and into it: archives and registries.
type transfers struct {
	*core

	images *localImages
}

// ExportCheckpoint writes a checkpoint as one file; see package portable.
func (v checkpointVerbs) ExportCheckpoint(ctx context.Context, ref string, w io.Writer, opts runtime.ExportOptions) error {
	return v.e.verb(ctx, onCheckpoint("checkpoint export", ref), func(ctx context.Context) error {
		return v.e.transfers.exportCheckpoint(ctx, ref, w, opts)
	})
}

func (t *transfers) exportCheckpoint(
	ctx context.Context, ref string, w io.Writer, opts runtime.ExportOptions,
) (err error) {
	row, err := t.checkpoint(ctx, ref)
	if err != nil {
		return err
	}
	if err := sound(row); err != nil {
		return err
	}
	reader, err := t.store.OpenCheckpoint(ctx, row.ID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	manifest, err := reader.Manifest().Encode()
	if err != nil {
		return err
	}
	c := portable.Checkpoint{Manifest: manifest, Data: reader}
	if lower := t.lowerOf(ctx, row); len(lower) > 0 {
		c.Lower = func(name string) ([]portable.LowerEntry, error) { return listLower(lower, name) }
	}
	return portable.Export(ctx, w, c, portable.Options{
		Compress: opts.Compress, Recipients: opts.Recipients, Progress: opts.Progress,
	})
}

// sound refuses to export or push a checkpoint that is known to be damaged.
func sound(row store.Checkpoint) error {
	err := damage(row)
	if err == nil {
		return nil
	}
	return hint(err, fmt.Sprintf("Take another one: a damaged checkpoint would travel as a whole one. What is hurt in it tells: agentbox verify %s", short(row.ID)))
}

// lowerOf returns the layers of a checkpoint's image, if they are here.
func (t *transfers) lowerOf(ctx context.Context, row store.Checkpoint) []string {
	s, err := specOf(row.SandboxID, row.Spec)
	if err != nil {
		return nil
	}
	host, err := t.host(cmp.Or(s.Backend, t.first))
	if err != nil || host.Images == nil {
		return nil
	}
	img, err := host.Images.ResolveDigest(ctx, row.ImageDigest)
	if err != nil {
		return nil
	}
	return img.Lower
}

// listLower lists a directory of an image, its layers merged as overlayfs does.
func listLower(layers []string, name string) (list []portable.LowerEntry, err error) {
	seen := map[string]bool{}
	for _, layer := range layers {
		jail, err := policy.Open(layer)
		if err != nil {
			return nil, err
		}
		h, err := jail.Handle(path.Join("/", name), false)
		_ = jail.Close()
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, runtime.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		fd := fmt.Sprintf("/proc/self/fd/%d", h.Fd())
		entries, err := os.ReadDir(fd)
		mark := make([]byte, 1)
		n, _ := unix.Getxattr(fd, "trusted.overlay.opaque", mark) // a missing mark hides nothing
		_ = h.Close()
		if errors.Is(err, unix.ENOTDIR) {
			break // a file here hides the layers below
		}
		if err != nil {
			return nil, err
		}
		for _, d := range entries {
			if seen[d.Name()] {
				continue
			}
			seen[d.Name()] = true
			if d.Type()&fs.ModeCharDevice != 0 {
				if info, err := d.Info(); err == nil && info.Sys().(*syscall.Stat_t).Rdev == 0 {
					continue // a whiteout
				}
			}
			list = append(list, portable.LowerEntry{Name: d.Name(), Dir: d.IsDir()})
		}
		if n == 1 && mark[0] == 'y' {
			break
		}
	}
	slices.SortFunc(list, func(a, b portable.LowerEntry) int { return cmp.Compare(a.Name, b.Name) })
	return list, nil
}

// ImportCheckpoint reads an archive of agentbox or Podman.
func (v checkpointVerbs) ImportCheckpoint(
	ctx context.Context, r io.Reader, opts runtime.ImportOptions,
) (runtime.Checkpoint, error) {
	return verb(ctx, v.e, &runtime.Op{Verb: "checkpoint import", Name: opts.Name},
		func(ctx context.Context) (runtime.Checkpoint, error) {
			return v.e.transfers.importCheckpoint(ctx, r, opts)
		})
}

func (t *transfers) importCheckpoint(
	ctx context.Context, r io.Reader, opts runtime.ImportOptions,
) (_ runtime.Checkpoint, err error) {
	if opts.Name != "" {
		if err := t.vacant(ctx, store.Checkpoint{SandboxName: opts.Name}); err != nil {
			return runtime.Checkpoint{}, err // before reading an archive that may be long
		}
	}
	scratch, err := t.store.Scratch()
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(scratch)) }()
	archive, err := portable.Open(ctx, r, portable.OpenOptions{
		Identities: opts.Identities, Scratch: scratch, Progress: opts.Progress,
	})
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	defer func() { err = errors.Join(err, archive.Close()) }()
	row, parts, lower, err := t.imported(ctx, archive.Facts(), opts)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	if there, err := t.have(ctx, row); there != nil || err != nil {
		return *cmp.Or(there, new(runtime.Checkpoint)), err
	}
	if err := t.vacant(ctx, row); err != nil {
		return runtime.Checkpoint{}, err
	}
	lock, err := t.store.Lock(ctx, row.SandboxID, "checkpoint import", lockWait)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	defer lock.Unlock()
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	draft, err := t.store.BeginCheckpoint(ctx, row)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	undo.Add(func(ctx context.Context) error { return draft.Abort(ctx, err) })
	got, err := archive.Import(ctx, draft, portable.ImportOptions{
		Trust: opts.Trust, Lower: func(name string) (overlay.Entry, error) { return statLower(lower, name) },
	})
	if err != nil {
		return runtime.Checkpoint{}, err
	}

	if row.Kind == runtime.KindFull && parts.Processes == nil {
		list, err := criu.Processes(draft.CRIUDir())
		if err != nil {
			return runtime.Checkpoint{}, err
		}
		parts.Processes = &store.Processes{Count: len(list)}
		for _, p := range list {
			parts.Processes.List = append(parts.Processes.List,
				store.Process{Pid: p.Pid, Parent: p.Ppid, Command: p.Comm, Stopped: p.Stopped})
		}
	}
	parts.Warnings = got.Notes
	done, err := draft.Commit(ctx, parts)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	undo.Release()
	t.log.Info("checkpoint imported", "sandbox", done.SandboxID, "checkpoint", done.ID)
	return t.images.arrived(ctx, done), draft.Close()
}

// named finds the sandbox that has exactly this name, or returns the zero value. The name may
// also be a prefix of other sandboxes' ids.
func (t *transfers) named(ctx context.Context, name string) (store.Sandbox, error) {
	sb, err := t.store.Sandbox(ctx, name)
	switch {
	case err == nil && sb.Name == name:
		return sb, nil
	case err == nil, errors.Is(err, runtime.ErrNotFound), errors.Is(err, runtime.ErrInvalid): // ErrInvalid: it is a prefix of several ids
		return store.Sandbox{}, nil
	}
	return store.Sandbox{}, err
}

// vacant refuses an incoming checkpoint if another sandbox has its sandbox's name, or another
// checkpoint has its own.
func (t *transfers) vacant(ctx context.Context, row store.Checkpoint) error {
	sb, err := t.named(ctx, row.SandboxName)
	if err != nil {
		return err
	}
	if sb.ID != "" && sb.ID != row.SandboxID {
		return hint(fmt.Errorf("sandbox %s: %w (id %s)", sb.Name, runtime.ErrExists, short(sb.ID)),
			"A restore by that name would be of that sandbox. Choose another one with --name.")
	}
	if row.Name == "" {
		return nil
	}
	taken, err := t.store.Checkpoint(ctx, row.SandboxID+"@"+row.Name)
	if errors.Is(err, runtime.ErrNotFound) || err == nil && taken.Name != row.Name { // it is a prefix of an id, or a tag
		return nil
	}
	if err != nil {
		return err
	}
	return hint(fmt.Errorf("checkpoint %s of sandbox %s: %w (id %s)", row.Name, row.SandboxName,
		runtime.ErrExists, short(taken.ID)),
		"Remove that one first, or bring this one in as one of another sandbox with --name.")
}

// have finds an incoming checkpoint that is here already.
func (t *transfers) have(ctx context.Context, row store.Checkpoint) (*runtime.Checkpoint, error) {
	there, err := t.store.Checkpoint(ctx, row.ID)
	switch {
	case errors.Is(err, runtime.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, err
	case there.Status == store.Failed && there.SandboxID == row.SandboxID:
		// Perhaps an earlier attempt to import it; start over.
		return nil, t.store.RemoveCheckpoint(ctx, row.ID)
	case there.Status != store.Ready:
		return nil, hint(fmt.Errorf("checkpoint %s: %w, and is %s", short(row.ID), runtime.ErrExists, there.Status),
			"Remove its record first: agentbox checkpoint rm "+short(row.ID))
	case there.SandboxID != row.SandboxID || there.SandboxName != row.SandboxName:
		return nil, hint(
			fmt.Errorf("checkpoint %s: %w, as one of sandbox %s", short(row.ID), runtime.ErrExists, there.SandboxName),
			"Use that one.")
	}
	origin, err := t.store.Origin(row.ID)
	if err != nil {
		return nil, err
	}
	if row.Origin != there.Digest && row.Origin != origin {
		return nil, hint(fmt.Errorf("checkpoint %s: %w, and is another one: its manifest has digest %s, this one has %s", short(row.ID), runtime.ErrExists, there.Digest, row.Origin),
			"Bring this one in as one of another sandbox with --name, or remove that one first: agentbox checkpoint rm "+short(row.ID))
	}
	view := t.images.arrived(ctx, there)
	return &view, nil
}

// imported makes the record of a checkpoint from its archive.
func (t *transfers) imported(
	ctx context.Context, facts portable.Facts, opts runtime.ImportOptions,
) (row store.Checkpoint, parts store.Manifest, lower []string, err error) {
	if facts.Manifest != nil {
		m, err := store.ParseManifest(facts.Manifest)
		if err != nil {
			return row, parts, nil, err
		}
		row, err = t.incoming(ctx, m, opts)
		parts = store.Manifest{
			Created: m.Created, Versions: m.Versions, TCP: m.TCP, Status: m.Status,
			Managed: m.Managed, Effect: m.Effect,
		}
		for _, v := range m.Volumes {
			parts.Volumes = append(parts.Volumes, store.Volume{Name: v.Name, Below: v.Below})
		}
		if m.Attached != nil {
			parts.Attached = &store.Attached{Foreign: true, Paths: m.Attached.Paths}
		}
		if m.Processes != nil {
			parts.Processes = &store.Processes{Count: m.Processes.Count, List: m.Processes.List}
		}
		return row, parts, t.lowerOf(ctx, row), err
	}
	host, err := t.host(t.first)
	if err != nil {
		return row, parts, nil, err
	}
	if host.Images == nil {
		return row, parts, nil, fmt.Errorf("%w: backend %s makes no sandboxes", runtime.ErrUnsupported, t.first)
	}
	img, err := host.Images.Resolve(ctx, cmp.Or(opts.Image, facts.Image))
	if err != nil {
		return row, parts, nil, hint(fmt.Errorf("the archive's image %s: %w", facts.Image, err),
			"Import that image first, or name with --image what it is called here.")
	}

	s := runtime.Spec{
		ID: newID(), Name: cmp.Or(opts.Name, facts.Name), Image: cmp.Or(opts.Image, facts.Image),
		ImageDigest: img.Digest,
		Args:        facts.Args, Env: facts.Env, Workdir: cmp.Or(facts.Workdir, "/"), User: facts.User,
		Hostname: facts.Hostname,
		Terminal: facts.Terminal, OpenStdin: facts.OpenStdin, ReadOnly: facts.ReadOnly,
		StopSignal: facts.Signal, Labels: facts.Labels,
		Network:   runtime.Network{Mode: cmp.Or(facts.Network, runtime.NetworkNone)},
		Resources: runtime.Resources{Memory: facts.Memory, CPUs: facts.CPUs, Pids: facts.Pids},
		Security:  runtime.Security{Capabilities: facts.Capabilities},
		Backend:   t.first,
	}
	for _, p := range facts.Ports {
		s.Network.Ports = append(s.Network.Ports, runtime.Port{
			HostIP: p.HostIP, Host: p.Host, Sandbox: p.Container, Protocol: p.Protocol,
		})
	}
	for _, m := range facts.Mounts {
		s.Mounts = append(s.Mounts, runtime.Mount{
			Type: m.Type, Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly,
			Options: strings.Join(m.Options, ","),
		})
	}
	if err := store.ValidName(s.Name); err != nil {
		return row, parts, nil, hint(err, "Give it a name with --name.")
	}
	if store.ValidLabels(s.Labels) != nil {
		s.Labels = nil
	}
	row = store.Checkpoint{
		ID: newID(), SandboxID: s.ID, SandboxName: s.Name, Kind: runtime.KindFull, Trigger: "import",
		Created: time.Now(), Foreign: true,
		ImageDigest: img.Digest, Labels: map[string]string{"import.engine": facts.Engine},
	}
	row.Spec, err = json.Marshal(s)
	parts = store.Manifest{
		Created: facts.Created, Status: string(runtime.Running), TCP: runtime.TCPEstablished,
		Versions: store.Versions{Runtime: facts.Runtime},
	}
	return row, parts, img.Lower, err
}

// ownLabels is the prefix of labels by which agentbox finds what sessions, agents and requests made.
const ownLabels = "agentbox."

// incoming makes the record of a checkpoint from another store. It drops a parent that is not
// here. The record has no warnings: those of the manifest are only its author's word.
func (t *transfers) incoming(
	ctx context.Context, m store.Manifest, opts runtime.ImportOptions,
) (store.Checkpoint, error) {
	row := store.Checkpoint{
		ID: m.ID, Name: m.Name, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind,
		Trigger: m.Trigger, Message: m.Message, Created: time.Now(),
		ImageDigest: m.ImageDigest, Labels: m.Labels, Spec: m.Spec, Parent: m.Parent, Foreign: true,
	}
	row.Labels = maps.Clone(row.Labels)
	maps.DeleteFunc(row.Labels, func(k, _ string) bool { return strings.HasPrefix(k, ownLabels) })
	var err error
	if row.Origin, err = m.Digest(); err != nil {
		return row, err
	}
	if row.Trigger == runtime.TriggerUndo {
		row.Trigger = "import" // made by a restore elsewhere; a restore here would remove it
	}
	if m.Parent != "" {
		if _, err := t.store.Checkpoint(ctx, m.Parent); errors.Is(err, runtime.ErrNotFound) {
			row.Parent = ""
		} else if err != nil {
			return row, err
		}
	}
	if opts.Name == "" && opts.Image == "" {
		return row, nil
	}
	s, err := specOf(row.SandboxID, row.Spec)
	if err != nil {
		return row, err
	}

	if opts.Name != "" {
		if err := store.ValidName(opts.Name); err != nil {
			return row, err
		}
		row.SandboxName, s.Name = opts.Name, opts.Name
		// Make it a separate sandbox, beside one of the same origin.
		row.ID, row.SandboxID, row.Parent = newID(), newID(), ""
		s.ID = row.SandboxID
	}

	if opts.Image != "" {
		from, err := t.imageStore()
		if err != nil {
			return row, err
		}
		img, err := from.Resolve(ctx, opts.Image)
		if err != nil {
			return row, err
		}
		s.Image, s.ImageDigest, row.ImageDigest = opts.Image, img.Digest, img.Digest
	}
	row.Spec, err = json.Marshal(s)
	return row, err
}

// statLower describes a directory of an image.
func statLower(layers []string, name string) (overlay.Entry, error) {
	for _, layer := range layers {
		entry, err := overlay.ReadDir(layer, name)
		if !errors.Is(err, runtime.ErrNotFound) {
			return entry, err
		}
	}
	return overlay.Entry{}, fmt.Errorf("%s: %w", name, runtime.ErrNotFound)
}

// PushCheckpoint stores a checkpoint in a registry.
func (v checkpointVerbs) PushCheckpoint(
	ctx context.Context, ref, reference string, opts runtime.RegistryOptions,
) (runtime.Pushed, error) {
	op := onCheckpoint("checkpoint push", ref)
	op.To = reference
	return verb(ctx, v.e, op, func(ctx context.Context) (runtime.Pushed, error) {
		return v.e.transfers.pushCheckpoint(ctx, ref, reference, opts)
	})
}

func (t *transfers) pushCheckpoint(
	ctx context.Context, ref, reference string, opts runtime.RegistryOptions,
) (_ runtime.Pushed, err error) {
	row, err := t.checkpoint(ctx, ref)
	if err == nil {
		err = sound(row)
	}
	if err != nil {
		return runtime.Pushed{}, err
	}
	reader, err := t.store.OpenCheckpoint(ctx, row.ID)
	if err != nil {
		return runtime.Pushed{}, err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	about := registry.About{ID: row.ID, Image: row.ImageDigest, Annotations: map[string]string{
		"org.opencontainers.image.created": row.Created.Format(time.RFC3339),
		"org.opencontainers.image.title":   row.SandboxName,
	}}
	if about.Manifest, err = reader.Manifest().Encode(); err != nil {
		return runtime.Pushed{}, err
	}
	for at := row; at.Parent != "" && len(about.Ancestors) < 100; {
		about.Ancestors = append(about.Ancestors, at.Parent)
		if at, err = t.store.Checkpoint(ctx, at.Parent); err != nil {
			break // it was removed since
		}
	}
	got, err := registry.Push(ctx, reference, reader, about,
		registry.Options{PlainHTTP: opts.PlainHTTP, Progress: opts.Progress})
	return runtime.Pushed(got), err
}

// PullCheckpoint fetches a checkpoint from a registry.
func (v checkpointVerbs) PullCheckpoint(
	ctx context.Context, reference string, opts runtime.RegistryOptions,
) (runtime.Checkpoint, error) {
	return verb(ctx, v.e, on("checkpoint pull", reference), func(ctx context.Context) (runtime.Checkpoint, error) {
		return v.e.transfers.pullCheckpoint(ctx, reference, opts)
	})
}

func (t *transfers) pullCheckpoint(
	ctx context.Context, reference string, opts runtime.RegistryOptions,
) (_ runtime.Checkpoint, err error) {
	scratch, err := t.store.PullDir()
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	var m store.Manifest
	var draft *store.Draft
	var lock *store.Lock
	defer func() { // after the draft has ended
		if lock != nil {
			lock.Unlock()
		}
	}()
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	var there *runtime.Checkpoint
	here := errors.New("it is here")
	_, err = registry.Pull(ctx, reference, func(ctx context.Context, manifest []byte) (_ registry.Target, err error) {
		if m, err = store.ParseManifest(manifest); err != nil {
			return nil, err
		}
		row, err := t.incoming(ctx, m, runtime.ImportOptions{})
		if err != nil {
			return nil, err
		}
		if there, err = t.have(ctx, row); err != nil {
			return nil, err
		}
		if there != nil {
			return nil, here
		}
		if lock, err = t.store.Lock(ctx, row.SandboxID, "checkpoint pull", lockWait); err != nil {
			return nil, err
		}
		if draft, err = t.store.BeginCheckpoint(ctx, row); err != nil {
			return nil, err
		}
		return draft, nil
	}, registry.Options{PlainHTTP: opts.PlainHTTP, Progress: opts.Progress, Scratch: scratch})
	if there != nil {
		return *there, nil
	}
	if draft != nil {
		undo.Add(func(ctx context.Context) error { return draft.Abort(ctx, err) })
	}
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	done, err := draft.CommitAs(ctx, m)
	if err != nil {
		return runtime.Checkpoint{}, err
	}
	undo.Release()
	t.log.Info("checkpoint pulled", "sandbox", done.SandboxID, "checkpoint", done.ID)
	return t.images.arrived(ctx, done), draft.Close()
}
