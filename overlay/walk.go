package overlay

import (
	"context"
	"fmt"
)

// WalkOptions modify Walk.
type WalkOptions struct {
	Digest bool // read all data and fill Entry.Digest
}

// Walk calls fn for every entry of an upperdir, in the order of ComparePaths,
// from the calling goroutine: the very entries that Capture of it would give.
// An entry that vanishes, changes or cannot be read ends it with an error, and
// so does a mount point. An error of fn is returned as it is.
func Walk(ctx context.Context, dir string, opts WalkOptions, fn func(Entry) error) error {
	s := scan{}
	if opts.Digest {
		s.content = withDigest
	}
	var own error
	err := s.run(ctx, dir, func(it *item) error {
		own = fn(it.entry)
		return own
	})
	if err != nil && own == nil {
		return fmt.Errorf("walk %s: %w", dir, err)
	}
	return err
}
