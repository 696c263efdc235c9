package source

import (
	"os/exec"
	"strings"
	"testing"
)

// Of a program that talks on and on only the end is kept.
func TestTail(t *testing.T) {
	var said tail
	cmd := exec.Command("sh", "-c", "yes $(printf %01000d 0) | head -c 2000000 >&2; echo the end >&2")
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if n := said.kept.Len(); n > 16<<10 || !strings.HasSuffix(said.said(), "the end") {
		t.Errorf("%d bytes are kept, ending in %q", n, said.said())
	}
}
