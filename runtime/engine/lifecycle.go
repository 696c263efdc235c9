package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/moby/sys/signal"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/rights"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/streams"
	"github.com/agentbox/agentbox/runtime/store"
)

// stopTimeout is how long Stop waits between the stop signal and SIGKILL when
// the caller does not say.
const stopTimeout = 10 * time.Second

// sandboxes creates, starts, stops and removes sandboxes, and reaches into them.
type sandboxes struct {
	*core

	events      *eventLog
	restarts    *restartLog
	marks       *marks
	admission   *admission
	checkpoints *checkpoints
	limits      *limits
	leases      *leases
	supervisor  *supervisor
	upkeep      *upkeep

	mu     sync.Mutex
	kept   map[string]string // variables taken out of the environment; see variable
	counts fileCounts
	listed specs
}

// Create creates a sandbox that can be started. On error nothing of it is left.
func (v sandboxVerbs) Create(ctx context.Context, req runtime.CreateRequest) (runtime.Sandbox, error) {
	return verb(ctx, v.e, &runtime.Op{Verb: "create", Ref: req.Spec.Image, Name: req.Spec.Name, ErrorsNamed: true},
		func(ctx context.Context) (runtime.Sandbox, error) {
			return v.e.sandboxes.createSandbox(ctx, req)
		})
}

func (bx *sandboxes) createSandbox(ctx context.Context, req runtime.CreateRequest) (_ runtime.Sandbox, err error) {
	name := req.Spec.Name
	defer func() { err = fail("create", name, err) }()
	from, err := bx.imageStore()
	if err != nil {
		return runtime.Sandbox{}, err
	}
	if req.Policy == nil {
		if req.Policy, err = bx.policies.Find(cmp.Or(req.PolicyName, policy.Default)); err != nil {
			return runtime.Sandbox{}, err
		}
	}

	// An image that the policy does not allow is not pulled.
	if err := req.Policy.Image(req.Spec.Image); err != nil {
		return runtime.Sandbox{}, err
	}
	img, err := from.Pull(ctx, req.Spec.Image, req.Pull)
	if err != nil {
		return runtime.Sandbox{}, unreachable(req.Spec.Image, err)
	}
	own := req.Spec.Labels
	req.Spec.Network.Mode = cmp.Or(req.Spec.Network.Mode, req.Policy.Rules.Network)
	s, err := complete(req, img, bx.first)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	host, err := bx.host(bx.first)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	if err := errors.Join(checkFilter(s, host), checkRestart(s, host.Properties())); err != nil {
		return runtime.Sandbox{}, err
	}
	name = s.Name
	if err := errors.Join(bx.admission.admit(&s, req, img, own), settleSteps(&s, req.Policy)); err != nil {
		return runtime.Sandbox{}, err
	}
	if err := errors.Join(callerLists(ctx, s.Mounts), checkSetup(req.Setup)); err != nil {
		return runtime.Sandbox{}, err
	}
	if req.WorkspaceFiles != 0 || !bx.readBefore(s.Mounts) {
		if err := boundWorkspaces(ctx, s.Mounts, req.WorkspaceFiles); err != nil {
			return runtime.Sandbox{}, err
		}
	}

	// Fail now rather than at the start.
	if _, err := bx.readSecrets(ctx, s, s.Secrets); err != nil {
		return runtime.Sandbox{}, err
	}
	if err := bx.mapIDs(ctx, &s, req.UserNS, req.Policy, host, img.Lower); err != nil {
		return runtime.Sandbox{}, err
	}
	row := store.Sandbox{
		ID: s.ID, Name: s.Name, Backend: bx.first, Image: s.Image, ImageDigest: s.ImageDigest,
		Lower: img.Lower, Attempt: 1, Created: time.Now(), Labels: s.Labels, Group: req.Group,
	}
	if row.Lease, err = bx.leases.activeLease(ctx, req.Lease); err != nil {
		return runtime.Sandbox{}, err
	}
	if row.Starter, err = starter(req); err != nil {
		return runtime.Sandbox{}, err
	}
	lock, err := bx.store.Lock(ctx, s.ID, "create", lockWait)
	if err != nil {
		return runtime.Sandbox{}, err
	}
	defer lock.Unlock()
	base := ""
	if len(s.Workspaces()) > 0 {
		base = newID()
	}
	if err := bx.create(ctx, &locked{Sandbox: row, host: host, lock: lock}, s, base, req.Setup); err != nil {
		return runtime.Sandbox{}, err
	}
	bx.log.Info("sandbox created", "sandbox", s.ID, "name", s.Name, "image", s.Image)
	return bx.inspect(ctx, s.ID)
}

