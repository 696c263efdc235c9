package criu

import (
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/guard"
)

// Versions names what process images depend on, each in its own words.
type Versions struct{ CRIU, Runtime, Kernel string }

// Program finds CRIU; none is ErrNotFound.
func Program() (string, error) { return host.Find("criu", nil) }

// ToolVersions asks the OCI runtime, CRIU and the kernel.
func ToolVersions(ctx context.Context, rt Runtime) (v Versions, err error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return v, fmt.Errorf("kernel version: %w", err)
	}
	v.Kernel = unix.ByteSliceToString(uts.Release[:])
	path, err := Program()
	if err != nil {
		return v, err
	}
	var group guard.Group
	ask := func(into *string, binary string) {
		group.Go(func() error {
			out, err := exec.CommandContext(ctx, binary, "--version").Output()
			if err != nil {
				return fmt.Errorf("%s --version: %w", binary, cmp.Or(ctx.Err(), err))
			}
			*into, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
			return nil
		})
	}
	ask(&v.CRIU, path)
	ask(&v.Runtime, rt.Binary)
	return v, group.Wait()
}
