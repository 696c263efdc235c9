package criu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestSettleYoung: a process that works in a directory that it has just made, and will soon
// remove, is let go on until it has left it; one that stays is not waited for.
func TestSettleYoung(t *testing.T) {
	ctx := context.Background()
	defer func(age, limit time.Duration) { young, youngLimit = age, limit }(young, youngLimit)
	for _, c := range []struct {
		name       string
		age, limit time.Duration
		leaves     bool
		want       string
	}{
		{"leaves", time.Hour, time.Minute, true, "/"},
		{"stays", time.Hour, 50 * time.Millisecond, false, "/tmp/new"},
		{"old", time.Nanosecond, time.Minute, true, "/tmp/new"},
	} {
		t.Run(c.name, func(t *testing.T) {
			young, youngLimit = c.age, c.limit
			const script = "mkdir /tmp/new; cd /tmp/new; echo >/up; until [ -e /go ]; do :; done; cd /; rm -r /tmp/new; exec sleep 1000"
			b, rt := start(t, []string{"sh", "-c", script}, nil)
			b.Until("it has begun", func() bool { _, err := os.Stat(filepath.Join(b.Files, "up")); return err == nil })
			if err := rt.Pause(ctx); err != nil {
				t.Fatal(err)
			}
			if c.leaves { // as soon as it goes on
				if err := os.WriteFile(filepath.Join(b.Files, "go"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			begun := time.Now()
			frozen, err := rt.Settle(ctx, b.Pid())
			if err != nil {
				t.Fatal(err)
			}
			if waited := frozen.After(begun); waited != (c.name != "old") {
				t.Errorf("it was let go on: %t", waited)
			}
			if where, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", b.Pid())); where != c.want {
				t.Errorf("it works in %s, want %s: %v", where, c.want, err)
			}
			if s := b.Status(); s != "paused" {
				t.Errorf("afterwards it is %s", s)
			}
		})
	}
}

// TestAge: of a directory on the root's mount the age is known, of another it is not.
func TestAge(t *testing.T) {
	dir := t.TempDir()
	made := time.Now()
	if age, known := ageOf(dir, "/", made.Add(time.Minute)); !known || age < 50*time.Second || age > 70*time.Second {
		t.Errorf("%v, %t", age, known)
	}
	if age, known := ageOf("/proc", "/", made); known {
		t.Errorf("of another mount: %v", age)
	}
	if _, known := ageOf(filepath.Join(dir, "none"), "/", made); known {
		t.Error("of none")
	}
}
