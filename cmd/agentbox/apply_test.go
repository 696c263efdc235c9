package main

import (
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

func TestApply(t *testing.T) {
	f := newFake()
	try(t, f, "", "apply", "--dry-run", "volume://ws").want(t, 0, "A /a b\nD /d\n")
	try(t, f, "", "apply", "--undo", "--force", "volume://ws").want(t, 0, "A /a b\nD /d\n")
	want := []string{"Apply volume://ws true false false", "Close", "Apply volume://ws false true true", "Close"}
	if len(f.calls) != len(want) {
		t.Fatalf("calls: %q", f.calls)
	}
	for i, w := range want {
		if f.calls[i] != w {
			t.Errorf("call %d: %q, want %q", i, f.calls[i], w)
		}
	}
	try(t, newFake(), "", "apply", "--dry-run", "--undo", "volume://ws").want(t, exitUsage, "", "exclude each other")
	try(t, newFake(), "", "apply").want(t, exitUsage, "", "SANDBOX is missing")
	f.fail["Apply"] = &runtime.Error{Err: runtime.ErrState}
	try(t, f, "", "apply", "volume://ws").want(t, exitState, "", "not possible in this state")
}
