package engine

import (
	"bytes"
	"sync"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// specs are those of the sandboxes that were listed last. A list needs all of them, to
// decode them is a good part of what it costs, and they hardly ever change.
type specs struct {
	mu   sync.Mutex
	byID map[string]decoded
}

type decoded struct {
	text []byte
	spec runtime.Spec
}

// of returns the specs of rows, as a list has them, which share what they point to with
// those of other calls: they are for reading. Where one does not decode errs has why.
func (s *specs) of(rows []store.Sandbox, errs []error) []runtime.Spec {
	s.mu.Lock()
	defer s.mu.Unlock()
	list, now := make([]runtime.Spec, len(rows)), make(map[string]decoded, len(rows))
	for i, row := range rows {
		d, ok := s.byID[row.ID]
		if !ok || !bytes.Equal(d.text, row.Spec) {
			d.text = row.Spec
			if d.spec, errs[i] = spec(row); errs[i] != nil {
				continue
			}
			d.spec = briefSpec(d.spec)
		}
		list[i], now[row.ID] = d.spec, d
	}
	s.byID = now // the others are gone
	return list
}

// briefSpec is the spec without its long texts, which are the same for most sandboxes and
// would be the greater part of a list.
func briefSpec(s runtime.Spec) runtime.Spec {
	s.Security.SeccompProfile = ""
	if s.Policy != nil {
		s.Policy = &runtime.Policy{Name: s.Policy.Name, Digest: s.Policy.Digest}
	}
	return s
}
