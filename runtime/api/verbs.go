package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// here is the error of what the service cannot do for its caller.
func here(format string, args ...any) error {
	return &runtime.Error{
		Err:  fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), ErrHere),
		Hint: "Without the service, as root, it works: AGENTBOX_HOST=none",
	}
}

// remotely refuses references to files: they are the caller's, not the service's.
func remotely(ref string) error {
	r, err := reference.Parse(ref, "")
	if err != nil {
		return nil // the service says what is wrong
	}
	switch r.Transport {
	case reference.OCI, reference.OCIArchive, reference.DockerArchive, reference.Dir:
		return here("%s is a file of yours", ref)
	}
	return nil
}

// portable refuses options that name files.
func portable(o image.SourceOptions) error {
	switch {
	case o.CertDir != "":
		return here("the certificates in %s are yours", o.CertDir)
	case o.AuthFile != "":
		return here("the credentials in %s are yours", o.AuthFile)
	}
	return nil
}

// values looks up what secrets come from: variables are sent along, files are the
// host's, which the service reads at each start; they must be the caller's to read.
func (c *conn) values(secrets []runtime.Secret, given bool) (wire.SecretValues, error) {
	v := wire.SecretValues{Variables: map[string]string{}}
	for _, s := range secrets {
		if s.Env != "" {
			if value, ok := c.lookup(s.Env); ok {
				v.Variables[s.Env] = value
			}
		}
		if s.File != "" && given {
			f, err := os.Open(s.File)
			if errors.Is(err, os.ErrPermission) {
				return v, fmt.Errorf("secret %s: %w: %v", s.Name, runtime.ErrDenied, err)
			}
			if err == nil {
				f.Close()
			}
		}
	}
	return v, nil
}

// valuesOf are those of a sandbox, and of secrets that are given.
func (c *conn) valuesOf(ctx context.Context, sandbox string, given []runtime.Secret) (wire.SecretValues, error) {
	if _, err := c.values(given, true); err != nil {
		return wire.SecretValues{}, err
	}
	sb, err := sandboxCalls{c}.Sandbox(ctx, sandbox)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		return wire.SecretValues{}, err
	}
	return c.values(append(sb.Spec.Secrets, given...), false)
}

func pulled(fn func(image.Progress)) func([]byte) error { return decoded(fn) }

// decoded decodes progress of any kind for fn; if fn is nil, it returns nil.
func decoded[P any](fn func(P)) func([]byte) error {
	if fn == nil {
		return nil
	}
	return func(data []byte) error {
		var p P
		err := json.Unmarshal(data, &p)
		if err == nil {
			fn(p)
		}
		return err
	}
}

// Create makes a sandbox.
func (c sandboxCalls) Create(ctx context.Context, req runtime.CreateRequest) (runtime.Sandbox, error) {
	if err := errors.Join(remotely(req.Spec.Image), portable(req.Pull.Source)); err != nil {
		return runtime.Sandbox{}, err
	}
	v, err := c.values(req.Spec.Secrets, true)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	body := wire.CreateBody{CreateRequest: req, SecretValues: v}
	return do[runtime.Sandbox](ctx, c.conn, at("sandboxes"), body, pulled(req.Pull.Progress))
}

// Wait blocks until the sandbox has exited.
func (c sandboxCalls) Wait(ctx context.Context, sandbox string) (runtime.Exit, error) {
	return get[runtime.Exit](ctx, c.conn, at("sandboxes", sandbox, "wait"), nil)
}

// Logs writes what the sandbox's processes printed.
func (c sandboxCalls) Logs(ctx context.Context, sandbox string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	q := url.Values{
		"follow": {strconv.FormatBool(opts.Follow)}, "tail": {strconv.Itoa(opts.Tail)},
		"timestamps": {strconv.FormatBool(opts.Timestamps)},
	}
	if !opts.Since.IsZero() {
		q.Set("since", opts.Since.Format(time.RFC3339Nano))
	}
	return c.follow(ctx, at("sandboxes", sandbox, "logs"), q, func(name string, data []byte) error {
		w := map[string]io.Writer{wire.EventStdout: stdout, wire.EventStderr: stderr}[name]
		var t wire.Text
		if err := json.Unmarshal(data, &t); err != nil || w == nil {
			return err
		}
		_, err := w.Write(t.Bytes())
		return err
	})
}

