package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// A fakeService is a Service in memory: enough of one for flags, output and
// exit codes. Its programs are functions.
type fakeService struct {
	fakeHistory
	fakeLeases
	mu          sync.Mutex
	sandboxes   []runtime.Sandbox // newest first
	checkpoints []runtime.Checkpoint
	images      []runtime.Image
	calls       []string
	fail        map[string]error // by method
	created     []runtime.CreateRequest
	execed      []runtime.Process
	reaped      []string
	ckOpts      runtime.CheckpointOptions
	applied     runtime.Applied
	applyOpts   runtime.ApplyOptions
	reOpts      runtime.RestoreOptions
	attached    []runtime.RestoredFile
	hostErr     error // of a restore, but for which it is done
	filter      runtime.CheckpointFilter
	logOpts     runtime.LogOptions
	since       time.Time // of Events
	diffReq     runtime.DiffRequest
	diff        runtime.Diff
	listed      []runtime.FileEntry
	history     []runtime.HistoryEntry
	stopTimeout time.Duration
	stdin       []byte

	// program is a sandbox's command: it runs in Start's wait and in Attach,
	// and its result is the exit code, or ErrDetached.
	program func(ctx context.Context, s runtime.Streams, signals <-chan string) (int, error)
	signals chan string
	exits   map[string]chan int
}

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 6789, time.UTC)

func newFake() *fakeService {
	return &fakeService{fail: map[string]error{}, signals: make(chan string, 16), exits: map[string]chan int{}}
}

func (f *fakeService) Policies(context.Context) ([]runtime.PolicyEntry, error) {
	return nil, f.call("Policies")
}

func (f *fakeService) Policy(_ context.Context, name string) (*policy.Policy, error) {
	return nil, f.call("Policy", name)
}

func (f *fakeService) UpdateEgress(_ context.Context, sandbox string, change runtime.EgressChange) ([]string, error) {
	return append([]string{"pypi.org 443"}, change.Add...), f.call("UpdateEgress", sandbox, change.Add, change.Remove)
}

func (f *fakeService) Events(
	_ context.Context, sandbox string, opts runtime.EventOptions, each func(runtime.Event) error,
) error {
	if err := f.call("Events", sandbox, opts.Follow, opts.Types); err != nil {
		return err
	}
	f.since = opts.Since
	return errors.Join(
		each(runtime.Event{
			Time: epoch, Sandbox: sandbox, Type: runtime.EventDenied, Protocol: "tls", Name: "evil.example",
			Address: "192.0.2.1:443", Reason: "no rule allows the name on this port", Missed: 3,
		}),
		each(runtime.Event{
			Time: epoch, Sandbox: sandbox, Type: runtime.EventOOM, Count: 1, Total: 2, Started: epoch, Limit: 16 << 20,
		}),
		each(runtime.Event{Time: epoch, Sandbox: sandbox, Type: runtime.EventPids, Count: 3, Total: 3, Started: epoch}),
		each(runtime.Event{Time: epoch, Sandbox: sandbox, Type: runtime.EventStorage, Used: 3 << 20, Limit: 2 << 20}),
		each(runtime.Event{Time: epoch, Sandbox: sandbox, Type: runtime.EventExpired, After: int64(time.Hour)}),
		each(runtime.Event{
			Time: epoch, Sandbox: sandbox, Type: runtime.EventIdle, After: int64(61234 * time.Millisecond),
		}))
}

func (f *fakeService) UpdateLifetime(
	_ context.Context, sandbox string, change runtime.LifetimeChange,
) (sb runtime.Sandbox, err error) {
	if change.TTL != nil && *change.TTL > 0 {
		sb.Expires = epoch.Add(*change.TTL)
	}
	text := func(d *time.Duration) string {
		if d == nil {
			return "-"
		}
		return d.String()
	}
	return sb, f.call("UpdateLifetime", sandbox, text(change.TTL), text(change.Idle))
}

