package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Reindexed is the result of Reindex.
type Reindexed struct {
	Packs       int
	Chunks      int64
	Checkpoints int      // whose records were made again
	Notes       []string // what could not be used, or is not as it was, and why
}

// Reindex rebuilds the index from the packs, and the records of checkpoints that have none
// from their manifests. Existing records stay as they are. Rebuilt ones are ready and not
// pinned, and foreign unless the disk shows that they were made here. Tags, freeze times
// and added sizes are lost; sandboxes and their heads are left alone. Reindex waits for
// drafts and readers to end, for half a minute at most, then returns ErrBusy. A kill leaves
// everything as it was.
func (s *Store) Reindex(ctx context.Context) (Reindexed, error) {
	one, err := s.rearrange(ctx, defaultWait)
	if err != nil {
		return Reindexed{}, err
	}
	defer one.Unlock()
	l, err := s.alone(ctx, "reindex", defaultWait)
	if err != nil {
		return Reindexed{}, err
	}
	defer l.Unlock()
	x := &reindex{s: s}
	if err := x.packs(ctx); err != nil {
		return x.did, err
	}
	return x.did, x.checkpoints(ctx)
}

type reindex struct {
	s   *Store
	did Reindexed
}

func (x *reindex) note(format string, args ...any) {
	if len(x.did.Notes) < maxNotes {
		x.did.Notes = append(x.did.Notes, fmt.Sprintf(format, args...))
	}
}

type packFileInfo struct {
	name    string
	created time.Time
}

// packs makes the index again, in one step.
func (x *reindex) packs(ctx context.Context) error {
	var files []packFileInfo
	var bad []string // there, but their footer cannot be used
	err := x.s.packFiles(func(name string) error {
		info, err := os.Lstat(pack.Path(x.s.packsDir(), name))
		if err != nil {
			return err
		}
		files = append(files, packFileInfo{name, info.ModTime()})
		return nil
	})
	if err != nil {
		return err
	}
	// A chunk that is in two packs belongs to the older one, as when it was made.
	slices.SortFunc(files, func(a, b packFileInfo) int {
		return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.name, b.name))
	})
	// No other process changes packs now, so they are proven before the database is locked.
	var sound []packFileInfo
	for _, f := range files {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		err := x.s.soundPack(f.name)
		switch {
		case err == nil:
			sound = append(sound, f)
		case errors.Is(err, fault.ErrCorrupt) || unreadable(err):
			bad = append(bad, f.name)
			x.note("pack %s: %v", f.name, err)
		default:
			return err
		}
	}
	var notes []string
	err = x.s.write(ctx, "make the index again", func(tx *sql.Tx) (err error) {
		notes, err = x.rebuild(ctx, tx, sound, bad)
		return err
	})
	for _, n := range notes {
		x.note("%s", n)
	}
	return err
}

func (x *reindex) rebuild(
	ctx context.Context, tx *sql.Tx, sound []packFileInfo, bad []string,
) (notes []string, err error) {
	was, err := packNames(ctx, tx)
	if err != nil {
		return nil, err
	}
	// Of a pack whose footer is damaged only the index knows the chunks.
	keep := []int64{0}
	for _, name := range bad {
		if num, ok := was[name]; ok {
			keep = append(keep, num)
			notes = append(notes, fmt.Sprintf("pack %s: what the index had of it was kept", name))
		}
	}
	var list []string
	for _, n := range keep {
		list = append(list, strconv.FormatInt(n, 10))
	}
	in := "(" + strings.Join(list, ",") + ")"
	for _, q := range []string{
		"DELETE FROM blobs WHERE pack NOT IN " + in, "DELETE FROM packs WHERE num NOT IN " + in,
	} {
		if _, err := tx.ExecContext(ctx, q); err != nil {
			return nil, err
		}
	}
	for _, f := range sound {
		if err := x.add(ctx, tx, f, keep); err != nil {
			return nil, err
		}
	}
	is, err := packNames(ctx, tx)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(was)) {
		if _, ok := is[name]; !ok {
			notes = append(notes, fmt.Sprintf("pack %.64q is gone", name))
		}
	}
	x.did.Packs = len(is)
	if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM blobs").Scan(&x.did.Chunks); err != nil {
		return nil, err
	}
	return notes, failpoint.Hit("store.reindex.in-transaction")
}