// Events hands what befell a sandbox to each.
func (c hostCalls) Events(
	ctx context.Context, sandbox string, opts runtime.EventOptions, each func(runtime.Event) error,
) error {
	q := url.Values{"follow": {strconv.FormatBool(opts.Follow)}, "type": opts.Types}
	if !opts.Since.IsZero() {
		q.Set("since", opts.Since.Format(time.RFC3339Nano))
	}
	return c.follow(ctx, at("sandboxes", sandbox, "events"), q, func(_ string, data []byte) error {
		var e runtime.Event
		if err := json.Unmarshal(data, &e); err != nil {
			return err
		}
		return each(e)
	})
}

// ReleaseHold lets a sandbox be used that a failed restore holds.
func (c hostCalls) ReleaseHold(ctx context.Context, sandbox string) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "release"), wire.None{})
}

// UpdateLifetime changes how long a sandbox may live.
func (c hostCalls) UpdateLifetime(
	ctx context.Context, sandbox string, change runtime.LifetimeChange,
) (runtime.Sandbox, error) {
	return do[runtime.Sandbox](ctx, c.conn, at("sandboxes", sandbox, "lifetime"), change, nil)
}

// UpdateStorage changes what the files of a sandbox may take.
func (c hostCalls) UpdateStorage(
	ctx context.Context, sandbox string, change runtime.StorageChange,
) (runtime.Sandbox, error) {
	return do[runtime.Sandbox](ctx, c.conn, at("sandboxes", sandbox, "storage"), change, nil)
}

// UpdateEgress changes what a sandbox may reach.
func (c hostCalls) UpdateEgress(ctx context.Context, sandbox string, change runtime.EgressChange) ([]string, error) {
	b, err := do[wire.RulesBody](ctx, c.conn, at("sandboxes", sandbox, "egress"), change, nil)
	return b.Rules, err
}

// Kill sends a signal to the sandbox's first process.
func (c sandboxCalls) Kill(ctx context.Context, sandbox, signal string) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "kill"), wire.KillBody{Signal: signal})
}

// Stop ends the sandbox's processes.
func (c sandboxCalls) Stop(ctx context.Context, sandbox string, timeout time.Duration) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "stop"), wire.StopBody{Timeout: &timeout})
}

// Restart stops a sandbox and starts it again.
func (c sandboxCalls) Restart(ctx context.Context, sandbox string, timeout time.Duration) error {
	v, err := c.valuesOf(ctx, sandbox, nil)
	if err != nil {
		return err
	}
	body := wire.RestartBody{SecretValues: v, StopBody: wire.StopBody{Timeout: &timeout}}
	return none(ctx, c.conn, at("sandboxes", sandbox, "restart"), body)
}

// Pause freezes every process of a running sandbox.
func (c sandboxCalls) Pause(ctx context.Context, sandbox string) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "pause"), wire.None{})
}

// Unpause thaws a paused sandbox.
func (c sandboxCalls) Unpause(ctx context.Context, sandbox string) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "unpause"), wire.None{})
}

// Remove frees all a sandbox has.
func (c sandboxCalls) Remove(ctx context.Context, sandbox string, opts runtime.RemoveOptions) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "remove"), opts)
}

// Sandbox describes one sandbox as it is now.
func (c sandboxCalls) Sandbox(ctx context.Context, sandbox string) (runtime.Sandbox, error) {
	return get[runtime.Sandbox](ctx, c.conn, at("sandboxes", sandbox), nil)
}

// Sandboxes lists all sandboxes, newest first.
func (c sandboxCalls) Sandboxes(ctx context.Context) ([]runtime.Sandbox, error) {
	return all[runtime.Sandbox](ctx, c.conn, at("sandboxes"), nil)
}

// CopyFrom writes a path of the sandbox as a tar stream.
func (c sandboxCalls) CopyFrom(ctx context.Context, sandbox, path string, w io.Writer) error {
	return c.download(ctx, at("sandboxes", sandbox, "archive"), url.Values{"path": {path}}, w)
}

// CopyTo extracts a tar stream into a directory of the sandbox.
func (c sandboxCalls) CopyTo(ctx context.Context, sandbox, path string, r io.Reader) error {
	route := at("sandboxes", sandbox, "archive")
	_, err := send[wire.None](ctx, c.conn, http.MethodPut, route, url.Values{"path": {path}}, r, nil)
	return err
}

