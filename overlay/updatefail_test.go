//go:build failpoint

package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

var updatePoints = []string{"overlay.update.staged", "overlay.update.op", "overlay.update.times", "overlay.update.end"}

// TestUpdateFails has an error at each point instead.
func TestUpdateFails(t *testing.T) {
	base := noDevices(t)
	want := filepath.Join(base, "want")
	must(t, os.Mkdir(want, 0o755))
	everything(t, want)
	for i, p := range updatePoints {
		dir := fmt.Sprint(base, "/dir", i)
		must(t, os.Mkdir(dir, 0o755))
		u := planDirs(t, dir, want)
		t.Setenv("AGENTBOX_FAILPOINT", p+"=enospc")
		err := u.Stage(t.Context(), dir, dir+".stage", &dirSource{dir: want})
		if err == nil {
			err = u.Apply(t.Context(), dir, dir+".stage")
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s: %v", p, err)
		}
		t.Setenv("AGENTBOX_FAILPOINT", "")
		must(t, os.RemoveAll(dir+".stage"))
		update(t, dir, want)
	}
}
