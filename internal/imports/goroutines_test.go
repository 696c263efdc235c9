package imports

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// unguarded is where goroutines are started otherwise than by internal/guard, and why a
// panic may end the process there.
var unguarded = map[string]string{
	"cmd/agentbox-runtime":       "a process for one call of the OCI runtime, which stays small",
	"cmd/agentbox/cp.go":         "one command",
	"cmd/agentbox/plugin.go":     "the plugin's process: dockerd starts it again",
	"cmd/agentbox/prune.go":      "one command",
	"cmd/agentbox/signals.go":    "one command",
	"cmd/agentbox/starting.go":   "one command",
	"cmd/agentbox/terminal.go":   "one command, which puts the terminal right first",
	"criu/cut/cut.go":            "a trial that agentbox-runtime alone makes",
	"criu/freezer/trap.go":       "a panic there is its caller's",
	"criu/wall/cover.go":         "in agentbox-runtime alone",
	"internal/enginetest":        "tests",
	"internal/guard":             "it is what starts them",
	"internal/remote/remotetest": "tests",
	"internal/thorough":          "tests",
	"runtime/backendtest":        "tests",
	"runtime/dockerplugin":       "the plugin's process: dockerd starts it again",
	"runtime/network/egress":     "the process behind filtered sandboxes, which catches those of each connection",
	"runtime/network/serve.go":   "that process; whoever needs it starts it again",
	"runtime/network/worker.go":  "likewise",
	"runtime/traces/tracestest":  "tests",
	"test":                       "tests",
}

// A panic in a goroutine of the service is an error of one piece of work: none is
// started but by internal/guard.
func TestGoroutines(t *testing.T) {
	used := map[string]bool{}
	excused := func(path string) bool {
		for p := path; p != "."; p = filepath.Dir(p) {
			if unguarded[p] != "" {
				used[p] = true
				return true
			}
		}
		return false
	}
	const root = "../.."
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil || d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata") {
			if err == nil {
				err = filepath.SkipDir
			}
			return err
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || excused(name) {
			return nil
		}
		files := token.NewFileSet()
		f, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, i := range f.Imports {
			if i.Path.Value == `"golang.org/x/sync/errgroup"` {
				t.Errorf("%s: use a guard.Group", files.Position(i.Pos()))
			}
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: use guard.Go, guard.Start or a group of it", files.Position(n.Pos()))
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "sync" && n.Sel.Name == "WaitGroup" &&
					!slices.Contains(counted, name) {
					t.Errorf("%s: use a guard.WaitGroup", files.Position(n.Pos()))
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for path := range unguarded {
		if !used[path] {
			t.Errorf("%s starts no goroutines: take it off the list", path)
		}
	}
}

// counted are the files whose sync.WaitGroup counts, and starts nothing.
var counted = []string{"runtime/api/server/server.go", "runtime/containerd/hub.go", "runtime/store/pack/writer.go"}
