package engine

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// sharing is a backend that lists the users of volumes.
type sharing struct {
	runtime.Backend
	users func(context.Context) (map[string][]string, error)
}

func (s sharing) VolumeUsers(ctx context.Context, _ string, _ []runtime.Volume) (map[string][]string, error) {
	return s.users(ctx)
}

// TestVolumeReachedBy: a container that mounts the volume's directory by another path, or can
// write above it, is a user of the volume too.
func TestVolumeReachedBy(t *testing.T) {
	root := t.TempDir()
	data := filepath.Join(root, "volumes/one/data")
	for _, dir := range []string{
		filepath.Join(data, "part"), filepath.Join(root, "volumes/one/database"), filepath.Join(root, "elsewhere"),
	} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{
		"link": data, "all": "volumes", "volumes/one/data/out": "../../../elsewhere",
	} {
		if err := os.Symlink(to, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{data, filepath.Join(root, "all/one/data")} {
		v := runtime.Volume{Path: path}
		for source, want := range map[string][2]bool{ // read-only, writable
			"volumes/one/data":          {true, true},
			"volumes/one/data/":         {true, true},
			"volumes/one/data/part":     {true, true},
			"link":                      {true, true},
			"link/part":                 {true, true},
			"all/one/data":              {true, true},
			"volumes/one/data/gone":     {true, true}, // by its name alone
			"volumes/one":               {false, true},
			"volumes":                   {false, true},
			"all":                       {false, true},
			"":                          {false, true},
			"volumes/one/database":      {false, false},
			"volumes/one/dat":           {false, false},
			"volumes/one/data/out":      {false, false},
			"elsewhere":                 {false, false},
			"volumes/one/data/part/../": {true, true},
		} {
			for i, writable := range []bool{false, true} {
				if got := v.ReachedBy(root+"/"+source, writable); got != want[i] {
					t.Errorf("%s is reached by %q (writable: %v): %v", path, source, writable, got)
				}
			}
		}
		if v.ReachedBy("", true) || !v.ReachedBy("/", true) || v.ReachedBy("/", false) {
			t.Error("of nothing, or all")
		}
	}
	gone := runtime.Volume{Path: root + "/gone/data"}
	if !gone.ReachedBy(root+"/gone//data/", false) || gone.ReachedBy(root+"/gone/other", true) {
		t.Error("of one that is gone")
	}
}

// TestAlone: the users of a volume are named. An engine that fails or never answers does not
// count as one that found no users, and its ErrNotFound is not about the sandbox.
func TestAlone(t *testing.T) {
	ask := func(ctx context.Context, users func(context.Context) (map[string][]string, error)) error {
		return alone(ctx, Host{Backend: sharing{users: users}}, "id", []runtime.Volume{{Name: "one"}, {Name: "two"}})
	}
	told := func(users map[string][]string, err error) error {
		return ask(t.Context(), func(context.Context) (map[string][]string, error) { return users, err })
	}
	if err := told(map[string][]string{"other": {"x"}}, nil); err != nil {
		t.Error(err)
	}
	if err := told(map[string][]string{"two": {"x", "y"}}, nil); !errors.Is(err, runtime.ErrState) ||
		!strings.Contains(err.Error(), "two is in use by x, y") {
		t.Errorf("of one that is in use: %v", err)
	}
	for _, is := range []error{runtime.ErrNotFound, runtime.ErrUnsupported, runtime.ErrState} {
		if err := told(nil, is); err == nil || errors.Is(err, runtime.ErrNotFound) ||
			is != runtime.ErrNotFound && !errors.Is(err, is) {
			t.Errorf("%v became %v", is, err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		never := make(chan struct{})
		defer close(never)
		hangs := func(context.Context) (map[string][]string, error) { <-never; return nil, nil }
		if err := ask(t.Context(), hangs); err == nil || !strings.Contains(err.Error(), "within 1m0s") {
			t.Errorf("of an engine that does not answer: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := ask(ctx, hangs); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("when the caller went away: %v", err)
		}
	})
}
