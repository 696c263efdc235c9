package overlay

import (
	"context"
	"io"
)

// Source has the data of the files of a tree.
type Source interface {
	// Data opens the data of a file (its extents, one after the other), exactly as many bytes as
	// the entry has. The data read is verified against the digests of the chunks; damage is
	// ErrCorrupt. Called from several goroutines at a time.
	Data(ctx context.Context, e Entry) (io.ReadCloser, error)
}

// Update holds the changes that make a directory what it is to be. It lists the differences only.
// However many there are, its memory use is small: what does not fit is in a file, until Close.
//
//	Collect -> PlanUpdate -> Stage (while the directory is still in use) -> Apply (while it is not)
type Update struct {
	// changes are all paths that differ. A directory that goes is followed by
	// everything in it.
	changes changeList
	n       int            // of which something is done about
	files   int            // of which data is staged
	bytes   int64          // of that data
	from    map[int]string // doLink: a path that has the inode by then, where that is not New.Hardlink

	// times has the wanted times of the directories in which names change and
	// which are not among the changes.
	times map[string]Time

	// cached: it was planned by PlanUpdateCached. again has the directories of what that
	// found as wanted, but not as the cache has it; nil: too many.
	cached bool
	again  map[string]bool
}

// updateChange is one path of a directory that an Update is about.
type updateChange struct {
	Path string
	Kind ChangeKind // Added, Deleted, Modified or TypeChanged
	Old  *Entry     // nil: Added
	New  *Entry     // nil: Deleted

	do    action
	inode *Entry // what the inode behind the path is to be: New, or what New is a hard link to
	from  string // doLink: a path that has the inode by then
}

// action is what Apply does about a path.
type action int

const (
	doNothing action = iota
	doRemove         // it and, of a directory, all below
	doDir            // make it unless it is one; give it its attributes when all in it is done
	doAttrs          // of a file, in place
	doFile           // move the staged file here
	doNode           // make a symlink, device, FIFO, socket or whiteout
	doLink           // make it a name of the inode that from has
)

// Empty reports whether nothing needs to be done.
func (u *Update) Empty() bool { return u.n == 0 }

// Len returns how many paths change.
func (u *Update) Len() int { return u.n }

// Bytes returns how many bytes of file data Stage reads and writes.
func (u *Update) Bytes() int64 { return u.bytes }

// Close gives back what the update holds on disk; it cannot be applied any
// more. It may be called again, and of nil.
func (u *Update) Close() error {
	if u == nil {
		return nil
	}
	return u.changes.close()
}

// at returns the i-th change.
func (u *Update) at(i int) (*updateChange, error) {
	c, err := u.changes.at(i)
	if err != nil {
		return nil, err
	}
	switch {
	case c.do == doLink:
		from, ok := u.from[i]
		if !ok {
			from = c.New.Hardlink
		}
		c.from = from
	case c.do == doAttrs && c.New.Hardlink != "":
		first, err := u.changes.find(c.New.Hardlink)
		if err != nil {
			return nil, err
		}
		leader, err := u.changes.at(first)
		if err != nil {
			return nil, err
		}
		c.inode = leader.New
	}
	return c, nil
}

// all goes through what there is something to do about, in order.
func (u *Update) all(fn func(i int, c *updateChange) error) error {
	for i := range u.changes.index {
		if u.changes.index[i].do == doNothing {
			continue
		}
		c, err := u.at(i)
		if err == nil {
			err = fn(i, c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// count adds what is done about a change to the sums, or takes it off them.
func (u *Update) count(c *updateChange, sign int) {
	if c.do != doNothing {
		u.n += sign
	}
	if c.do == doFile {
		u.files += sign
		u.bytes += int64(sign) * c.New.data()
	}
}
