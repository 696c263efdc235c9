// Package store keeps what agentbox must not forget: which sandboxes exist,
// their checkpoints, and what a verb was in the middle of.
//
// It owns, below one root directory,
//
//	state.db              SQLite in WAL mode: sandboxes, checkpoints, journal,
//	                      and where in which pack a chunk is
//	locks/ID              one flock file per sandbox
//	locks/store           held shared by drafts and readers, exclusively to
//	                      remove chunks
//	packs/aa/NAME         chunks of data, many to a file (package pack), immutable
//	packs/tmp-*           packs being written
//	checkpoints/ID/       one published checkpoint, never changed again:
//	    manifest.json     canonical JSON; its BLAKE3 digest is the checkpoint's identity
//	checkpoints/tmp-*     scratch of drafts, and removals under way
//	checkpoints/failed/ID logs of the newest failures
//	memory/SANDBOX.N      file cache of a sandbox's N-th tree (overlay.Collect)
//	reserve               room for the records that free room on a full disk
//
// All data is cut into chunks, each named by the BLAKE3 digest of its bytes and
// stored once. In JSON and in messages to users a chunk is called a piece. A checkpoint comes into being as a Draft: a pending row and a
// scratch directory. The engine gives it the data of files, the list of
// entries, and the process images; what no pack has goes into a pack of the
// draft's own. Commit makes that pack durable, then the manifest, then, in one
// transaction, the rows of the chunks and the ready checkpoint. A reader goes
// the other way: the row's digest proves the manifest, the manifest's digests
// prove the lists, and these prove the data. Sweep finishes or undoes what a
// killed process left.
//
// Several processes share one root. SQLite serialises rows; everything else
// about one sandbox is serialised by its Lock, which the callers take.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

const (
	// busyTimeout is short because SQLite sleeps through a cancelled context;
	// write tries again until writeWait is over.
	busyTimeout = 500 * time.Millisecond
	writeWait   = 20 * time.Second
	undoWait    = 30 * time.Second // for work that must go on after a cancel
)

// Store is one root directory. Its methods are safe for concurrent use, by
// goroutines and by processes.
type Store struct {
	root string
	db   *sql.DB  // the one connection that writes
	read *sql.DB  // those of all reading outside of a transaction
	file *os.File // state.db; see Close
	// level is the connection's synchronous; see atLevel.
	level string
	find  *sql.Stmt // see index.go
}

// Open opens the store below root and makes it if it is not there. A state of
// a newer agentbox is ErrUnsupported, a damaged state.db ErrCorrupt; without
// root's rights or on a read-only disk it is ErrDenied.
func Open(ctx context.Context, root string) (*Store, error) { return openAt(ctx, root, false) }

// OpenExisting opens a store that is there. One that is not is ErrNotFound, and is not made,
// even if it is removed meanwhile.
func OpenExisting(ctx context.Context, root string) (*Store, error) { return openAt(ctx, root, true) }

func openAt(ctx context.Context, root string, existing bool) (*Store, error) {
	if os.Geteuid() != 0 {
		return nil, &fault.Error{Op: "open state", ID: root, Hint: "Run it as root, for instance with sudo.",
			Err: fmt.Errorf("only root may: %w", fault.ErrDenied)}
	}
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("root directory: %w", err)
	}
	s := &Store{root: root}
	if !existing {
		err = denied(os.MkdirAll(root, 0o700))
	} else if s.Gone() {
		err = fault.ErrNotFound
	}
	if err == nil {
		err = s.makeDirs()
	}
	if err != nil {
		return nil, &fault.Error{Op: "open state", ID: root, Err: err}
	}
	// Two processes that both turn a new database to WAL, or both migrate it,
	// would fail each other.
	l, err := s.flock(ctx, openLock, "open", writeWait)
	if err != nil {
		return nil, &fault.Error{Op: "open state", ID: root, Err: err}
	}
	defer l.Unlock()
	err = s.openDB(ctx)
	if outOfRoom(err) && s.useReserve() {
		err = s.openDB(ctx)
	}
	if err != nil {
		var e *fault.Error
		if !errors.As(err, &e) {
			err = &fault.Error{Op: "open state", ID: s.dbPath(), Err: err}
		}
		return nil, err
	}
	s.fillReserve()
	return s, nil
}

