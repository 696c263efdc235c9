package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
)

// cgroupMount is where the controllers are.
const cgroupMount = "/sys/fs/cgroup"

// ownCgroup has CRIU restore processes into the cgroup of their container. By
// itself it moves them to the path where they were dumped, which is another
// container's for a fork. Where the controllers are v1's the runtime says so for
// each of them; under v2 it leaves it out.
func ownCgroup(c call, r stage.Restore) error {
	path, err := ownPath(c)
	if err != nil || path == "" || r.Config == "" {
		return err
	}
	config, err := os.ReadFile(r.Config)
	if err != nil {
		return err
	}
	// The process that staged it writes it anew before anything else uses it.
	line := `cgroup-root "` + path + `"` + "\n"
	if strings.Contains(string(config), line) {
		return nil
	}
	return replace(r.Config, append(config, line...))
}

// ownPath returns the path of the cgroup of a call's container below v2's mount; empty: the
// controllers are v1's, or the runtime chooses it.
func ownPath(c call) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(cgroupMount, &st); err != nil || st.Type != unix.CGROUP2_SUPER_MAGIC {
		return "", err
	}
	data, err := os.ReadFile(filepath.Join(c.bundle(), "config.json"))
	if err != nil {
		return "", err
	}
	var spec struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return "", err
	}
	return cgroupOf(spec.Linux.CgroupsPath, slices.Contains(c.globals, "--systemd-cgroup"))
}

// cgroupOf returns the path, below the mount, of a container's cgroup by the
// cgroupsPath of its bundle; empty: the runtime chooses it.
func cgroupOf(path string, systemd bool) (string, error) {
	if systemd && strings.Count(path, ":") == 2 {
		part := strings.SplitN(path, ":", 3)
		slice, unit := part[0], part[2]
		if slice == "" {
			slice = "system.slice"
		}
		if !strings.HasSuffix(unit, ".slice") {
			unit = part[1] + "-" + unit + ".scope"
		}
		path = "/"
		// a-b.slice lies in a.slice.
		if name := strings.TrimSuffix(slice, ".slice"); name != "-" {
			for i, c := range name + "-" {
				if c == '-' {
					path = filepath.Join(path, name[:i]+".slice")
				}
			}
		}
		path = filepath.Join(path, unit)
	}
	if !filepath.IsAbs(path) {
		return "", nil
	}
	if path = filepath.Clean(path); strings.ContainsAny(path, "\"\\\n\x00") {
		return "", errors.New("the path of its cgroup cannot be said to CRIU: " + fmt.Sprintf("%q", path))
	}
	return path, nil
}
