package engine

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/store"
)

// maxForks bounds one Fork.
const maxForks = 1000

// forkPart is what a fork has of its own: its identities.
type forkPart struct {
	noWork
	*restoration
	receipt runtime.Forked
	noStart bool
	trial   *trial // nil: the fork stays
}

// trial makes a fork that is only looked at, then rolled back. It runs no hooks.
type trial struct {
	// look is called instead of letting the fork go on: once its processes are restored and still
	// frozen or, with files, once its files are in place. It returns an error.
	look    func(ctx context.Context, r *restoration) error
	files   bool
	offline bool                // it has no network
	change  func(*runtime.Spec) // of the fork; nil: none
}

// Fork makes new sandboxes from a checkpoint. Each is a sandbox of its own, with its own
// id, name, hostname and address. The memory of its processes is the origin's, and its
// receipt says so. If one fork fails the others stay, and the error comes with their
// receipts.
func (v checkpointVerbs) Fork(ctx context.Context, ref string, opts runtime.ForkOptions) ([]runtime.Forked, error) {
	return verb(ctx, v.e, onSandbox("fork", ref), func(ctx context.Context) ([]runtime.Forked, error) {
		return v.e.restores.fork(ctx, ref, opts)
	})
}

func (rs *restores) fork(ctx context.Context, ref string, opts runtime.ForkOptions) (_ []runtime.Forked, err error) {
	opts.Count = max(opts.Count, len(opts.Names), 1)
	switch {
	case opts.Count > maxForks:
		return nil, fmt.Errorf("%w: %d forks at once, at most %d", runtime.ErrInvalid, opts.Count, maxForks)
	case len(opts.Names) > 0 && len(opts.Names) != opts.Count:
		return nil, fmt.Errorf("%w: %d names for %d forks", runtime.ErrInvalid, len(opts.Names), opts.Count)
	}

	for i, name := range opts.Names {
		if err := store.ValidName(name); err != nil {
			return nil, err
		}
		if slices.Contains(opts.Names[:i], name) {
			return nil, fmt.Errorf("%w: name %q is given twice", runtime.ErrInvalid, name)
		}
		sb, err := rs.transfers.named(ctx, name)
		if err != nil {
			return nil, err
		}
		if sb.ID != "" {
			return nil, fmt.Errorf("sandbox %q: %w", name, runtime.ErrExists)
		}
	}
	if opts.Count > 1 && len(opts.Grants.Ports) > 0 {
		return nil, fmt.Errorf("%w: a port can be published by one fork only", runtime.ErrInvalid)
	}
	if err := callerLists(ctx, opts.Grants.Mounts); err != nil {
		return nil, err
	}
	row, err := rs.forkFrom(ctx, ref, opts)
	if err != nil {
		return nil, err
	}
	steps, err := rs.forking(ctx, row, opts)
	if err != nil {
		return nil, err
	}
	defer steps.End()
	list := make([]*runtime.Forked, opts.Count)
	group := new(guard.Group)
	group.SetLimit(4) // forks wait for the disk and the kernel, not only for a CPU
	for i := range list {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			name := ""
			if len(opts.Names) > 0 {
				name = opts.Names[i]
			}
			f, err := rs.forkOne(ctx, row, name, opts, steps, nil)
			if err == nil {
				list[i] = &f
			}
			return err
		})
	}
	err = group.Wait()
	var done []runtime.Forked
	for _, f := range list {
		if f != nil {
			done = append(done, *f)
		}
	}
	return done, err
}

// forking follows what makes forks of a checkpoint, and says how much that is.
func (rs *restores) forking(
	ctx context.Context, row store.Checkpoint, opts runtime.ForkOptions,
) (*progress.Meter, error) {
	if opts.Progress == nil {
		return nil, nil
	}
	reader, err := rs.store.OpenCheckpoint(ctx, row.ID)
	if err != nil {
		return nil, err
	}
	m := reader.Manifest()
	n := m.Files[0].Data
	if row.Kind == runtime.KindFull && !opts.FilesOnly && !opts.NoStart {
		n += m.Processes.Bytes()
	}
	if err := reader.Close(); err != nil {
		return nil, err
	}
	s := progress.Follow(opts.Progress)
	s.All(runtime.PhaseForking, n*int64(opts.Count))
	return s, nil
}

// forkFrom finds the checkpoint to fork, or takes a new one.
func (rs *restores) forkFrom(
	ctx context.Context, ref string, opts runtime.ForkOptions,
) (row store.Checkpoint, err error) {
	sb, gone, err := rs.owner(ctx, ref)
	if err != nil {
		return row, err
	}
	if opts.Checkpoint == "" && !gone {
		c, err := rs.checkpoints.takeCheckpoint(ctx, sb.ID,
			runtime.CheckpointOptions{Trigger: "fork", FilesOnly: opts.FilesOnly, Progress: opts.Progress})
		if err != nil {
			return row, err
		}
		return rs.store.Checkpoint(ctx, c.ID)
	}
	if opts.Checkpoint == "" { // a removed sandbox is at no checkpoint
		row, err = rs.newest(ctx, sb, false, opts.Foreign)
	} else {
		row, err = rs.choose(ctx, sb, opts.Checkpoint, false, opts.Foreign)
	}
	if err != nil {
		return row, err
	}
	return row, checkDamage(sb.Name, row, false)
}

