package runtime

// PolicyEntry is one of a list.
type PolicyEntry struct {
	Name        string   `json:"name"`
	Base        []string `json:"base"` // the nearest first
	File        string   `json:"file"`
	Description string   `json:"description"`
	Digest      string   `json:"digest"`
	Error       string   `json:"error"` // what is wrong with it; empty: nothing
}

// EgressChange is what Update does to the egress rules of a sandbox.
type EgressChange struct {
	Add    []string `json:"add"`
	Remove []string `json:"remove"`
}
