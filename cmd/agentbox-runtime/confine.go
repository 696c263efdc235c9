package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/criu/lsm"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
)

// confine has the processes of a restore confined as those are that the runtime
// starts in the container: by the AppArmor profile of its bundle.
func (w wrapper) confine(c call, r stage.Restore) (profile string, err error) {
	path := filepath.Join(c.bundle(), "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	var spec struct {
		Process struct {
			Profile string `json:"apparmorProfile"`
		} `json:"process"`
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return spec.Process.Profile, damaged(lsm.Set(r.Images, spec.Process.Profile))
}

// damaged says of images that make no sense here what is said of those that CRIU
// makes no sense of.
func damaged(err error) error {
	if errors.Is(err, fault.ErrCorrupt) {
		return fmt.Errorf("the images are damaged or incomplete. Verify the checkpoint. [%w]", err)
	}
	return err
}

// confined proves that all processes of a frozen container are, if any is left.
func confined(c call, profile string) error {
	if profile == "" {
		return nil
	}
	box, err := freezer.Open(c.root, c.id)
	if err != nil {
		return err
	}
	pids, err := box.Processes()
	if err != nil {
		return err
	}
	return lsm.Check(pids, profile)
}
