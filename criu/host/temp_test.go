package host

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestSweepTemp(t *testing.T) {
	dir := t.TempDir()
	left, full, other := filepath.Join(dir, ".criu.mntns.abc123"), filepath.Join(dir, ".criu.mntns.file"), filepath.Join(dir, "other")
	for _, d := range []string{left, other} {
		if err := os.Mkdir(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(full, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	running := filepath.Join(dir, "criu")
	if err := os.Symlink(sleep, running); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(running, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = sweepTemp(dir)
	if _, e := os.Stat(left); err != nil || e != nil {
		t.Errorf("swept while a CRIU runs: %v, %v", err, e)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	// Others on this machine may run CRIU, too.
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if err := sweepTemp(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(left); os.IsNotExist(err) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it is left")
		}
	}
	for _, kept := range []string{full, other} {
		if _, err := os.Stat(kept); err != nil {
			t.Error(err)
		}
	}
}
