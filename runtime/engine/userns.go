package engine

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// The ranges lie where systemd puts those of its containers, and where the tools that add
// users to a host put none.
const (
	firstID   = 524288
	rangeSize = 65536
	ranges    = (1878982656 - firstID) / rangeSize
)

// mapIDs gives a new sandbox a range of ids that no other sandbox on this root has, and no
// running one of another root, if the host and the rest of its spec allow that. If they do
// not, it fails only where mode or policy require a range.
func (bx *sandboxes) mapIDs(
	ctx context.Context, s *runtime.Spec, mode string, by *policy.Policy, host Host, lower []string,
) error {
	switch mode {
	case "", runtime.UserNSAuto:
	case runtime.UserNSHost:
		bx.log.Debug("user namespace not used, as requested", "sandbox", s.ID)
		return nil
	default:
		return fmt.Errorf("%w: user namespace %q: choose %s or %s", runtime.ErrInvalid, mode,
			runtime.UserNSAuto, runtime.UserNSHost)
	}
	why, err := bx.idsOf(ctx, s, host, lower)
	switch {
	case err != nil:
		return err
	case why == "":
		bx.log.Debug("user namespace assigned", "sandbox", s.ID, "first", s.IDs.Base)
		return nil
	case by.Rules.NeedsNamespace():
		return by.NoNamespace(why)
	case mode == runtime.UserNSAuto:
		return hint(fmt.Errorf("%w: a user namespace (--userns %s): %s", runtime.ErrUnsupported, mode, why),
			"Without --userns it has the host's user ids then.")
	}
	s.HostIDs = why
	bx.log.Info("user namespace not used", "sandbox", s.ID, "reason", why)
	return nil
}

// keepIDs checks whether a sandbox that is made from a checkpoint can keep the
// checkpoint's ids on this host. Processes need the same ids; files alone can get others.
//
// The files of a foreign checkpoint, without processes, get a range like a new sandbox.
func (bx *sandboxes) keepIDs(
	ctx context.Context, s *runtime.Spec, host Host, lower []string, processes, foreign bool,
) error {
	if foreign && !processes {
		p, err := recorded(*s)
		if err != nil {
			return err
		}
		s.IDs, s.HostIDs = nil, ""
		return bx.mapIDs(ctx, s, "", p, host, lower)
	}
	if s.IDs == nil {
		return nil
	}
	why := "backend " + s.Backend + " has no user namespaces"
	if mapper, ok := host.Backend.(runtime.IDMapper); !ours(*s.IDs) {
		// A spec from elsewhere could name ids of users of this host.
		why = fmt.Sprintf("%d ids from %d on are no range of sandboxes", s.IDs.Size, s.IDs.Base)
	} else if ok {
		var err error
		if why, err = mapper.MayMap(ctx, *s, lower, *s.IDs); why == "" || err != nil {
			return err
		}
	}
	if processes {
		return hint(fmt.Errorf("%w: its processes have user ids of their own, which is not possible here: %s",
			runtime.ErrUnsupported, why), "Mend that, or take the files alone: --files-only.")
	}
	s.IDs, s.HostIDs = nil, ""
	// Another range will do.
	if none, err := bx.idsOf(ctx, s, host, lower); none == "" || err != nil {
		return err
	}
	if p, err := recorded(*s); err != nil {
		return err
	} else if p != nil && p.Rules.NeedsNamespace() {
		return p.NoNamespace(why)
	}
	s.HostIDs = why
	bx.log.Info("user namespace not used", "sandbox", s.ID, "reason", why)
	return nil
}

// idsOf sets the ids of a sandbox, or returns why it can have none of its own.
func (bx *sandboxes) idsOf(ctx context.Context, s *runtime.Spec, host Host, lower []string) (why string, err error) {
	mapper, ok := host.Backend.(runtime.IDMapper)
	if !ok {
		return fmt.Sprintf("backend %s: its engine maps ids for all of its containers, or for none", s.Backend), nil
	}
	if why := contradiction(*s); why != "" {
		return why, nil
	}
	ids, err := bx.freeIDs(ctx, s.ID, mapper)
	if err != nil {
		return "", err
	}
	if why, err := mapper.MayMap(ctx, *s, lower, ids); why != "" || err != nil {
		return why, err
	}
	for _, dir := range lower {
		largest, err := images.LargestID(dir)
		if err != nil {
			return "", err
		}
		if largest >= rangeSize {
			return fmt.Sprintf("the image has files of %d, whom it would not have", largest), nil
		}
	}
	s.IDs = &ids
	return "", nil
}

