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

	// Of a restore that failed with a strategy: what was tried, and that the
	// sandbox was stopped safely.
	Attempts []RestoreAttempt `json:"attempts,omitempty"`
	Held     bool             `json:"held,omitempty"`
}

// HookSandbox is a sandbox as hooks are told of it.
type HookSandbox struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Image       string            `json:"image"`
	ImageDigest string            `json:"image_digest"`
	Backend     string            `json:"backend"`
	Labels      map[string]string `json:"labels,omitempty"`
}

// HookCheckpoint is a checkpoint as hooks are told of it. One that is yet to be
// taken has no id.
type HookCheckpoint struct {
	ID      string            `json:"id,omitempty"`
	Name    string            `json:"name,omitempty"`
	Trigger string            `json:"trigger"`
	Labels  map[string]string `json:"labels,omitempty"`
}

// AlertSignature is the header that signs what is posted: "t=SECONDS,v1=HEX", the
// latter HMAC-SHA256 over SECONDS, a dot and the body.
const AlertSignature = "Agentbox-Signature"