func (f *fakeService) UpdateStorage(
	_ context.Context, sandbox string, change runtime.StorageChange,
) (runtime.Sandbox, error) {
	return runtime.Sandbox{}, f.call("UpdateStorage", sandbox, change.Size)
}

func (f *fakeService) call(method string, args ...any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, strings.TrimSpace(method+" "+strings.TrimSpace(fmt.Sprintln(args...))))
	return f.fail[method]
}

func (f *fakeService) find(ref string) (*runtime.Sandbox, error) {
	for i := range f.sandboxes {
		if sb := &f.sandboxes[i]; sb.Name == ref || strings.HasPrefix(sb.ID, ref) {
			return sb, nil
		}
	}
	return nil, &runtime.Error{
		Op: "find", ID: ref, Err: fmt.Errorf("sandbox %w", runtime.ErrNotFound),
		Hint: "'agentbox ps -a' lists all sandboxes.",
	}
}

func (f *fakeService) Create(_ context.Context, req runtime.CreateRequest) (runtime.Sandbox, error) {
	err := f.call("Create", req.Spec.Name, req.Spec.Image, req.Spec.Args)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.created = append(f.created, req)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	spec := req.Spec
	spec.ID = fmt.Sprintf("%032x", 0xabc0+len(f.sandboxes))
	spec.Name = cmp.Or(spec.Name, "made-up")
	sb := runtime.Sandbox{
		ID: spec.ID, Name: spec.Name, Status: runtime.Created, Image: spec.Image, Backend: "fake", Created: epoch,
		Labels: spec.Labels, Spec: spec,
	}
	f.sandboxes = slices.Insert(f.sandboxes, 0, sb)
	f.exits[sb.ID] = make(chan int, 1)
	return sb, nil
}

func (f *fakeService) Start(ctx context.Context, ref string, s *runtime.Streams) (func() error, error) {
	if err := f.call("Start", ref); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ref)
	if err != nil {
		return nil, err
	}
	sb.Status, sb.Pid, sb.Started = runtime.Running, 4242, epoch
	if s == nil {
		return nil, nil
	}
	id := sb.ID
	return func() error { return f.serve(ctx, id, *s) }, nil
}

func (f *fakeService) serve(ctx context.Context, id string, s runtime.Streams) error {
	if f.program == nil {
		f.exits[id] <- 0
		return nil
	}
	code, err := f.program(ctx, s, f.signals)
	if err == nil {
		f.exits[id] <- code
	}
	return err
}

func (f *fakeService) Attach(ctx context.Context, ref string, s runtime.Streams) error {
	if err := f.call("Attach", ref); err != nil {
		return err
	}
	return f.serve(ctx, ref, s)
}

func (f *fakeService) Exec(ctx context.Context, ref string, p runtime.Process, s runtime.Streams) (int, error) {
	f.execed = append(f.execed, p)
	if err := f.call("Exec", ref, p.Args); err != nil {
		return 0, err
	}
	if _, err := f.find(ref); err != nil {
		return 0, err
	}
	if f.program == nil {
		return 0, nil
	}
	return f.program(ctx, s, f.signals)
}

func (f *fakeService) Wait(ctx context.Context, ref string) (runtime.Exit, error) {
	if err := f.call("Wait", ref); err != nil {
		return runtime.Exit{}, err
	}
	f.mu.Lock()
	sb, err := f.find(ref)
	if err != nil {
		f.mu.Unlock()
		return runtime.Exit{}, err
	}
	exited := f.exits[sb.ID]
	done := sb.Status == runtime.Exited || exited == nil
	exit := runtime.Exit{Code: sb.ExitCode, OOMKilled: sb.OOMKilled}
	f.mu.Unlock()
	if done {
		return exit, nil
	}
	select {
	case code := <-exited:
		return runtime.Exit{Code: code}, nil
	case <-ctx.Done():
		return runtime.Exit{}, ctx.Err()
	}
}

func (f *fakeService) Mount(ctx context.Context, ref, dir string, shown func(runtime.Mounted)) error {
	if err := f.call("Mount", ref, dir); err != nil {
		return err
	}
	shown(runtime.Mounted{Dir: dir})
	return nil
}