// Mount mounts files of the sandbox, until they are unmounted or ctx ends.
func (c sandboxCalls) Mount(ctx context.Context, sandbox, dir string, shown func(runtime.Mounted)) error {
	_, err := do[wire.None](ctx, c.conn, at("sandboxes", sandbox, "mount"), wire.MountBody{Dir: dir}, decoded(shown))
	return err
}

// Stat describes a path in the sandbox.
func (c sandboxCalls) Stat(ctx context.Context, sandbox, path string) (runtime.PathStat, error) {
	st, err := get[wire.Stat](ctx, c.conn, at("sandboxes", sandbox, "stat"), url.Values{"path": {path}})
	return st.Decoded(), err
}

// List lists a path, and what is in it.
func (c sandboxCalls) List(
	ctx context.Context, sandbox, path string, opts runtime.ListOptions, fn func(runtime.FileEntry) error,
) error {
	q := url.Values{
		"path": {path}, "recursive": {strconv.FormatBool(opts.Recursive)}, "name": {opts.Name}, "file_type": {opts.Type},
	}
	var own error
	err := c.follow(ctx, at("sandboxes", sandbox, "files"), q, func(_ string, data []byte) error {
		var part wire.Files
		if err := json.Unmarshal(data, &part); err != nil {
			return err
		}
		for _, f := range part.Files {
			if own = fn(f); own != nil {
				return own
			}
		}
		return nil
	})
	if own != nil {
		return own
	}
	return err
}

// Checkpoint takes one.
func (c checkpointCalls) Checkpoint(
	ctx context.Context, sandbox string, opts runtime.CheckpointOptions,
) (runtime.Checkpoint, error) {
	return do[runtime.Checkpoint](ctx, c.conn, at("sandboxes", sandbox, "checkpoints"), opts, decoded(opts.Progress))
}

// Restore puts a sandbox back.
func (c checkpointCalls) Restore(ctx context.Context, sandbox string, opts runtime.RestoreOptions) (runtime.Restored, error) {
	if err := portable(opts.Pull.Source); err != nil {
		return runtime.Restored{}, err
	}
	v, err := c.valuesOf(ctx, sandbox, opts.Secrets)
	if err != nil {
		return runtime.Restored{}, err
	}
	body := wire.RestoreBody{RestoreOptions: opts, SecretValues: v}
	return do[runtime.Restored](ctx, c.conn, at("sandboxes", sandbox, "restore"), body, restored(opts))
}

// PlanRestore returns what Restore would change.
func (c checkpointCalls) PlanRestore(
	ctx context.Context, sandbox string, opts runtime.RestoreOptions,
) (runtime.RestorePlan, error) {
	return do[runtime.RestorePlan](ctx, c.conn, at("sandboxes", sandbox, "plan"), opts, nil)
}

// Undo goes back in a sandbox's history by steps.
func (c checkpointCalls) Undo(ctx context.Context, sandbox string, opts runtime.UndoOptions) (runtime.Restored, error) {
	return do[runtime.Restored](ctx, c.conn, at("sandboxes", sandbox, "undo"), opts, decoded(opts.Progress))
}

// Redo goes forward again to what Undo has left.
func (c checkpointCalls) Redo(ctx context.Context, sandbox string, opts runtime.UndoOptions) (runtime.Restored, error) {
	return do[runtime.Restored](ctx, c.conn, at("sandboxes", sandbox, "redo"), opts, decoded(opts.Progress))
}

// PlanUndo returns what Undo or Redo would change.
func (c checkpointCalls) PlanUndo(ctx context.Context, sandbox string, opts runtime.UndoOptions) (runtime.RestorePlan, error) {
	return do[runtime.RestorePlan](ctx, c.conn, at("sandboxes", sandbox, "undo", "plan"), opts, nil)
}

// UndoList lists where Undo and Redo lead.
func (c checkpointCalls) UndoList(ctx context.Context, sandbox string) (runtime.UndoList, error) {
	return get[runtime.UndoList](ctx, c.conn, at("sandboxes", sandbox, "undo", "list"), nil)
}

// Fork starts new sandboxes from a checkpoint.
func (c checkpointCalls) Fork(ctx context.Context, sandbox string, opts runtime.ForkOptions) ([]runtime.Forked, error) {
	v, err := c.valuesOf(ctx, sandbox, opts.Secrets)
	if err != nil {
		return nil, err
	}
	body := wire.ForkBody{ForkOptions: opts, SecretValues: v}
	return do[[]runtime.Forked](ctx, c.conn, at("sandboxes", sandbox, "fork"), body, decoded(opts.Progress))
}

