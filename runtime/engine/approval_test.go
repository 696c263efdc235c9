package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// TestApprovals: an approval is good for one plan, once, and until it expires.
func TestApprovals(t *testing.T) {
	ctx := t.Context()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	a := approvals{filepath.Join(t.TempDir(), "approvals"), func() time.Time { return now }}
	want := func(n int) runtime.Approval {
		return runtime.Approval{Plan: fmt.Sprintf("%016x", n) + strings.Repeat("0", 48), Changes: n, Lasts: time.Hour}
	}
	ask := func(n int) runtime.Approval {
		t.Helper()
		got, err := a.ask(ctx, want(n))
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	approved := func(n int) bool { t.Helper(); return !ask(n).Approved.IsZero() }
	approve := func(id string) {
		t.Helper()
		if _, err := a.approve(ctx, id); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	_, err := a.approve(ctx, want(1).Plan[:16])
	refused("approve what was never asked for", err, runtime.ErrNotFound)
	if approved(1) || approved(2) {
		t.Error("approved from the start")
	}
	refused("use of what is not approved", a.use(ctx, want(1)), runtime.ErrApproval)
	_, err = a.approve(ctx, "0000000")
	refused("approve one by too few digits", err, runtime.ErrNotFound)
	_, err = a.approve(ctx, "00000000")
	refused("approve one of two", err, runtime.ErrInvalid)
	_, err = a.approve(ctx, "")
	refused("approve anything", err, runtime.ErrNotFound)
	_, err = a.approve(ctx, "../../etc/passwd")
	refused("approve a path", err, runtime.ErrNotFound)

	one := ask(1)
	alike := want(1)
	alike.Plan = alike.Plan[:63] + "1"
	_, err = a.ask(ctx, alike)
	refused("another plan under the id of one that waits", err, runtime.ErrDenied)
	approve(one.ID)
	_, err = a.ask(ctx, alike)
	refused("another plan under the id of an approval", err, runtime.ErrDenied)
	if !approved(1) || approved(2) {
		t.Error("the approval of one plan is not that of just this one")
	}
	if err := a.use(ctx, want(1)); err != nil {
		t.Fatal(err)
	}
	refused("use a second time", a.use(ctx, want(1)), runtime.ErrApproval)
	if approved(1) {
		t.Error("approved after it was used up")
	}

	approve(one.ID)
	now = now.Add(time.Hour)
	refused("use of one that has expired", a.use(ctx, want(1)), runtime.ErrApproval)
	if approved(1) {
		t.Error("approved after it has expired")
	}
	approve(one.ID)
	now = now.Add(20 * time.Minute)
	short := want(1)
	short.Lasts = 10 * time.Minute
	if got, err := a.ask(ctx, short); err != nil || !got.Approved.IsZero() || got.Lasts != short.Lasts {
		t.Errorf("approved for longer than the rules now say: %+v, %v", got, err)
	}

	// A request expires, too, and what is no approval of ours is left out.
	for name, text := range map[string]string{"0123456789abcdef.json": "{", "other": "x", ".tmp-x": "x", "fedcba9876543210.json": `{"id":"x"}`} {
		if err := os.WriteFile(filepath.Join(a.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ask(3)
	now = now.Add(requestLasts)
	err = a.locked(ctx, func(list []runtime.Approval) error {
		if len(list) != 0 {
			t.Errorf("left: %+v", list)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(a.dir); err != nil || len(left) != 1 || left[0].Name() != "other" {
		t.Errorf("left: %v, %v", left, err)
	}
	for n := range maxApprovals {
		ask(n)
	}
	_, err = a.ask(ctx, want(maxApprovals))
	refused("one too many", err, runtime.ErrState)
}
