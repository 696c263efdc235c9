package record

import (
	"fmt"
	"os"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// idPattern matches a sandbox's id; any other name in our directories is not a sandbox's.
var idPattern = lazy.Regexp(`^[0-9a-f]{32}$`)

// IsID reports whether a name is that of a sandbox.
func IsID(name string) bool { return idPattern().MatchString(name) }

// CheckID is ErrNotFound for what cannot be a sandbox's id.
func CheckID(id string) error {
	if !IsID(id) {
		return fmt.Errorf("container %q: %w", id, fault.ErrNotFound)
	}
	return nil
}

// OtherRoot reports whether theirs, the root in the label of an engine's object, is another
// root than mine. A root that no longer exists counts as mine: it was perhaps moved to where
// mine is.
func OtherRoot(mine, theirs string) bool {
	if theirs == "" || theirs == mine {
		return false
	}
	a, err := os.Stat(theirs)
	if err != nil {
		return false
	}
	b, err := os.Stat(mine)
	return err != nil || !os.SameFile(a, b)
}