// Apply brings what a sandbox changed into the directory below.
func (c hostCalls) Apply(ctx context.Context, sandbox string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	return do[runtime.Applied](ctx, c.conn, at("sandboxes", sandbox, "apply"), opts, nil)
}

// Approvals lists the applies that a person has to approve.
func (c hostCalls) Approvals(ctx context.Context) ([]runtime.Approval, error) {
	return all[runtime.Approval](ctx, c.conn, at("approvals"), nil)
}

// Approve approves an apply, once.
func (c hostCalls) Approve(ctx context.Context, id string) (runtime.Approval, error) {
	return do[runtime.Approval](ctx, c.conn, at("approvals", id, "approve"), nil, nil)
}

// Diff returns the changes between two states.
func (c checkpointCalls) Diff(ctx context.Context, req runtime.DiffRequest) (runtime.Diff, error) {
	return do[runtime.Diff](ctx, c.conn, at("diff"), req, nil)
}

// Stats returns the resources that sandboxes use.
func (c sandboxCalls) Stats(ctx context.Context, opts runtime.StatsOptions) ([]runtime.Stats, error) {
	return do[[]runtime.Stats](ctx, c.conn, at("stats"), opts, nil)
}

// History lists a sandbox's checkpoints.
func (c checkpointCalls) History(
	ctx context.Context, sandbox string, opts runtime.HistoryOptions,
) ([]runtime.HistoryEntry, error) {
	return all[runtime.HistoryEntry](ctx, c.conn, at("sandboxes", sandbox, "history"),
		url.Values{"all": {strconv.FormatBool(opts.All)}})
}

// Checkpoints lists checkpoints.
func (c checkpointCalls) Checkpoints(ctx context.Context, f runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
	q := url.Values{
		"sandbox": {f.Sandbox}, "all": {strconv.FormatBool(f.All)}, "trigger": {f.Trigger}, "policy": {f.Policy},
	}
	for k, v := range f.Labels {
		q.Add("label", k+"="+v)
	}
	return all[runtime.Checkpoint](ctx, c.conn, at("checkpoints"), q)
}

// CheckpointInfo returns one.
func (c checkpointCalls) CheckpointInfo(ctx context.Context, checkpoint string) (runtime.Checkpoint, error) {
	return get[runtime.Checkpoint](ctx, c.conn, at("checkpoints", checkpoint), nil)
}

// RemoveCheckpoint removes one.
func (c checkpointCalls) RemoveCheckpoint(ctx context.Context, checkpoint string) error {
	return none(ctx, c.conn, at("checkpoints", checkpoint, "remove"), wire.None{})
}

// RemoveCheckpoints removes those that match.
func (c checkpointCalls) RemoveCheckpoints(
	ctx context.Context, f runtime.CheckpointFilter,
) (runtime.RemovedCheckpoints, error) {
	return do[runtime.RemovedCheckpoints](ctx, c.conn, at("checkpoints", "remove"), f, nil)
}

// VerifyCheckpoint rereads all of it.
func (c checkpointCalls) VerifyCheckpoint(ctx context.Context, checkpoint string) error {
	return none(ctx, c.conn, at("checkpoints", checkpoint, "verify"), wire.None{})
}

// PinCheckpoint keeps a checkpoint from Prune.
func (c checkpointCalls) PinCheckpoint(ctx context.Context, checkpoint string, pinned bool) error {
	return none(ctx, c.conn, at("checkpoints", checkpoint, "pin"), wire.PinBody{Pinned: pinned})
}

// TagCheckpoint gives a checkpoint one more name.
func (c checkpointCalls) TagCheckpoint(ctx context.Context, checkpoint, tag string) error {
	return none(ctx, c.conn, at("checkpoints", checkpoint, "tag"), wire.TagBody{Tag: tag})
}

// UntagCheckpoint takes a tag away.
func (c checkpointCalls) UntagCheckpoint(ctx context.Context, ref string) error {
	return none(ctx, c.conn, at("checkpoints", ref, "untag"), wire.None{})
}

// Prune removes the checkpoints that no rule keeps.
func (c hostCalls) Prune(ctx context.Context, opts runtime.PruneOptions) (runtime.Pruned, error) {
	return do[runtime.Pruned](ctx, c.conn, at("prune"), opts, progressOf(opts.Progress))
}

