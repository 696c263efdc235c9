package engine

import "testing"

// TestAreaOf: a path belongs to the innermost area that it lies in.
func TestAreaOf(t *testing.T) {
	areas := []area{{at: "."}, {at: "w"}, {at: "w/in/side"}, {at: "work"}}
	for name, want := range map[string]struct {
		at int
		in string
	}{
		".": {0, "."}, "etc/x": {0, "etc/x"}, "w": {1, "."}, "w/a": {1, "a"}, "w/in": {1, "in"},
		"w/in/side": {2, "."}, "w/in/side/b/c": {2, "b/c"}, "work": {3, "."}, "workshop": {0, "workshop"}, "work/w": {3, "w"},
	} {
		at, in := areaOf(areas, name)
		if at != want.at || in != want.in {
			t.Errorf("%s: area %d, %s; want %d, %s", name, at, in, want.at, want.in)
		}
		if at > 0 && areas[at].outside(in) != name {
			t.Errorf("%s and back is %s", name, areas[at].outside(in))
		}
	}
}
