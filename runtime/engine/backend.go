package engine

import (
	"github.com/agentbox/agentbox/runtime"
)

// Host is one backend with its images.
type Host struct {
	runtime.Backend
	Images runtime.Images // nil: it makes no sandboxes, it only adopts
	// Original leads back into what the sandboxes were laid over; nil: there
	// is no way back.
	Original runtime.Original
}
