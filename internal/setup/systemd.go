package setup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/agentbox/agentbox/dist/systemd"
	"github.com/agentbox/agentbox/internal/fault"
)

// systemdMark begins every file that Systemd has made.
const systemdMark = "# agentbox: "

// systemdFiles are where the files of dist/systemd go.
var systemdFiles = []struct{ name, path string }{
	{"sysusers.conf", "/etc/sysusers.d/agentbox.conf"},
	{"tmpfiles.conf", "/etc/tmpfiles.d/agentbox.conf"},
	{"agentbox.socket", "/etc/systemd/system/agentbox.socket"},
	{"agentbox.service", "/etc/systemd/system/agentbox.service"},
}

// SystemdOptions modify Systemd.
type SystemdOptions struct {
	Program string // absolute path of agentbox
	Dest    string // write below this directory, and do not tell systemd; empty: this host
	DryRun  bool
	Remove  bool
	Force   bool // replace and remove files that are not setup's

	Now func() time.Time // nil: time.Now
}

// SystemdResult is the documented JSON of `agentbox setup systemd`; it only ever grows.
type SystemdResult struct {
	Files   []SystemdFile `json:"files"`
	Changed bool          `json:"changed"`
	DryRun  bool          `json:"dry_run"`
	Removed bool          `json:"removed"` // it was asked to remove
	Told    bool          `json:"told"`    // systemd did what follows from it
	Notes   []string      `json:"notes"`
	// units of the same names, such as a package's, serve now that setup's are removed
	Others bool `json:"others"`
}

// SystemdFile is one file of it.
type SystemdFile struct {
	Path    string `json:"path"`
	Changed bool   `json:"changed"`
	Diff    string `json:"diff"`
	Backup  string `json:"backup"` // empty: there was nothing to back up
}

// Systemd installs the service's units, the group of its socket and its directory,
// and starts it; or takes all but the group out again. Sandboxes go on.
func Systemd(ctx context.Context, opts SystemdOptions) (SystemdResult, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	s := systemdSetup{SystemdOptions: opts, result: SystemdResult{
		DryRun: opts.DryRun, Removed: opts.Remove, Files: []SystemdFile{}, Notes: []string{},
	}}
	if !opts.Remove {
		if err := s.checkProgram(); err != nil {
			return s.result, err
		}
	}
	if err := s.read(); err != nil {
		return s.result, err
	}
	if opts.DryRun {
		return s.result, nil
	}
	if !opts.Remove {
		if err := s.verify(ctx); err != nil {
			return s.result, err
		}
	}
	booted := opts.Dest == "" && haveSystemd()
	if opts.Remove && booted {
		if err := s.disable(ctx); err != nil {
			return s.result, err
		}
	}
	if err := s.write(); err != nil {
		return s.result, err
	}
	switch {
	case opts.Dest != "":
	case !booted:
		s.note("systemd does not run here: it was not reloaded")
	default:
		if err := s.tell(ctx); err != nil {
			return s.result, err
		}
		s.result.Told = true
	}
	if opts.Remove && s.result.Changed && opts.Dest == "" && !s.result.Others {
		s.note("the group agentbox stays; sandboxes go on, and commands use the embedded engine")
	}
	return s.result, nil
}

type systemdSetup struct {
	SystemdOptions
	files  []file
	ours   []bool   // they hold what setup writes
	texts  [][]byte // what they are to hold; nil: they are to go
	result SystemdResult
}

func (s *systemdSetup) note(format string, args ...any) {
	s.result.Notes = append(s.result.Notes, fmt.Sprintf(format, args...))
}

// isOdd reports whether the path of a program in a unit cannot have the rune.
func isOdd(r rune) bool {
	return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune(`"'\%$;`, r)
}

// isOurs reports whether data is a file of dist/systemd to the byte, whichever program it
// starts: setup can write it again.
func isOurs(text, data []byte) bool {
	before, after, ok := bytes.Cut(text, []byte(systemd.Program+" "))
	if !ok {
		return bytes.Equal(data, text)
	}
	program, ok := bytes.CutPrefix(data, before)
	if ok {
		program, ok = bytes.CutSuffix(program, slices.Concat([]byte(" "), after))
	}
	return ok && filepath.IsAbs(string(program)) && !bytes.ContainsFunc(program, isOdd)
}

// checkProgram refuses what systemd could not start, or would read as something else.
func (s *systemdSetup) checkProgram() error {
	p := s.Program
	if !filepath.IsAbs(p) || strings.ContainsFunc(p, isOdd) {
		return fmt.Errorf("%q is no path that a unit can hold: %w", p, fault.ErrInvalid)
	}
	info, err := os.Stat(filepath.Join("/", s.Dest, p))
	if s.Dest != "" && errors.Is(err, fs.ErrNotExist) {
		return nil // it will be installed there
	}
	if err == nil && (!info.Mode().IsRegular() || info.Mode()&0o111 == 0) {
		err = fmt.Errorf("%s is no program: %w", p, fault.ErrInvalid)
	}
	return err
}