// forkIdentity gives the spec of a checkpoint a name and an identity of its own.
func forkIdentity(s *runtime.Spec, row store.Checkpoint, name string, opts runtime.ForkOptions) {
	origin := *s
	s.ID = newID()
	s.Name = cmp.Or(name, forkName(row.SandboxName, s.ID))
	if s.Hostname == short(origin.ID) {
		s.Hostname = short(s.ID)
	} else {
		s.Hostname = forkName(s.Hostname, s.ID)
	}
	s.Network.Ports = opts.Grants.Ports // the origin has its own
	if len(opts.Labels) > 0 {
		labels := maps.Clone(opts.Labels)
		for k, v := range s.Labels {
			if _, ok := labels[k]; !ok {
				labels[k] = v
			}
		}
		s.Labels = labels
	}
}

// forkReceipt says what a fork has of its own, and what it shares with its origin; ports: the
// origin publishes some.
func (r *restoration) forkReceipt(ports bool) (f runtime.Forked) {
	f.Reseeded = []string{
		"id, name", "hostname", "network address and MAC",
		"AGENTBOX_SANDBOX, AGENTBOX_SANDBOX_NAME and AGENTBOX_ATTEMPT of new processes",
	}
	if ports && !r.row.Foreign {
		f.Shared = append(f.Shared, "published ports stay with the origin; the fork has none")
	}
	for _, m := range r.spec.Mounts {
		if m.Type == "bind" || m.Type == "volume" {
			f.Shared = append(f.Shared, fmt.Sprintf("%s is %s, for the origin and all its forks", m.Target, m.Source))
		}
	}
	if r.row.Attached != nil {
		f.Shared = append(f.Shared, fmt.Sprintf("host files of the checkpoint (%d) are left as they are",
			len(r.row.Attached.Paths)))
	}
	for _, secret := range r.spec.Secrets {
		f.Shared = append(f.Shared, "secret "+secret.Name)
	}
	if r.full() {
		f.Shared = append(f.Shared,
			"all that processes have in memory: environment, tokens, and the state of random number generators, which will produce the same numbers unless the program reseeds",
			"process start times and monotonic clocks",
			"TCP connections of the origin are closed in the fork")
	}
	return f
}

// forkRecord completes the spec of a fork, and returns its record and its backend.
func (rs *restores) forkRecord(
	ctx context.Context, row store.Checkpoint, s *runtime.Spec, opts runtime.ForkOptions, full bool,
) (
	box store.Sandbox, host Host, err error) {
	if s.Secrets, err = rs.sandboxes.inherited(ctx, row, *s, opts.Secrets); err != nil {
		return box, host, err
	}
	if err := rs.admission.readmitOf(row, s, opts.Grants, full); err != nil {
		return box, host, err
	}
	host, err = rs.host(cmp.Or(s.Backend, rs.first))
	if err != nil {
		return box, host, err
	}
	if err := checkFilter(*s, host); err != nil {
		return box, host, err
	}
	img, err := imageOf(ctx, host.Images, row.ImageDigest, *s, image.PullOptions{})
	if err != nil {
		return box, host, err
	}
	if err := rs.sandboxes.keepIDs(ctx, s, host, img.Lower, full, row.Foreign); err != nil {
		return box, host, err
	}
	box = store.Sandbox{
		ID: s.ID, Name: s.Name, Backend: cmp.Or(s.Backend, rs.first), Image: s.Image, ImageDigest: row.ImageDigest,
		Lower: img.Lower, Attempt: 1, Created: time.Now(), Labels: s.Labels, Group: opts.Group,
	}
	box.Lease, err = rs.leases.activeLease(ctx, opts.Lease)
	return box, host, err
}

