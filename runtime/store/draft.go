package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	keptFailures = 20      // directories of logs
	keptLogs     = 8       // files in each
	keptLog      = 1 << 20 // bytes of each, its end
	keptRows     = 1000    // records of failures
)

// Draft is a checkpoint in the making. It ends with Commit or CommitAs, and
// then Close; or with Abort, also after an error of Commit. From its beginning
// on nothing that the store has goes away. Sink and PutChunk are for concurrent
// use, and the Put methods may run side by side.
type Draft struct {
	s     *Store
	row   Checkpoint
	dir   string
	lock  *Lock
	x     *index
	pack  *pack.Writer
	reads func(int64) // see CountImages; nil: not counted

	mu     sync.Mutex // guards what follows
	need   idSet
	trees  map[int]Tree
	lines  map[int][]overlay.Chunk // the chunks of their lines
	images []Image                 // nil: there were none yet
	listed *Tree                   // their list; nil: it is short
	put    string                  // the pack, once it has its name
	ended  bool                    // by Commit or Abort
	closed bool
}

// BeginCheckpoint records a pending checkpoint and makes its draft. The caller holds the
// sandbox's lock until the draft's end: by it Sweep distinguishes a checkpoint under way from
// an abandoned one. A name that a ready checkpoint of the sandbox has is ErrExists. While
// space is being reclaimed it waits, for a minute at most, and then returns ErrBusy. A
// checkpoint from elsewhere has c.Foreign and c.Origin set, and is Created when it arrives.
func (s *Store) BeginCheckpoint(ctx context.Context, c Checkpoint) (*Draft, error) {
	if c.ID == "" {
		c.ID = NewID()
	}
	if c.Created.IsZero() {
		c.Created = time.Now()
	}
	c.Created = c.Created.UTC().Round(0)
	c.Status, c.Error, c.Digest = Pending, "", ""
	c.Added, c.Unchanged, c.Damaged, c.Tags = 0, false, "", nil
	if c.Name != "" {
		if err := ValidCheckpointName(c.Name); err != nil {
			return nil, err
		}
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	if err := failpoint.Hit("store.begin.before-row"); err != nil {
		return nil, err
	}
	lock, err := s.share(ctx, "checkpoint")
	if err != nil {
		return nil, err
	}
	err = s.write(ctx, "begin a checkpoint", func(tx *sql.Tx) error {
		var id string
		err := tx.QueryRowContext(ctx, `SELECT id FROM checkpoints WHERE id = ?1
			OR sandbox_id = ?2 AND name = ?3 AND name <> '' AND status = 'ready'`, c.ID, c.SandboxID, c.Name).Scan(&id)
		switch {
		case err == nil && id == c.ID:
			return fmt.Errorf("checkpoint id %s: %w", id, fault.ErrExists)
		case err == nil:
			return nameTaken(c.Name, id)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if err := joinLease(ctx, tx, c.Lease); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO checkpoints ("+checkpointColumns+
			", pulled) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
			c.ID, c.Name, c.SandboxID, c.SandboxName, c.Kind, c.Status, c.Error, c.Parent,
			c.Trigger, c.Created.UnixNano(),
			c.Files, c.Processes, c.Bytes, c.Digest, c.ImageDigest, encode(c.Labels), int64(c.Frozen),
			encode(c.Warnings), string(c.Spec), c.Added, c.Unchanged, c.Damaged, c.Pinned, c.Lease, c.Message,
			c.Foreign)
		return err
	})
	if err != nil {
		lock.Unlock()
		return nil, err
	}
	d := &Draft{
		s: s, row: c, dir: s.draftDir(c.ID), lock: lock, x: newIndex(s.packs), trees: map[int]Tree{},
		lines: map[int][]overlay.Chunk{},
	}
	d.pack, err = pack.Create(s.packsDir())
	if err == nil {
		err = failpoint.Hit("store.begin.before-dir")
	}
	if err == nil {
		err = os.Mkdir(d.dir, 0o700)
	}
	if err == nil {
		err = failpoint.Hit("store.begin.after-dir")
	}
	if err != nil {
		return nil, errors.Join(err, d.Abort(ctx, err))
	}
	return d, nil
}

func (c *Checkpoint) check() error {
	if c.Name != "" {
		if err := ValidName(c.Name); err != nil {
			return err
		}
	}
	if c.Parent != "" {
		if err := checkID("parent", c.Parent); err != nil {
			return err
		}
	}
	if c.Kind != KindFiles && c.Kind != KindFull {
		return fmt.Errorf("checkpoint kind %q: %w", c.Kind, fault.ErrInvalid)
	}
	if len(c.Trigger) > maxTrigger || !isPrintable(c.Trigger, "") {
		return fmt.Errorf("trigger %.64q: at most %d bytes of text: %w", c.Trigger, maxTrigger, fault.ErrInvalid)
	}
	return errors.Join(checkID("checkpoint", c.ID), checkID("sandbox", c.SandboxID), validSandboxName(c.SandboxName),
		ValidMessage(c.Message), ValidLabels(c.Labels), validSpec(c.Spec))
}

// ID is the checkpoint's.
func (d *Draft) ID() string { return d.row.ID }

// Dir is the draft's scratch directory. Close and Abort remove it; nothing in it becomes part of
// the checkpoint, except what PutImages reads from CRIUDir.
func (d *Draft) Dir() string { return d.dir }

// CRIUDir is the directory for the process images, made when first asked for.
func (d *Draft) CRIUDir() string {
	dir := filepath.Join(d.dir, ImagesName)
	_ = os.Mkdir(dir, 0o700) // a failure shows as soon as the directory is used
	return dir
}

// Close removes the scratch directory of a draft that was committed. Until then
// files may be moved out of it. Idempotent; Abort does the same then.
func (d *Draft) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.ended {
		return fmt.Errorf("checkpoint %s is neither committed nor given up: %w", d.row.ID, fault.ErrState)
	}
	if d.closed {
		return nil
	}
	d.closed = true
	return os.RemoveAll(d.dir)
}

// Abort gives a draft up: its files are removed and its record says failed,
// because of cause. The ends of the named log files, paths inside Dir, are
// kept at checkpoints/failed/ID. It goes on when ctx is cancelled. After
// Commit has succeeded it is Close, and a second time it does nothing.
func (d *Draft) Abort(ctx context.Context, cause error, keep ...string) error {
	d.mu.Lock()
	if d.ended {
		d.mu.Unlock()
		return d.Close()
	}
	defer d.mu.Unlock()
	d.ended, d.closed = true, true
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
	defer cancel()
	defer d.lock.Unlock()
	logs := d.readLogs(keep)

	// The files go first: after "no space left" the record needs their room.
	// The manifest is gone before the chunks that it names.
	_ = os.Remove(d.newIndexCache()) // what stays is swept later
	err := failpoint.Hit("store.abort.before-remove")
	if err == nil {
		err = d.s.discard(d.row.ID)
	}
	if d.pack != nil {
		err = errors.Join(err, d.pack.Abort())
	}
	if d.put != "" && err == nil {
		err = d.s.dropPack(ctx, d.put)
	}
	reason := "given up"
	if cause != nil {
		reason = cause.Error()
	}
	if hit := failpoint.Hit("store.abort.before-row"); hit != nil {
		return errors.Join(err, hit)
	}
	return errors.Join(err, d.s.setFailed(ctx, d.row.ID, reason), d.s.keepLogs(d.row.ID, logs))
}

// discard removes the files of a checkpoint that is no longer, or not yet, one.
func (d *dirs) discard(id string) error {
	gone := d.removedDir(id)
	if there, err := exists(d.published(id)); err != nil {
		return err
	} else if there {
		// Files that readers may see go in one step.
		if err := os.RemoveAll(gone); err != nil {
			return err
		}
		if err := os.Rename(d.published(id), gone); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return errors.Join(os.RemoveAll(d.draftDir(id)), os.RemoveAll(gone), fsx.SyncDir(d.checkpointsDir()))
}

// readLogs reads the ends of log files. Nothing in a draft is a reason to
// fail an Abort, so what cannot be read is left out.
func (d *Draft) readLogs(keep []string) map[string][]byte {
	if len(keep) == 0 {
		return nil
	}
	root, err := os.OpenRoot(d.dir)
	if err != nil {
		return nil
	}
	defer root.Close()
	logs := map[string][]byte{}
	for _, path := range keep {
		name := keptName(path)
		if len(logs) == keptLogs || !filepath.IsLocal(path) || !isPlain(name) {
			continue
		}
		f, err := root.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
			b, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-keptLog), keptLog))
			if err == nil {
				logs[name] = b
			}
		}
		_ = f.Close()
	}
	return logs
}