func (f *fakeService) Logs(_ context.Context, ref string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	f.logOpts = opts
	if err := f.call("Logs", ref); err != nil {
		return err
	}
	fmt.Fprintln(stdout, "out")
	fmt.Fprintln(stderr, "err")
	return nil
}

func (f *fakeService) Kill(_ context.Context, ref, signal string) error {
	if err := f.call("Kill", ref, signal); err != nil {
		return err
	}
	select {
	case f.signals <- signal:
	default:
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := f.find(ref)
	return err
}

func (f *fakeService) Stop(_ context.Context, ref string, timeout time.Duration) error {
	f.stopTimeout = timeout
	err := f.call("Stop", ref)
	if err == nil {
		_, err = f.find(ref)
	}
	return err
}

func (f *fakeService) Restart(_ context.Context, ref string, timeout time.Duration) error {
	f.stopTimeout = timeout
	return f.simple("Restart", ref)
}

func (f *fakeService) simple(method, ref string) error {
	if err := f.call(method, ref); err != nil {
		return err
	}
	_, err := f.find(ref)
	return err
}

func (f *fakeService) Pause(_ context.Context, ref string) error   { return f.simple("Pause", ref) }
func (f *fakeService) Unpause(_ context.Context, ref string) error { return f.simple("Unpause", ref) }

func (f *fakeService) Remove(_ context.Context, ref string, opts runtime.RemoveOptions) error {
	if err := f.call("Remove", ref, opts.Force, opts.Checkpoints); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ref)
	if err != nil {
		return err
	}
	id := sb.ID
	f.sandboxes = slices.DeleteFunc(f.sandboxes, func(s runtime.Sandbox) bool { return s.ID == id })
	return nil
}

func (f *fakeService) Sandbox(_ context.Context, ref string) (runtime.Sandbox, error) {
	if err := f.call("Sandbox", ref); err != nil {
		return runtime.Sandbox{}, err
	}
	sb, err := f.find(ref)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	return *sb, nil
}

func (f *fakeService) Sandboxes(context.Context) ([]runtime.Sandbox, error) {
	return f.sandboxes, f.call("Sandboxes")
}

func (f *fakeService) Checkpoint(
	ctx context.Context, ref string, opts runtime.CheckpointOptions,
) (runtime.Checkpoint, error) {
	if err := slowly(ctx, &opts.Progress, opts.Name); err != nil {
		return runtime.Checkpoint{}, err
	}
	f.ckOpts = opts
	if err := f.simple("Checkpoint", ref); err != nil {
		return runtime.Checkpoint{}, err
	}
	c := runtime.Checkpoint{
		ID: strings.Repeat("3f2a", 8), Name: opts.Name, SandboxName: ref, Kind: runtime.KindFull,
		Status:  runtime.CheckpointReady,
		Created: epoch, Files: 12, Processes: 3, Bytes: 1_234_567, Frozen: 84 * time.Millisecond, Labels: opts.Labels,
		Warnings: []string{"an exec session is not part of it"},
	}
	f.checkpoints = slices.Insert(f.checkpoints, 0, c)
	return c, nil
}

func (f *fakeService) Restore(ctx context.Context, ref string, opts runtime.RestoreOptions) (runtime.Restored, error) {
	if err := slowly(ctx, &opts.Progress, opts.Checkpoint); err != nil {
		return runtime.Restored{}, err
	}
	f.reOpts = opts
	if err := f.simple("Restore", ref); err != nil {
		return runtime.Restored{}, err
	}
	sb, _ := f.find(ref)
	newest := slices.IndexFunc(f.checkpoints, func(c runtime.Checkpoint) bool {
		return c.Trigger != runtime.TriggerUndo
	})
	return runtime.Restored{
		Sandbox: *sb, Checkpoint: f.checkpoints[newest], Verified: opts.Verify, Down: 120 * time.Millisecond,
		Lost: f.lost, Attached: f.attached,
	}, f.hostErr
}

