package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/agentbox/agentbox/internal/cptar"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Bounds of a Setup.
const (
	maxSetupFiles  = 64
	maxSetupBytes  = 1 << 20
	maxSetupGroups = 65536   // the kernel's
	maxAccounts    = 4 << 20 // of an account file of the image
)

var accountName = lazy.Regexp(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`)

// checkSetup refuses what could not be set up, or could not be read as it was meant.
func checkSetup(s *runtime.Setup) error {
	if s == nil {
		return nil
	}
	if a := s.Account; a != nil {
		switch {
		case !accountName().MatchString(a.Name):
			return fmt.Errorf("%w: account %.80q: not a name", runtime.ErrInvalid, a.Name)
		case !setupPath(a.Home) || strings.Contains(a.Home, ":"):
			return fmt.Errorf("%w: account %s: its home directory %.80q", runtime.ErrInvalid, a.Name, a.Home)
		case len(a.Groups) == 0 || len(a.Groups) > maxSetupGroups:
			return fmt.Errorf("%w: account %s: %d groups", runtime.ErrInvalid, a.Name, len(a.Groups))
		}
		for _, g := range a.Groups {
			if !accountName().MatchString(g.Name) {
				return fmt.Errorf("%w: group %.80q: not a name", runtime.ErrInvalid, g.Name)
			}
		}
	}
	size := 0
	for _, f := range s.Files {
		if !setupPath(f.Path) || f.Mode&^0o777 != 0 {
			return fmt.Errorf("%w: file %.80q with mode %o", runtime.ErrInvalid, f.Path, f.Mode)
		}
		size += len(f.Data)
	}
	if len(s.Files) > maxSetupFiles || size > maxSetupBytes {
		return fmt.Errorf("%w: more than %d files, or %d bytes, to set a sandbox up", runtime.ErrInvalid,
			maxSetupFiles, maxSetupBytes)
	}
	return nil
}

// setupPath reports whether a path is absolute, clean and not the root.
func setupPath(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && p != "/" && !strings.ContainsFunc(p, unicode.IsControl)
}

// setUp writes what a new sandbox has over its image.
func setUp(ctx context.Context, host Host, s runtime.Spec, setup *runtime.Setup) error {
	if setup == nil {
		return nil
	}
	c, err := host.Inspect(ctx, s.ID)
	if err != nil {
		return err
	}
	err = host.Mount(ctx, s.ID, func(root string) error {
		jail, err := policy.Open(root)
		if err != nil {
			return err
		}
		defer jail.Close()
		w := &setupWriter{jail: jail, upper: c.Upper, spec: s, now: time.Now()}
		w.tar = tar.NewWriter(&w.buf)
		if err := w.all(*setup); err != nil {
			return err
		}
		return cptar.To(ctx, root, s.IDs, "/", &w.buf)
	})
	if err != nil {
		return fmt.Errorf("set up the sandbox: %w", err)
	}
	return nil
}

// A setupWriter makes the tar stream of what a sandbox is set up with.
type setupWriter struct {
	jail  *policy.Jail // the new sandbox's root
	upper string
	spec  runtime.Spec
	now   time.Time
	buf   bytes.Buffer
	tar   *tar.Writer
}

func (w *setupWriter) all(s runtime.Setup) error {
	if s.Account != nil {
		if err := errors.Join(w.account(*s.Account), w.home(*s.Account)); err != nil {
			return err
		}
	}
	for _, f := range s.Files {
		if err := w.parents(f.Path); err != nil {
			return err
		}
		if err := w.file(f.Path, int64(f.Mode), f.Data); err != nil {
			return err
		}
	}
	return w.tar.Close()
}

func (w *setupWriter) file(name string, mode int64, data []byte) error {
	real, _, err := w.jail.Real(name)
	if err != nil {
		return err
	}
	err = w.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: real[1:], Mode: mode, Size: int64(len(data)), ModTime: w.now, Format: tar.FormatPAX,
	})
	if err != nil {
		return err
	}
	_, err = w.tar.Write(data)
	return err
}

func (w *setupWriter) dir(name string, uid, gid uint32) error {
	real, _, err := w.jail.Real(name)
	if err != nil {
		return err
	}
	return w.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: real[1:] + "/", Mode: 0o755, Uid: int(uid), Gid: int(gid), ModTime: w.now,
		Format: tar.FormatPAX,
	})
}

// parents makes the directories above a file that the image lacks.
func (w *setupWriter) parents(name string) error {
	for i, c := range name {
		if c != '/' || i == 0 {
			continue
		}
		if _, exists, err := w.jail.Real(name[:i]); err != nil {
			return err
		} else if !exists {
			if err := w.dir(name[:i], 0, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// account adds what the account files of the image lack.
func (w *setupWriter) account(a runtime.Account) error {
	passwd, err := w.read("/etc/passwd")
	if err != nil {
		return err
	}
	group, err := w.read("/etc/group")
	if err != nil {
		return err
	}
	a.Groups = slices.DeleteFunc(slices.Clone(a.Groups), func(g runtime.AccountGroup) bool {
		return w.spec.IDs != nil && g.GID >= w.spec.IDs.Size // it cannot have them
	})
	if len(a.Groups) == 0 {
		return fmt.Errorf("%w: account %s has no group that a user namespace has", runtime.ErrUnsupported, a.Name)
	}
	name, newPasswd := withUser(passwd, a)
	for _, f := range []struct {
		path      string
		old, text []byte
	}{{"/etc/passwd", passwd, newPasswd}, {"/etc/group", group, withGroups(group, name, a.Groups)}} {
		if bytes.Equal(f.old, f.text) {
			continue
		}
		if err := errors.Join(w.parents(f.path), w.file(f.path, 0o644, f.text)); err != nil {
			return err
		}
	}
	return nil
}

// read reads an account file of the image; a missing one is empty.
func (w *setupWriter) read(name string) ([]byte, error) {
	f, err := w.jail.OpenFile(name, os.O_RDONLY, 0)
	if errors.Is(err, runtime.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxAccounts+1))
	if err == nil && len(data) > maxAccounts {
		err = fmt.Errorf("%w: %s of the image is larger than %d bytes", runtime.ErrInvalid, name, maxAccounts)
	}
	return data, err
}

// home makes the home directory, and the directories in it that lead to workspaces. What a
// workspace has is not touched, nor what the image has.
func (w *setupWriter) home(a runtime.Account) error {
	dirs := []string{a.Home}
	for _, m := range w.spec.Mounts {
		target := path.Clean(m.Target)
		if fsx.Within(target, a.Home) {
			return nil
		}
		for dir := path.Dir(target); dir != a.Home && fsx.Within(a.Home, dir); dir = path.Dir(dir) {
			dirs = append(dirs, dir)
		}
	}
	slices.Sort(dirs)
	if err := w.parents(a.Home); err != nil {
		return err
	}
	for _, dir := range slices.Compact(dirs) {
		if hasMount(w.spec, dir) {
			continue
		}
		real, exists, err := w.jail.Real(dir)
		if err != nil {
			return err
		}
		// What is in the upperdir was made for a mount.
		if _, err := os.Lstat(filepath.Join(w.upper, real)); exists && err != nil {
			continue
		}
		if err := w.dir(dir, a.UID, a.Groups[0].GID); err != nil {
			return err
		}
	}
	return nil
}

// hasMount reports whether a directory is, or lies in, what a sandbox mounts.
func hasMount(s runtime.Spec, dir string) bool {
	return slices.ContainsFunc(s.Mounts, func(m runtime.Mount) bool { return fsx.Within(path.Clean(m.Target), dir) })
}

// withUser puts an account at the top of a passwd file, unless the first of its id is the same. It
// returns the name that it has there.
func withUser(passwd []byte, a runtime.Account) (name string, text []byte) {
	uid, gid := decimal(a.UID), decimal(a.Groups[0].GID)
	name = a.Name
	known := accounts(passwd, 7)
	if slices.ContainsFunc(known, func(f []string) bool { return f[0] == name && f[2] != uid }) {
		name += "-" + uid
	}
	first := slices.IndexFunc(known, func(f []string) bool { return f[2] == uid })
	if first >= 0 && known[first][0] == name && known[first][3] == gid && known[first][5] == a.Home {
		return name, passwd
	}
	line := fmt.Sprintf("%s:x:%s:%s::%s:/bin/sh\n", name, uid, gid, a.Home)
	return name, append([]byte(line), passwd...)
}

// accounts splits the lines of an account file. Those with another number of fields are left out.
func accounts(text []byte, fields int) (list [][]string) {
	for line := range strings.Lines(string(text)) {
		if f := strings.Split(strings.TrimSuffix(line, "\n"), ":"); len(f) == fields {
			list = append(list, f)
		}
	}
	return list
}

func decimal(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

// withGroups makes an account a member of its groups in a group file, and adds those that are
// missing. A member of its primary group it is already.
func withGroups(group []byte, name string, groups []runtime.AccountGroup) []byte {
	var lines []string
	at, taken := map[string]int{}, map[string]bool{} // by id, by name
	add := func(line string) {
		if f := strings.Split(line, ":"); len(f) == 4 {
			if _, ok := at[f[2]]; !ok {
				at[f[2]] = len(lines)
			}
			taken[f[0]] = true
		}
		lines = append(lines, line)
	}
	for line := range strings.Lines(string(group)) {
		add(strings.TrimSuffix(line, "\n"))
	}
	changed := false
	for i, g := range groups {
		id := decimal(g.GID)
		if _, ok := at[id]; !ok {
			as := g.Name
			if taken[as] {
				as += "-" + id
			}
			add(as + ":x:" + id + ":")
			changed = true
		}
		line := &lines[at[id]]
		members := (*line)[strings.LastIndexByte(*line, ':')+1:]
		if i == 0 || g.GID == groups[0].GID || slices.Contains(strings.Split(members, ","), name) {
			continue
		}
		if members != "" {
			*line += ","
		}
		*line += name
		changed = true
	}
	if !changed {
		return group
	}
	return []byte(strings.Join(lines, "\n") + "\n")
}
