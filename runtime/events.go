package runtime

import (
	"time"
)

// Types of events.
const (
	EventDenied  = "denied"        // network mode filtered: it tried to reach what no rule allows
	EventOOM     = "oom"           // the kernel killed some of its processes for lack of memory
	EventPids    = "pids-limit"    // it could not create processes or threads
	EventStorage = "storage-limit" // its files reached their limit: it was killed, or the kernel refuses more
	EventExpired = "expired"       // it was stopped because its TTL was over
	EventIdle    = "idle"          // it was stopped because it was idle
	EventEffect  = "effect"        // the undo command of an effect was run
	EventRestore = "restore"       // an attempt to restore it failed
	EventLease   = "lease"         // it is removed because its lease has ended
	EventHeld    = "held"          // every restore attempt failed: it is on hold

	EventReconciled = "reconciled" // its exit had not been recorded or cleaned up
	EventRestarted  = "restarted"  // it was started again, as its restart policy says
	EventGivenUp    = "given-up"   // it is not started again, though it has failed
	EventHostFiles  = "host-files" // a restore left attached files of the host as they were without being told to
)

// EventTypes lists all types.
var EventTypes = []string{
	EventDenied, EventOOM, EventPids, EventStorage, EventExpired, EventIdle, EventEffect, EventRestore, EventHeld,
	EventLease, EventReconciled, EventRestarted, EventGivenUp, EventHostFiles,
}

// Event is something that happened to a sandbox without a command of its owner: the
// documented JSON of `agentbox events`; it only ever grows. The kernel reports the
// limits that it enforces (oom, pids-limit) as counters: all hits since the last look
// are one event, with the time of the next look, at the latest the sandbox's end.
type Event struct {
	Time    time.Time `json:"time"`
	Sandbox string    `json:"sandbox"`
	Type    string    `json:"type"`

	// Of denied; see egress.Event.
	Protocol string `json:"protocol,omitempty"`
	Name     string `json:"name,omitempty"`
	Address  string `json:"address,omitempty"`
	Reason   string `json:"reason,omitempty"` // of lease, too
	Missed   int    `json:"missed,omitempty"`

	// Of restore: the strategy that was tried; Reason is its outcome.
	Strategy string `json:"strategy,omitempty"`

	// Of effect; with Name, its label, and Reason, its status and why.
	Effect     string `json:"effect,omitempty"`     // its id
	Checkpoint string `json:"checkpoint,omitempty"` // that was being restored

	// oom, pids-limit: how many since the event of the type before it; restarted: how often since its owner started it
	Count   int64     `json:"count,omitempty"`
	Total   int64     `json:"total,omitempty"`    // oom, pids-limit: how many since Started
	Started time.Time `json:"started,omitzero"`   // oom, pids-limit: when it was started
	Used    int64     `json:"used,omitempty"`     // storage-limit: bytes that its files took, at least
	Refused bool      `json:"refused,omitempty"`  // storage-limit: the kernel refused more; else it was killed
	Limit   int64     `json:"limit,omitempty"`    // bytes (oom, storage-limit) or processes (pids-limit)
	After   int64     `json:"after_ns,omitempty"` // expired: its ttl; idle: for how long nothing had gone on
	// reconciled, restarted, given-up: the exit code that it had ended with
	Exit *int `json:"exit,omitempty"`
}

// EventOptions select what Events returns.
type EventOptions struct {
	Follow bool
	Since  time.Time
	Types  []string // empty: all
}
