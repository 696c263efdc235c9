package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	// busyTimeout is short because SQLite sleeps through a cancelled context;
	// write tries again until writeWait is over.
	busyTimeout = 500 * time.Millisecond
	writeWait   = 20 * time.Second
	undoWait    = 30 * time.Second // for work that must go on after a cancel
)

// database is state.db.
type database struct {
	*dirs
	db   *sql.DB  // the one connection that writes
	read *sql.DB  // those of all reading outside of a transaction
	file *os.File // state.db; see Close
	// level is the connection's synchronous; see atLevel.
	level string
}

func (d *database) openDB(ctx context.Context) (err error) {
	// SQLite gives the WAL and its index the mode of the database file, so
	// that file is made here rather than with the umask's mode.
	f, err := os.OpenFile(d.dbPath(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
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
	db, err := d.connect("immediate", "journal_mode(WAL)", "synchronous(FULL)",
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
	d.db, d.file, d.level = db, f, "FULL"
	if err := d.migrate(ctx); err != nil {
		return err
	}
	// In WAL mode a reader does not wait for the writer, whose connection is busy for as
	// long as the disk takes, and each query sees all that was committed before it. There
	// are several connections, so that a long query does not delay a list.
	read, err := d.connect("deferred", "query_only(ON)")
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
	d.read = read
	return nil
}

// connect prepares connections to state.db, which are made when they are first needed.
func (d *database) connect(lock string, pragmas ...string) (*sql.DB, error) {
	q := url.Values{
		"_txlock": {lock},
		// The file may be forged: it is not to run or to change more than it is asked to.
		"_defensive": {"1"},
		"_pragma": append([]string{
			fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "trusted_schema(OFF)", "cell_size_check(ON)",
		}, pragmas...),
	}
	u := url.URL{Scheme: "file", Path: d.dbPath(), RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", u.String())
	return db, dbError("open", err)
}

// write runs fn in a transaction that holds SQLite's write lock from its start.
// When it returns, that one, and all that were recorded lazily before it, are durable.
func (d *database) write(ctx context.Context, what string, fn func(*sql.Tx) error) error {
	return d.atLevel(ctx, "FULL", what, fn)
}

// lazily is write for changes that must outlive this process but not a power failure: nothing in
// them matters before the next write, or after a boot.
func (d *database) lazily(ctx context.Context, what string, fn func(*sql.Tx) error) error {
	return d.atLevel(ctx, "NORMAL", what, fn)
}

// atLevel runs fn in a transaction that SQLite makes as durable as synchronous(level) is.
// The level stays the connection's, for the next one most often has the same.
func (d *database) atLevel(ctx context.Context, level, what string, fn func(*sql.Tx) error) (err error) {
	conn, err := d.db.Conn(ctx)
	if err != nil {
		return cancelled(ctx, dbError(what, err))
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// There is one connection, which is ours now. Should it be a new one, it is at FULL.
	if d.level != level {
		d.level = "" // in case its state is unknown
		if _, err := conn.ExecContext(ctx, "PRAGMA synchronous("+level+")"); err != nil {
			return cancelled(ctx, dbError(what, err))
		}
		d.level = level
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
func (d *database) release(ctx context.Context, what string, fn func(*sql.Tx) error) error {
	err := d.write(ctx, what, fn)
	if outOfRoom(err) && d.useReserve() {
		err = d.write(ctx, what, fn)
	}
	return err
}

// query calls fn for each row. fn must not ask the database.
func (d *database) query(ctx context.Context, q string, args []any, fn func(*sql.Rows) error) error {
	const what = "read the index"
	rows, err := d.read.QueryContext(ctx, q, args...)
	if err != nil {
		return cancelled(ctx, dbError(what, err))
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows); err != nil {
			return cancelled(ctx, dbError(what, err))
		}
	}
	return cancelled(ctx, dbError(what, rows.Err()))
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
func (d *database) Close() (err error) {
	defer func() { err = errors.Join(err, d.file.Close()) }()
	if info, err := os.Lstat(d.dbPath() + "-wal"); err == nil && info.Size() <= keepWAL {
		// Without the lock all is as it should be, but later.
		_ = unix.FcntlFlock(d.file.Fd(), unix.F_OFD_SETLK,
			&unix.Flock_t{Type: unix.F_RDLCK, Start: sharedFirst, Len: sharedSize})
	}
	if err := errors.Join(d.read.Close(), d.db.Close()); err != nil {
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
