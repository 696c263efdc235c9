package runtime

import "path/filepath"

// Where state is kept unless another root is named.
const (
	DefaultRoot = "/var/lib/agentbox"
	DefaultRun  = "/run/agentbox"
)

// Dirs returns where the lasting and the transient state of a root are kept; an empty root is
// the default one.
func Dirs(root string) (lasting, transient string) {
	if root == "" || root == DefaultRoot {
		return DefaultRoot, DefaultRun
	}
	return root, filepath.Join(root, "run")
}