// keepLogs stores logs of a failure and removes the oldest ones.
func (d *dirs) keepLogs(id string, logs map[string][]byte) error {
	if len(logs) == 0 {
		return nil
	}
	dir := filepath.Join(d.failedDir(), id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	var errs []error
	for name, b := range logs {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), b, 0o600))
	}
	return errors.Join(append(errs, d.pruneLogs())...)
}

func (d *dirs) pruneLogs() error {
	entries, err := os.ReadDir(d.failedDir())
	if err != nil {
		return err
	}
	type old struct {
		name string
		time time.Time
	}
	var list []old
	for _, e := range entries {
		if info, err := e.Info(); err == nil { // else another process removed it
			list = append(list, old{e.Name(), info.ModTime()})
		}
	}
	sort.Slice(list, func(i, j int) bool { return list[i].time.After(list[j].time) })
	var errs []error
	for i := keptFailures; i < len(list); i++ {
		errs = append(errs, os.RemoveAll(filepath.Join(d.failedDir(), list[i].name)))
	}
	return errors.Join(errs...)
}

// KeptLog returns the path at which Abort keeps a log that lies in the draft's directory now.
func (d *Draft) KeptLog(path string) string {
	rel, err := filepath.Rel(d.dir, path)
	if err != nil {
		return path
	}
	return filepath.Join(d.s.FailedDir(d.row.ID), keptName(rel))
}

func keptName(path string) string { return strings.ReplaceAll(filepath.Clean(path), "/", "_") }

// FailedDir returns the directory in which Abort keeps the logs of a failed checkpoint; it may not
// exist.
func (d *dirs) FailedDir(id string) string { return filepath.Join(d.failedDir(), id) }