// ofHost lists capabilities that the kernel checks only in the host's user namespace.
var ofHost = []string{
	"AUDIT_CONTROL", "AUDIT_READ", "BLOCK_SUSPEND", "BPF", "IPC_LOCK", "LEASE", "LINUX_IMMUTABLE", "MAC_ADMIN",
	"MAC_OVERRIDE", "MKNOD",
	"PERFMON", "SYSLOG", "SYS_MODULE", "SYS_NICE", "SYS_PACCT", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME", "WAKE_ALARM",
}

// contradiction returns what in a spec would not work in a user namespace, or "".
func contradiction(s runtime.Spec) string {
	if s.Network.Mode == runtime.NetworkHost {
		return "--network host: a user namespace has no say over the host's network"
	}
	for _, c := range s.Security.Capabilities {
		if slices.Contains(ofHost, c) {
			return fmt.Sprintf("capability %s: it means nothing in a user namespace", c)
		}
	}
	for _, id := range strings.Split(s.User, ":") {
		if n, err := strconv.ParseUint(id, 10, 64); err == nil && n >= rangeSize {
			return fmt.Sprintf("user %s: it has no ids from %d on", s.User, rangeSize)
		}
	}
	return ""
}

// ours reports whether m could be a range from freeIDs.
func ours(m idmap.Map) bool {
	return m.Size == rangeSize && m.Base >= firstID && (m.Base-firstID)%rangeSize == 0 &&
		(m.Base-firstID)/rangeSize < ranges
}

// freeIDs finds an unused range.
func (bx *sandboxes) freeIDs(ctx context.Context, id string, mapper runtime.IDMapper) (idmap.Map, error) {
	all, err := bx.store.Sandboxes(ctx)
	if err != nil {
		return idmap.Map{}, err
	}
	taken := map[uint32]bool{}
	for _, sb := range all {
		other, err := ids(sb)
		if err != nil {
			return idmap.Map{}, err
		}
		if other != nil {
			taken[other.Base] = true // all lie on one grid
		}
	}
	elsewhere, err := mapper.IDsElsewhere()
	if err != nil {
		return idmap.Map{}, err
	}
	for _, base := range elsewhere {
		taken[base] = true
	}
	// The search starts at a place derived from the id, so that two sandboxes created at
	// the same time find different ranges.
	h := fnv.New32a()
	_, _ = h.Write([]byte(id))
	for i := range uint32(ranges) {
		if base := firstID + (h.Sum32()+i)%ranges*rangeSize; !taken[base] {
			return idmap.Map{Base: base, Size: rangeSize}, nil
		}
	}
	return idmap.Map{}, fmt.Errorf("%w: all %d ranges of user ids are taken", runtime.ErrBusy, ranges)
}

// ids returns the id map of a sandbox, or nil.
func ids(sb store.Sandbox) (*idmap.Map, error) {
	s, err := spec(sb)
	return s.IDs, err
}

// hand gives process images to the root of a user namespace, as which CRIU reads them. The
// group stays the host's root: before the namespace has its ids, CRIU reads the images
// with that group and no other rights.
func hand(ids *idmap.Map, images string) error {
	if ids == nil {
		return nil
	}
	list, err := os.ReadDir(images)
	if err != nil {
		return err
	}
	give := func(path string, mode os.FileMode) error {
		return errors.Join(os.Lchown(path, int(ids.Base), 0), os.Chmod(path, mode))
	}
	errs := []error{give(images, 0o750)}
	for _, f := range list {
		errs = append(errs, give(filepath.Join(images, f.Name()), 0o640))
	}
	return errors.Join(errs...)
}
