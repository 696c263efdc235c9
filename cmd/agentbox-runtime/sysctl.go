package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/criu/stage"
)

// settle puts the network namespace that a restore has made in order: its
// settings, and then its links; see link.go.
func (w wrapper) settle(c call, r stage.Restore) error {
	if !slices.Contains(r.Flags, "--empty-ns") {
		return nil
	}
	pid, err := c.pid()
	if err != nil {
		return err
	}
	switch err := endStandIn(pid); {
	case errors.Is(err, fs.ErrNotExist):
		return nil // its first process has ended already, and with it the namespace
	case err != nil:
		return err
	}
	if err := w.settings(c, pid); err != nil {
		return err
	}
	if !cuts(r) {
		return nil
	}
	return reconnect(pid)
}

// pid is the first process of a container that was just made.
func (c call) pid() (int, error) {
	text, err := os.ReadFile(c.flags["pid-file"])
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// settings writes the bundle's settings for the network namespace: CRIU left
// its contents out, the runtime applies them only when it creates, and the
// engine fills in links and addresses alone.
func (w wrapper) settings(c call, pid int) error {
	data, err := os.ReadFile(filepath.Join(c.bundle(), "config.json"))
	if err != nil {
		return err
	}
	var spec struct {
		Linux struct {
			Sysctl map[string]string `json:"sysctl"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	files := map[string]string{}
	for name, value := range spec.Linux.Sysctl {
		// Dots part the words, or slashes do where a word has dots.
		if !strings.Contains(name, "/") {
			name = strings.ReplaceAll(name, ".", "/")
		}
		if strings.HasPrefix(name, "net/") && filepath.IsLocal(name) {
			files["/proc/sys/"+name] = value
		}
	}
	if len(files) == 0 {
		return nil
	}
	return inNetwork(pid, func() error {
		for path, value := range files {
			// One that this kernel does not have the container did without.
			if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		return nil
	})
}
