//go:build failpoint

package portable

import (
	"bytes"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"errors"
)

// points are all of the package, in the order of an export and an import.
var points = []string{
	"portable.export.begin", "portable.export.after-facts", "portable.export.after-files",
	"portable.export.after-images", "portable.export.before-end",
	"portable.import.after-facts", "portable.import.after-trees", "portable.import.after-files",
	"portable.import.before-image",
	"portable.import.after-mounts", "portable.import.after-images", "portable.import.before-put",
	"portable.import.after-put",
}

func TestFailpointsListed(t *testing.T) {
	var found []string
	list, err := os.ReadDir(".")
	must(t, err)
	for _, e := range list {
		if strings.HasSuffix(e.Name(), ".go") && !strings.HasSuffix(e.Name(), "_test.go") {
			data, err := os.ReadFile(e.Name())
			must(t, err)
			for _, m := range regexp.MustCompile(`failpoint\.Hit\("([^"]*)"\)`).FindAllSubmatch(data, -1) {
				found = append(found, string(m[1]))
			}
		}
	}
	slices.Sort(found)
	want := slices.Sorted(slices.Values(points))
	if !slices.Equal(slices.Compact(found), want) {
		t.Errorf("in the code are %q", found)
	}
}

// Whatever fails, nothing is left and the error says so.
func TestFailpoints(t *testing.T) {
	_, c := full(t)
	ours, theirs := exported(t, c, Options{}), podmanArchive(t)
	for _, p := range points {
		t.Run(p, func(t *testing.T) {
			t.Setenv("AGENTBOX_FAILPOINT", p+"=enospc")
			fired := 0
			if strings.Contains(p, ".export.") {
				if err := Export(t.Context(), io.Discard, c, Options{}); errors.Is(err, syscall.ENOSPC) {
					fired++
				} else {
					t.Errorf("the export ended with %v", err)
				}
			} else {
				for _, archive := range [][]byte{ours, theirs} {
					_, _, _, err := importBytes(t, bytes.Clone(archive), OpenOptions{}, ImportOptions{})
					if errors.Is(err, syscall.ENOSPC) {
						fired++
					} else if err != nil {
						t.Errorf("the import ended with %v", err)
					}
				}
			}
			if fired == 0 {
				t.Error("it never fired")
			}
		})
	}
}
