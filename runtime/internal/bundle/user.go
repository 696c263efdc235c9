package bundle

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"github.com/moby/sys/user"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// account is the identity a process runs with.
type account struct {
	uid, gid uint32
	groups   []uint32
	home     string
}

// User is whose rights something is done with that a sandbox's user asked for.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// LookUser finds the user that name|uid[:group|gid] means in the root filesystem
// root; empty is root.
func LookUser(root *os.File, who string) (User, error) {
	a, err := lookUser(root, who)
	return User{UID: a.uid, GID: a.gid, Groups: a.groups}, err
}

// accountLimit bounds /etc/passwd and /etc/group, which the sandbox writes.
const accountLimit = 4 << 20

// lookUser finds name|uid[:group|gid] in the account files of a root filesystem. It follows
// nothing in them or in their names out of that root. A user given by numbers, or not at
// all, needs no account files: unusable ones count as empty then, so that root can get in
// and repair them. But the runtime opens them, too, and would wait for ever at a FIFO.
// Without a root there are none.
func lookUser(root *os.File, who string) (account, error) {
	passwd, perr := readInRoot(root, "/etc/passwd")
	group, gerr := readInRoot(root, "/etc/group")
	err := errors.Join(perr, gerr)
	if errors.Is(err, errIrregular) {
		return account{}, &fault.Error{
			Err: err, Hint: "Put a regular file in its place with agentbox cp, or restore the sandbox.",
		}
	}
	if err != nil && !numeric(who) {
		return account{}, err
	}
	var u *user.ExecUser
	if err == nil {
		u, err = user.GetExecUser(who, &user.ExecUser{Home: "/"}, bytes.NewReader(passwd), bytes.NewReader(group))
	}
	if err != nil && numeric(who) {
		u, err = user.GetExecUser(who, &user.ExecUser{Home: "/"}, bytes.NewReader(nil), bytes.NewReader(nil))
	}
	if err != nil {
		return account{}, fmt.Errorf("%w: user %q: %w", fault.ErrInvalid, who, err)
	}
	a := account{uid: uint32(u.Uid), gid: uint32(u.Gid), home: u.Home}
	// A line break in a hostile passwd cannot occur, but other control
	// characters would make the variable unreadable.
	if !filepath.IsAbs(a.home) || strings.ContainsFunc(a.home, func(r rune) bool { return r < ' ' }) {
		a.home = "/"
	}
	// The primary group counts as a supplementary one too: otherwise a file
	// mode that shuts that group out could be got round by giving it up.
	a.groups = append(a.groups, a.gid)
	for _, gid := range u.Sgids {
		if !slices.Contains(a.groups, uint32(gid)) {
			a.groups = append(a.groups, uint32(gid))
		}
	}
	return a, nil
}

// numeric reports whether a user, and the group where there is one, is given by
// number, or not at all.
func numeric(who string) bool {
	name, group, pair := strings.Cut(who, ":")
	for _, part := range []string{name, group} {
		if _, err := strconv.ParseUint(part, 10, 31); err != nil && part != "" {
			return false
		}
	}
	return !pair || group != ""
}

// numericUser returns what a user means without account files: itself if it is numeric,
// else root.
func numericUser(who string) string {
	if numeric(who) {
		return who
	}
	if name, _, _ := strings.Cut(who, ":"); name != "" && numeric(name) {
		return name
	}
	return "0"
}

var errIrregular = errors.New("not a regular file")

// readInRoot reads a regular file beneath root; a missing one is empty.
func readInRoot(root *os.File, path string) ([]byte, error) {
	if root == nil {
		return nil, nil
	}
	handle, err := pathrs.OpenatInRoot(root, path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	st, err := handle.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		// Opening a FIFO or a device would block, or worse.
		return nil, fmt.Errorf("%w: %s in the sandbox is %w", fault.ErrInvalid, path, errIrregular)
	}
	f, err := pathrs.Reopen(handle, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, accountLimit+1))
	if err == nil && len(data) > accountLimit {
		err = fmt.Errorf("%w: %s in the sandbox is larger than %d bytes", fault.ErrInvalid, path, accountLimit)
	}
	return data, err
}
