package setup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// DockerConfig is where dockerd looks for its configuration.
const DockerConfig = "/etc/docker/daemon.json"

// DockerOptions say how to set Docker up.
type DockerOptions struct {
	Options
	Default bool   // make it the default runtime as well
	Pidfile string // of dockerd; empty: the configuration's, or dockerd's default
	Host    string // unix://...; empty: DOCKER_HOST, or where the daemon listens

	Self     string // this program
	Plugin   string // what `docker agentbox` starts; empty: the docker-agentbox beside Self
	Plugins  string // directory for the plugin; empty: one of pluginDirs
	NoPlugin bool
}

// dockerSetup is one run of Docker.
type dockerSetup struct {
	DockerOptions
	file   file
	conf   daemonConfig
	data   []byte // the new text
	gone   bool   // the file goes altogether
	link   *Link
	daemon *daemon
	result Result
}

// Docker registers the runtime in dockerd's configuration, makes a running
// dockerd take it up, and links the plugin of the docker command. With
// opts.Remove it takes all of that out again.
//
// When the daemon does not take the new configuration, the old one is put
// back: a daemon.json that dockerd refuses keeps it from starting.
func Docker(ctx context.Context, opts DockerOptions) (Result, error) {
	var err error
	s := dockerSetup{}
	if opts.Options, s.result, err = opts.resolve("docker", DockerConfig); err != nil {
		return s.result, err
	}
	s.DockerOptions = opts
	if s.file, err = readFile(opts.Config); err != nil {
		return s.result, err
	}
	if !opts.DryRun {
		if err := os.MkdirAll(filepath.Dir(s.file.path), 0o755); err != nil {
			return s.result, err
		}
		unlock, err := s.file.lock()
		if err != nil {
			return s.result, err
		}
		defer unlock()
	}
	if err := s.plan(ctx); err != nil {
		return s.result, err
	}
	if opts.DryRun {
		return s.result, nil
	}
	return s.result, s.apply(ctx)
}

// plan finds out all that is to be done, and whether it can be.
func (s *dockerSetup) plan(ctx context.Context) (err error) {
	if s.conf, err = readDaemonConfig(s.file.data); err != nil {
		return in(s.file.path, err)
	}
	if s.daemon, err = findDaemon(ctx, s.DockerOptions, s.conf); err != nil {
		return err
	}
	if err := s.checkDaemon(); err != nil {
		return err
	}
	if s.Remove {
		err = s.planRemove(ctx)
	} else {
		s.data, err = addRuntime(s.file.data, s.Name, s.Runtime, s.Default)
	}
	if err != nil {
		return in(s.file.path, err)
	}
	if !s.NoPlugin {
		if s.Remove {
			s.link, err = planUnlink(s.Plugins)
		} else {
			s.link, err = planLink(s.Plugins, s.Self, s.Plugin)
		}
		if err != nil {
			return err
		}
		s.result.Plugin = s.link
	}
	s.result.Diff = s.file.diff(s.data, s.gone)
	s.result.Changed = s.result.Diff != "" || s.gone
	return nil
}

// checkDaemon refuses what the running daemon would not take.
func (s *dockerSetup) checkDaemon() error {
	d := s.daemon
	if d == nil {
		return nil
	}
	if !d.reads(s.file.path) {
		err := fmt.Errorf("the running dockerd (process %d) reads %s, not %s: %w", d.pid, d.config(),
			s.file.path, fault.ErrInvalid)
		if s.Pidfile != "" || s.Config == DockerConfig {
			return &fault.Error{Hint: "Name its configuration with --config " + d.config() + ".", Err: err}
		}
		// The file of a daemon that does not run yet.
		s.daemon = nil
		return nil
	}
	if s.Remove {
		return nil
	}
	flag := ""
	switch {
	case d.flags.addRuntime:
		flag = "--add-runtime"
	case d.flags.defaultRuntime && s.Default:
		flag = "--default-runtime"
	default:
		return nil
	}
	return &fault.Error{
		Hint: fmt.Sprintf("Move what it says into %s and restart dockerd, or register agentbox with one more such flag: --add-runtime %s=%s.", s.file.path, s.Name, s.Runtime),
		Err:  fmt.Errorf("dockerd (process %d) was started with %s, and does not start with both that and the same setting in its file: %w", d.pid, flag, fault.ErrState),
	}
}

