package imports

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// Bounds of what one has to keep in mind at once.
const (
	maxMethods = 80 // fewer, of any type
	maxLines   = 80 // at most, of a function of the engine
)

// TestSizes holds types and the functions of the engine to their bounds.
func TestSizes(t *testing.T) {
	methods := map[string]int{} // directory and type -> how many it declares
	functions := 0
	fset := token.NewFileSet()
	err := filepath.WalkDir("../..", func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := e.Name(); e.IsDir() && path != "../.." && (name == "testdata" || strings.HasPrefix(name, ".")) {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := filepath.ToSlash(filepath.Dir(path))
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if fn.Recv != nil {
				methods[dir+"."+receiver(fn.Recv.List[0].Type)]++
			}
			if strings.HasPrefix(dir, "../../runtime/engine") {
				functions++
				if n := fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line + 1; n > maxLines {
					t.Errorf("%s: %s has %d lines, want at most %d", path, fn.Name.Name, n, maxLines)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, n := range methods {
		if n >= maxMethods {
			t.Errorf("%s has %d methods, want fewer than %d", name, n, maxMethods)
		}
	}
	if functions < 100 || len(methods) < 100 {
		t.Errorf("only %d functions and %d types were found", functions, len(methods))
	}
}

// receiver returns the name of a method's type.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return "?"
}
