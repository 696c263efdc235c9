package store

import (
	"context"
	"io"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Cutter is a Sink that keeps nothing: it shows how a Draft would cut the data.
type Cutter struct{}

// Data: see overlay.Sink.
func (Cutter) Data(ctx context.Context, size int64, r io.Reader) (string, []overlay.Chunk, error) {
	digest, list, err := cut(ctx, size, r, func(raw []byte) (pack.ID, error) { return pack.Sum(raw), nil })
	if len(list) < 2 {
		list = nil
	}
	return digest, list, err
}
