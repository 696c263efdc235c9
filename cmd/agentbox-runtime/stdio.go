package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A container's standard streams are pipes that its monitor has made, and belong to
// the host's root. To open one by name (/dev/stdout) takes the right to it, which root
// of a user namespace has not, and runc, which gives streams to the user of a process,
// may do that only with those of the namespace. So the wrapper does it, before anything
// of the container runs, and for a restore, whose processes get new pipes, too.
// Named pipes and terminals are left to those that made them.

// user is whose the streams of a process are to be.
type user struct {
	Terminal bool `json:"terminal"`
	User     struct {
		UID int64 `json:"uid"`
		GID int64 `json:"gid"`
	} `json:"user"`
}

// mapping is a range of ids of a user namespace.
type mapping struct {
	Inside  int64 `json:"containerID"`
	Outside int64 `json:"hostID"`
	Size    int64 `json:"size"`
}

// giveCreate gives the standard streams of this process to the user of a container's
// first process.
func giveCreate(c call) {
	data, err := os.ReadFile(filepath.Join(c.bundle(), "config.json"))
	if err != nil {
		return // the runtime says so
	}
	var spec struct {
		Process user `json:"process"`
		Linux   struct {
			UIDs []mapping `json:"uidMappings"`
			GIDs []mapping `json:"gidMappings"`
		} `json:"linux"`
	}
	if json.Unmarshal(data, &spec) == nil {
		spec.Process.give(spec.Linux.UIDs, spec.Linux.GIDs)
	}
}

// giveExec gives them to the user of a process that is to be executed beside a
// container's first one.
func giveExec(c call, first *os.File) {
	data, err := os.ReadFile(c.flags["process"])
	if err != nil {
		return
	}
	var process user
	if json.Unmarshal(data, &process) == nil {
		process.give(mappings(first, "uid_map"), mappings(first, "gid_map"))
	}
}

// give leaves alone what it may not change, as the runtime does: nothing but an
// opening by name depends on it.
func (u user) give(uids, gids []mapping) {
	uid, ok := outside(u.User.UID, uids)
	gid, known := outside(u.User.GID, gids)
	if u.Terminal || !ok || !known {
		return
	}
	for fd := range 3 {
		var fs unix.Statfs_t
		if unix.Fstatfs(fd, &fs) == nil && fs.Type == unix.PIPEFS_MAGIC {
			_ = unix.Fchown(fd, uid, gid)
		}
	}
}

// outside is what an id inside is on the host.
func outside(id int64, list []mapping) (int, bool) {
	for _, m := range list {
		if id >= m.Inside && id-m.Inside < m.Size {
			return int(m.Outside + id - m.Inside), true
		}
	}
	return 0, false
}

// mappings reads a map of ids of a process's user namespace.
func mappings(process *os.File, name string) (list []mapping) {
	data, err := os.ReadFile(under(process, name))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(data)) {
		var n [3]int64
		fields := strings.Fields(line)
		if len(fields) != len(n) {
			return nil
		}
		for i, f := range fields {
			if n[i], err = strconv.ParseInt(f, 10, 64); err != nil {
				return nil
			}
		}
		list = append(list, mapping{n[0], n[1], n[2]})
	}
	return list
}
