package policy

import (
	"encoding/json"
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
)

// wire is a Policy on its way to the service, which judges by it: its rules in
// their canonical form, nothing left to a file.
type wire struct {
	Name        string            `json:"name"`
	File        string            `json:"file"`
	Description string            `json:"description,omitempty"`
	Base        []string          `json:"base,omitempty"`
	Rules       json.RawMessage   `json:"rules"`
	Origin      map[string]Origin `json:"origin,omitempty"`
}

// MarshalJSON is the policy whole, with where its rules stand.
func (p *Policy) MarshalJSON() ([]byte, error) {
	return json.Marshal(wire{p.Name, p.File, p.Description, p.Base, p.Rules.Canonical(), p.origin})
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (p *Policy) UnmarshalJSON(data []byte) error {
	var w wire
	if err := json.Unmarshal(data, &w); err != nil {
		return err
	}
	got, err := ParseCanonical(w.Name, w.Rules)
	if err != nil {
		return fmt.Errorf("%w: %v", fault.ErrInvalid, err) // not ErrCorrupt: no record is damaged
	}
	got.File, got.Description, got.Base = w.File, w.Description, w.Base
	if w.Origin != nil {
		got.origin = w.Origin
	}
	*p = *got
	return nil
}