// keepWAL is the largest WAL, in bytes, that stays when the last user closes the database.
// The next command reads that much to open it, which takes far less than a millisecond.
const keepWAL = 512 << 10

// Close releases the database. Drafts, readers and locks have their own ends.
//
// When the last user closes it, SQLite moves the WAL into state.db and waits for the disk,
// and the next command waits again to create a new WAL. With a short WAL, Close prevents
// that: it holds a shared lock on the byte range that all users of the database lock, so
// SQLite finds another user. The content of the WAL is as durable as when it was written.
func (s *Store) Close() (err error) {
	defer func() { err = errors.Join(err, s.file.Close()) }()
	if info, err := os.Lstat(s.dbPath() + "-wal"); err == nil && info.Size() <= keepWAL {
		// Without the lock all is as it should be, but later.
		_ = unix.FcntlFlock(s.file.Fd(), unix.F_OFD_SETLK,
			&unix.Flock_t{Type: unix.F_RDLCK, Start: sharedFirst, Len: sharedSize})
	}
	if err := errors.Join(s.read.Close(), s.db.Close()); err != nil {
		return dbError("close", err)
	}
	return nil
}

const (
	// readers is how many connections read.
	readers = 4
	// walSize is what a WAL is cut to, in bytes, when it begins anew; it grows while
	// readers follow each other without a gap.
	walSize = 4 << 20
)

// The bytes of state.db that users of it lock; see "File locking" in SQLite's os.h.
const (
	sharedFirst = 0x40000000 + 2
	sharedSize  = 510
)

// Root is the directory that all lies in.
func (s *Store) Root() string { return s.root }

// Gone reports whether the root was removed: what is read then is in files
// that have no name any more.
func (s *Store) Gone() bool {
	_, err := os.Lstat(s.dbPath())
	return errors.Is(err, fs.ErrNotExist)
}

func (s *Store) dbPath() string             { return filepath.Join(s.root, "state.db") }
func (s *Store) locksDir() string           { return filepath.Join(s.root, "locks") }
func (s *Store) checkpointsDir() string     { return filepath.Join(s.root, "checkpoints") }
func (s *Store) packsDir() string           { return filepath.Join(s.root, "packs") }
func (s *Store) cacheDir() string           { return filepath.Join(s.root, "memory") }
func (s *Store) stagedDir() string          { return filepath.Join(s.root, "staged") }
func (s *Store) failedDir() string          { return filepath.Join(s.root, "checkpoints", "failed") }
func (s *Store) published(id string) string { return filepath.Join(s.root, "checkpoints", id) }
func (s *Store) draftDir(id string) string  { return filepath.Join(s.root, "checkpoints", tmpPrefix+id) }
func (s *Store) removedDir(id string) string {
	return filepath.Join(s.root, "checkpoints", removePrefix+id)
}

const (
	tmpPrefix    = "tmp-"
	removePrefix = "tmp-rm-"
)

