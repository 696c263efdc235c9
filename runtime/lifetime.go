package runtime

import (
	"time"
)

// Lifetime bounds how long a sandbox lives; zero means no bound.
type Lifetime struct {
	// the sandbox is stopped this long after Begun, and cannot be started again
	TTL   time.Duration `json:"ttl_ns,omitempty"`
	Idle  time.Duration `json:"idle_ns,omitempty"` // it is stopped when it has been idle for this long
	Begun Moment        `json:"begun,omitzero"`    // when it was created, or given the TTL
}

// Moment is an instant by two clocks: the wall clock, which can be set, and, within one
// boot of the host, a monotonic one.
type Moment struct {
	Time time.Time     `json:"time"`
	Boot string        `json:"boot,omitempty"`
	Up   time.Duration `json:"up_ns,omitempty"` // since that boot, sleep included
}

// LifetimeChange is what UpdateLifetime changes; nil: unchanged, 0: no bound.
type LifetimeChange struct {
	TTL  *time.Duration `json:"ttl_ns,omitempty"`
	Idle *time.Duration `json:"idle_ns,omitempty"`

	Restart *Restart `json:"restart,omitempty"`
}

// A sandbox is idle, for Lifetime.Idle, while no exec runs in it, no terminal is attached
// to it, and its processes use less than IdleShare of one core. Time that it is paused does
// not count.

// IdleShare is the share of one core from which a sandbox is not idle.
const IdleShare = 0.01

// Restart policies, with Docker's names.
const (
	RestartNo            = "no"
	RestartOnFailure     = "on-failure"     // when it ended by itself with an exit code other than 0
	RestartAlways        = "always"         // when it ended by itself, and after the host's next boot in any case
	RestartUnlessStopped = "unless-stopped" // when it ended by itself, and after a boot unless its owner had stopped it
)

// What a restart starts from.
const (
	RestartFromCommand = "command"
	RestartFromHead    = "head" // the checkpoint it was last at: its files, and its processes if it has any
)

// Restart says whether a sandbox that has ended is started again; the zero value: it is not.
// A sandbox that its owner, its TTL or its idle limit has stopped is not restarted.
type Restart struct {
	Policy  string `json:"policy,omitempty"`
	Retries int    `json:"retries,omitempty"` // on-failure: the most restarts; 0: no limit
	From    string `json:"from,omitempty"`    // empty: RestartFromCommand
}

// Restarts counts the restarts of a sandbox since its owner started it.
type Restarts struct {
	Count    int       `json:"count"`
	LastExit int       `json:"last_exit"`          // its exit code before the last restart
	LastEnd  time.Time `json:"last_end,omitzero"`  // and its end then
	Stopped  bool      `json:"stopped,omitempty"`  // its owner, or a limit of its lifetime, has stopped it
	GivenUp  bool      `json:"given_up,omitempty"` // it has used up its retries, or an undo command has failed
	Error    string    `json:"error,omitempty"`    // why the last restart failed
}

// On a filesystem with project quotas the kernel enforces --storage-size for sandboxes of the
// backend oci: it refuses further writes. Elsewhere the supervisor kills the sandbox. A stopped or
// frozen sandbox has no limit, so that agentbox can stage files beside the present ones: the
// limit is lifted once a sandbox is frozen, and set before it is thawed. The watch sets a
// limit that a killed verb has left lifted.

// StorageHit records that a sandbox's files have reached their limit.
type StorageHit struct {
	Time  time.Time `json:"time"`
	Used  int64     `json:"used"` // at least
	Limit int64     `json:"limit"`
	// the kernel refuses more, and the sandbox goes on; otherwise it was killed
	Refused bool `json:"refused,omitempty"`
}

// StorageChange is what UpdateStorage changes.
type StorageChange struct {
	Size int64 `json:"size"` // bytes that the files may take; 0: no limit
}