// read finds what is there, and what changes.
func (s *systemdSetup) read() error {
	for _, f := range systemdFiles {
		text, err := systemd.Files.ReadFile(f.name)
		if err != nil {
			return err
		}
		now, err := readFile(filepath.Join("/", s.Dest, f.path))
		if err != nil {
			return err
		}
		if now.exists && !bytes.HasPrefix(now.data, []byte(systemdMark)) && !s.Force {
			return &fault.Error{
				Hint: "If it may go, use --force.",
				Err:  fmt.Errorf("%s is there, and agentbox has not made it: %w", now.path, fault.ErrExists),
			}
		}
		s.ours = append(s.ours, isOurs(text, now.data))
		text = bytes.ReplaceAll(text, []byte("ExecStart="+systemd.Program+" "), []byte("ExecStart="+s.Program+" "))
		if s.Remove {
			text = nil
		}
		changed := !bytes.Equal(now.data, text) || now.exists == s.Remove
		if s.Remove && !now.exists {
			changed = false
		}
		one := SystemdFile{Path: now.path, Changed: changed}
		if changed {
			one.Diff = now.diff(text, s.Remove)
			s.result.Changed = true
		}
		s.files, s.texts, s.result.Files = append(s.files, now), append(s.texts, text), append(s.result.Files, one)
	}
	return nil
}

// verify has systemd read the units before they are where it finds them.
func (s *systemdSetup) verify(ctx context.Context) (err error) {
	if !s.result.Changed || s.Dest != "" {
		return nil
	}
	dir, err := os.MkdirTemp("", "agentbox-units-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	args := []string{"verify", "--man=no"}
	for i, f := range systemdFiles {
		if strings.HasSuffix(f.name, ".conf") {
			continue
		}
		path := filepath.Join(dir, f.name)
		if err := os.WriteFile(path, s.texts[i], 0o644); err != nil {
			return err
		}
		args = append(args, path)
	}
	out, err := command(ctx, "systemd-analyze", args...).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		s.note("systemd-analyze is not installed here: the units were not verified")
		return nil
	}
	// A warning about some other unit that these name is not ours to heed.
	about := slices.DeleteFunc(strings.Split(string(out), "\n"), func(line string) bool {
		return !strings.Contains(line, dir)
	})
	if err != nil && ctx.Err() == nil || len(about) > 0 {
		return fmt.Errorf("systemd does not take the units: %w: %s", fault.ErrUnsupported,
			strings.TrimSpace(string(out)))
	}
	return ctx.Err()
}

// write puts the files in their places, or takes them away. One that fails leaves
// those before it: the same call does the rest.
func (s *systemdSetup) write() error {
	for i, f := range s.files {
		one := &s.result.Files[i]
		if !one.Changed {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(f.path), 0o755); err != nil {
			return err
		}
		err := func() (err error) {
			unlock, err := f.lock()
			if err != nil {
				return err
			}
			defer unlock()
			// Files of other origin, or changed since, are kept; setup's own can be had again.
			if !s.ours[i] {
				if one.Backup, err = f.backup(s.Now()); err != nil {
					return fmt.Errorf("backup: %w", err)
				}
			}
			if s.Remove {
				return f.remove()
			}
			return f.replace(s.texts[i])
		}()
		if err != nil {
			return in(f.path, err)
		}
	}
	return nil
}

// tell has systemd make the group and the directory, and start the service. A
// service that runs is restarted if its unit is another one.
func (s *systemdSetup) tell(ctx context.Context) error {
	if s.Remove {
		if err := s.run(ctx, "systemctl", "daemon-reload"); err != nil {
			return err
		}
		return s.handOver(ctx)
	}
	steps := [][]string{
		{"systemd-sysusers", s.files[0].path},
		{"systemd-tmpfiles", "--create", s.files[1].path},
		{"systemctl", "daemon-reload"},
		{"systemctl", "enable", "agentbox.socket", "agentbox.service"},
	}
	if s.result.Changed {
		steps = append(steps, []string{"systemctl", "stop", "agentbox.service", "agentbox.socket"})
	}
	steps = append(steps, []string{"systemctl", "start", "agentbox.socket", "agentbox.service"})
	for _, step := range steps {
		if err := s.run(ctx, step[0], step[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// units are those whose files are there: units of the same names that lie elsewhere are
// not setup's.
func (s *systemdSetup) units() (names []string) {
	for i, f := range systemdFiles {
		if s.files[i].exists && filepath.Dir(f.path) == "/etc/systemd/system" {
			names = append(names, f.name)
		}
	}
	return names
}

// disable stops the service and its socket, while systemd still has their units.
func (s *systemdSetup) disable(ctx context.Context) error {
	units := s.units()
	if len(units) == 0 {
		return nil
	}
	return s.run(ctx, "systemctl", append([]string{"disable", "--now"}, units...)...)
}

// handOver has the units serve that setup's were before, which are a package's: what was
// disabled and stopped went by the name.
func (s *systemdSetup) handOver(ctx context.Context) error {
	if len(s.units()) == 0 {
		return nil
	}
	var names, paths []string
	for _, name := range []string{"agentbox.socket", "agentbox.service"} {
		out, err := command(ctx, "systemctl", "show", "-p", "FragmentPath", "--value", name).Output()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if path := strings.TrimSpace(string(out)); err == nil && path != "" {
			names, paths = append(names, name), append(paths, path)
		}
	}
	if len(names) == 0 {
		return nil
	}
	for _, verb := range []string{"enable", "start"} {
		if err := s.run(ctx, "systemctl", append([]string{verb}, names...)...); err != nil {
			var f *fault.Error
			if errors.As(err, &f) {
				f.Hint = "Setup's units are removed. Mend it, and call 'systemctl enable --now " +
					strings.Join(names, " ") + "'."
			}
			return err
		}
	}
	s.result.Others = true
	s.note("these are used now, such as a package's: %s; they are enabled and run", strings.Join(paths, ", "))
	return nil
}

func (s *systemdSetup) run(ctx context.Context, name string, args ...string) error {
	out, err := command(ctx, name, args...).CombinedOutput()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &fault.Error{
		Hint: "Mend it and call this again: it does what is missing. 'systemctl status agentbox.socket agentbox.service' tells more.",
		Err:  fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out))),
	}
}
