package runtime

import (
	"time"
)

// Stats is the resource usage of a sandbox, as the kernel counts it. It is the documented
// JSON of `agentbox top`; it only ever grows. Limits are the sandbox's own; 0: none.
type Stats struct {
	Sandbox     string        `json:"sandbox"` // its id
	Name        string        `json:"name"`
	Status      Status        `json:"status"`
	Time        time.Time     `json:"time"`             // of this sample
	Started     time.Time     `json:"started,omitzero"` // start of the CPU time
	CPU         time.Duration `json:"cpu_ns"`           // CPU time, summed over all cores
	Memory      int64         `json:"memory"`           // bytes, without inactive file cache
	MemoryLimit int64         `json:"memory_limit"`     // bytes
	Pids        int64         `json:"pids"`             // processes and threads
	PidsLimit   int64         `json:"pids_limit"`       //
	// bytes that its files take, as Resources.Storage counts them; null: not requested, or too many files to count
	Disk         *int64    `json:"disk,omitempty"`
	StorageLimit int64     `json:"storage_limit"`       // bytes
	Checkpoint   time.Time `json:"checkpoint,omitzero"` // when its newest checkpoint, undo ones aside, was taken
}

// StatsOptions modify Stats; the zero value selects all running or paused sandboxes.
type StatsOptions struct {
	Sandboxes []string `json:"sandboxes"` // only these, in any state
	All       bool     `json:"all"`       // include stopped ones
	Disk      bool     `json:"disk"`      // include disk usage, which may be some seconds old
}
