package runtime

import (
	"time"
)

// Lifetime bounds how long a sandbox lives; zero means no bound.
type Lifetime struct {
	TTL   time.Duration `json:"ttl_ns,omitempty"`  // it is stopped so long after Begun, and not started again
	Idle  time.Duration `json:"idle_ns,omitempty"` // it is stopped when nothing goes on in it for so long
	Begun Moment        `json:"begun,omitzero"`    // when it was made, or given the TTL
}

// Moment is an instant by two clocks: the one that people set, and, within one
// boot of the host, one that runs evenly.
type Moment struct {
	Time time.Time     `json:"time"`
	Boot string        `json:"boot,omitempty"`
	Up   time.Duration `json:"up_ns,omitempty"` // since that boot, sleep included
}

// LifetimeChange is what UpdateLifetime changes; nil: as it is, 0: no bound.
type LifetimeChange struct {
	TTL  *time.Duration `json:"ttl_ns,omitempty"`
	Idle *time.Duration `json:"idle_ns,omitempty"`

	Restart *Restart `json:"restart,omitempty"`
}

// Nothing goes on in a sandbox, for Lifetime.Idle, while no command of an exec is
// there, no terminal is attached to it, and its processes have less than IdleShare of
// one core. While it is paused no such time passes.

// IdleShare is the share of one core from which on a sandbox is not idle.
const IdleShare = 0.01

// Restart policies, in Docker's words.
const (
	RestartNo            = "no"
	RestartOnFailure     = "on-failure"     // when it ended by itself with another code than 0
	RestartAlways        = "always"         // when it ended by itself, and after the host's next boot in any case
	RestartUnlessStopped = "unless-stopped" // when it ended by itself, and after a boot unless its owner had stopped it
)

// What a restart begins with.
const (
	RestartFromCommand = "command"
	RestartFromHead    = "head" // the newest checkpoint: its files, and its processes if it has any
)

// Restart says whether a sandbox comes back that has ended; the zero value: it
// does not. What its owner, its time or its idleness has stopped does not count.
type Restart struct {
	Policy  string `json:"policy,omitempty"`
	Retries int    `json:"retries,omitempty"` // on-failure: at most so often; 0: without end
	From    string `json:"from,omitempty"`    // empty: RestartFromCommand
}

// Restarts is how often a sandbox came back since its owner started it.
type Restarts struct {
	Count    int       `json:"count"`
	LastExit int       `json:"last_exit"`          // the code with which it had ended before the last one
	LastEnd  time.Time `json:"last_end,omitzero"`  // and when
	Stopped  bool      `json:"stopped,omitempty"`  // its owner, or a limit of its lifetime, has stopped it
	GivenUp  bool      `json:"given_up,omitempty"` // it has failed as often as it may, or an undo command has
	Error    string    `json:"error,omitempty"`    // why the last one did not succeed
}

// Where its filesystem has project quotas the kernel holds a sandbox of the
// backend oci to --storage-size: what is more it refuses. Elsewhere the watch kills
// it. What stands still is held to nothing, so that agentbox can bring files back
// beside those that are there: a limit is lifted once a sandbox is frozen, and set
// before it goes on. The watch sets one that a killed verb has left lifted.

// StorageHit is that the files of a sandbox took all that it was given.
type StorageHit struct {
	Time    time.Time `json:"time"`
	Used    int64     `json:"used"` // at least
	Limit   int64     `json:"limit"`
	Refused bool      `json:"refused,omitempty"` // the kernel refuses more, and it goes on; else it was killed
}

// StorageChange is what UpdateStorage changes.
type StorageChange struct {
	Size int64 `json:"size"` // bytes that the files may take; 0: no limit
}
