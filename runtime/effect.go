package runtime

import "time"

// A restore cannot roll back what a sandbox has done outside itself. The sandbox's ledger has
// an undo command for each such effect, and a restore to a checkpoint from before the effect
// runs that command: the effect is compensated, not rolled back.

// What a restore does if an undo command fails.
const (
	OnFailureAbort    = "abort"    // it is called off
	OnFailureContinue = "continue" // it goes on; the effect stays outstanding
	OnFailureRetry    = "retry"    // it runs the command again, a few times; then as with abort
)

// The states of an effect.
const (
	EffectOutstanding = "outstanding"
	EffectRunning     = "running"     // its undo command is running
	EffectCompensated = "compensated" // its undo command has ended with exit code 0
	EffectFailed      = "failed"      // its undo command has failed; the effect is still outstanding
	EffectUnknown     = "unknown"     // its undo command was killed, so its outcome is unknown
	EffectRemoved     = "removed"     // taken off the ledger by its owner
)

// Effect is something that a sandbox has done outside itself, with its undo command: the
// documented JSON of `agentbox effect ls`; it only ever grows.
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

	// Of the last run of the undo command.
	Checkpoint string    `json:"checkpoint,omitempty"` // the one being restored
	Tries      int       `json:"tries,omitempty"`      // runs so far, by all restores
	Ended      time.Time `json:"ended,omitzero"`
	Error      string    `json:"error,omitempty"`
	Output     string    `json:"output,omitempty"` // the first KiB
}

// EffectRequest asks for an entry in the ledger.
type EffectRequest struct {
	// the undo command: a program of the host, run by root, and its arguments; there is no shell
	Command   []string      `json:"command"`
	Group     string        `json:"group"` // effects of one group are compensated together
	Label     string        `json:"label"`
	OnFailure string        `json:"on_failure"` // empty: OnFailureAbort
	Timeout   time.Duration `json:"timeout_ns"` // 0: 30 s; at most 10 min
}