func packNames(ctx context.Context, tx *sql.Tx) (map[string]int64, error) {
	rows, err := tx.QueryContext(ctx, "SELECT name, num FROM packs")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	names := map[string]int64{}
	for rows.Next() {
		var name string
		var num int64
		if err := rows.Scan(&name, &num); err != nil {
			return nil, err
		}
		names[name] = num
	}
	return names, rows.Err()
}

// soundPack proves the footer and the name of a pack.
func (d *dirs) soundPack(name string) error {
	f, _, err := d.openPack(name)
	if err != nil {
		return err
	}
	return f.Close()
}

func (d *dirs) openPack(name string) (*os.File, *pack.Reader, error) {
	dir, err := openDir(d.packsDir() + "/" + name[:2])
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	f, _, err := openPlain(dir, name)
	if err != nil {
		return nil, nil, err
	}
	r, err := pack.Open(f)
	if err == nil && r.Name() != name {
		err = fmt.Errorf("its name should be %s: %w", r.Name(), fault.ErrCorrupt)
	}
	if err != nil {
		_ = f.Close() // it was only read
		return nil, nil, err
	}
	return f, r, nil
}

func (x *reindex) add(ctx context.Context, tx *sql.Tx, p packFileInfo, lost []int64) error {
	f, r, err := x.s.openPack(p.name)
	if err != nil {
		return err
	}
	defer f.Close()
	blobs, err := r.Blobs()
	if err != nil {
		return err
	}
	if _, err := x.s.addPack(ctx, tx, pack.Info{Name: p.name, Bytes: r.Bytes(), Blobs: blobs}, lost); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, "UPDATE packs SET created = ? WHERE name = ?", p.created.UnixNano(), p.name)
	return err
}

// checkpoints makes records for the published checkpoints that have none.
func (x *reindex) checkpoints(ctx context.Context) error {
	known, err := x.s.checkpoints(ctx, "")
	if err != nil {
		return err
	}
	rows := map[string]Checkpoint{}
	for _, c := range known {
		rows[c.ID] = c
	}
	dir, err := openDir(x.s.checkpointsDir())
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := readDir(dir)
	if err != nil {
		return err
	}
	slices.Sort(names)
	there := map[string]bool{}
	var found []unrecorded
	for _, id := range names {
		if !isID(id) {
			continue
		}
		r, err := x.s.openPublished(id)
		switch {
		case errors.Is(err, fault.ErrCorrupt) || errors.Is(err, fault.ErrUnsupported) || unreadable(err):
			x.note("checkpoint %s: %v", id, err)
			there[id] = rows[id].Status == Ready
			continue
		case err != nil:
			return err
		}
		there[id] = true
		switch c, ok := rows[id]; {
		case !ok:
			u, err := x.s.unrecorded(id, r)
			if err != nil {
				return err
			}
			found = append(found, u)
		case c.Status == Ready && c.Digest != r.digest:
			x.note("checkpoint %s: its record is of another manifest (%s, this is %s)", id, c.Digest, r.digest)
		case c.Status == Failed:
			x.note("checkpoint %s: its record says that it failed (%s)", id, c.Error)
		}
	}
	for _, c := range known {
		if c.Status == Ready && !there[c.ID] {
			x.note("checkpoint %s of sandbox %s: its directory is gone", c.ID, c.SandboxName)
		}
	}
	slices.SortFunc(found, func(a, b unrecorded) int {
		return cmp.Or(a.created.Compare(b.created), cmp.Compare(a.r.manifest.ID, b.r.manifest.ID))
	})
	if len(found) == 0 {
		return nil
	}
	x.note("tags and pins of the checkpoints whose records were made again are lost")
	cat, err := x.s.loadCatalog(ctx)
	if err != nil {
		return err
	}
	v := newSurvey(cat)
	for _, u := range found {
		if err := x.checkpoint(ctx, v, u, there); err != nil {
			return fmt.Errorf("checkpoint %s: %w", u.r.manifest.ID, err)
		}
	}
	return nil
}

