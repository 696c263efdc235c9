// Package wall stands between the images of processes and the host. CRIU runs as
// root and does what images say: it mounts what they name, writes the cgroup files
// that they name, and gives processes the rights that they list. Images may have been
// forged, or damaged in the store.
//
// So the images are held against the container's spec (the bundle's config.json)
// twice. Judge reads them before CRIU starts: each file has to be of a kind that is
// known, and may ask for nothing that a process of such a container could not have.
// What the spec decides alone, as cgroups, is written anew. Inspect reads what the kernel
// says of the restored processes, which are frozen and have not run yet. Judge keeps
// CRIU from doing harm; Inspect does not depend on how CRIU reads its images.
//
// A container without a user namespace whose processes may have CAP_SYS_ADMIN is as
// good as the host's root. Its mounts are the spec's all the same, and what it can have
// mounted itself.
//
// The OCI runtime wrapper imports this package and starts for every call of an engine,
// so it decodes by protowire instead of linking the types of all images.
package wall

import (
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
)

// Hint says what can be done about a Refusal.
const Hint = "Restore its files alone (--files-only), or another checkpoint."

// Refusal says which image asks for something that its container does not have.
type Refusal struct {
	Image string // a file name; empty: what CRIU has restored
	Field string
	Why   string
}

func (r *Refusal) Error() string {
	if r.Image == "" {
		return fmt.Sprintf("the restored processes are not what the container's spec allows: %s: %s", r.Field, r.Why)
	}
	return fmt.Sprintf("image %s is not what a process of this container can have: %s: %s", r.Image, r.Field, r.Why)
}

// Unwrap makes it an ErrDenied.
func (r *Refusal) Unwrap() error { return fault.ErrDenied }

func refuse(image, field, format string, a ...any) error {
	return &Refusal{image, field, fmt.Sprintf(format, a...)}
}
