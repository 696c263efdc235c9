package store

import (
	"context"

	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Missing returns those of the chunks that neither a usable pack nor this draft has: what a pull has
// to fetch. Malformed digests are ErrInvalid.
func (d *Draft) Missing(ctx context.Context, digests []string) (missing []string, err error) {
	var set idSet
	for _, digest := range digests {
		id, err := pack.ParseID(digest)
		if err != nil {
			return nil, err
		}
		if !d.pack.Has(id) {
			set.add(id)
		}
	}
	ids, err := d.x.sound(ctx, set.list(), func(place) error { return nil })
	for _, id := range ids {
		missing = append(missing, id.String())
	}
	return missing, err
}
