package images

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Owners deep down, under any name, count; and the result is not computed twice.
func TestLargestID(t *testing.T) {
	layer := filepath.Join(t.TempDir(), "diff")
	if err := os.Mkdir(layer, 0o755); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(layer)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	deep := "\xff\n"
	for len(deep) < 2*4096 { // longer than the kernel takes a path to be
		deep += "/" + strings.Repeat("d", 200)
	}
	if err := root.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, id := range map[string]int{"shallow": 1000, deep + "/link": 70000} {
		if err := root.Symlink("/etc/passwd", name); err != nil {
			t.Fatal(err)
		}
		if err := root.Lchown(name, 0, id); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if got, err := LargestID(layer); got != 70000 || err != nil {
			t.Fatalf("%d, %v", got, err)
		}
		if err := syscall.Rename(layer, layer+".away"); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
}
