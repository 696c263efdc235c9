package policy

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Scope keeps the file tools of an agent in one directory of a sandbox.
//
// A name is judged first: relative ones begin at the working directory, and
// where the deepest existing ancestor really lies, symlinks resolved, decides.
// So aliases of the directory are inside, links out of it are not, and files
// yet to be made are judged like others. What was judged is then opened in a
// jail of its own, whose root is the scope's directory: a process that swaps a
// directory for a symlink between the two cannot lead out of it.
type Scope struct {
	*Jail        // of top
	outer *Jail  // of the sandbox
	base  string // the working directory, real
	top   string // what names may lie in, real: the working directory or "/"
}

// Scope makes a scope of the working directory dir. With whole, names may lie
// anywhere in the sandbox. The scope is good as long as the jail is.
func (j *Jail) Scope(dir string, whole bool) (*Scope, error) {
	base, exists, err := j.Real(path.Join("/", dir))
	if err != nil {
		return nil, err
	}
	if !exists {
		return nil, &fault.Error{Op: "open", ID: dir, Err: fmt.Errorf("the working directory is %w", fault.ErrNotFound),
			Hint: "It is made when the sandbox starts, or with mkdir in the sandbox."}
	}
	top := base
	if whole {
		top = "/"
	}
	if top == "/" {
		return &Scope{Jail: j, outer: j, base: base, top: top}, nil
	}
	h, err := j.Handle(base+"/.", true)
	if err != nil {
		return nil, err
	}
	return &Scope{Jail: &Jail{root: h}, outer: j, base: base, top: top}, nil
}

// Close releases the scope, not the jail that it was made of.
func (s *Scope) Close() error {
	if s.Jail == s.outer {
		return nil
	}
	return s.Jail.Close()
}

// Place is a name that was found to lie in a scope.
type Place struct {
	Path string // for the scope's jail: absolute, "/" being the scope's directory, free of symlinks
	Real string // as the sandbox has it
}

// Find judges name; empty means the working directory. Outside of the scope
// the error is ErrDenied and names the working directory.
func (s *Scope) Find(name string) (Place, error) {
	if strings.ContainsRune(name, 0) {
		return Place{}, fail("open", name, unix.EINVAL)
	}
	full := name
	if !path.IsAbs(name) {
		full = s.base + "/" + name
	}
	real, _, err := s.outer.Real(full)
	if err != nil {
		if pe := (*jailError)(nil); errors.As(err, &pe) {
			pe.Path = name
		}
		return Place{}, err
	}
	switch {
	case s.top == "/":
		return Place{Path: real, Real: real}, nil
	case real == s.top:
		return Place{Path: "/", Real: real}, nil
	case strings.HasPrefix(real, s.top+"/"):
		return Place{Path: real[len(s.top):], Real: real}, nil
	}
	return Place{}, s.outside(name)
}

// FindGlob judges where a walk for the pattern g begins. An absolute pattern, or
// one with "..", replaces the directory dir as the base, and is judged as such.
func (s *Scope) FindGlob(dir string, g Glob) (Place, error) {
	base := g.Base
	if !path.IsAbs(base) {
		base = dir + "/" + base
		if dir == "" {
			base = "./" + g.Base
		}
	}
	at, err := s.Find(base)
	if errors.Is(err, fault.ErrDenied) {
		return at, s.outside(g.String())
	}
	return at, err
}

// Name is how the sandbox knows a place's path below the scope's directory.
func (s *Scope) Name(p string) string { return path.Join(s.top, p) }

func (s *Scope) outside(name string) error {
	return &fault.Error{Op: "open", ID: name,
		Err:  fmt.Errorf("%w: it lies outside of the working directory %s", fault.ErrDenied, s.top),
		Hint: "Use a path below " + s.top + "; a path that is left out means " + s.top + "."}
}
