package hostfile

import "context"

// Has reports whether a file is as s says. A name that is not a regular file, or a file with
// other names too, is refused.
func (d *Dir) Has(ctx context.Context, name string, s State) (bool, error) {
	have, err := d.look(ctx, name)
	if err != nil {
		return false, err
	}
	defer have.close()
	return s.is(ctx, have)
}