// Usage returns what space is used for.
func (c hostCalls) Usage(ctx context.Context) (runtime.Usage, error) {
	return get[runtime.Usage](ctx, c.conn, at("usage"), nil)
}

// Verify proves that checkpoints can be restored whole.
func (c hostCalls) Verify(ctx context.Context, opts runtime.VerifyOptions) (runtime.VerifyReport, error) {
	return do[runtime.VerifyReport](ctx, c.conn, at("verify"), opts, progressOf(opts.Progress))
}

// Reindex rebuilds the index of the store.
func (c hostCalls) Reindex(ctx context.Context) (runtime.Reindexed, error) {
	return do[runtime.Reindexed](ctx, c.conn, at("reindex"), wire.None{}, nil)
}

// Reconcile finishes or undoes what was interrupted, and repairs what differs from its records.
func (c hostCalls) Reconcile(ctx context.Context) (runtime.ReconcileReport, error) {
	return do[runtime.ReconcileReport](ctx, c.conn, at("recover"), wire.None{}, nil)
}

// ExportCheckpoint writes an archive. Its progress is what has arrived.
func (c checkpointCalls) ExportCheckpoint(
	ctx context.Context, checkpoint string, w io.Writer, opts runtime.ExportOptions,
) error {
	if opts.Progress != nil {
		w = io.MultiWriter(w, counter(opts.Progress))
	}
	return c.download(ctx, at("checkpoints", checkpoint, "export"),
		url.Values{"compress": {opts.Compress}, "recipient": opts.Recipients}, w)
}

// ImportCheckpoint reads what ExportCheckpoint wrote. Its progress is what was sent.
func (c checkpointCalls) ImportCheckpoint(
	ctx context.Context, r io.Reader, opts runtime.ImportOptions,
) (runtime.Checkpoint, error) {
	header := http.Header{}
	if opts.Identities != "" {
		data, err := readSmall(opts.Identities)
		if err != nil {
			return runtime.Checkpoint{}, err
		}
		header.Set(wire.HeaderIDs, base64.StdEncoding.EncodeToString(data))
	}
	if opts.Progress != nil {
		r = io.TeeReader(r, counter(opts.Progress))
	}
	q := url.Values{"name": {opts.Name}, "image": {opts.Image}, "trust": {strconv.FormatBool(opts.Trust)}}
	return send[runtime.Checkpoint](ctx, c.conn, http.MethodPost, at("checkpoints", "import"), q, r, header)
}

// maxIdentities bounds the keys in a header.
const maxIdentities = 32 << 10