func (s *dockerSetup) planRemove(ctx context.Context) error {
	s.data = s.file.data
	entry, there := s.conf.Runtimes[s.Name]
	if !there {
		return nil
	}
	if filepath.Base(entry.Path) != wrapperName && !s.Force {
		return &fault.Error{
			Hint: "Use --force to remove it all the same.",
			Err: fmt.Errorf("the runtime %q is %q, which setup did not put there: %w", s.Name,
				entry.Path, fault.ErrState),
		}
	}
	if s.daemon != nil && !s.Force {
		users, err := s.daemon.users(ctx, s.Name)
		if err != nil {
			return fmt.Errorf("which containers use it: %w", err)
		}
		if len(users) > 0 {
			return &fault.Error{
				Hint: "Remove them, or use --force; without the runtime they cannot be started.",
				Err:  fmt.Errorf("runtime %q is in use by %s: %w", s.Name, strings.Join(users, ", "), fault.ErrBusy),
			}
		}
	}
	for _, makeDefault := range []bool{false, true} {
		old, ok := s.file.before(func(old []byte) ([]byte, error) {
			if c, err := readDaemonConfig(old); err != nil || c.has(s.Name) {
				return nil, fault.ErrExists
			}
			return addRuntime(old, s.Name, entry.Path, makeDefault)
		})
		if ok {
			s.data = old
			return nil
		}
	}
	var err error
	if s.data, err = removeRuntime(s.file.data, s.Name); err != nil {
		return err
	}
	// The default that was replaced is in a backup.
	if s.conf.DefaultRuntime == s.Name {
		for _, path := range s.file.backups() {
			old, err := readFile(path)
			if err != nil {
				continue
			}
			if c, err := readDaemonConfig(old.data); err == nil && c.DefaultRuntime != s.Name {
				if _, still := s.conf.Runtimes[c.DefaultRuntime]; still || c.DefaultRuntime == "runc" {
					s.data, err = setDefaultRuntime(s.data, c.DefaultRuntime)
					return err
				}
				break
			}
		}
	}
	// dockerd does without its default file, not without one that it was told.
	created, err := addRuntime(nil, s.Name, entry.Path, s.conf.DefaultRuntime == s.Name)
	if err == nil && string(created) == string(s.file.data) &&
		s.file.path == DockerConfig && (s.daemon == nil || s.daemon.flags.configFile == "") {
		s.data, s.gone = nil, true
	}
	return nil
}

func (c daemonConfig) has(name string) bool { _, ok := c.Runtimes[name]; return ok }

func (s *dockerSetup) apply(ctx context.Context) (err error) {
	if s.result.Changed {
		if err := s.write(ctx); err != nil {
			return err
		}
	}
	if err := s.tell(ctx); err != nil {
		if s.result.Changed {
			err = s.putBack(ctx, err)
		}
		return err
	}
	if s.link != nil && s.link.Changed {
		if s.Remove {
			err = s.link.remove()
			s.link.Target = ""
		} else {
			err = s.link.make()
		}
	}
	return err
}

// write validates the new text, backs the old one up and replaces it.
func (s *dockerSetup) write(ctx context.Context) error {
	if s.gone {
		return s.file.remove()
	}
	d, err := s.file.draft(s.data)
	if err != nil {
		return err
	}
	defer d.discard()
	program := "dockerd"
	if s.daemon != nil && filepath.IsAbs(s.daemon.exe) {
		program = s.daemon.exe
	}
	known, err := validate(ctx, program, d.temp.Name())
	if err != nil {
		s.result.Changed = false
		return &fault.Error{Hint: "Nothing was changed.", Err: in(s.file.path, err)}
	}
	if !known {
		s.result.note("dockerd could not validate the new configuration (it can from 23.0 on); agentbox checked that it is JSON and that only its own entry changed")
	}
	if err := s.untouched(); err != nil {
		return err
	}
	if s.result.Backup, err = s.file.backup(s.Now()); err != nil {
		return fmt.Errorf("backup: %w", err)
	}
	return d.commit()
}

// untouched proves that the edit changed nothing but what it was to change.
func (s *dockerSetup) untouched() error {
	now, err := readDaemonConfig(s.data)
	if err != nil {
		return in(s.file.path, err)
	}
	if now.has(s.Name) == s.Remove {
		return fmt.Errorf("%s: the edit failed: %w", s.file.path, fault.ErrCorrupt)
	}
	for _, pair := range [][2]daemonConfig{{s.conf, now}, {now, s.conf}} {
		for key, raw := range pair[0].present {
			if key != keyRuntimes && key != keyDefaultRuntime && string(raw) != string(pair[1].present[key]) {
				return fmt.Errorf("%s: the edit would change %q: %w", s.file.path, key, fault.ErrCorrupt)
			}
		}
		for name, entry := range pair[0].Runtimes {
			if name != s.Name && entry != pair[1].Runtimes[name] {
				return fmt.Errorf("%s: the edit would change the runtime %q: %w", s.file.path, name, fault.ErrCorrupt)
			}
		}
	}
	return nil
}