// makeDirs creates the directories below the root and refuses those that another user owns: their content
// is restored as root.
func (s *Store) makeDirs() error {
	var st unix.Stat_t
	if err := unix.Stat(s.root, &st); err != nil {
		return denied(err)
	}
	if err := checkOwner(s.root, &st); err != nil {
		return err
	}
	if err := s.checkParts(); err != nil {
		return err
	}
	for _, dir := range []string{
		s.locksDir(), s.packsDir(), s.cacheDir(), s.checkpointsDir(), s.failedDir(), s.stagedDir(),
	} {
		if err := unix.Lstat(dir, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Uid == 0 {
			continue
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return denied(err)
		}
		if err := unix.Lstat(dir, &st); err != nil {
			return denied(err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != 0 {
			return fmt.Errorf("%s is not a directory of root's: %w", dir, fault.ErrDenied)
		}
		if err := fsx.SyncDir(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	return nil
}

// checkParts refuses what others can change, and symlinks, among all that lies in the root: a
// root that was copied or mounted from elsewhere can lead out of itself by any of its names.
func (s *Store) checkParts() error {
	entries, err := os.ReadDir(s.root)
	if err != nil {
		return denied(err)
	}
	for _, e := range entries {
		path := filepath.Join(s.root, e.Name())
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); errors.Is(err, fs.ErrNotExist) {
			continue // a temporary file
		} else if err != nil {
			return denied(err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			return linkError(path)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
			continue // it has no content, and its mode decides what may connect
		}
		if err := checkOwner(path, &st); err != nil {
			return err
		}
	}
	// A root other than the default one holds its own transient state.
	run := filepath.Join(s.root, "run")
	if entries, err = os.ReadDir(run); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.Type()&fs.ModeSymlink != 0 {
			return linkError(filepath.Join(run, e.Name()))
		}
	}
	return denied(err)
}

func linkError(path string) error {
	return &fault.Error{Op: "check", ID: path,
		Hint: "Put in its place what it leads to; another disk can be mounted there.",
		Err:  fmt.Errorf("a symbolic link in the state directory: %w", fault.ErrDenied)}
}

// checkOwner refuses what is not root's, or can be written by others.
func checkOwner(path string, st *unix.Stat_t) error {
	if st.Uid != 0 {
		return &fault.Error{Op: "check", ID: path,
			Hint: "Choose a directory of root's own: its owner may have put anything there. If all of it is yours: chown root " + path,
			Err:  fmt.Errorf("it belongs to user %d, not to root: %w", st.Uid, fault.ErrDenied)}
	}
	if st.Mode&0o002 != 0 || st.Mode&0o020 != 0 && st.Gid != 0 {
		return &fault.Error{Op: "check", ID: path,
			Hint: "Choose a directory of root's own, or take the right away: chmod go-w " + path,
			Err:  fmt.Errorf("others may write here: %w", fault.ErrDenied)}
	}
	return nil
}

func (s *Store) openDB(ctx context.Context) (err error) {
	// SQLite gives the WAL and its index the mode of the database file, so
	// that file is made here rather than with the umask's mode.
	f, err := os.OpenFile(s.dbPath(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return denied(err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	// Else closing any file of that name, as Close does, ends all locks of this process on
	// it, those of another Store on the same root too.
	if _, err := sqlite.OFDLocking(true); err != nil && !errors.Is(err, sqlite.ErrOFDLockingUnavailable) {
		return err
	}
	db, err := s.connect("immediate", "journal_mode(WAL)", "synchronous(FULL)",
		fmt.Sprintf("journal_size_limit(%d)", walSize))
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = db.Close() // the first error is the one to return
		}
	}()
	// One connection: goroutines of one process then queue without SQLite's
	// sleeping busy handler.
	db.SetMaxOpenConns(1)
	s.db, s.file, s.level = db, f, "FULL"
	if err := s.migrate(ctx); err != nil {
		return err
	}
	// In WAL mode a reader does not wait for the writer, whose connection is busy for as
	// long as the disk takes, and each query sees all that was committed before it. There
	// are several connections, so that a long query does not delay a list.
	read, err := s.connect("deferred", "query_only(ON)")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = read.Close()
		}
	}()
	read.SetMaxOpenConns(readers)
	read.SetMaxIdleConns(readers)
	s.read = read
	return s.prepare(ctx)
}

// connect prepares connections to state.db, which are made when they are first needed.
func (s *Store) connect(lock string, pragmas ...string) (*sql.DB, error) {
	q := url.Values{
		"_txlock": {lock},
		// The file may be forged: it is not to run or to change more than it is asked to.
		"_defensive": {"1"},
		"_pragma": append([]string{
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "trusted_schema(OFF)", "cell_size_check(ON)",
		}, pragmas...),
	}
	u := url.URL{Scheme: "file", Path: s.dbPath(), RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", u.String())
	return db, dbError("open", err)
}

// write runs fn in a transaction that holds SQLite's write lock from its start.
// When it returns, that one, and all that were recorded lazily before it, are durable.
func (s *Store) write(ctx context.Context, what string, fn func(*sql.Tx) error) error {
	return s.atLevel(ctx, "FULL", what, fn)
}

// lazily is write for changes that must outlive this process but not a power failure: nothing in
// them matters before the next write, or after a boot.
func (s *Store) lazily(ctx context.Context, what string, fn func(*sql.Tx) error) error {
	return s.atLevel(ctx, "NORMAL", what, fn)
}

// atLevel runs fn in a transaction that SQLite makes as durable as synchronous(level) is.
// The level stays the connection's, for the next one most often has the same.
func (s *Store) atLevel(ctx context.Context, level, what string, fn func(*sql.Tx) error) (err error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return cancelled(ctx, dbError(what, err))
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// There is one connection, which is ours now. Should it be a new one, it is at FULL.
	if s.level != level {
		s.level = "" // in case its state is unknown
		if _, err := conn.ExecContext(ctx, "PRAGMA synchronous("+level+")"); err != nil {
			return cancelled(ctx, dbError(what, err))
		}
		s.level = level
	}
	return transact(ctx, conn, what, fn)
}

func transact(ctx context.Context, db interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}, what string, fn func(*sql.Tx) error) error {
	deadline := time.Now().Add(writeWait)
	for {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			if err = dbError(what, err); errors.Is(err, fault.ErrBusy) &&
				time.Now().Before(deadline) && ctx.Err() == nil {
				continue // busyTimeout was the pause
			}
			return cancelled(ctx, err)
		}
		if err := within(tx, fn); err != nil {
			return cancelled(ctx, dbError(what, err))
		}
		return nil
	}
}

// within runs fn and commits. A panic of fn continues after the transaction is rolled
// back: an open one would block all further writes.
func within(tx *sql.Tx, fn func(*sql.Tx) error) error {
	defer tx.Rollback() // which does nothing after the commit
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// release is write for what gives room back. On a full disk not even a
// removal could be recorded, so the reserve is spent on it.
func (s *Store) release(ctx context.Context, what string, fn func(*sql.Tx) error) error {
	err := s.write(ctx, what, fn)
	if outOfRoom(err) && s.useReserve() {
		err = s.write(ctx, what, fn)
	}
	return err
}

const reserveSize = 1 << 20

func (s *Store) reservePath() string { return filepath.Join(s.root, "reserve") }

func (s *Store) useReserve() bool { return os.Remove(s.reservePath()) == nil }

// fillReserve puts the room aside again. A disk that has none left now gets
// another chance at the next Open.
func (s *Store) fillReserve() {
	if info, err := os.Lstat(s.reservePath()); err == nil && info.Size() == reserveSize {
		return
	}
	f, err := os.OpenFile(s.reservePath(), os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return
	}
	// Real bytes: not every filesystem can allocate without writing.
	_, err = f.WriteAt(make([]byte, reserveSize), 0)
	if errors.Join(err, f.Close()) != nil {
		_ = os.Remove(s.reservePath())
	}
}

// outOfRoom knows SQLite's several words for a full disk.
func outOfRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// cancelled returns the context's error in place of what it made the database say.
func cancelled(ctx context.Context, err error) error {
	if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}

// dbError gives SQLite's errors the meaning of our sentinels and leaves all others alone.
func dbError(what string, err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	if e.Code() == sqlite3.SQLITE_IOERR_SHMSIZE { // the WAL's index could not grow
		return fmt.Errorf("state.db, %s: %w: %w", what, syscall.ENOSPC, err)
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return fmt.Errorf("state.db, %s: another process holds it: %w", what, fault.ErrBusy)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return &fault.Error{Op: "state.db", ID: what,
			Hint: "Put back a copy of all three, state.db, state.db-wal and state.db-shm, or move them aside. Checkpoints are not affected. Sandboxes that a copy does not know go on and are left alone: agentbox recover names them.",
			Err:  fmt.Errorf("%w: %w", fault.ErrCorrupt, err)}
	case sqlite3.SQLITE_FULL:
		return fmt.Errorf("state.db, %s: %w", what, syscall.ENOSPC)
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH:
		return fmt.Errorf("state.db, %s: %w: %w", what, fault.ErrDenied, err)
	}
	return fmt.Errorf("state.db, %s: %w", what, err)
}

// denied marks the errors that mean "you may not write here".
func denied(err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%w: %w", fault.ErrDenied, err)
	}
	return err
}
