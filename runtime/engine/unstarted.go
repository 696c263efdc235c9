package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// `run` calls create and then start, and between the two only the caller knows of the
// sandbox. Until the start the caller owns it: its process is in the sandbox's record. If
// that process ends, the next command removes the sandbox, or the service does within
// lookUnstarted.

// lookUnstarted is how often the service looks for such sandboxes.
const lookUnstarted = 2 * time.Second

// starter returns the record of a sandbox's owner until its start.
func starter(req runtime.CreateRequest) (string, error) {
	if !req.ToStart {
		return "", nil
	}
	pid := req.Caller
	if pid == 0 {
		pid = os.Getpid()
	}
	o, err := own(runtime.LeaseTerms{Owner: runtime.OwnerPid, Pid: pid})
	if err != nil {
		return "", fmt.Errorf("the caller that is to start it: %w", err)
	}
	data, err := json.Marshal(o)
	return string(data), err
}

// hasStarter reports whether the caller that will start a sandbox is alive.
func hasStarter(sb store.Sandbox) (bool, error) {
	var o runtime.LeaseOwner
	if err := json.Unmarshal([]byte(sb.Starter), &o); err != nil {
		return false, fmt.Errorf("the starter of sandbox %s: %w: %w", sb.ID, runtime.ErrCorrupt, err)
	}
	if o.Boot != bootID() {
		return false, nil
	}
	return ownerAlive(o)
}

// freeUnstarted removes the sandboxes whose caller has ended before it started them. It
// leaves alone sandboxes of living callers, and those that another verb is at work on.
func (bx *sandboxes) freeUnstarted(ctx context.Context, as runtime.Own) (did []string, err error) {
	list, err := bx.store.Unstarted(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, sb := range list {
		err := guard.Do(func() error {
			alive, err := hasStarter(sb)
			if alive || err != nil {
				return err
			}
			gone, err := bx.freeOne(ctx, sb.ID, as)
			if gone {
				did = append(did, fmt.Sprintf("removed sandbox %s (%s), whose caller ended before it was started",
					sb.Name, short(sb.ID)))
				bx.log.Warn("verb recovered", "sandbox", sb.ID, "verb", opCreate, "action", did[len(did)-1])
			}
			return err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s, which was not started: %w", sb.Name, err))
		}
	}
	return did, errors.Join(errs...)
}

func (bx *sandboxes) freeOne(ctx context.Context, id string, as runtime.Own) (gone bool, err error) {
	lock, err := bx.store.Lock(ctx, id, "rm", 0)
	if errors.Is(err, runtime.ErrBusy) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	row, err := bx.store.Sandbox(ctx, id)
	if errors.Is(err, runtime.ErrNotFound) || err == nil && row.Starter == "" {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if intents, err := bx.pendingOf(ctx, id); err != nil || len(intents) > 0 {
		return false, err // an interrupted verb is finished first
	}
	host, err := bx.host(row.Backend)
	if err != nil {
		return false, err
	}
	c, err := host.Inspect(ctx, id)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		return false, err
	}
	if err == nil && c.Status != runtime.Created { // it was started, but that was not recorded
		return false, bx.store.Started(ctx, id)
	}
	as.Why = "its caller ended before it was started"
	err = bx.observed(ctx, runtime.ByItself("rm", subjectOf(row), as), func(ctx context.Context) error {
		return bx.remove(ctx, &locked{Sandbox: row, host: host, lock: lock}, false)
	})
	return err == nil, err
}

// started ends the caller's ownership of a sandbox: the start has succeeded, or has failed
// while its caller lives, which then decides.
func (bx *sandboxes) started(ctx context.Context, sb store.Sandbox, err error) {
	if sb.Starter == "" || err != nil && ctx.Err() != nil {
		return
	}
	if err := bx.store.Started(context.WithoutCancel(ctx), sb.ID); err != nil {
		bx.log.Warn("start not recorded", "sandbox", sb.ID, "err", err)
	}
}

// pendingOf lists the intents of a sandbox.
func (bx *sandboxes) pendingOf(ctx context.Context, id string) (of []store.Intent, err error) {
	all, err := bx.store.Intents(ctx)
	for _, in := range all {
		if in.Sandbox == id {
			of = append(of, in)
		}
	}
	return of, err
}