// creating is the journal's data of a creation.
type creating struct {
	Backend string `json:"backend"`
	Base    string `json:"base,omitempty"` // id of its base checkpoint
}

// create records a sandbox, whose lock is held, has the backend make its container, sets it up,
// and takes the base checkpoint of that id; empty: none.
func (bx *sandboxes) create(
	ctx context.Context, sb *locked, s runtime.Spec, base string, setup *runtime.Setup,
) (err error) {
	if sb.Spec, err = json.Marshal(s); err != nil {
		return err
	}
	row, host, data := sb.Sandbox, sb.host, creating{sb.Backend, base}
	return bx.intent(ctx, store.Intent{Op: opCreate, Sandbox: s.ID}, data, func(int64) (err error) {
		var undo undo.Stack
		defer func() { undo.Run(ctx, &err) }()
		if err := failpoint.Hit("create.before-row"); err != nil {
			return err
		}
		if err := bx.store.PutSandbox(ctx, row); err != nil {
			return err
		}
		undo.Add(func(ctx context.Context) error { return bx.store.DeleteSandbox(ctx, s.ID) })
		if err := failpoint.Hit("create.after-row"); err != nil {
			return err
		}
		// Only the row marks the image as in use; until then it could be removed.
		if len(row.Lower) > 0 {
			if _, err := host.Images.ResolveDigest(ctx, row.ImageDigest); err != nil {
				return fmt.Errorf("the image was removed meanwhile: %w", err)
			}
		}
		undo.Add(func(ctx context.Context) error { return host.Remove(ctx, s.ID) })
		if err := host.Create(ctx, s, row.Lower); err != nil {
			return err
		}
		if err := setUp(ctx, host, s, setup); err != nil {
			return err
		}
		if err := failpoint.Hit("create.after-backend"); err != nil || base == "" {
			return err
		}
		undo.Add(func(ctx context.Context) error { return bx.store.RemoveCheckpoint(ctx, base) })
		if err := bx.checkpoints.takeBase(ctx, sb, base); err != nil {
			return err
		}
		return failpoint.Hit("create.after-base")
	})
}

// complete fills in a request from the image and from defaults, and refuses a request
// that cannot work.
func complete(req runtime.CreateRequest, img image.Image, backend string) (runtime.Spec, error) {
	s := req.Spec
	s.ID = newID()
	if s.Name == "" {
		s.Name = "box-" + s.ID[:8]
	}
	if err := store.ValidName(s.Name); err != nil {
		return s, err
	}
	s.ImageDigest, s.Backend = img.Digest, backend
	if len(img.RepoDigests) > 0 {
		s.ImageSource = img.RepoDigests[0]
	}

	// Docker's rule: a given entrypoint drops the image's command too.
	entry, cmd := req.Entrypoint, s.Args
	if entry == nil {
		entry = img.Config.Entrypoint
		if len(cmd) == 0 {
			cmd = img.Config.Cmd
		}
	}
	s.Args = slices.Concat(entry, cmd)
	if len(s.Args) == 0 {
		return s, fmt.Errorf("%w: the image names no command and none was given", runtime.ErrInvalid)
	}
	s.Env = runtime.JoinEnv(img.Config.Env, s.Env)
	s.User = cmp.Or(s.User, img.Config.User)
	s.Workdir = path.Clean("/" + cmp.Or(s.Workdir, img.Config.Workdir))
	s.StopSignal, s.Volumes = cmp.Or(s.StopSignal, img.Config.StopSignal), img.Config.Volumes
	if _, err := signal.ParseSignal(s.StopSignal); err != nil && s.StopSignal != "" {
		return s, hint(fmt.Errorf("%w: stop signal %.40q", runtime.ErrInvalid, s.StopSignal),
			"Choose one with --stop-signal.")
	}
	s.Hostname = cmp.Or(s.Hostname, short(s.ID))
	if len(s.Hostname) > 63 {
		return s, fmt.Errorf("%w: hostname %q is longer than 63 bytes", runtime.ErrInvalid, s.Hostname)
	}
	if img.Config.Labels != nil {
		s.Labels = mergeLabels(img.Config.Labels, s.Labels)
	}
	s.Network.Mode = cmp.Or(s.Network.Mode, runtime.NetworkBridge)
	return s, checkCompleted(s)
}