func readSmall(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("identities: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxIdentities+1))
	if err == nil && len(data) > maxIdentities {
		err = here("identities: %s is longer than %d bytes", file, maxIdentities)
	}
	return data, err
}

// counter counts what is written to it.
func counter(fn runtime.Progress) io.Writer {
	var done int64
	return writerFunc(func(p []byte) (int, error) {
		done += int64(len(p))
		fn(done, 0)
		return len(p), nil
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// PushCheckpoint stores a checkpoint in a registry.
func (c checkpointCalls) PushCheckpoint(
	ctx context.Context, checkpoint, reference string, opts runtime.RegistryOptions,
) (runtime.Pushed, error) {
	body := wire.RegistryBody{Reference: reference, Options: opts}
	return do[runtime.Pushed](ctx, c.conn, at("checkpoints", checkpoint, "push"), body, progressOf(opts.Progress))
}

// PullCheckpoint brings one back.
func (c checkpointCalls) PullCheckpoint(
	ctx context.Context, reference string, opts runtime.RegistryOptions,
) (runtime.Checkpoint, error) {
	body := wire.RegistryBody{Reference: reference, Options: opts}
	return do[runtime.Checkpoint](ctx, c.conn, at("checkpoints", "pull"), body, progressOf(opts.Progress))
}

// PullImage gets an image.
func (c imageCalls) PullImage(ctx context.Context, ref string, opts image.PullOptions) (runtime.Image, error) {
	if err := errors.Join(remotely(ref), portable(opts.Source)); err != nil {
		return runtime.Image{}, err
	}
	body := wire.PullBody{Reference: ref, Options: opts}
	return do[runtime.Image](ctx, c.conn, at("images", "pull"), body, pulled(opts.Progress))
}

// PushImage writes an image to where the reference to says.
func (c imageCalls) PushImage(ctx context.Context, ref, to string, opts image.SourceOptions) (runtime.PushedImage, error) {
	if err := errors.Join(remotely(to), portable(opts)); err != nil {
		return runtime.PushedImage{}, err
	}
	body := wire.PushBody{To: to, Options: opts}
	return do[runtime.PushedImage](ctx, c.conn, at("images", ref, "push"), body, decoded(opts.Progress))
}

// ImportImage sends the caller's tarball.
func (c imageCalls) ImportImage(ctx context.Context, name, source string) (runtime.Image, error) {
	f, err := os.Open(source)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("%v: %w", err, runtime.ErrNotFound)
		}
		return runtime.Image{}, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || info.IsDir() {
		return runtime.Image{}, errors.Join(err, here("%s is a directory of yours", source))
	}
	return c.ImportImageFrom(ctx, name, f)
}

// ImportImageFrom sends a tar stream.
func (c imageCalls) ImportImageFrom(ctx context.Context, name string, r io.Reader) (runtime.Image, error) {
	return send[runtime.Image](ctx, c.conn, http.MethodPost, at("images", "import"), url.Values{"name": {name}}, r, nil)
}

// Images lists images.
func (c imageCalls) Images(ctx context.Context) ([]runtime.Image, error) {
	return all[runtime.Image](ctx, c.conn, at("images"), nil)
}

// InspectImage describes one.
func (c imageCalls) InspectImage(ctx context.Context, ref string) (runtime.ImageDetails, error) {
	return get[runtime.ImageDetails](ctx, c.conn, at("images", ref), nil)
}

// TagImage gives an image one more name.
func (c imageCalls) TagImage(ctx context.Context, ref, name string) error {
	return none(ctx, c.conn, at("images", ref, "tag"), wire.NameBody{Name: name})
}

// RemoveImage removes a name of an image.
func (c imageCalls) RemoveImage(ctx context.Context, name string) error {
	return none(ctx, c.conn, at("images", name, "remove"), wire.None{})
}

// PruneImages removes images that nothing needs.
func (c imageCalls) PruneImages(ctx context.Context, everything bool) (runtime.PrunedImages, error) {
	return do[runtime.PrunedImages](ctx, c.conn, at("images", "prune"), wire.AllBody{All: everything}, nil)
}

// VerifyImage reads an image's files again.
func (c imageCalls) VerifyImage(ctx context.Context, ref string) (runtime.Image, error) {
	return do[runtime.Image](ctx, c.conn, at("images", ref, "verify"), wire.None{}, nil)
}

// Commit makes an image of a sandbox, or of a checkpoint.
func (c imageCalls) Commit(ctx context.Context, ref, to string, opts runtime.CommitOptions) (runtime.Committed, error) {
	if err := errors.Join(remotely(to), portable(opts.Source)); err != nil {
		return runtime.Committed{}, err
	}
	body := wire.CommitBody{Ref: ref, To: to, Options: opts}
	return do[runtime.Committed](ctx, c.conn, at("commit"), body, decoded(opts.Source.Progress))
}

// Policies lists the policies that names stand for.
func (c hostCalls) Policies(ctx context.Context) ([]runtime.PolicyEntry, error) {
	return all[runtime.PolicyEntry](ctx, c.conn, at("policies"), nil)
}

// Policy resolves the name of one.
func (c hostCalls) Policy(ctx context.Context, name string) (*policy.Policy, error) {
	return get[*policy.Policy](ctx, c.conn, at("policies", name), nil)
}

// AddEffect records an effect.
func (c hostCalls) AddEffect(ctx context.Context, sandbox string, req runtime.EffectRequest) (runtime.Effect, error) {
	return do[runtime.Effect](ctx, c.conn, at("sandboxes", sandbox, "effects"), req, nil)
}

// Effects lists the ledger of a sandbox.
func (c hostCalls) Effects(ctx context.Context, sandbox string, everything bool) ([]runtime.Effect, error) {
	return all[runtime.Effect](ctx, c.conn, at("sandboxes", sandbox, "effects"),
		url.Values{"all": {strconv.FormatBool(everything)}})
}

// RemoveEffect takes one off the ledger.
func (c hostCalls) RemoveEffect(ctx context.Context, sandbox, effect string) error {
	return none(ctx, c.conn, at("sandboxes", sandbox, "effects", effect, "remove"), wire.None{})
}
