package docker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// box is a container as the daemon describes it.
type box struct {
	container.InspectResponse
	status runtime.Status
}

func (c box) live() bool { return c.status == runtime.Running || c.status == runtime.Paused }

// own reports whether Create made it. Labels alone do not: an image gives its own
// to every container of it, and `docker commit` gives those of a sandbox to an
// image.
func (c box) own() bool {
	id := c.Config.Labels[labelID]
	return id != "" && c.HostConfig.ContainerIDFile == proof(id)
}

// proof returns the mark that Create writes into a field of a container that no image can set, and
// that the daemon only keeps.
func proof(id string) string { return "agentbox:" + id }

// find looks a container up by our id.
func (b *Backend) find(ctx context.Context, id string) (box, error) {
	if err := record.CheckID(id); err != nil {
		return box{}, err
	}
	if known := b.known(id); known != "" {
		c, err := b.inspect(ctx, known)
		if !errors.Is(err, fault.ErrNotFound) {
			return c, err
		}
		b.forget(id)
	}
	c, err := b.search(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return box{}, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	if err == nil {
		b.remember(id, c.ID)
	}
	return c, err
}

// search finds the container that Create made for this root under an id of ours, else an
// adopted one whose id begins with it.
func (b *Backend) search(ctx context.Context, id string) (box, error) {
	list, err := b.labelled(ctx, labelID+"="+id)
	if err != nil {
		return box{}, err
	}
	for _, c := range list {
		// A container that came with a checkpoint may exist a second time, in the root that it
		// came from.
		if c.own() && !record.OtherRoot(b.root, c.Config.Labels[labelRoot]) {
			return c, nil
		}
	}
	// Not by the daemon's own search, which looks for a name first.
	found, err := b.api.ContainerList(ctx, container.ListOptions{
		All: true, Filters: filters.NewArgs(filters.Arg("id", id)),
	})
	if err != nil {
		return box{}, b.explain(ctx, err)
	}
	for _, s := range found {
		if !strings.HasPrefix(s.ID, id) {
			continue
		}
		if c, err := b.inspect(ctx, s.ID); err != nil || !c.own() {
			return c, err
		}
	}
	return box{}, fault.ErrNotFound
}

// labelled inspects the containers that have all of some labels.
func (b *Backend) labelled(ctx context.Context, labels ...string) (boxes []box, err error) {
	args := filters.NewArgs()
	for _, l := range labels {
		args.Add("label", l)
	}
	list, err := b.api.ContainerList(ctx, container.ListOptions{All: true, Filters: args})
	if err != nil {
		return nil, b.explain(ctx, err)
	}
	for _, s := range list {
		c, err := b.inspect(ctx, s.ID)
		if errors.Is(err, fault.ErrNotFound) {
			continue // removed since
		}
		if err != nil {
			return nil, err
		}
		boxes = append(boxes, c)
	}
	return boxes, nil
}

func (b *Backend) known(id string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ids[id]
}

func (b *Backend) remember(id, theirs string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ids[id] = theirs
}

func (b *Backend) forget(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.ids, id)
}

// inspect asks for one container, by what the daemon knows it by. The daemon
// learns of an exit a moment after the kernel; that moment is waited for, or a
// container that is gone would be one that runs.
func (b *Backend) inspect(ctx context.Context, name string) (box, error) {
	deadline := time.Now().Add(grace)
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		r, err := b.api.ContainerInspect(ctx, name)
		if cerrdefs.IsNotFound(err) {
			return box{}, fmt.Errorf("container %s: %w", name, fault.ErrNotFound)
		}
		if err != nil {
			return box{}, b.explain(ctx, err)
		}
		if r.ContainerJSONBase == nil || r.State == nil || r.HostConfig == nil || r.Config == nil {
			return box{}, fmt.Errorf("container %s: %w: the daemon's description of it has holes",
				name, fault.ErrCorrupt)
		}
		c := box{r, statusOf(r.State)}
		if !c.live() || holds(r.State.Pid, r.ID) || time.Now().After(deadline) {
			// It may have been frozen or thawed behind the daemon's back.
			if is, known := frozen(r.State.Pid); known && c.live() {
				c.status = runtime.Running
				if is {
					c.status = runtime.Paused
				}
			}
			return c, nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return box{}, ctx.Err()
		}
	}
}

func statusOf(s *container.State) runtime.Status {
	switch {
	case s.Restarting, s.Dead, string(s.Status) == "removing":
		return runtime.Exited
	case s.Paused:
		return runtime.Paused
	case s.Running:
		return runtime.Running
	case string(s.Status) == "created", instant(s.StartedAt).IsZero():
		return runtime.Created
	}
	return runtime.Exited
}

// holds reports whether a process lives, zombies aside, and is one of the container's: a pid
// is soon another's.
func holds(pid int, id string) bool {
	if pid <= 0 {
		return false
	}
	if p, err := proc.Read(pid); err != nil || p.Ended() {
		return false
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && strings.Contains(string(groups), id)
}

// frozen reports whether a process is frozen, by any program, and whether that could be
// determined; see kernel.Cgroups.Frozen.
func frozen(pid int) (is, known bool) {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false, false
	}
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		var files []string
		runs := "THAWED"
		switch f[1] {
		case "freezer":
			files = []string{filepath.Join("/sys/fs/cgroup/freezer", f[2], "freezer.state")}
		case "":
			runs = "0"
			files = []string{
				filepath.Join("/sys/fs/cgroup", f[2], "cgroup.freeze"),
				filepath.Join("/sys/fs/cgroup/unified", f[2], "cgroup.freeze"),
			}
		}
		for _, file := range files {
			if data, err := os.ReadFile(file); err == nil {
				known = true
				is = is || strings.TrimSpace(string(data)) != runs
			}
		}
	}
	return is, known
}

// instant reads one of the daemon's times; what is no time is zero.
func instant(s string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.Year() < 1970 {
		return time.Time{}
	}
	return t
}

// List returns the ids of all containers that Create made under this root.
func (b *Backend) List(ctx context.Context) ([]string, error) {
	list, err := b.labelled(ctx, labelRoot+"="+b.root, labelID)
	if err != nil {
		return nil, err
	}
	ids := make([]string, 0, len(list))
	for _, c := range list {
		if id := c.Config.Labels[labelID]; c.own() && record.IsID(id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