// checkCompleted refuses what no policy and no backend could make good.
func checkCompleted(s runtime.Spec) error {
	switch s.Network.Mode {
	case runtime.NetworkNone, runtime.NetworkHost, runtime.NetworkBridge, runtime.NetworkFiltered:
	default:
		return fmt.Errorf("%w: network %q: choose none, host, bridge or filtered", runtime.ErrInvalid, s.Network.Mode)
	}
	bridged := s.Network.Mode == runtime.NetworkBridge || s.Network.Mode == runtime.NetworkFiltered
	if !bridged && len(s.Network.Ports) > 0 || s.Network.Mode != runtime.NetworkBridge && s.Network.Group != "" {
		return fmt.Errorf("%w: ports and network groups need --network bridge", runtime.ErrInvalid)
	}
	if err := checkText("the command", s.Args); err != nil {
		return err
	}
	if err := checkText("the environment", s.Env); err != nil {
		return err
	}
	for _, m := range s.Mounts {
		if err := checkMount(m); err != nil {
			return err
		}
	}
	if err := checkSecrets(s); err != nil {
		return err
	}
	if text := s.Security.SeccompProfile; text != "" {
		if _, err := policy.ParseSeccomp(text); err != nil {
			return err
		}
	}
	_, err := every(s)
	if err := errors.Join(err, checkLifetime(s.Lifetime)); err != nil {
		return err
	}
	r := s.Resources
	if r.Memory < 0 || r.CPUs < 0 || r.Pids < 0 {
		return fmt.Errorf("%w: a limit is negative", runtime.ErrInvalid)
	}

	// The minimum that the kernel needs to start a process, and Docker's.
	if r.Memory > 0 && r.Memory < 6<<20 {
		return fmt.Errorf("%w: memory limit below 6 MiB", runtime.ErrInvalid)
	}
	return nil
}

// mergeLabels adds the labels of the user to those of the image. It leaves out labels of
// the image that are too long or too many.
func mergeLabels(img, own map[string]string) map[string]string {
	labels := maps.Clone(own)
	if labels == nil {
		labels = map[string]string{}
	}
	for _, k := range slices.Sorted(maps.Keys(img)) {
		if _, ok := labels[k]; ok {
			continue
		}
		labels[k] = img[k]
		if store.ValidLabels(labels) != nil {
			delete(labels, k)
		}
	}
	return labels
}

// checkText refuses text that JSON, in which an OCI runtime gets its spec, would alter.
func checkText(what string, list []string) error {
	for _, s := range list {
		if !utf8.ValidString(s) {
			return hint(fmt.Errorf("%w: %s is not valid UTF-8: %q", runtime.ErrInvalid, what, s),
				"Have a shell in the sandbox make the bytes: sh -c 'cat \"$(printf \"name\\377\")\"'")
		}
	}
	return nil
}

