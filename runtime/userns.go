package runtime

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/runtime/store"
)

// User namespaces of sandboxes.
const (
	UserNSHost = "host" // none: the host's ids
	UserNSAuto = "auto" // one with a range of ids of its own
)

// The ranges lie where systemd has those of its containers and the tools that
// add users to a host have none.
const (
	firstID   = 524288
	rangeSize = 65536
	ranges    = (1878982656 - firstID) / rangeSize
)

// mapIDs gives a sandbox that is to be made a range of ids that no other on
// this root has.
func (e *Engine) mapIDs(ctx context.Context, s *Spec, mode string) error {
	switch mode {
	case "", UserNSHost:
		return nil
	case UserNSAuto:
	default:
		return fmt.Errorf("%w: user namespace %q: choose %s or %s", ErrInvalid, mode, UserNSAuto, UserNSHost)
	}
	if s.Backend != "oci" {
		return hint(fmt.Errorf("%w: --userns %s with the backend %s", ErrUnsupported, mode, s.Backend), "Its engine maps ids for all of its containers, or for none.")
	}
	if s.Network.Mode == NetworkHost {
		return hint(fmt.Errorf("%w: --userns %s with --network host: a user namespace has no say over the host's network", ErrUnsupported, mode), "Choose another network, or --userns host.")
	}
	all, err := e.store.Sandboxes(ctx)
	if err != nil {
		return err
	}
	taken := map[uint32]bool{}
	for _, sb := range all {
		other, err := spec(sb)
		if err != nil {
			return err
		}
		if other.IDs != nil {
			taken[other.IDs.Base] = true
		}
	}
	// Where it begins to look follows from the id: two that are made at the
	// same time find different ones.
	h := fnv.New32a()
	_, _ = h.Write([]byte(s.ID))
	for i := range uint32(ranges) {
		if base := firstID + (h.Sum32()+i)%ranges*rangeSize; !taken[base] {
			s.IDs = &idmap.Map{Base: base, Size: rangeSize}
			return nil
		}
	}
	return fmt.Errorf("%w: all %d ranges of user ids are taken", ErrBusy, ranges)
}

// ids is the map of a sandbox's ids, if it has one.
func ids(sb store.Sandbox) (*idmap.Map, error) {
	s, err := spec(sb)
	return s.IDs, err
}

// hand gives process images to the root of a user namespace, by whom CRIU has
// them read; at first, before the namespace has its ids, by one who is of the
// host's group root and no more.
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
