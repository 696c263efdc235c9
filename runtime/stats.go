package runtime

import (
	"time"
)

// Stats are what a sandbox uses, as the kernel counts it. It is the documented
// JSON of `agentbox top`; it only ever grows. Limits are the sandbox's own; 0: none.
type Stats struct {
	Sandbox      string        `json:"sandbox"` // its id
	Name         string        `json:"name"`
	Status       Status        `json:"status"`
	Time         time.Time     `json:"time"`                // of this sample
	Started      time.Time     `json:"started,omitzero"`    // since when the processor time counts
	CPU          time.Duration `json:"cpu_ns"`              // processor time, of all cores together
	Memory       int64         `json:"memory"`              // bytes, without what is only cached of files that are not in use
	MemoryLimit  int64         `json:"memory_limit"`        // bytes
	Pids         int64         `json:"pids"`                // processes and threads
	PidsLimit    int64         `json:"pids_limit"`          //
	Disk         *int64        `json:"disk,omitempty"`      // bytes that its files take, as Resources.Storage counts them; null: not asked for, or too many to count
	StorageLimit int64         `json:"storage_limit"`       // bytes
	Checkpoint   time.Time     `json:"checkpoint,omitzero"` // when its newest checkpoint was taken, undo ones not counted
}

// StatsOptions modify Stats; the zero value asks for all that run or are paused.
type StatsOptions struct {
	Sandboxes []string `json:"sandboxes"` // only these, in whatever state
	All       bool     `json:"all"`       // those that do not run, too
	Disk      bool     `json:"disk"`      // what their files take, too, as of some seconds ago
}
