package volume

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Options place the volumes. Root and Run are needed.
type Options struct {
	Root string // agentbox's lasting state, e.g. /var/lib/agentbox
	Run  string // agentbox's transient state, e.g. /run/agentbox
	// Engine knows the containers that use a volume; nil: the Docker daemon
	// that DOCKER_HOST names, or the default one.
	Engine Engine
	// Recover finishes what a killed agentbox left; Mount calls it when it finds a
	// volume held, perhaps by a process that is gone. May be nil.
	Recover func(context.Context) error
	Log     *slog.Logger
}

// Volumes are the volumes of one root. Its methods are safe for concurrent
// use, by goroutines and by processes.
type Volumes struct {
	root, run, dir string
	engine         Engine
	recover        func(context.Context) error
	log            *slog.Logger
}

// Open makes Volumes; it touches nothing.
func Open(opts Options) (*Volumes, error) {
	if opts.Root == "" || opts.Run == "" {
		return nil, fmt.Errorf("%w: volumes without root or run directory", fault.ErrInvalid)
	}
	v := &Volumes{root: opts.Root, run: opts.Run, engine: opts.Engine, recover: opts.Recover, log: opts.Log}
	// One spelling for all: a mount is found again by the path of its upperdir.
	if real, err := filepath.EvalSymlinks(opts.Root); err == nil {
		v.root = real
	}
	v.dir = filepath.Join(v.root, "volumes")
	if v.log == nil {
		v.log = slog.Default()
	}
	if v.engine == nil {
		var err error
		if v.engine, err = Docker(); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// Volume is the documented JSON of `agentbox volume inspect`; it only ever grows.
type Volume struct {
	ID         string    `json:"id"`   // 32 hex digits; a volume made anew has another
	Name       string    `json:"name"` // unique on this root
	From       string    `json:"from"` // the directory below; empty: none
	ReadOnly   bool      `json:"read_only"`
	Created    time.Time `json:"created"`
	Upperdir   string    `json:"upperdir"`
	Mountpoint string    `json:"mountpoint"` // empty unless mounted
	Mounts     int       `json:"mounts"`     // how many mounts were asked for and not given back
	Applied    time.Time `json:"applied,omitzero"`
}

// stored is the content of volume.json.
type stored struct {
	Version  int       `json:"version"`
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	From     string    `json:"from,omitempty"`
	ReadOnly bool      `json:"read_only,omitempty"`
	Created  time.Time `json:"created"`
}

const version = 1

// CreateOptions say what a volume is to be.
type CreateOptions struct {
	From     string // a directory of the host; empty: the volume begins empty
	ReadOnly bool
}

var namePattern = lazy.Regexp(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

// idPattern is the form of an id: it becomes a part of paths.
var idPattern = lazy.Regexp(`^[0-9a-f]{32}$`)

// ValidName reports whether a volume can have this name: [a-zA-Z0-9][a-zA-Z0-9_.-]*,
// at most 128 bytes.
func ValidName(name string) error {
	if len(name) > 128 || !namePattern().MatchString(name) {
		if len(name) > 40 {
			name = name[:40] + "..."
		}
		return &fault.Error{Err: fmt.Errorf("%w: volume name %q", fault.ErrInvalid, name),
			Hint: "Names are of letters, digits, '_', '.' and '-', begin with a letter or digit and have at most 128 bytes."}
	}
	return nil
}

func (v *Volumes) path(name string, rest ...string) string {
	return filepath.Join(append([]string{v.dir, name}, rest...)...)
}

// Create makes a volume. For an existing one it returns nil if the options are the same, else
// ErrExists.
func (v *Volumes) Create(ctx context.Context, name string, opts CreateOptions) (err error) {
	if err := ValidName(name); err != nil {
		return err
	}
	if opts.From != "" {
		if opts.From, err = v.judge(opts.From); err != nil {
			return err
		}
	}
	if old, err := v.load(name); err == nil {
		return same(old, opts)
	} else if !errors.Is(err, fault.ErrNotFound) {
		return err
	}
	// A longer path, or one with a backslash, is not in the kernel's list of
	// mounts in a form that it could be found by.
	if upper := v.path(name, "upper"); len(upper) > 255 || strings.Contains(upper, `\`) {
		return fmt.Errorf("%w: the path %q is too long for a volume, or has a backslash", fault.ErrInvalid, upper)
	}
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(v.dir, ".new-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(temp))
		}
	}()
	unlock, err := record.Lock(ctx, temp, "volume "+name) // tells Sweep that it is in use
	if err != nil {
		return err
	}
	defer unlock()
	rec := stored{
		Version: version, ID: newID(), Name: name, From: opts.From, ReadOnly: opts.ReadOnly, Created: time.Now().UTC(),
	}
	if err := v.furnish(temp, rec); err != nil {
		return err
	}
	if err := failpoint.Hit("volume.create.before-rename"); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, v.path(name), unix.RENAME_NOREPLACE); err != nil {
		if err != unix.EEXIST && err != unix.ENOTEMPTY {
			return fmt.Errorf("publish volume %s: %w", name, err)
		}
		old, e := v.load(name)
		if e != nil {
			return e
		}
		return errors.Join(same(old, opts), os.RemoveAll(temp))
	}
	v.log.Info("volume created", "volume", name, "from", opts.From)
	return fsx.SyncDir(v.dir)
}

// furnish fills a volume's directory and proves that it can be mounted.
func (v *Volumes) furnish(dir string, rec stored) error {
	for _, sub := range []string{"work", "merged", "lower"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	// Whatever the umask: it is the root directory that an empty volume shows.
	if err := os.Chmod(filepath.Join(dir, "lower"), 0o755); err != nil {
		return err
	}
	below := rec.From
	if below == "" {
		below = filepath.Join(dir, "lower")
	}
	if err := apply.MakeUpper(filepath.Join(dir, "upper"), below); err != nil {
		return err
	}
	if err := mountAt(dir, rec); err != nil {
		return err
	}
	if err := overlay.Unmount(filepath.Join(dir, "merged"), overlay.UnmountOptions{}); err != nil {
		return err
	}
	return record.WriteJSON(filepath.Join(dir, "volume.json"), rec, true)
}

func same(old stored, opts CreateOptions) error {
	if old.From == opts.From && old.ReadOnly == opts.ReadOnly {
		return nil
	}
	return fmt.Errorf("volume %s: %w, over %s", old.Name, fault.ErrExists, over(old.From))
}

func over(from string) string {
	if from == "" {
		return "no directory"
	}
	return from
}

// judge resolves the directory that a volume is to lie over, and refuses those
// that hold agentbox's own state: its checkpoints would be in the volume.
func (v *Volumes) judge(from string) (string, error) {
	if !filepath.IsAbs(from) {
		return "", fmt.Errorf("%w: from=%q must be an absolute path", fault.ErrInvalid, from)
	}
	real, err := filepath.EvalSymlinks(from)
	if errors.Is(err, fs.ErrNotExist) {
		return "", &fault.Error{Err: fmt.Errorf("directory %s: %w", from, fault.ErrNotFound), Hint: "Create it first."}
	}
	if err != nil {
		return "", err
	}
	if st, err := os.Stat(real); err != nil {
		return "", err
	} else if !st.IsDir() {
		return "", fmt.Errorf("%w: %s is not a directory", fault.ErrInvalid, from)
	}
	for _, own := range []string{v.root, v.run} {
		at, err := filepath.EvalSymlinks(own)
		if errors.Is(err, fs.ErrNotExist) {
			at, err = filepath.Clean(own), nil
		}
		if err != nil {
			return "", err
		}
		if fsx.Within(real, at) || fsx.Within(at, real) {
			return "", &fault.Error{Err: fmt.Errorf("%w: %s and agentbox's own state at %s contain one another",
				fault.ErrDenied, from, at),
				Hint: "Name a directory apart from it: checkpoints of all sandboxes would be in the volume."}
		}
	}
	return real, nil
}

// load reads the record of a volume.
func (v *Volumes) load(name string) (rec stored, err error) {
	if err := ValidName(name); err != nil {
		return rec, err
	}
	err = record.ReadJSON(v.path(name, "volume.json"), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return rec, fmt.Errorf("volume %s: %w", name, fault.ErrNotFound)
	}
	if err != nil {
		return rec, fmt.Errorf("volume %s: %w", name, err)
	}
	if rec.Version > version {
		return rec, fmt.Errorf("volume %s was made by a newer agentbox: %w", name, fault.ErrUnsupported)
	}
	if rec.Name != name || !idPattern().MatchString(rec.ID) ||
		rec.From != "" && (!filepath.IsAbs(rec.From) || filepath.Clean(rec.From) != rec.From) {
		return rec, fmt.Errorf("volume %s: its record is another's: %w", name, fault.ErrCorrupt)
	}
	// A root from elsewhere may have it lead out of itself.
	if err := fsx.NoLinks(v.path(name), "", "upper", "work", "merged", apply.DirApply, apply.DirUndo); err != nil {
		return rec, fmt.Errorf("volume %s: %w: %w", name, fault.ErrCorrupt, err)
	}
	return rec, nil
}

// find reads the record of a volume by its name or its id.
func (v *Volumes) find(ref string) (stored, error) {
	rec, err := v.load(ref)
	if err == nil || !errors.Is(err, fault.ErrNotFound) && !errors.Is(err, fault.ErrInvalid) {
		return rec, err
	}
	names, e2 := v.names()
	if e2 != nil {
		return rec, e2
	}
	for _, name := range names {
		if r, e := v.load(name); e == nil && r.ID == ref {
			return r, nil
		}
	}
	return stored{}, fmt.Errorf("volume %s: %w", ref, fault.ErrNotFound)
}

func (v *Volumes) names() ([]string, error) {
	list, err := os.ReadDir(v.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range list {
		if e.IsDir() && ValidName(e.Name()) == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Inspect describes a volume, by its name or id.
func (v *Volumes) Inspect(_ context.Context, ref string) (Volume, error) {
	rec, err := v.find(ref)
	if err != nil {
		return Volume{}, err
	}
	return v.view(rec)
}

// List describes all volumes, by name. A volume that cannot be read is left out and logged; it
// does not hide the others.
func (v *Volumes) List(context.Context) ([]Volume, error) {
	names, err := v.names()
	if err != nil {
		return nil, err
	}
	list := []Volume{}
	for _, name := range names {
		rec, err := v.load(name)
		var one Volume
		if err == nil {
			one, err = v.view(rec)
		}
		if err != nil {
			if !errors.Is(err, fault.ErrNotFound) {
				v.log.Error("volume not readable", "volume", name, "err", err)
			}
			continue
		}
		list = append(list, one)
	}
	return list, nil
}

func (v *Volumes) view(rec stored) (Volume, error) {
	out := Volume{
		ID: rec.ID, Name: rec.Name, From: rec.From, ReadOnly: rec.ReadOnly, Created: rec.Created,
		Upperdir: v.path(rec.Name, "upper"),
	}
	refs, err := v.refs(rec.Name)
	if err != nil {
		return out, err
	}
	for _, r := range refs.List {
		out.Mounts += r.Count
	}
	merged := v.path(rec.Name, "merged")
	on, err := overlay.Mounted(merged)
	if on {
		out.Mountpoint = merged
	}
	out.Applied = v.home(rec).Last()
	return out, err
}

// Remove deletes a volume and its changes. It returns ErrState for one in use, and nil for one
// that does not exist.
func (v *Volumes) Remove(ctx context.Context, ref string) error {
	rec, err := v.find(ref)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	unlock, err := v.lock(ctx, rec.Name)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	if err := v.idle(ctx, rec); err != nil {
		return err
	}
	trash := filepath.Join(v.dir, ".old-"+rec.ID)
	if err := os.Rename(v.path(rec.Name), trash); err != nil {
		return err
	}
	if err := failpoint.Hit("volume.remove.after-rename"); err != nil {
		return err
	}
	v.log.Info("volume removed", "volume", rec.Name)
	return errors.Join(fsx.SyncDir(v.dir), os.RemoveAll(trash))
}

// Sweep deletes what killed processes left of volumes half-made and half-removed,
// and settles what they left of others. One failing step does not stop the others.
func (v *Volumes) Sweep(ctx context.Context) error {
	list, err := os.ReadDir(v.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range list {
		name := e.Name()
		switch {
		case strings.HasPrefix(name, ".new-"), strings.HasPrefix(name, ".old-"):
			errs = append(errs, v.sweep(filepath.Join(v.dir, name)))
		case e.IsDir() && ValidName(name) == nil:
			unlock, err := v.lock(ctx, name)
			if err == nil {
				unlock()
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (v *Volumes) sweep(dir string) error {
	l, err := flock.Try(dir, flock.Dir)
	if errors.Is(err, flock.ErrHeld) {
		return nil // a verb holds it
	}
	if err != nil {
		return err
	}
	defer l.Unlock()
	return errors.Join(overlay.Unmount(filepath.Join(dir, "merged"), overlay.UnmountOptions{}), os.RemoveAll(dir))
}

// lockWait bounds how long a verb waits for another one on the same volume.
const lockWait = 90 * time.Second

// lock takes the lock of a volume, and brings what a killed process left
// there to its end.
func (v *Volumes) lock(ctx context.Context, name string) (func(), error) {
	wait, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	unlock, err := record.Lock(wait, v.path(name), "volume "+name)
	if err != nil {
		return nil, err
	}
	if _, err := v.settle(name); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

// newID returns 128 random bits as 32 hex digits.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// sorted returns what names a set of users in messages.
func sorted(set map[string]bool) []string {
	var list []string
	for s := range set {
		list = append(list, s)
	}
	slices.Sort(list)
	return list
}
