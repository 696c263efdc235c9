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
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
)

// Store is one root directory. Its methods are safe for concurrent use, by goroutines and by
// processes. It consists of parts, each of which knows those before it: where the files are,
// the database, its rows, the locks, and the packs. The Store itself takes, reads, proves and
// removes checkpoints by them.
type Store struct {
	*database
	*records
	*locks
	*packs
}

func newStore(root string) *Store {
	db := &database{dirs: &dirs{root: root}}
	rows := &records{database: db}
	return &Store{database: db, records: rows, locks: &locks{records: rows}, packs: &packs{database: db}}
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
	s := newStore(root)
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
	if err == nil {
		if err = s.prepare(ctx); err != nil {
			_ = s.Close() // the first error is the one to return
		}
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
