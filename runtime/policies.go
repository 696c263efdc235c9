package runtime

// PolicyEntry is one policy in a list.
type PolicyEntry struct {
	Name        string   `json:"name"`
	Base        []string `json:"base"` // nearest first
	File        string   `json:"file"`
	Description string   `json:"description"`
	Digest      string   `json:"digest"`
	Error       string   `json:"error"` // why it is invalid; empty: it is valid
}

// EgressChange is what UpdateEgress changes.
type EgressChange struct {
	Add    []string `json:"add"`
	Remove []string `json:"remove"`
}
