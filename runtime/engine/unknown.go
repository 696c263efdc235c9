package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// A sandbox can be intact and yet missing from state.db: the database may be an older copy,
// or have lost its state.db-wal. The sandbox may hold a user's work, so it is removed only
// when it is named.

// leaveUnknown frees the leftovers of a sandbox that is not in state.db, whose lock is
// held. It leaves an intact sandbox alone, and says so.
func (bx *sandboxes) leaveUnknown(ctx context.Context, host Host, id string) (did string, whole bool, err error) {
	_, err = host.Inspect(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) {
		did, err = unless(host.Remove(ctx, id), "freed what was left of sandbox %s", short(id))
		return did, false, err
	}
	if err != nil {
		return "", false, err
	}
	return fmt.Sprintf("left sandbox %s alone, which state.db does not know: if state.db is an older one, put back the newer with its -wal; to remove the sandbox: agentbox rm -f %s", short(id), id), true, nil
}

// removeUnknown removes a sandbox that is not in state.db, by its full id.
func (bx *sandboxes) removeUnknown(ctx context.Context, id string, opts runtime.RemoveOptions, missing error) error {
	if raw, err := hex.DecodeString(id); err != nil || len(raw) != 16 || opts.AtExit {
		return missing
	}
	host, err := bx.host(bx.first)
	if err != nil {
		return missing
	}
	lock, err := bx.store.Lock(ctx, id, "rm", lockWait)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if _, err := bx.store.Sandbox(ctx, id); !errors.Is(err, runtime.ErrNotFound) {
		return errors.Join(missing, err)
	}
	if _, err := host.Inspect(ctx, id); errors.Is(err, runtime.ErrNotFound) {
		return missing
	} else if err != nil {
		return err
	}
	if !opts.Force {
		return hint(fmt.Errorf("%w: it is there, and state.db does not know it", runtime.ErrState),
			"Put back the state.db that knows it, or remove it with --force.")
	}
	return bx.remove(ctx, &locked{
		Sandbox: store.Sandbox{ID: id, Backend: bx.first}, host: host, lock: lock,
	}, opts.Checkpoints)
}

// forget removes a file of a sandbox that is gone.
func (r *reconciling) forget(ctx context.Context, id, path string) error {
	if used, err := flock.Held(path, 0); err != nil || used {
		return nil // held by a process of the sandbox, which is about to notice
	}
	lock, err := r.e.store.Lock(ctx, id, "recover", 0)
	if err != nil {
		return nil // not a sandbox's, or a sandbox of that id is being created
	}
	defer lock.Unlock()
	if _, err := r.e.store.Sandbox(ctx, id); !errors.Is(err, runtime.ErrNotFound) {
		return err
	}
	return ignoreMissing(os.Remove(path))
}
