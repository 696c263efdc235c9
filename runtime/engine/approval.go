package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Approvals are files of the root, one for each apply that a person has to approve. Their name is the
// beginning of the digest of the apply's plan, so that an approval is good for just that plan.
const dirApprovals = "approvals"

const (
	maxApprovals = 1000
	// requestLasts is how long a request waits for a person.
	requestLasts = 24 * time.Hour
	idLength     = 16 // hex digits
	minApproval  = 8  // of them that are enough to name one
	maxSome      = 50 // changes that a request names
)

var approvalID = lazy.Regexp(`^[0-9a-f]{16}$`)

// approvals are the approvals of a root directory.
type approvals struct {
	dir string
	now func() time.Time
}

func (e *core) approvals() approvals {
	return approvals{filepath.Join(e.store.Root(), dirApprovals), time.Now}
}

func (a approvals) path(id string) string { return filepath.Join(a.dir, id+".json") }

// locked runs fn with all that has not expired, and forgets the rest.
func (a approvals) locked(ctx context.Context, fn func(list []runtime.Approval) error) (err error) {
	if err := os.Mkdir(a.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	unlock, err := record.Lock(ctx, a.dir, "approvals")
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := os.ReadDir(a.dir)
	if err != nil {
		return err
	}
	var list []runtime.Approval
	for _, e := range entries {
		id, _ := strings.CutSuffix(e.Name(), ".json")
		if strings.HasPrefix(e.Name(), ".tmp-") { // of a write that was killed
			if err := os.Remove(filepath.Join(a.dir, e.Name())); err != nil {
				return err
			}
		}
		if !approvalID().MatchString(id) {
			continue
		}
		var one runtime.Approval
		err := record.ReadJSON(a.path(id), &one)
		if err == nil && one.ID == id && a.now().Before(one.Expires) {
			list = append(list, one)
			continue
		}
		if err != nil && !errors.Is(err, runtime.ErrCorrupt) {
			return err
		}
		if err := os.Remove(a.path(id)); err != nil {
			return err
		}
	}
	slices.SortFunc(list, func(x, y runtime.Approval) int { return y.Asked.Compare(x.Asked) })
	return fn(list)
}

// find returns the approval with an id that begins so.
func find(list []runtime.Approval, id string) (runtime.Approval, error) {
	var found []runtime.Approval
	for _, one := range list {
		if len(id) >= minApproval && strings.HasPrefix(one.ID, id) {
			found = append(found, one)
		}
	}
	switch len(found) {
	case 0:
		return runtime.Approval{}, hint(fmt.Errorf("approval %.40q: %w", id, runtime.ErrNotFound),
			"It was used, has expired, or never existed; 'agentbox approve --list' lists the open ones.")
	case 1:
		return found[0], nil
	}
	return runtime.Approval{}, fmt.Errorf("%w: %d approvals begin with %q", runtime.ErrInvalid, len(found), id)
}

// ask returns the approval of a plan, and asks for it if there is none. A dry run is answered the same.
func (a approvals) ask(ctx context.Context, want runtime.Approval) (got runtime.Approval, err error) {
	want.ID = want.Plan[:idLength]
	err = a.locked(ctx, func(list []runtime.Approval) error {
		// The person who has seen the other one would approve this one by its id.
		if slices.ContainsFunc(list, func(one runtime.Approval) bool {
			return one.ID == want.ID && one.Plan != want.Plan
		}) {
			return fmt.Errorf("%w: another apply waits for its approval as %s", runtime.ErrDenied, want.ID)
		}
		if i := slices.IndexFunc(list, func(one runtime.Approval) bool { return one.Plan == want.Plan }); i >= 0 {
			// Only what a person has seen counts, and for no longer than the rules now say.
			got = list[i]
			if got.Approved.IsZero() || !a.now().Before(got.Approved.Add(want.Lasts)) {
				got.Approved = time.Time{}
			} else {
				return nil
			}
		} else if len(list) >= maxApprovals {
			return hint(fmt.Errorf("%w: %d applies wait for an approval", runtime.ErrState, len(list)),
				"See 'agentbox approve --list'; each request expires after a day.")
		}
		got = want
		got.Asked = a.now().UTC()
		got.Expires = got.Asked.Add(requestLasts)
		return record.WriteJSON(a.path(got.ID), got, true)
	})
	return got, err
}

// approve grants what was asked for.
func (a approvals) approve(ctx context.Context, id string) (got runtime.Approval, err error) {
	err = a.locked(ctx, func(list []runtime.Approval) (err error) {
		if got, err = find(list, id); err != nil {
			return err
		}
		got.Approved = a.now().UTC()
		got.Expires = got.Approved.Add(got.Lasts)
		return record.WriteJSON(a.path(got.ID), got, true)
	})
	return got, err
}

// use uses an approval up. One that has expired meanwhile does not count.
func (a approvals) use(ctx context.Context, want runtime.Approval) error {
	return a.locked(ctx, func(list []runtime.Approval) error {
		for _, one := range list {
			if one.Plan == want.Plan && !one.Approved.IsZero() {
				err := errors.Join(os.Remove(a.path(one.ID)), fsx.SyncDir(a.dir))
				return errors.Join(err, failpoint.Hit("approve.after-use"))
			}
		}
		return notApproved(want, "its approval has expired")
	})
}

// notApproved is the error of an apply that a person has to approve.
func notApproved(a runtime.Approval, why string) error {
	return hint(fmt.Errorf("%w: %s; nothing was applied", fault.ErrApproval, why),
		"A person approves it with: agentbox approve "+a.ID+"; then run apply again.")
}

// Approvals lists the applies that wait for a person, and those that were approved and have not
// been applied yet, newest first.
func (v hostVerbs) Approvals(ctx context.Context) ([]runtime.Approval, error) {
	return verb(ctx, v.e, reads(on("approve ls", "")), func(ctx context.Context) (list []runtime.Approval, err error) {
		err = v.e.approvals().locked(ctx, func(all []runtime.Approval) error {
			list = append([]runtime.Approval{}, all...)
			return nil
		})
		return list, err
	})
}

// Approve approves the apply with an id, once.
func (v hostVerbs) Approve(ctx context.Context, id string) (runtime.Approval, error) {
	return verb(ctx, v.e, on("approve", id), func(ctx context.Context) (runtime.Approval, error) {
		return v.e.approvals().approve(ctx, id)
	})
}