func checkMount(m runtime.Mount) error {
	if m.Type == runtime.MountWorkspace && m.Source == "/" {
		return hint(fmt.Errorf("%w: / cannot be a workspace", runtime.ErrInvalid),
			"Name the directory to work on; to look at the whole host: -v /:/host:ro")
	}
	if !path.IsAbs(m.Target) || path.Clean(m.Target) == "/" {
		return fmt.Errorf("%w: mount target %q must be an absolute path other than /", runtime.ErrInvalid, m.Target)
	}
	what := "bind source"
	switch m.Type {
	case "bind":
	case runtime.MountWorkspace:
		what = runtime.MountWorkspace
	default:
		return nil
	}
	if !filepath.IsAbs(m.Source) {
		return fmt.Errorf("%w: %s %q must be an absolute path", runtime.ErrInvalid, what, m.Source)
	}
	info, err := os.Stat(m.Source)
	if errors.Is(err, os.ErrNotExist) {
		return hint(fmt.Errorf("%s %s: %w", what, m.Source, runtime.ErrNotFound),
			"Create it first: agentbox does not make host directories.")
	}
	if err == nil && m.Type == runtime.MountWorkspace && !info.IsDir() {
		return hint(fmt.Errorf("%w: workspace %s is not a directory", runtime.ErrInvalid, m.Source),
			"Name the directory that it is in.")
	}
	return err
}

// callerLists refuses a workspace that the caller could not list by itself. The sources are where
// they really are. A caller on another host has root's rights here.
func callerLists(ctx context.Context, mounts []runtime.Mount) error {
	c, ok := runtime.CallerOf(ctx)
	if !ok || c.UID == 0 || c.Address != "" {
		return nil
	}
	for _, m := range mounts {
		if m.Type != runtime.MountWorkspace {
			continue
		}
		if err := rights.Lists(rights.User{UID: c.UID, GID: c.GID, Groups: c.Groups}, m.Source); err != nil {
			return hint(fmt.Errorf("workspace %s: %w: as user %d: %w", m.Source, runtime.ErrDenied, c.UID, err),
				"Name a directory that you can list yourself.")
		}
	}
	return nil
}

// Start starts a created or exited sandbox.
func (v sandboxVerbs) Start(ctx context.Context, ref string, streams *runtime.Streams) (func() error, error) {
	return verb(ctx, v.e, onSandbox("start", ref), func(ctx context.Context) (wait func() error, err error) {
		sb, err := v.e.acquire(ctx, ref, "start", lockWait)
		if err != nil {
			return nil, err
		}
		return v.e.sandboxes.start(ctx, sb, streams)
	})
}

// start is Start for a sandbox whose lock it takes over.
func (bx *sandboxes) start(ctx context.Context, sb *locked, streams *runtime.Streams) (wait func() error, err error) {
	return bx.launch(ctx, sb, streams, nil)
}

// mayLaunch refuses the start, or the restart, of a sandbox.
func mayLaunch(sb *locked, s runtime.Spec, c runtime.Container, restart bool) error {
	live := c.Status == runtime.Running || c.Status == runtime.Paused
	switch {
	case live && !restart:
		return wrongState(sb.Name, c.Status)
	case live && c.AutoRemove:
		return hint(fmt.Errorf("%w: its engine removes it as soon as it stops (it was started with --rm), and a restart stops it", runtime.ErrState),
			"Restart it by its engine, or start it again without --rm.")
	case restart:
		if err := hasMounts(s); err != nil {
			return err
		}
	}
	return errors.Join(mayUse(sb.Sandbox), mayStart(s), mayMount(s))
}

