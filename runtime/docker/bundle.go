package docker

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

const maxBundle = 16 << 20 // bytes of a config.json; the seccomp profile is in it

// bundleSpec reads the configuration with which the OCI runtime made a
// container that runs.
func bundleSpec(c box) (*specs.Spec, error) {
	dir, err := bundleDir(c)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var spec specs.Spec
	if err := json.NewDecoder(io.LimitReader(f, maxBundle)).Decode(&spec); err != nil {
		return nil, fmt.Errorf("bundle of %s: %w: %w", c.ID, fault.ErrCorrupt, err)
	}
	return &spec, nil
}

// bundleDir is the working directory of the container's shim.
func bundleDir(c box) (string, error) {
	shim, err := shimOf(c)
	return shim + "/cwd", err
}

// shimOf returns the directory in /proc of a container's shim, the parent of its first
// process. We read names of programs there, so no process of a container may pass for a
// shim: the pid of the first process can be another's by now.
func shimOf(c box) (string, error) {
	first, err := proc.Read(c.State.Pid)
	if err != nil {
		return "", fmt.Errorf("container %s: %w", c.ID, fault.ErrState)
	}
	dir := fmt.Sprintf("/proc/%d", first.Parent)
	cwd, err := os.Readlink(dir + "/cwd")
	if err != nil || filepath.Base(cwd) != c.ID || !kernel.SharesNamespaces(first.Parent, "pid", "user") {
		return "", fmt.Errorf("container %s: its first process (%d) has no shim: %w", c.ID,
			c.State.Pid, fault.ErrUnsupported)
	}
	return dir, nil
}
