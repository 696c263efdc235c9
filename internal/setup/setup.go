// Package setup registers agentbox-runtime with container engines.
//
// Docker, Containerd and Podman each take one file, their engine's
// configuration, through the same steps: read it, edit its text (jsonedit.go,
// tomledit.go: what is not ours keeps its bytes), prove that nothing but our
// entry changed, have the engine validate the new text, back the old one up,
// replace it atomically, and make the running engine take it up without
// stopping a container. Each returns a Result that says what was done, and
// leaves the file as it was when it returns an error.
//
// The package knows files and daemons, never sandboxes.
package setup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// DefaultName is the name that the runtime is registered under.
const DefaultName = "agentbox"

// wrapperName is the file name of agentbox-runtime; an entry whose path ends
// in another one was not made by setup.
const wrapperName = "agentbox-runtime"

// Options are common to all engines.
type Options struct {
	Name    string // empty: DefaultName
	Runtime string // absolute path of agentbox-runtime; not needed to remove
	Config  string // empty: the engine's own

	DryRun bool // only say what would change
	Remove bool // take out what was put in
	Force  bool // remove although it is in use, or agentbox did not put it in

	Now func() time.Time // nil: time.Now
}

// Result is the documented JSON of `agentbox setup`; it only ever grows.
type Result struct {
	Engine   string   `json:"engine"`
	Name     string   `json:"name"`
	Runtime  string   `json:"runtime"` // path; empty when removed
	Config   string   `json:"config"`
	Changed  bool     `json:"changed"` // the configuration, or with dry_run: it would be
	DryRun   bool     `json:"dry_run"`
	Removed  bool     `json:"removed"` // it was asked to remove
	Diff     string   `json:"diff"`
	Backup   string   `json:"backup"`           // empty: there was nothing to back up
	Reloaded bool     `json:"reloaded"`         // the running engine was told
	Verified bool     `json:"verified"`         // the engine itself says so
	Plugin   *Link    `json:"plugin,omitempty"` // Docker's
	Notes    []string `json:"notes"`
}

func (r *Result) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

func (o Options) resolve(engine, config string) (Options, Result, error) {
	if o.Name == "" {
		o.Name = DefaultName
	}
	if o.Config == "" {
		o.Config = config
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	r := Result{Engine: engine, Name: o.Name, Config: o.Config, DryRun: o.DryRun, Removed: o.Remove, Notes: []string{}}
	if err := checkName(o.Name); err != nil {
		return o, r, err
	}
	if o.Remove {
		return o, r, nil
	}
	r.Runtime = o.Runtime
	return o, r, checkRuntime(o.Runtime)
}

var goodName = lazy.Regexp(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$`)

func checkName(name string) error {
	why := ""
	switch {
	case !goodName().MatchString(name):
		why = "a name is 1 to 64 letters, digits, '_', '.' and '-'"
	case name == "runc" || name == "crun" || strings.HasPrefix(name, "io.containerd."):
		why = "engines reserve this name"
	}
	if why == "" {
		return nil
	}
	return fmt.Errorf("runtime name %q: %s: %w", name, why, fault.ErrInvalid)
}

// checkRuntime refuses what an engine could not start, before an engine is
// told to.
func checkRuntime(path string) error {
	hint := "Build and install it beside agentbox (make install), or name it with --runtime."
	st, err := os.Stat(path)
	switch {
	case !filepath.IsAbs(path) || !utf8.ValidString(path) || strings.ContainsFunc(path, unicode.IsControl):
		return fmt.Errorf("%q is no path that a configuration can hold: %w", path, fault.ErrInvalid)
	case errors.Is(err, os.ErrNotExist):
		return &fault.Error{Hint: hint, Err: fmt.Errorf("%s is not there: %w", path, fault.ErrNotFound)}
	case err != nil:
		return err
	case !st.Mode().IsRegular() || st.Mode()&0o111 == 0:
		return &fault.Error{Hint: hint, Err: fmt.Errorf("%s is no program: %w", path, fault.ErrInvalid)}
	}
	return nil
}

// in tells which file an error is about.
func in(path string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", path, err)
}
