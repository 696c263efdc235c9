package apply

import (
	"encoding/base64"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// The files that are applied were made inside the sandbox, by root as well. They get into a
// directory of the host: there a device is the host's, a set-user-id program gives its owner's
// rights to every user, and an owner is a user of the host.

// gate judges what comes into the original.
type gate struct {
	from    *Root
	dir     string // its path
	at      string // what is put before paths in messages
	owners  bool   // the owners that files have come, too
	allow   []string
	new     map[string]ids   // directories that the original does not have
	owns    map[string]ids   // entries of the upperdir that get another owner
	coming  map[string]kinds // what comes or goes, for git
	refused []runtime.Refusal
}

type ids struct{ uid, gid uint32 }

func newGate(from *Root, at Place, opts runtime.ApplyOptions) *gate {
	g := &gate{
		from: from, dir: at.From, at: at.At, owners: opts.Owners, new: map[string]ids{}, owns: map[string]ids{},
		coming: map[string]kinds{},
	}
	for _, p := range opts.Allow {
		if rel, ok := Inside(at.At, path.Join("/", p)); ok {
			g.allow = append(g.allow, rel)
		}
	}
	return g
}

const capabilityXattr = "security.capability"

// comes judges one entry that gets into the original, after the directory that
// it is in.
func (g *gate) comes(e overlay.Entry) error {
	privileged := ""
	switch {
	case e.Type == overlay.TypeChar || e.Type == overlay.TypeBlock:
		g.refuse(e.Path, fmt.Sprintf("it is a device (%s %d:%d)", e.Type, e.Major, e.Minor), false)
		return nil
	case e.Type == overlay.TypeFile && e.Mode&(unix.S_ISUID|unix.S_ISGID) != 0:
		privileged = fmt.Sprintf("its set-id bits give the rights of user %d, group %d (mode %04o)", e.UID, e.GID,
			e.Mode)
	case e.Type == overlay.TypeFile && e.Xattrs[capabilityXattr] != "":
		privileged = "it has file capabilities"
	}
	if privileged != "" {
		if !slices.Contains(g.allow, e.Path) {
			g.refuse(e.Path, privileged, true)
		}
		return nil // with another owner it would be another program
	}
	want, err := g.owner(e)
	if err != nil {
		return err
	}
	if want != (ids{e.UID, e.GID}) {
		g.owns[e.Path] = want
	}
	return nil
}

// owner returns whose an entry is to be: what the original has by the name keeps
// its owner, what is new is its directory's owner's.
func (g *gate) owner(e overlay.Entry) (ids, error) {
	if g.owners {
		return ids{e.UID, e.GID}, nil
	}
	var to ids
	low, err := g.from.stat(e.Path)
	if err != nil {
		return ids{}, err
	}
	if low != nil {
		to = ids{low.Uid, low.Gid}
	} else if to, err = g.ownerOfDir(path.Dir(e.Path)); err != nil {
		return ids{}, err
	}
	if e.Type == overlay.TypeDir && !isDir(low) {
		g.new[e.Path] = to
	}
	return to, nil
}

func (g *gate) ownerOfDir(dir string) (ids, error) {
	if to, ok := g.new[dir]; ok {
		return to, nil
	}
	if dir == "." {
		a, err := attrsOf(g.from)
		return ids{a.UID, a.GID}, err
	}
	st, err := g.from.stat(dir)
	if err == nil && st == nil {
		err = &fs.PathError{Op: "stat", Path: dir, Err: unix.ENOENT}
	}
	if err != nil {
		return ids{}, err
	}
	return ids{st.Uid, st.Gid}, nil
}

// allowsBelow reports whether a path, or a directory that it is in, was named to be let through.
func (g *gate) allowsBelow(rel string) bool {
	return slices.ContainsFunc(g.allow, func(top string) bool { return within(rel, top) })
}

func (g *gate) refuse(rel, reason string, mayAllow bool) {
	r := runtime.Refusal{Path: path.Join(g.at, rel), Reason: reason, MayAllow: mayAllow}
	if !utf8.ValidString(r.Path) {
		r.PathB64 = base64.StdEncoding.EncodeToString([]byte(r.Path))
	}
	g.refused = append(g.refused, r)
}

// refusal is the error about what must not come, nil if there is nothing.
func refusal(places string, refused []runtime.Refusal) error {
	if len(refused) == 0 {
		return nil
	}
	list, flags := []string{}, []string{}
	for _, r := range refused {
		list = append(list, r.Path+": "+r.Reason)
		if r.MayAllow {
			flags = append(flags, "--allow "+r.Path)
		}
	}
	hint := "Remove devices in the sandbox."
	if len(flags) > 0 {
		hint = "What you want all the same is named one by one: agentbox apply " +
			strings.Join(clip(flags, 5), " ") + " ..."
		if len(flags) < len(list) {
			hint += " Devices never come: remove them in the sandbox."
		}
	}
	return &fault.Error{Err: fmt.Errorf("%w: this must not get into %s: %s", fault.ErrDenied, places,
		strings.Join(clip(list, 10), "; ")), Hint: hint}
}

// show replaces the owners in changes by those that the original will have.
func (g *gate) show(changes []runtime.Change) []runtime.Change {
	if g.owners {
		return changes
	}
	out := changes[:0]
	for _, c := range changes {
		if c.Change == string(overlay.Modified) {
			c.What = slices.DeleteFunc(c.What, func(s string) bool { return s == "owner" })
			if len(c.What) == 0 {
				continue
			}
			if c.Old != nil && c.New != nil {
				c.New.UID, c.New.GID = c.Old.UID, c.Old.GID
			}
		} else if o, ok := g.owns[strings.TrimPrefix(rawPath(c), "/")]; ok && c.New != nil {
			c.New.UID, c.New.GID = o.uid, o.gid
		}
		out = append(out, c)
	}
	return out
}

// PathOf returns the path of a change, also one that is no text.
func PathOf(c runtime.Change) string { return rawPath(c) }

func rawPath(c runtime.Change) string {
	if b, err := base64.StdEncoding.DecodeString(c.PathB64); err == nil && len(b) > 0 {
		return string(b)
	}
	return c.Path
}