func (f *fakeService) Checkpoints(_ context.Context, filter runtime.CheckpointFilter) ([]runtime.Checkpoint, error) {
	f.filter = filter
	if filter.Sandbox != "" {
		if _, err := f.find(filter.Sandbox); err != nil {
			return nil, err
		}
	}
	return f.checkpoints, f.call("Checkpoints")
}

func (f *fakeService) CheckpointInfo(_ context.Context, ref string) (runtime.Checkpoint, error) {
	if err := f.call("CheckpointInfo", ref); err != nil {
		return runtime.Checkpoint{}, err
	}
	for _, c := range f.checkpoints {
		if strings.HasPrefix(c.ID, ref) || c.Name == ref {
			return c, nil
		}
	}
	return runtime.Checkpoint{}, fmt.Errorf("checkpoint %s: %w", ref, runtime.ErrNotFound)
}

func (f *fakeService) RemoveCheckpoint(_ context.Context, ref string) error {
	return f.call("RemoveCheckpoint", ref)
}

func (f *fakeService) RemoveCheckpoints(
	_ context.Context, filter runtime.CheckpointFilter,
) (runtime.RemovedCheckpoints, error) {
	f.filter = filter
	return runtime.RemovedCheckpoints{Removed: []string{"c1"}, Pinned: []string{"c2"}}, f.call("RemoveCheckpoints")
}

func (f *fakeService) VerifyCheckpoint(_ context.Context, ref string) error {
	return f.call("VerifyCheckpoint", ref)
}

func (f *fakeService) Diff(_ context.Context, req runtime.DiffRequest) (runtime.Diff, error) {
	f.diffReq = req
	return f.diff, f.simple("Diff", req.Sandbox)
}

func (f *fakeService) History(
	_ context.Context, ref string, opts runtime.HistoryOptions,
) ([]runtime.HistoryEntry, error) {
	return f.history, f.call("History", ref, opts.All)
}

func (f *fakeService) Apply(_ context.Context, ref string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	f.applyOpts = opts
	if len(f.applied.Changes) > 0 {
		return f.applied, f.call("Apply", ref, opts.DryRun, opts.Undo, opts.Force, "owners", opts.Allow)
	}
	out := runtime.Applied{
		Sandbox: ref, Original: "/srv/repo", DryRun: opts.DryRun, Undone: opts.Undo,
		Changes: []runtime.Change{
			{Path: "/a b", Change: "A", Type: "file"}, {Path: "/d", Change: "D", Type: "dir"},
		},
	}
	if !strings.HasPrefix(ref, "volume://") {
		out.Checkpoint = "5abc5abc5abc"
		out.Workspaces = []runtime.AppliedWorkspace{{Path: "/work", Original: "/srv/repo"}}
		out.Changes[0].Path, out.Changes[1].Path = "/work/a b", "/work/d"
		out.Merged, out.Conflicts = []string{"/m"}, nil
		if opts.Markers {
			out.Conflicts, out.Merged = []string{"/c"}, []string{"/c", "/m"}
		}
		switch ref {
		case "torn":
			out.Conflicts, out.SandboxName = []string{"/work/both", "/work/.git/refs/heads/main"}, "torn"
			out.Refs = []runtime.AppliedRef{{
				Path: "/work/.git/refs/heads/main", Ref: "refs/heads/main", Directory: "aa11", Sandbox: "bb22",
			}}
		case "risky":
			out.Refused = []runtime.Refusal{
				{Path: "/work/.git/config", Reason: "git runs it", MayAllow: true}, {Path: "/work/null", Reason: "it is a device"},
			}
		}
		return out, f.call("Apply", ref, opts.DryRun, opts.Workspace, opts.Paths)
	}
	return out, f.call("Apply", ref, opts.DryRun, opts.Undo, opts.Force)
}

func (f *fakeService) ImportImage(_ context.Context, name, source string) (runtime.Image, error) {
	return runtime.Image{Name: name, Digest: "sha256:" + strings.Repeat("ab", 32)}, f.call("ImportImage", name, source)
}