// unrecorded is a published checkpoint that has no record.
type unrecorded struct {
	r       *Reader
	origin  string
	created time.Time // of a foreign one, when it came here
}

func (s *Store) unrecorded(id string, r *Reader) (unrecorded, error) {
	u := unrecorded{r: r, created: r.manifest.Created}
	var err error
	if u.origin, err = s.Origin(id); err != nil || u.origin == originHere {
		return u, err
	}
	info, err := os.Lstat(filepath.Join(s.published(id), ManifestName))
	if err == nil {
		u.created = info.ModTime().UTC()
	}
	return u, err
}

func (x *reindex) checkpoint(ctx context.Context, v *survey, u unrecorded, there map[string]bool) error {
	r := u.r
	defer r.chunks.close()
	n, damage, err := v.checkpoint(ctx, r)
	if err != nil {
		return err
	}
	m := &r.manifest
	c := Checkpoint{ID: m.ID, Name: m.Name, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind,
		Status: Ready, Parent: m.Parent,
		Trigger: m.Trigger, Message: m.Message, Created: u.created, Files: m.Files[0].Entries, Bytes: r.size, Digest: r.digest,
		ImageDigest: m.ImageDigest,
		Labels:      m.Labels, Spec: m.Spec, Foreign: u.origin != originHere}
	if !madeElsewhere(u.origin, r.digest) { // else they are its author's words
		c.Warnings = m.Warnings
	}
	if m.Processes != nil {
		c.Processes = m.Processes.Count
	}
	if !there[c.Parent] {
		c.Parent = ""
	}
	// A manifest may come from anywhere; what it says has to be fit for a record.
	if err := c.check(); err != nil {
		x.note("checkpoint %s: %v", c.ID, err)
		return nil
	}
	gone := 0
	v.each(n, newBitset(v.size()), func(i uint32) {
		if int(i) >= len(v.cat.ids) || v.cat.slots[i].pack == noPack {
			gone++
		}
		c.Bytes += v.stored(i)
	})
	switch {
	case len(damage) > 0:
		c.Damaged = damage[0].Error()
	case gone > 0:
		c.Damaged = fmt.Sprintf("%d pieces are in no pack", gone)
	}
	if c.Damaged != "" {
		c.Damaged = strings.ToValidUTF8(c.Damaged[:min(len(c.Damaged), maxMark)], "?")
		x.note("checkpoint %s: %s", c.ID, c.Damaged)
	}
	if err := failpoint.Hit("store.reindex.before-checkpoint"); err != nil {
		return err
	}
	err = x.s.write(ctx, "record a checkpoint", func(tx *sql.Tx) error {
		var taken string
		err := tx.QueryRowContext(ctx,
			"SELECT id FROM checkpoints WHERE sandbox_id = ? AND name = ? AND name <> '' AND status = 'ready'",
			c.SandboxID, c.Name).Scan(&taken)
		if err == nil {
			x.note("checkpoint %s: its name %s is that of checkpoint %s", c.ID, c.Name, taken)
			c.Name = ""
		} else if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO checkpoints ("+checkpointColumns+
			", pulled, attached) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
			c.ID, c.Name, c.SandboxID, c.SandboxName, c.Kind, c.Status, c.Error, c.Parent,
			c.Trigger, c.Created.UnixNano(),
			c.Files, c.Processes, c.Bytes, c.Digest, c.ImageDigest, encode(c.Labels), int64(c.Frozen),
			encode(c.Warnings), string(c.Spec), c.Added, c.Unchanged, c.Damaged, c.Pinned, c.Lease,
			c.Message, c.Foreign, m.Attached.record())
		return err
	})
	if err == nil {
		x.did.Checkpoints++
	}
	return err
}
