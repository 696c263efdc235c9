package volume

import (
	"context"
	"fmt"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/agentbox/agentbox/internal/fault"
)

// Engine knows the containers that use volumes.
type Engine interface {
	// Using lists the containers that run or are paused and have the volume
	// of this name, with this upperdir: other drivers have names of their own.
	Using(ctx context.Context, volume, upper string) ([]User, error)
	// Pause freezes a container; one that is paused is ErrState, one that has
	// ended ErrNotFound.
	Pause(ctx context.Context, id string) error
	// Unpause thaws a container; one that is not paused, or gone, is nil.
	Unpause(ctx context.Context, id string) error
}

// User is a container that uses a volume.
type User struct {
	ID     string
	Name   string
	Pid    int // of its first process; 0: not known
	Mounts int // how many places in it have the volume
	Paused bool
}

// engineTimeout bounds one call to the daemon: a volume must not stay as it is
// because a daemon hangs.
const engineTimeout = 20 * time.Second

// docker is the Engine on a Docker daemon.
type docker struct{ api *client.Client }

// Docker returns the Engine on the Docker daemon that DOCKER_HOST names, or the
// default one. It asks the daemon nothing yet.
func Docker() (Engine, error) {
	api, err := client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation(),
		client.WithTraceProvider(noop.NewTracerProvider()))
	if err != nil {
		return nil, fmt.Errorf("docker client: %w: %w", fault.ErrInvalid, err)
	}
	return docker{api}, nil
}

func (d docker) Using(ctx context.Context, volume, upper string) ([]User, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	list, err := d.api.ContainerList(ctx, container.ListOptions{
		All: true, Filters: filters.NewArgs(filters.Arg("volume", volume)),
	})
	if err != nil {
		return nil, fmt.Errorf("ask the Docker daemon at %s who uses volume %s: %w", d.api.DaemonHost(), volume, err)
	}
	var users []User
	for _, c := range list {
		// A restarting container has no process, and cannot be inspected while the daemon
		// waits for our Mount.
		if s := string(c.State); s != "running" && s != "paused" {
			continue
		}
		full, err := d.api.ContainerInspect(ctx, c.ID)
		if cerrdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ask the Docker daemon about container %s: %w", c.ID, err)
		}
		if full.State == nil || full.State.Pid == 0 {
			continue // it ended, or waits to be started again
		}
		// The daemon does not report where a plugin's volume lies (20.10); the kernel does.
		if points, err := mountpoints(full.State.Pid, upper); err != nil || len(points) == 0 {
			continue
		}
		u := User{ID: c.ID, Name: strings.TrimPrefix(full.Name, "/"), Pid: full.State.Pid, Paused: full.State.Paused}
		for _, m := range full.Mounts {
			if m.Name == volume {
				u.Mounts++
			}
		}
		users = append(users, u)
	}
	return users, nil
}

func (d docker) Pause(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	err := d.api.ContainerPause(ctx, id)
	if err == nil {
		return nil
	}
	c, e := d.api.ContainerInspect(ctx, id)
	switch {
	case cerrdefs.IsNotFound(err), cerrdefs.IsNotFound(e), e == nil && c.State != nil && !c.State.Running:
		return fmt.Errorf("pause container %s: %w", id, fault.ErrNotFound)
	case e == nil && c.State != nil && c.State.Paused:
		return fmt.Errorf("pause container %s: %w", id, fault.ErrState)
	}
	return fmt.Errorf("pause container %s: %w", id, err)
}

func (d docker) Unpause(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	err := d.api.ContainerUnpause(ctx, id)
	if err == nil || cerrdefs.IsNotFound(err) {
		return nil
	}
	if c, e := d.api.ContainerInspect(ctx, id); cerrdefs.IsNotFound(e) ||
		e == nil && c.State != nil && !c.State.Paused {
		return nil
	}
	return fmt.Errorf("unpause container %s: %w", id, err)
}