func (f *fakeService) ImportImageFrom(_ context.Context, name string, r io.Reader) (runtime.Image, error) {
	data, err := io.ReadAll(r)
	f.stdin = data
	return runtime.Image{Name: name, Digest: "sha256:" + strings.Repeat("cd", 32)},
		errors.Join(err, f.call("ImportImageFrom", name))
}

func (f *fakeService) Images(context.Context) ([]runtime.Image, error) {
	return f.images, f.call("Images")
}

func (f *fakeService) RemoveImage(_ context.Context, name string) error {
	return f.call("RemoveImage", name)
}

func (f *fakeService) Reconcile(context.Context) (runtime.ReconcileReport, error) {
	return runtime.ReconcileReport{}, f.call("Reconcile")
}

func (f *fakeService) Reap(_ context.Context, id string) error {
	f.reaped = append(f.reaped, id)
	return f.call("Reap", id)
}

func (f *fakeService) Close() error { return f.call("Close") }

// The sandbox's files of the fake: a directory /d with a file f, and a
// symlink /l to it.
func (f *fakeService) Files(_ context.Context, ref string, _ func(*policy.Jail) error) error {
	return f.call("Files", ref)
}

func (f *fakeService) Stat(_ context.Context, ref, p string) (runtime.PathStat, error) {
	if err := f.call("Stat", p); err != nil {
		return runtime.PathStat{}, err
	}
	switch strings.TrimSuffix(strings.TrimSuffix(p, "/."), "/") {
	case "", "/d", "/tmp":
		return runtime.PathStat{Name: p, Dir: true}, nil
	case "/d/f":
		return runtime.PathStat{Name: "f", Size: 2}, nil
	case "/l":
		if strings.HasSuffix(p, "/") || strings.HasSuffix(p, "/.") {
			return runtime.PathStat{Name: "l", Dir: true}, nil
		}
		return runtime.PathStat{Name: "l", Link: "/d"}, nil
	}
	return runtime.PathStat{}, fmt.Errorf("%s: %w", p, runtime.ErrNotFound)
}

func (f *fakeService) List(
	_ context.Context, ref, p string, opts runtime.ListOptions, fn func(runtime.FileEntry) error,
) error {
	err := f.call("List", ref, p, opts.Recursive, opts.Name, opts.Type)
	for _, e := range f.listed {
		if err == nil {
			err = fn(e)
		}
	}
	return err
}

func (f *fakeService) CopyFrom(_ context.Context, ref, p string, w io.Writer) error {
	if err := f.call("CopyFrom", p); err != nil {
		return err
	}
	tw := tar.NewWriter(w)
	write := func(h tar.Header, data string) {
		h.Size = int64(len(data))
		_ = tw.WriteHeader(&h)
		_, _ = io.WriteString(tw, data)
	}
	switch p {
	case "/d", "/l/", "/l/.", "/d/.":
		top := map[string]string{"/d": "d", "/l/": "l", "/l/.": ".", "/d/.": "."}[p]
		write(tar.Header{Typeflag: tar.TypeDir, Name: top + "/", Mode: 0o755}, "")
		write(tar.Header{Typeflag: tar.TypeReg, Name: top + "/f", Mode: 0o644}, "hi")
	case "/d/f":
		write(tar.Header{Typeflag: tar.TypeReg, Name: "f", Mode: 0o644}, "hi")
	case "/l":
		write(tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "d"}, "")
	default:
		return fmt.Errorf("%s: %w", p, runtime.ErrNotFound)
	}
	return tw.Close()
}

func (f *fakeService) CopyTo(_ context.Context, ref, p string, r io.Reader) error {
	if err := f.call("CopyTo", p); err != nil {
		return err
	}
	data, err := io.ReadAll(r)
	f.stdin = data
	return err
}

// tarNames lists the entries that were copied in.
func (f *fakeService) tarNames() (names []string) {
	tr := tar.NewReader(bytes.NewReader(f.stdin))
	for {
		h, err := tr.Next()
		if err != nil {
			return names
		}
		names = append(names, h.Name)
	}
}