// forkOne makes one fork, with try a trial.
func (rs *restores) forkOne(
	ctx context.Context, row store.Checkpoint, name string, opts runtime.ForkOptions, steps *progress.Meter, try *trial,
) (_ runtime.Forked, err error) {
	begun := time.Now()
	s, err := specOf(row.SandboxID, row.Spec)
	if err != nil {
		return runtime.Forked{}, err
	}
	if s.Adopted {
		return runtime.Forked{}, hint(fmt.Errorf("%w: its container is its engine's, and agentbox cannot make another",
			runtime.ErrUnsupported),
			"Run it as a sandbox of agentbox: agentbox --backend docker run ...")
	}
	full := row.Kind == runtime.KindFull && !opts.FilesOnly && !opts.NoStart
	withheld, err := claim(&s, row, opts.Grants, full)
	if err != nil {
		return runtime.Forked{}, err
	}
	ports := len(s.Network.Ports) > 0
	forkIdentity(&s, row, name, opts)
	if try != nil && try.change != nil {
		try.change(&s)
	}
	box, host, err := rs.forkRecord(ctx, row, &s, opts, full)
	if err != nil {
		return runtime.Forked{}, err
	}
	if try != nil && try.offline { // whatever modes the policy has
		s.Network = runtime.Network{Mode: runtime.NetworkNone}
	}
	lock, err := rs.store.Lock(ctx, s.ID, "fork", lockWait)
	if err != nil {
		return runtime.Forked{}, err
	}
	defer lock.Unlock()
	r := rs.newRestoration(&locked{Sandbox: box, host: host, lock: lock, steps: steps},
		restoring{Phase: phasePrepare, FilesOnly: opts.FilesOnly || opts.NoStart, Fork: true})
	r.row, r.spec = row, s
	r.forks(&forkPart{noStart: opts.NoStart, trial: try})
	if err := checkSources(s); err != nil {
		return runtime.Forked{}, err
	}
	r.fork.receipt = r.forkReceipt(ports)

	h, err := rs.admission.hooksOf("fork", s)
	if err != nil {
		return runtime.Forked{}, err
	}
	if try != nil {
		h = &hooks{e: rs.core} // no hooks run
	}
	defer func() { h.failed(ctx, err) }()
	h.of(row)
	if !opts.NoStart {
		if err := h.before(ctx, policy.BeforeStart); err != nil {
			return runtime.Forked{}, err
		}
	}
	if err := rs.perform(ctx, r); err != nil {
		return runtime.Forked{}, err
	}
	rs.supervisor.enforce(s, r.c)
	out := r.fork.receipt
	out.Checkpoint, out.Took, out.Warnings = checkpointView(row), time.Since(begun), withheld
	out.Sandbox, err = rs.sandboxes.inspect(context.WithoutCancel(ctx), s.ID)
	rs.log.Info("sandbox forked", "sandbox", s.ID, "checkpoint", row.ID, "took", out.Took)
	return out, err
}

// forkName derives the name of a fork from its origin's.
func forkName(origin, id string) string {
	origin = strings.ReplaceAll(origin, "://", "-")
	return origin[:min(len(origin), 40)] + "-fork-" + id[:6]
}

// The files that identify a machine. A file that is missing or empty stays so.
var seeds = []string{
	"/etc/machine-id", "/var/lib/dbus/machine-id", "/var/lib/systemd/random-seed", "/var/lib/urandom/random-seed",
	"/var/lib/misc/random-seed",
}

const maxSeed = 64 << 10

// arrange gives a fork, before its start, a machine id and random seeds of its own. The files
// keep their sizes, because a process may have them open.
func (r *forkPart) arrange(ctx context.Context) error {
	if err := failpoint.Hit("fork.before-reseed"); err != nil {
		return err
	}
	got := &r.receipt
	err := r.sb.host.Mount(ctx, r.sb.ID, func(root string) error {
		jail, err := policy.Open(root)
		if err != nil {
			return err
		}
		defer jail.Close()
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails
		for _, name := range seeds {
			done, err := reseedFile(jail, name, hex.EncodeToString(id[:]))
			if err != nil {
				return fmt.Errorf("reseed %s: %w", name, err)
			}
			if done {
				got.Reseeded = append(got.Reseeded, name)
			}
		}
		keys := 0
		for _, kind := range []string{"rsa", "ecdsa", "ed25519"} {
			if _, err := jail.Lstat("/etc/ssh/ssh_host_" + kind + "_key"); err == nil {
				keys++
			}
		}
		if keys > 0 {
			got.Shared = append(got.Shared, "/etc/ssh/ssh_host_*_key")
		}
		return nil
	})
	err = errors.Join(err, failpoint.Hit("fork.after-reseed"))
	if err == nil && r.trial != nil && r.trial.files {
		err = r.trial.look(ctx, r.restoration)
	}
	return err
}

func reseedFile(jail *policy.Jail, name, id string) (done bool, err error) {
	info, err := jail.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, runtime.ErrNotFound) ||
		err == nil && (!info.Mode().IsRegular() || info.Size() == 0) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	f, err := jail.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	data := make([]byte, min(info.Size(), maxSeed))
	if strings.HasSuffix(name, "machine-id") {
		n, err := f.ReadAt(data, 0)
		if len(bytes.TrimSpace(data[:n])) != len(id) || err != nil && n == 0 {
			return false, nil // "uninitialized": systemd creates one at boot
		}
		copy(data, id)
	} else {
		_, _ = rand.Read(data)
	}
	_, err = f.WriteAt(data, 0)
	return err == nil, err
}

// awaken gives the restored, frozen processes of a fork its own hostname and thaws them.
func (r *forkPart) awaken(ctx context.Context) error {
	if r.trial != nil {
		return r.trial.look(ctx, r.restoration)
	}
	c, err := r.sb.host.Inspect(ctx, r.sb.ID)
	if err != nil {
		return err
	}
	if err := criu.SetHostname(c.Pid, r.spec.Hostname); err != nil {
		return err
	}
	// Its engine does not know that it was paused.
	r.c.Stage.TakePaused()
	if err := failpoint.Hit("fork.before-thaw"); err != nil {
		return err
	}
	if runtime.Status(r.reader.Manifest().Status) == runtime.Paused {
		return nil
	}
	return r.sb.host.Unpause(ctx, r.sb.ID)
}
