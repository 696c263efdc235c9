package runtime

// HookFacts is what a hook reads at its standard input: the documented JSON of
// hooks; it only ever grows.
type HookFacts struct {
	Hook       string          `json:"hook"`
	Verb       string          `json:"verb"` // "start", "checkpoint", "restore" or "fork"
	Policy     string          `json:"policy"`
	Sandbox    HookSandbox     `json:"sandbox"`
	Checkpoint *HookCheckpoint `json:"checkpoint,omitempty"`
	Error      string          `json:"error,omitempty"` // of a verb that failed

	// For a failed restore with a strategy: its attempts, and whether the sandbox was put
	// on hold.
	Attempts []RestoreAttempt `json:"attempts,omitempty"`
	Held     bool             `json:"held,omitempty"`
}

// HookSandbox is a sandbox in HookFacts.
type HookSandbox struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Image       string            `json:"image"`
	ImageDigest string            `json:"image_digest"`
	Backend     string            `json:"backend"`
	Labels      map[string]string `json:"labels,omitempty"`
}

// HookCheckpoint is a checkpoint in HookFacts. One that is yet to be taken has no id.
type HookCheckpoint struct {
	ID      string            `json:"id,omitempty"`
	Name    string            `json:"name,omitempty"`
	Trigger string            `json:"trigger"`
	Labels  map[string]string `json:"labels,omitempty"`
}

// AlertSignature is the header that signs a posted alert: "t=SECONDS,v1=HEX", where HEX is
// HMAC-SHA256 over SECONDS, a dot and the body.
const AlertSignature = "Agentbox-Signature"
