package main

import (
	"cmp"
	"context"
	"os"
	"os/exec"
	"os/user"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	accounts "github.com/moby/sys/user"

	"github.com/agentbox/agentbox/internal/rights"
)

// A shellUser is the user of this host that a shell is for.
type shellUser struct {
	rights.User
	Name, Shell string
	Home        string // in a sandbox
	hostHome    string
	sudo        bool // this process is root's, which acts for the user
}

// askTime bounds how long a program of the host may take to say what the user has set.
const askTime = 2 * time.Second

// callingUser returns the user that runs this command or, for root, the one that has become root
// by sudo.
func callingUser(ctx context.Context) (u shellUser, err error) {
	u.UID, u.GID = uint32(os.Getuid()), uint32(os.Getgid())
	uid, uerr := strconv.ParseUint(os.Getenv("SUDO_UID"), 10, 32)
	gid, gerr := strconv.ParseUint(os.Getenv("SUDO_GID"), 10, 32)
	if u.sudo = os.Geteuid() == 0 && uerr == nil && gerr == nil && uid != 0; u.sudo {
		u.UID, u.GID = uint32(uid), uint32(gid)
	}
	name, home := os.Getenv("USER"), os.Getenv("HOME")
	if u.sudo {
		name, home = os.Getenv("SUDO_USER"), os.Getenv("SUDO_HOME")
	}
	if known, err := accounts.LookupUid(int(u.UID)); err == nil {
		name, u.Shell = known.Name, known.Shell
		home = cmp.Or(home, known.Home)
	}
	u.Name = plainName(name)
	u.hostHome = home
	if u.Home = path.Clean(home); !homeLike(u.Home) {
		u.Home = "/home/" + u.Name
	}
	if u.UID == 0 {
		u.Name, u.Home = "root", "/root"
	}
	if !u.sudo {
		u.Shell = cmp.Or(os.Getenv("SHELL"), u.Shell)
		groups, err := os.Getgroups()
		for _, g := range groups {
			u.Groups = append(u.Groups, uint32(g))
		}
		return u, err
	}
	// Not every group of a user is in /etc/group.
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, "id", "-G", "--", name).Output()
	if err != nil {
		out = nil // of a user that the host no longer knows, the primary group is left
	}
	for _, g := range strings.Fields(string(out)) {
		if n, err := strconv.ParseUint(g, 10, 32); err == nil {
			u.Groups = append(u.Groups, uint32(n))
		}
	}
	return u, nil
}

// plainName is the name of an account that any system takes.
func plainName(name string) string {
	name = strings.Map(func(r rune) rune {
		if r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) || strings.ContainsRune("_.-", r) {
			return r
		}
		return -1
	}, name)
	name = strings.TrimLeft(name, ".-")
	if len(name) > 32 {
		name = name[:32]
	}
	return cmp.Or(name, "user")
}

// homeLike reports whether a home directory can have its path in a sandbox, too: it is none of the
// image's own directories.
func homeLike(home string) bool {
	if !path.IsAbs(home) || strings.ContainsFunc(home, unicode.IsControl) || strings.Contains(home, ":") {
		return false
	}
	top, _, _ := strings.Cut(home[1:], "/")
	return top != home[1:] && !slices.Contains([]string{
		"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "root", "run", "sbin", "sys", "usr", "var",
	}, top)
}

// groupName is the name of a group of the host.
func groupName(gid uint32) string {
	if g, err := user.LookupGroupId(strconv.FormatUint(uint64(gid), 10)); err == nil {
		return plainName(g.Name)
	}
	return "group" + strconv.FormatUint(uint64(gid), 10)
}

// terminalEnv is what the caller's environment says of its terminal, its languages and its editors.
func (u shellUser) terminalEnv(tty bool) (env []string) {
	for _, kv := range os.Environ() {
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case name == "TERM" && !tty:
			continue
		case name == "EDITOR" || name == "VISUAL":
			words := strings.Fields(value)
			if len(words) == 0 {
				continue
			}
			words[0] = filepath.Base(words[0]) // where it lies, there may be none
			value = strings.Join(words, " ")
		case strings.HasPrefix(name, "LC_"):
		case !slices.Contains([]string{"TERM", "COLORTERM", "LANG", "LANGUAGE", "TZ"}, name):
			continue
		}
		if utf8.ValidString(value) && !strings.ContainsFunc(value, unicode.IsControl) {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// gitEnv makes the commits of a sandbox the user's.
func (u shellUser) gitEnv(ctx context.Context) (env []string) {
	for _, item := range []struct{ key, name string }{{"user.name", "NAME"}, {"user.email", "EMAIL"}} {
		value := u.gitConfig(ctx, item.key)
		for _, role := range []string{"AUTHOR", "COMMITTER"} {
			name := "GIT_" + role + "_" + item.name
			if v := cmp.Or(os.Getenv(name), value); v != "" && utf8.ValidString(v) {
				env = append(env, name+"="+v)
			}
		}
	}
	return env
}

// gitConfig asks git for one of the user's own settings, with the user's rights and not in the
// directory of the sandbox, whose settings are not the user's.
func (u shellUser) gitConfig(ctx context.Context, key string) string {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "git", "config", "--global", "--includes", "--get", key)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", []string{"HOME=" + u.hostHome, "PATH=" + os.Getenv("PATH"), "LC_ALL=C"}, askTime
	if xdg := os.Getenv("XDG_CONFIG_HOME"); xdg != "" && !u.sudo {
		cmd.Env = append(cmd.Env, "XDG_CONFIG_HOME="+xdg)
	}
	if u.sudo {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}}
	}
	out, err := cmd.Output()
	if err != nil {
		return "" // nothing is set, or there is no git
	}
	return strings.TrimSuffix(string(out), "\n")
}

// configDir is where the user keeps the configuration of programs.
func (u shellUser) configDir() string {
	if xdg := os.Getenv("XDG_CONFIG_HOME"); filepath.IsAbs(xdg) && !u.sudo {
		return xdg
	}
	return filepath.Join(u.hostHome, ".config")
}

// short is a path as the user writes it.
func (u shellUser) short(dir string) string {
	if rest, ok := strings.CutPrefix(dir, u.hostHome+"/"); ok && u.hostHome != "" {
		return "~/" + rest
	}
	return dir
}

// spec is the user as a sandbox's specification has it.
func (u shellUser) spec() string { return strconv.FormatUint(uint64(u.UID), 10) }
