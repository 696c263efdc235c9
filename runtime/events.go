package runtime

import (
	"time"
)

// Types of events.
const (
	EventDenied  = "denied"        // filtered, it tried to reach what no rule allows
	EventOOM     = "oom"           // the kernel killed processes of it for memory
	EventPids    = "pids-limit"    // processes or threads could not be made
	EventStorage = "storage-limit" // its files take all they may: it was killed, or more is refused
	EventExpired = "expired"       // it was stopped because its time was over
	EventIdle    = "idle"          // it was stopped because nothing went on in it
	EventEffect  = "effect"        // the undo command of an effect was run
	EventRestore = "restore"       // a try to restore it failed
	EventLease   = "lease"         // it is removed because its lease has ended
	EventHeld    = "held"          // no try did better: nobody may use it

	EventReconciled = "reconciled" // it had ended without anybody seeing to it
	EventRestarted  = "restarted"  // it was started again, as its restart policy says
	EventGivenUp    = "given-up"   // it is not started again, though it has failed
	EventHostFiles  = "host-files" // a restore has left files of the host as they are, though nobody has asked for that
)

// EventTypes are all there are.
var EventTypes = []string{EventDenied, EventOOM, EventPids, EventStorage, EventExpired, EventIdle, EventEffect, EventRestore, EventHeld, EventLease, EventReconciled, EventRestarted, EventGivenUp, EventHostFiles}

// Event is something that befell a sandbox without its owner's doing: the
// documented JSON of `agentbox events`; it only ever grows. The limits that the
// kernel holds (oom, pids-limit) are counters: what nobody looked at meanwhile
// is one event, of the time at which it was seen or, at the latest, of the end.
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

	// Of restore: which strategy was tried; Reason is what became of it.
	Strategy string `json:"strategy,omitempty"`

	// Of effect; with Name, its label, and Reason, its status and why.
	Effect     string `json:"effect,omitempty"`     // its id
	Checkpoint string `json:"checkpoint,omitempty"` // that was being restored

	Count   int64     `json:"count,omitempty"`    // oom, pids-limit: how many since the event of the type before it; restarted: how often since its owner started it
	Total   int64     `json:"total,omitempty"`    // oom, pids-limit: how many since Started
	Started time.Time `json:"started,omitzero"`   // oom, pids-limit: when it was started
	Used    int64     `json:"used,omitempty"`     // storage-limit: bytes that its files took, at least
	Refused bool      `json:"refused,omitempty"`  // storage-limit: the kernel refused more; else it was killed
	Limit   int64     `json:"limit,omitempty"`    // bytes (oom, storage-limit) or processes (pids-limit)
	After   int64     `json:"after_ns,omitempty"` // expired: its ttl; idle: for how long nothing had gone on
	Exit    *int      `json:"exit,omitempty"`     // reconciled, restarted, given-up: the exit code that it had ended with
}

// EventOptions choose what Events returns.
type EventOptions struct {
	Follow bool
	Since  time.Time
	Types  []string // empty: all
}
