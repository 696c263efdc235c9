package engine

import (
	"github.com/agentbox/agentbox/runtime"
)

// Host is one backend with its images.
type Host struct {
	runtime.Backend
	Images runtime.Images // nil: the backend only adopts containers
	// Original applies changes to the directory that a sandbox is layered over; nil:
	// that is not supported.
	Original runtime.Original
}
