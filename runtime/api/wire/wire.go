// Package wire has what the client of the service and its server say to each other: the bodies
// of requests and answers that are no type of package runtime, headers, events, the messages of
// a session, and problems.
package wire

import (
	"fmt"
	"net/http"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
)

// Headers of our own.
const (
	HeaderRequest = "Agentbox-Request" // a name for the request, to cancel it by
	HeaderKey     = "Idempotency-Key"
	HeaderReplay  = "Idempotency-Replayed"
	HeaderIDs     = "Agentbox-Identities" // base64
	TrailerStatus = "Agentbox-Status"     // "ok", or a problem
)

// None is the body of a verb that takes or returns nothing.
type None struct{}

// Info identifies the service.
type Info struct {
	Version string `json:"version"`
	Root    string `json:"root"`
	Backend string `json:"backend"` // of new sandboxes
}

// Health says that the service is alive.
type Health struct {
	Status  string    `json:"status"` // "ok"
	Version string    `json:"version"`
	Started time.Time `json:"started"`
}

// Page is a part of a list.
type Page[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next,omitempty"` // the cursor of what follows; empty: nothing does
}

// Progress is the progress of a verb, in bytes unless it says otherwise.
type Progress struct {
	Done  int64 `json:"done"`
	Total int64 `json:"total"` // 0: not known
}

// RestoreProgress is the progress of a restore: a runtime.Step or, without phase, the
// image.Progress of a layer that is pulled.
type RestoreProgress struct {
	image.Progress
	Phase runtime.Phase `json:"phase"`
}

// Route is how the service names a request that it has no route for; by it clients distinguish
// an unknown verb from a missing object.
func Route(r *http.Request) string { return fmt.Sprintf("%.20s %.200s", r.Method, r.URL.Path) }