// tell makes a running daemon take the file up and asks whether it did.
func (s *dockerSetup) tell(ctx context.Context) error {
	d := s.daemon
	if d == nil {
		if s.result.Changed {
			s.result.note("no dockerd that reads %s is running: it takes effect when one starts", s.file.path)
		}
		return nil
	}
	have, err := d.registered(ctx)
	if err != nil {
		s.result.note("dockerd (process %d) runs, but its API cannot be asked: %v", d.pid, err)
	}
	asked := err == nil
	now, err := readDaemonConfig(s.data)
	if err != nil {
		return err
	}
	stays := false // in the daemon, until it is restarted
	done := func(r registered) bool {
		return r.paths[s.Name] == s.Runtime && (!s.Default || r.def == s.Name)
	}
	if s.Remove {
		done = func(r registered) bool { _, there := r.paths[s.Name]; return !there && r.def != s.Name }
		if s.result.Changed && asked && have.def == s.Name && now.DefaultRuntime == "" {
			if err := s.resetDefault(ctx); err != nil {
				return err
			}
		}
		if len(now.Runtimes) == 0 {
			// dockerd takes up a shorter list, but not that there is none any
			// more; 20.10 panics if it is told an empty one.
			done = func(r registered) bool { return r.def != s.Name }
			if _, stays = have.paths[s.Name]; stays {
				s.result.note("the running dockerd forgets the runtime when it is next restarted: it ignores that its last runtime was taken out")
			}
		}
	}
	if asked && done(have) {
		s.result.Verified = !stays
		return nil
	}
	if !now.reloadable() {
		s.result.note("dockerd was not told: it does not survive reading an empty list of runtimes; it takes effect at its next start")
		return nil
	}
	if err := d.reload(ctx); err != nil {
		return err
	}
	s.result.Reloaded = true
	if !asked {
		return nil
	}
	if err := d.await(ctx, done); err != nil {
		return err
	}
	s.result.Verified = !stays
	return nil
}

// resetDefault makes the running daemon go back to runc by way of a file that
// says so: that default-runtime is missing changes nothing in it, and the file
// that remains shall not have it.
func (s *dockerSetup) resetDefault(ctx context.Context) error {
	between, err := setDefaultRuntime(s.file.data, "runc")
	if err != nil {
		return err
	}
	present, err := readFile(s.file.path)
	if err != nil {
		return err
	}
	if err := present.overwrite(between); err != nil {
		return err
	}
	err = s.daemon.reload(ctx)
	if err == nil {
		err = s.daemon.await(ctx, func(r registered) bool { return r.def == "runc" })
	}
	final, rerr := readFile(s.file.path)
	if rerr == nil {
		if s.gone {
			rerr = final.remove()
		} else {
			rerr = final.replace(s.data)
		}
	}
	s.result.Reloaded = err == nil
	return errors.Join(err, rerr)
}

// overwrite is replace for a file that may have been removed a moment ago.
func (f file) overwrite(data []byte) error {
	if !f.exists {
		f.mode = 0o644
	}
	return f.replace(data)
}

// putBack undoes write: a file that dockerd does not take must not stay.
func (s *dockerSetup) putBack(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*reloadTimeout)
	defer cancel()
	present, err := readFile(s.file.path)
	switch {
	case err != nil:
	case s.file.exists:
		present.mode, present.uid, present.gid = s.file.mode, s.file.uid, s.file.gid
		err = present.replace(s.file.data)
	case present.exists:
		err = present.remove()
	}
	if err != nil {
		return errors.Join(cause, fmt.Errorf("put %s back: %w", s.file.path, err))
	}
	if s.conf.reloadable() {
		if err := s.daemon.reload(ctx); err != nil {
			slog.Warn("daemon not reloaded after its configuration was put back", "err", err)
		}
	}
	s.result.Changed, s.result.Reloaded = false, false
	return &fault.Error{
		Hint: "The configuration is as it was. dockerd's log says why (journalctl -u docker).",
		Err:  cause,
	}
}
