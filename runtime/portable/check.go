package portable

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	criucore "github.com/checkpoint-restore/go-criu/v7/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mnt"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/policy"
)

// grantable are the capabilities of a container's root, as bits: those of any
// engine's, and of our own older versions'. All are below 32.
var grantable = func() (bits uint32) {
	for _, c := range policy.DockerCapabilities {
		bits |= 1 << slices.Index(policy.AllCapabilities, c)
	}
	return bits
}()

// checkImages returns an error if processes of images made elsewhere must not be restored.
// CRIU runs as root and does what images say: it mounts what they name and gives processes
// the capabilities that they list. Images that pass have no more than a container of the
// usual kind says it has; CRIU is not made for hostile images, so restoring processes means
// trusting the maker. An error is ErrDenied, or ErrCorrupt when the images make no sense.
func checkImages(dir string) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	names, err := imageNames(root, "mountpoints-*.img")
	if err != nil {
		return err
	}
	if len(names) > 1 {
		return denied("%d mount namespaces", len(names))
	}
	for _, name := range names {
		if err := checkMounts(root, name); err != nil {
			return err
		}
	}
	// AppArmor policy for the kernel, and credentials as CRIU had them before
	// 2.0, which nothing here looks at.
	for _, pattern := range []string{"apparmor.img", "creds-*.img"} {
		if names, err = imageNames(root, pattern); err != nil {
			return err
		}
		if len(names) > 0 {
			return denied("%s, which no engine's container has", names[0])
		}
	}
	if names, err = imageNames(root, "core-*.img"); err != nil {
		return err
	}
	for _, name := range names {
		err := eachEntry(root, name, magicCore, func(data []byte) error {
			var e criucore.CoreEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			return checkCredentials(name, &e)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func denied(format string, a ...any) error {
	return &fault.Error{
		Err:  fmt.Errorf("process images: %s: %w", fmt.Sprintf(format, a...), fault.ErrDenied),
		Hint: "Processes of a sandbox have no such thing: these had more rights, or were forged.",
	}
}

func checkMounts(root *os.Root, name string) error {
	roots, sealed, proc := 0, false, false
	err := eachEntry(root, name, magicMounts, func(data []byte) error {
		e := &mnt.MntEntry{}
		if err := proto.Unmarshal(data, e); err != nil {
			return err
		}
		target := e.GetMountpoint()
		if !path.IsAbs(target) || path.Clean(target) != target {
			return corrupt("%s: a mount at %.80q", name, target)
		}
		// Read-only in the filesystem's own flags (sb_flags) does not make the mount read-only:
		// CRIU mounts with those, and then sets the flags of the mount.
		ro := e.GetFlags()&unix.MS_RDONLY != 0
		switch {
		case target == "/":
			roots++ // the runtime's
			return nil
		case e.GetExtKey() != "":
			return nil // external: the runtime provides it, if at all
		}
		switch mnt.Fstype(e.GetFstype()) {
		case mnt.Fstype_PROC:
			proc = proc || target == "/proc"
			// A process that can write there sets, for one, what the kernel runs at a core dump.
			sealed = sealed || target == "/proc/sys" && ro
			return nil
		case mnt.Fstype_SYSFS:
			if !ro {
				return denied("a writable sysfs at %.80q", target)
			}
			return nil
		case mnt.Fstype_CGROUP2:
			// A sandbox has its own to read, where its host has v2.
			if target == "/sys/fs/cgroup" && ro {
				return nil
			}
		case mnt.Fstype_TMPFS, mnt.Fstype_DEVPTS, mnt.Fstype_MQUEUE:
			return nil
		}
		return denied("a mount of %.80q at %.80q", e.GetSource(), target)
	})
	switch {
	case err != nil:
		return err
	case roots != 1:
		return denied("%d root directories", roots)
	case proc && !sealed:
		return denied("a writable /proc/sys")
	}
	return nil
}

// States of a process that has ended, which has no credentials.
const taskDead, taskZombie = 2, 6

func checkCredentials(name string, e *criucore.CoreEntry) error {
	c := e.GetThreadCore().GetCreds()
	if state := e.GetTc().GetTaskState(); c == nil && state != taskDead && state != taskZombie {
		return denied("%s has no credentials, so that it would have those of CRIU", name)
	}
	for _, set := range [][]uint32{c.GetCapInh(), c.GetCapPrm(), c.GetCapEff(), c.GetCapBnd()} {
		for i, word := range set {
			may := uint32(0)
			if i == 0 {
				may = grantable
			}
			if word&^may != 0 {
				return denied("%s has the capabilities %#x, which a container does not get", name,
					uint64(word&^may)<<(32*i))
			}
		}
	}
	// A restore gives processes the AppArmor profile of the sandbox, except for a profile that
	// is a part of it, which may allow more.
	if label := c.GetLsmProfile(); strings.Contains(label, "//") {
		return denied("%s has the AppArmor profile %.80q, a part of one or several", name, label)
	}
	return nil
}