// launch is start; unless stop is nil, it stops the sandbox first.
func (bx *sandboxes) launch(
	ctx context.Context, sb *locked, streams *runtime.Streams, stop *runtime.StopOptions,
) (wait func() error, err error) {
	defer sb.lock.Unlock()
	defer func() { bx.started(ctx, sb.Sandbox, err) }()
	s, err := spec(sb.Sandbox)
	if err != nil {
		return nil, err
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	live := c.Status == runtime.Running || c.Status == runtime.Paused
	if err := mayLaunch(sb, s, c, stop != nil); err != nil {
		return nil, err
	}
	bx.events.keepHits(ctx, sb.Sandbox, c)
	secrets, err := bx.readSecrets(ctx, s, s.Secrets)
	if err != nil {
		return nil, err
	}
	h, err := bx.admission.hooksOf("start", s)
	if err != nil {
		return nil, err
	}
	defer func() { h.failed(ctx, err) }()
	if err := h.before(ctx, policy.BeforeStart); err != nil {
		return nil, err
	}
	if streams != nil && s.AutoRemove {
		if err := bx.hold(ctx, sb.ID); err != nil {
			return nil, err
		}
	}

	// An --rm sandbox must not be removed by a stop after which it did not start.
	keep := stop != nil && live && s.AutoRemove
	if keep != sb.Kept {
		if err := bx.store.Keep(ctx, sb.ID, keep); err != nil {
			return nil, err
		}
	}

	err = bx.intent(ctx, store.Intent{Op: opStart, Sandbox: sb.ID}, nil, func(int64) error {
		if stop != nil { // with the intent on record, for which the disk may have had no room
			if c, err = bx.stopFor(ctx, sb, *stop); err != nil {
				return err
			}
		}
		if err := failpoint.Hit("start.before-backend"); err != nil {
			return err
		}
		bx.limits.holdFiles(s, c)
		wait, err = sb.host.Start(ctx, sb.ID, runtime.StartOptions{
			Streams: streams, Env: identity(s, sb.Attempt), Secrets: secrets,
		})
		if err != nil {
			return err
		}
		if err := failpoint.Hit("start.after-backend"); err != nil || !keep {
			return err
		}
		if err := bx.store.Keep(context.WithoutCancel(ctx), sb.ID, false); err != nil {
			return fmt.Errorf("it has started, but would stay when it ends: %w", err)
		}
		return nil
	})
	if err != nil {
		bx.release(sb.ID)
		return nil, err
	}
	bx.log.Info("sandbox started", "sandbox", sb.ID)
	bx.supervisor.enforce(s, c)
	return bx.counted(s, wait), nil
}

// counted has an attached session count as use of the sandbox until wait, which may be nil,
// returns.
func (bx *sandboxes) counted(s runtime.Spec, wait func() error) func() error {
	if wait == nil {
		return nil
	}
	done, err := bx.limits.use(s)
	if err != nil {
		bx.log.Warn("attached session not counted", "sandbox", s.ID, "err", err)
		return wait
	}
	return func() error {
		defer done()
		return wait()
	}
}

// wrongState is the error of a verb that needs the sandbox in another state, with the
// command that brings it there.
func wrongState(name string, is runtime.Status) error {
	err := fmt.Errorf("%w: it is %s", runtime.ErrState, is)
	switch is {
	case runtime.Created, runtime.Exited:
		return hint(err, "Start it with: agentbox start "+name)
	case runtime.Paused:
		return hint(err, "Let it go on with: agentbox unpause "+name)
	}
	return err
}

// inState finds a sandbox and checks that it is in one of the given states.
func (bx *sandboxes) inState(
	ctx context.Context, ref string, states ...runtime.Status,
) (located, runtime.Container, error) {
	sb, err := bx.locate(ctx, ref)
	if err != nil {
		return sb, runtime.Container{}, err
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return sb, c, err
	}
	if !slices.Contains(states, c.Status) {
		return sb, c, wrongState(sb.Name, c.Status)
	}
	return sb, c, nil
}

// running finds a running sandbox. It waits for one that a checkpoint has frozen: callers
// must not notice checkpoints.
func (bx *sandboxes) running(ctx context.Context, ref, verb string) (located, error) {
	sb, c, err := bx.inState(ctx, ref, runtime.Running, runtime.Paused)
	if err == nil {
		err = mayUse(sb.Sandbox)
	}
	if err != nil || c.Status == runtime.Running {
		return sb, err
	}
	lock, err := bx.store.Lock(ctx, sb.ID, verb, frozenWait)
	if err != nil {
		return sb, err
	}
	defer lock.Unlock()
	// No checkpoint is under way now: a sandbox that is still paused was paused by request.
	sb, _, err = bx.inState(ctx, sb.ID, runtime.Running)
	return sb, err
}

// Attach connects streams to a running sandbox's first process.
func (v sandboxVerbs) Attach(ctx context.Context, ref string, streams runtime.Streams) error {
	return v.e.verb(ctx, errorsNamed(onSandbox("attach", ref)), func(ctx context.Context) error {
		return v.e.sandboxes.attach(ctx, ref, streams)
	})
}

func (bx *sandboxes) attach(ctx context.Context, ref string, streams runtime.Streams) error {
	sb, err := bx.running(ctx, ref, "attach")
	var done func()
	if err == nil {
		done, err = bx.limits.inUseBy(sb.Sandbox)
	}
	if err == nil {
		defer done()
		err = sb.host.Attach(ctx, sb.ID, streams)
	}
	if errors.Is(err, runtime.ErrDetached) {
		return runtime.ErrDetached
	}
	return fail("attach", ref, err)
}

// Exec runs one more process in a running sandbox.
func (v sandboxVerbs) Exec(ctx context.Context, ref string, p runtime.Process, streams runtime.Streams) (int, error) {
	op := onSandbox("exec", ref)
	if len(p.Args) > 0 {
		op.Program = p.Args[0]
	}
	return verb(ctx, v.e, op, func(ctx context.Context) (int, error) {
		exit, err := v.e.sandboxes.exec(ctx, ref, p, streams)
		if err == nil && !p.Detach {
			op.Exit = &exit
		}
		return exit, err
	})
}

func (bx *sandboxes) exec(ctx context.Context, ref string, p runtime.Process, ends runtime.Streams) (int, error) {
	if len(p.Args) == 0 {
		return 0, fmt.Errorf("%w: no command", runtime.ErrInvalid)
	}
	if err := errors.Join(checkText("the command", p.Args), checkText("the environment", p.Env),
		store.ValidMessage(p.Message)); err != nil {
		return 0, err
	}
	sb, err := bx.running(ctx, ref, "exec")
	if err != nil {
		return 0, err
	}
	if err := mayBe(sb.Sandbox, p.User); err != nil {
		return 0, err
	}
	done, err := bx.limits.inUseBy(sb.Sandbox)
	if err != nil {
		return 0, err
	}
	defer done()
	s, err := spec(sb.Sandbox)
	if err != nil {
		return 0, err
	}
	if err := bx.checkpoints.beforeExec(ctx, sb.Sandbox, s, p); err != nil {
		return 0, err
	}
	exit, err := bx.execBetweenFreezes(ctx, sb, p, ends)
	if errors.Is(err, runtime.ErrDetached) {
		return exit, runtime.ErrDetached
	}
	if err == nil {
		bx.checkpoints.afterExec(ctx, sb.Sandbox, s, p)
	}
	return exit, err
}

// execBetweenFreezes tries once more whenever a checkpoint has frozen the sandbox between our
// look at it and the runtime's, which then refuses.
func (bx *sandboxes) execBetweenFreezes(
	ctx context.Context, sb located, p runtime.Process, ends runtime.Streams,
) (exit int, err error) {
	again := streams.NewAgain(ends)
	defer again.Close()
	for range execTries {
		now, same := again.Next()
		if !same {
			break
		}
		exit, err = sb.host.Exec(ctx, sb.ID, p, now)
		if !errors.Is(err, runtime.ErrState) || !runtime.IsUnstarted(err) {
			break
		}
		if _, gone := bx.running(ctx, sb.ID, "exec"); gone != nil {
			break
		}
	}
	return exit, err
}

// Wait blocks until the sandbox has exited.
func (v sandboxVerbs) Wait(ctx context.Context, ref string) (runtime.Exit, error) {
	op := reads(onSandbox("wait", ref))
	return verb(ctx, v.e, op, func(ctx context.Context) (runtime.Exit, error) {
		sb, err := v.e.locate(ctx, ref)
		if err != nil {
			return runtime.Exit{}, err
		}
		exit, err := sb.host.Wait(ctx, sb.ID)
		if err == nil {
			op.Exit = &exit.Code
		}
		return exit, err
	})
}

// Logs writes what the sandbox's processes printed.
func (v sandboxVerbs) Logs(ctx context.Context, ref string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	return v.e.verb(ctx, reads(onSandbox("logs", ref)), func(ctx context.Context) error {
		sb, err := v.e.locate(ctx, ref)
		if err != nil {
			return err
		}
		return sb.host.Logs(ctx, sb.ID, opts, stdout, stderr)
	})
}

// Kill sends a signal to the sandbox's first process.
func (v sandboxVerbs) Kill(ctx context.Context, ref, signal string) error {
	op := onSandbox("kill", ref)
	op.Signal = signal
	return v.e.verb(ctx, op, func(ctx context.Context) error { return v.e.sandboxes.kill(ctx, ref, signal) })
}

func (bx *sandboxes) kill(ctx context.Context, ref, signal string) (err error) {
	if err := validSignal(cmp.Or(signal, "KILL")); err != nil {
		return err
	}
	sb, c, err := bx.inState(ctx, ref, runtime.Running, runtime.Paused)
	if err != nil {
		return err
	}
	if c.Status == runtime.Paused && isKill(signal) {
		// A frozen process dies only once it thaws; Stop does both.
		return bx.stop(ctx, sb.ID, runtime.StopOptions{})
	}
	if ends(signal, sb.Sandbox) {
		// Do not write during a restart, which would overwrite it. A verb that holds the
		// lock for longer while the sandbox runs is not a restart.
		lock, err := bx.store.Lock(ctx, sb.ID, "kill", lockWait)
		if err == nil {
			defer lock.Unlock()
		} else if !errors.Is(err, runtime.ErrBusy) {
			return err
		}
		if err := bx.restarts.meant(sb.Sandbox); err != nil {
			return err
		}
	}
	return sb.host.Kill(ctx, sb.ID, cmp.Or(signal, "KILL"))
}

func validSignal(name string) error {
	if sig, err := signal.ParseSignal(name); err != nil || sig < 1 || sig > 64 {
		return hint(fmt.Errorf("%w: unknown signal %.50q", runtime.ErrInvalid, name),
			"Write for example SIGTERM, TERM or 15.")
	}
	return nil
}

// ends reports whether a signal is one that users send to end a sandbox.
func ends(name string, sb store.Sandbox) bool {
	sig, err := signal.ParseSignal(cmp.Or(name, "KILL"))
	if err != nil {
		return false // its engine says so
	}
	s, err := spec(sb)
	if err != nil {
		return false
	}
	own, err := signal.ParseSignal(cmp.Or(s.StopSignal, "TERM"))
	return err == nil && sig == own || slices.Contains([]syscall.Signal{
		syscall.SIGKILL, syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT,
	}, sig)
}

func isKill(signal string) bool {
	switch strings.TrimPrefix(strings.ToUpper(signal), "SIG") {
	case "", "KILL", "9":
		return true
	}
	return false
}

// Pause freezes every process of a running sandbox.
func (v sandboxVerbs) Pause(ctx context.Context, ref string) error {
	return v.e.verb(ctx, onSandbox("pause", ref), func(ctx context.Context) error {
		return v.e.sandboxes.freeze(ctx, ref, runtime.Running)
	})
}

// Unpause thaws a paused sandbox.
func (v sandboxVerbs) Unpause(ctx context.Context, ref string) error {
	return v.e.verb(ctx, onSandbox("unpause", ref), func(ctx context.Context) error {
		return v.e.sandboxes.freeze(ctx, ref, runtime.Paused)
	})
}

// freeze pauses a running sandbox, or unpauses a paused one.
func (bx *sandboxes) freeze(ctx context.Context, ref string, from runtime.Status) error {
	sb, err := bx.acquire(ctx, ref, "pause", lockWait)
	if err != nil {
		return err
	}
	_, c, err := bx.inState(ctx, sb.ID, from)
	var s runtime.Spec
	if err == nil && from == runtime.Paused {
		s, err = spec(sb.Sandbox)
		err = errors.Join(err, mayUse(sb.Sandbox))
	}
	if err == nil {
		if from == runtime.Running {
			err = bx.checkpoints.pause(ctx, sb, c)
		} else {
			bx.limits.holdFiles(s, c)
			err = sb.host.Unpause(ctx, sb.ID)
		}
	}
	sb.lock.Unlock()
	return err
}
