package docker

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/fault"
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
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.State.Pid))
	if err != nil {
		return "", fmt.Errorf("container %s: %w", c.ID, fault.ErrState)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	f := strings.Fields(rest)
	if len(f) < 2 {
		return "", fmt.Errorf("container %s: %w", c.ID, fault.ErrState)
	}
	dir, err := os.Readlink("/proc/" + f[1] + "/cwd")
	if err != nil || filepath.Base(dir) != c.ID {
		return "", fmt.Errorf("container %s: its first process (%d) has no shim: %w", c.ID, c.State.Pid, fault.ErrUnsupported)
	}
	return "/proc/" + f[1] + "/cwd", nil
}
