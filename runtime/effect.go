package runtime

import "time"

// What a sandbox has done outside of itself no restore takes back. Its ledger has
// an undo command for each such effect, and a restore to a checkpoint from before it
// runs that: the effect is compensated, not rolled back.

// What follows when an undo command fails.
const (
	OnFailureAbort    = "abort"    // the restore is called off
	OnFailureContinue = "continue" // it goes on; the effect stays outstanding
	OnFailureRetry    = "retry"    // it is run again, a few times; then as with abort
)

// The states of an effect.
const (
	EffectOutstanding = "outstanding"
	EffectRunning     = "running"     // its undo command is
	EffectCompensated = "compensated" // the undo command has ended with 0
	EffectFailed      = "failed"      // with something else; it is outstanding yet
	EffectUnknown     = "unknown"     // it was killed: whether it has had its way is not known
	EffectRemoved     = "removed"     // taken off the ledger by its owner
)

// Effect is what a sandbox has done outside of itself, with how that is
// compensated: the documented JSON of `agentbox effect ls`; it only ever grows.
type Effect struct {
	ID        string        `json:"id"`
	Sandbox   string        `json:"sandbox"` // its id
	Head      string        `json:"head"`    // the checkpoint that the sandbox was at; empty: none
	Group     string        `json:"group,omitempty"`
	Label     string        `json:"label,omitempty"`
	Command   []string      `json:"command"`
	OnFailure string        `json:"on_failure"`
	Timeout   time.Duration `json:"timeout_ns"`
	Created   time.Time     `json:"created"`
	Status    string        `json:"status"`

	// Of the last time that the undo command was run.
	Checkpoint string    `json:"checkpoint,omitempty"` // that was being restored
	Tries      int       `json:"tries,omitempty"`      // so far, of all restores
	Ended      time.Time `json:"ended,omitzero"`
	Error      string    `json:"error,omitempty"`
	Output     string    `json:"output,omitempty"` // the first KiB
}

// EffectRequest asks for an entry in the ledger.
type EffectRequest struct {
	Command   []string      `json:"command"` // the undo command: a program of the host, run by root, and its arguments; there is no shell
	Group     string        `json:"group"`   // effects of one group are compensated together
	Label     string        `json:"label"`
	OnFailure string        `json:"on_failure"` // empty: OnFailureAbort
	Timeout   time.Duration `json:"timeout_ns"` // 0: 30 s; at most 10 min
}
