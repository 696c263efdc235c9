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
	Dest    string // write below this directory, and tell nobody; empty: this host
	DryRun  bool
	Remove  bool
	Force   bool // replace and remove files that somebody else made

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
	s := systemdSetup{SystemdOptions: opts, result: SystemdResult{DryRun: opts.DryRun, Removed: opts.Remove, Files: []SystemdFile{}, Notes: []string{}}}
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
	booted := opts.Dest == "" && runsSystemd()
	if opts.Remove && booted && s.result.Changed {
		// While its units are there.
		if err := s.run(ctx, "systemctl", "disable", "--now", "agentbox.socket", "agentbox.service"); err != nil {
			return s.result, err
		}
	}
	if err := s.write(); err != nil {
		return s.result, err
	}
	switch {
	case opts.Dest != "":
	case !booted:
		s.note("systemd does not run here: nobody was told")
	default:
		if err := s.tell(ctx); err != nil {
			return s.result, err
		}
		s.result.Told = true
	}
	if opts.Remove && s.result.Changed && opts.Dest == "" {
		s.note("the group agentbox stays; sandboxes go on, and commands use the embedded engine")
	}
	return s.result, nil
}

type systemdSetup struct {
	SystemdOptions
	files  []file
	texts  [][]byte // what they are to hold; nil: they are to go
	result SystemdResult
}

func (s *systemdSetup) note(format string, args ...any) {
	s.result.Notes = append(s.result.Notes, fmt.Sprintf(format, args...))
}

// runsSystemd tells what sd_booted(3) does.
func runsSystemd() bool {
	info, err := os.Lstat("/run/systemd/system")
	return err == nil && info.IsDir()
}

// checkProgram refuses what systemd could not start, or would read as something else.
func (s *systemdSetup) checkProgram() error {
	p := s.Program
	odd := func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune(`"'\%$;`, r)
	}
	if !filepath.IsAbs(p) || strings.ContainsFunc(p, odd) {
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
	about := slices.DeleteFunc(strings.Split(string(out), "\n"), func(line string) bool { return !strings.Contains(line, dir) })
	if err != nil && ctx.Err() == nil || len(about) > 0 {
		return fmt.Errorf("systemd does not take the units: %w: %s", fault.ErrUnsupported, strings.TrimSpace(string(out)))
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
			if s.Remove {
				return f.remove()
			}
			// What somebody else has written is kept; what setup has can be had again.
			if f.exists && !bytes.HasPrefix(f.data, []byte(systemdMark)) {
				if one.Backup, err = f.backup(s.Now()); err != nil {
					return fmt.Errorf("backup: %w", err)
				}
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
		return s.run(ctx, "systemctl", "daemon-reload")
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
