package wall

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/host"
)

// cover hides masked paths in a mount namespace and makes others read-only there, as the OCI
// runtime does where it starts a container. Images of another engine's container, or of an earlier
// version's, have other ones.
func cover(pid int, masked, readonly []string) error {
	return host.InMountsOf(pid, func() error {
		root, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(root)
		for _, p := range masked {
			if err := hide(root, p); err != nil {
				return fmt.Errorf("mask %s: %w", p, err)
			}
		}
		for _, p := range readonly {
			if err := seal(root, p); err != nil {
				return fmt.Errorf("make %s read-only: %w", p, err)
			}
		}
		return nil
	})
}

// hide covers a directory by an empty one, and anything else by /dev/null.
func hide(root int, path string) error {
	at, err := openIn(root, path)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := unix.Fchdir(at); err != nil {
			return err
		}
		return unix.Mount("tmpfs", ".", "tmpfs", unix.MS_RDONLY, "")
	}
	from, err := openIn(root, null)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	if err := unix.Fstat(from, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != 1 || unix.Minor(st.Rdev) != 3 {
		return fmt.Errorf("the container's %s is another device", null)
	}
	return bindOver(from, at, nil)
}

// seal covers a path by itself, read-only.
func seal(root int, path string) error {
	at, err := openIn(root, path)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	return bindOver(at, at, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
}

func bindOver(from, at int, attr *unix.MountAttr) error {
	tree, err := unix.OpenTree(from, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	if attr != nil {
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attr); err != nil {
			return err
		}
	}
	return unix.MoveMount(tree, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}
