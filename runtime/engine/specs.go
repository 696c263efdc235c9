package engine

import (
	"bytes"
	"sync"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// specs caches the decoded specs of the sandboxes that were listed last. A list needs all of
// them, decoding them is a good part of its cost, and they hardly ever change.
type specs struct {
	mu   sync.Mutex
	byID map[string]decoded
}

type decoded struct {
	text []byte
	spec runtime.Spec
}

// of returns the brief specs of rows. They are read-only, because they share memory with
// those of other calls. If a spec cannot be decoded, its error is in errs.
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
	s.byID = now // drop the other sandboxes
	return list
}

// briefSpec returns a spec without its long texts, which are the same for most sandboxes and
// would make up most of a list.
func briefSpec(s runtime.Spec) runtime.Spec {
	s.Security.SeccompProfile = ""
	if s.Policy != nil {
		s.Policy = &runtime.Policy{Name: s.Policy.Name, Digest: s.Policy.Digest}
	}
	return s
}
