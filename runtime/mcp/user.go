package mcp

import (
	"errors"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/internal/rights"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
)

// as runs fn with the rights to files of a user of a sandbox, whose ids are those of the sandbox,
// which ids maps to the host's; see rights.As.
func as(u bundle.User, ids *idmap.Map, fn func() error) (err error) {
	if ids != nil && u.UID == 0 {
		return ids.AsRoot(fn)
	}
	if u, err = onHost(u, ids); err != nil {
		return err
	}
	return rights.As(rights.User(u), fn)
}

// onHost maps a user of a sandbox to its ids on the host.
func onHost(u bundle.User, ids *idmap.Map) (bundle.User, error) {
	var errs []error
	host := func(id uint32) uint32 {
		n, err := ids.Host(int(id))
		errs = append(errs, err)
		return uint32(n)
	}
	out := bundle.User{UID: host(u.UID), GID: host(u.GID)}
	for _, g := range u.Groups {
		out.Groups = append(out.Groups, host(g))
	}
	return out, errors.Join(errs...)
}
