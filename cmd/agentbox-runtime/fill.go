package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
)

// fillVerb is how the hook of a container with a user namespace calls this
// program: agentbox, which starts the container, waits at a socket for the
// process whose network namespace it is to fill, and says "ok" when it has.
const fillVerb = "agentbox-fill"

// fill is the hook: it reads the container's state, as hooks do.
func fill(in io.Reader, socket string) int {
	if err := func() error {
		var state struct {
			Pid int `json:"pid"`
		}
		if err := json.NewDecoder(io.LimitReader(in, 1<<20)).Decode(&state); err != nil {
			return err
		}
		// A socket's path has at most 107 bytes.
		dir, err := os.Open(filepath.Dir(socket))
		if err != nil {
			return err
		}
		defer dir.Close()
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(),
			filepath.Base(socket))})
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := fmt.Fprintln(conn, state.Pid); err != nil {
			return err
		}
		if err := conn.CloseWrite(); err != nil {
			return err
		}
		answer, err := io.ReadAll(io.LimitReader(conn, 4096))
		if err == nil && string(answer) != "ok" {
			err = errors.New(string(answer))
		}
		return err
	}(); err != nil {
		fmt.Fprintln(os.Stderr, "agentbox-runtime: make the network:", err)
		return 1
	}
	return 0
}
