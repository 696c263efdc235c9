package policy

import (
	"fmt"
	"path"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// Glob is a pattern of paths: *, ? and [a-z] match within a name, ** any number
// of directories, and {a,b} either. Names that begin with a dot are names like
// any other.
type Glob struct {
	// Base is the beginning of the pattern that has no wildcard: where a walk
	// begins. It may be absolute, and may have ".." in it.
	Base    string
	pattern string
	ways    [][]string // the rest, braces expanded, by component
}

const (
	maxGlob       = 4096 // bytes
	maxGlobWays   = 64   // that braces expand to
	maxGlobDepth  = 64   // components
	anyDepth      = "**"
	globMetaChars = `*?[{\`
)

// ParseGlob parses a pattern. A meaningless one is ErrInvalid; a ".." after a wildcard, whose
// target cannot be judged, is ErrDenied.
func ParseGlob(pattern string) (Glob, error) {
	bad := func(why string) (Glob, error) {
		return Glob{}, fmt.Errorf("%w: the pattern %q %s", fault.ErrInvalid, clip(pattern, 200), why)
	}
	switch {
	case pattern == "":
		return bad("is empty")
	case len(pattern) > maxGlob:
		return bad("is too long")
	case strings.ContainsRune(pattern, 0):
		return bad("has a NUL in it")
	}
	g := Glob{pattern: pattern}
	rest := pattern
	if i := strings.IndexAny(rest, globMetaChars); i >= 0 {
		rest = rest[:i]
	}
	// The last name is matched, not walked from, also when it is a plain one.
	cut := strings.LastIndexByte(rest, '/') + 1
	g.Base, rest = pattern[:cut], pattern[cut:]
	ways, ok := braces(rest)
	if !ok {
		return bad(fmt.Sprintf("has braces that do not match, or stand for more than %d patterns", maxGlobWays))
	}
	for _, way := range ways {
		var parts []string
		for c := range strings.SplitSeq(way, "/") {
			switch c {
			case "", ".":
				continue
			case "..":
				return Glob{}, &fault.Error{Op: "glob", ID: pattern,
					Err:  fmt.Errorf("%w: a .. cannot follow a wildcard", fault.ErrDenied),
					Hint: "Write .. at the beginning of the pattern, or name the directory to search in as the path."}
			case anyDepth:
				if len(parts) > 0 && parts[len(parts)-1] == anyDepth {
					continue
				}
			default:
				if _, err := path.Match(c, ""); err != nil {
					return bad("has a wrong [class] or ends with a backslash")
				}
			}
			parts = append(parts, c)
		}
		if len(parts) > maxGlobDepth {
			return bad("has too many parts")
		}
		g.ways = append(g.ways, parts)
	}
	return g, nil
}

func (g Glob) String() string { return g.pattern }

// Match reports whether the path rel, relative to the walk's base, is meant.
func (g Glob) Match(rel string) bool {
	whole, _ := g.reach(rel)
	return whole
}

// Below reports whether anything below the directory rel can be meant.
func (g Glob) Below(rel string) bool {
	_, part := g.reach(rel)
	return part
}

// leadsBelow is Below, but that a ** at the beginning of the whole pattern does not stand for rel: what it
// means below rel it means wherever that is.
func (g Glob) leadsBelow(rel string) bool {
	for _, way := range g.ways {
		if g.Base == "" && len(way) > 0 && way[0] == anyDepth {
			// Each end of rel is where the rest of the pattern may begin.
			for at := rel; at != ""; _, at, _ = strings.Cut(at, "/") {
				if (Glob{ways: [][]string{way[1:]}}).Below(at) {
					return true
				}
			}
		} else if (Glob{ways: [][]string{way}}).Below(rel) {
			return true
		}
	}
	return false
}

// reach follows rel through all ways at once: at[i] says that the first i parts
// of a way can stand for what was read.
func (g Glob) reach(rel string) (whole, part bool) {
	for _, way := range g.ways {
		at := make([]bool, len(way)+1)
		at[0] = true
		skip(way, at)
		for name := range strings.SplitSeq(rel, "/") {
			if name == "" {
				continue
			}
			for i := len(way); i >= 0; i-- {
				// Any number of directories goes on with one more.
				stays := at[i] && i < len(way) && way[i] == anyDepth
				moves := false
				if i > 0 && at[i-1] && way[i-1] != anyDepth {
					moves, _ = path.Match(way[i-1], name)
				}
				at[i] = stays || moves
			}
			skip(way, at)
		}
		whole = whole || at[len(way)]
		// A pattern that ends with ** covers all that is below, too.
		part = part || contains(at[:len(way)])
	}
	return whole, part
}

// skip lets each ** stand for no directory at all.
func skip(way []string, at []bool) {
	for i, p := range way {
		if at[i] && p == anyDepth {
			at[i+1] = true
		}
	}
}

func contains(at []bool) bool {
	for _, yes := range at {
		if yes {
			return true
		}
	}
	return false
}

// braces expands {a,b} from the left, nested ones too.
func braces(s string) ([]string, bool) {
	done, todo := []string(nil), []string{s}
	for steps := 0; len(todo) > 0; steps++ {
		if steps > 8*maxGlobWays || len(todo)+len(done) > maxGlobWays {
			return nil, false
		}
		s, todo = todo[0], todo[1:]
		open, close, commas, ok := firstBraces(s)
		if !ok {
			return nil, false
		}
		if open < 0 {
			done = append(done, s)
			continue
		}
		from := open + 1
		for _, to := range append(commas, close) {
			todo = append(todo, s[:open]+s[from:to]+s[close+1:])
			from = to + 1
		}
	}
	return done, true
}

// firstBraces finds the first pair of braces outside of a [class] and the commas
// between them; open is -1 when there is none.
func firstBraces(s string) (open, close int, commas []int, ok bool) {
	open = -1
	depth, class := 0, false
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '\\':
			i++
		case class:
			class = c != ']'
		case c == '[':
			class = true
		case c == '{':
			if depth == 0 {
				open = i
			}
			depth++
		case c == ',' && depth == 1:
			commas = append(commas, i)
		case c == '}' && depth > 0:
			if depth--; depth == 0 {
				return open, i, commas, true
			}
		}
	}
	return -1, 0, nil, depth == 0
}

func clip(s string, most int) string {
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
