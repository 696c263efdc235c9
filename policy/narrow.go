package policy

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// beneath reports whether a path is top or below it.
func beneath(top, p string) bool {
	return top == "/" || p == top || strings.HasPrefix(p, top+"/")
}

func beneathAny(tops []string, p string) bool {
	return slices.ContainsFunc(tops, func(top string) bool { return beneath(top, p) })
}

// matches reports whether a text fits a pattern: * stands for anything without a slash, ** for
// anything.
//
// For a text that is a pattern itself, true means that each text of that pattern fits pattern;
// stars of the text are then covered by no letters, and ** by nothing less than **.
func matches(pattern, text string) bool {
	// reach[i] is whether the pattern so far fits the first i bytes of the text.
	reach := make([]bool, len(text)+1)
	reach[0] = true
	for len(pattern) > 0 {
		switch {
		case strings.HasPrefix(pattern, "**"):
			for i := range len(text) {
				reach[i+1] = reach[i+1] || reach[i]
			}
			pattern = strings.TrimLeft(pattern, "*")
		case pattern[0] == '*':
			for i := range len(text) {
				// A ** of the text may hold a slash.
				slash := text[i] == '/' || strings.HasPrefix(text[i:], "**") ||
					i > 0 && text[i-1] == '*' && text[i] == '*'
				reach[i+1] = reach[i+1] || reach[i] && !slash
			}
			pattern = pattern[1:]
		default:
			for i := len(text) - 1; i >= 0; i-- {
				reach[i+1] = reach[i] && text[i] == pattern[0] && text[i] != '*'
			}
			reach[0] = false
			pattern = pattern[1:]
		}
	}
	return reach[len(text)]
}

func coversImage(base *Rules, pattern string) bool {
	return slices.ContainsFunc(base.Images, func(b string) bool { return matches(b, pattern) })
}

func coversAppArmor(base *Rules, profile string) bool {
	return slices.ContainsFunc(base.AppArmor, func(b string) bool { return matches(b, profile) })
}

// coversDigest reports whether base covers a digest, whose image may have any name.
func coversDigest(base *Rules, digest string) bool {
	return slices.Contains(base.Digests, digest) || slices.Contains(base.Images, "**")
}

// allowsNetwork reports whether a mode is allowed. A filtered sandbox reaches less than one on a
// bridge.
func (r *Rules) allowsNetwork(mode string) bool {
	return slices.Contains(r.Networks, mode) || mode == networkFiltered && slices.Contains(r.Networks, "bridge")
}

func (r *Rules) allowsEgress(rule EgressRule) bool {
	return r.Egress == nil || coversEgress(r.Egress, rule)
}

// coversIDs reports whether each id of own is in one of the ranges.
func coversIDs(base []IDRange, own IDRange) bool {
	sorted := slices.SortedFunc(slices.Values(base), func(a, b IDRange) int { return cmp.Compare(a.First, b.First) })
	next := uint64(own.First)
	for _, r := range sorted {
		if uint64(r.First) <= next && uint64(r.Last) >= next {
			next = uint64(r.Last) + 1
		}
	}
	return next > uint64(own.Last)
}

// allowsUID reports whether a user id, in digits, is allowed.
func (r *Rules) allowsUID(uid string) bool {
	n, err := strconv.ParseUint(uid, 10, 32)
	return err == nil && n < 1<<32-1 && !(r.NonRoot && n == 0) && coversIDs(r.UIDs, IDRange{uint32(n), uint32(n)})
}

// allUsers reports whether any user is allowed, so that the user behind a name does not matter.
func (r *Rules) allUsers() bool {
	return !r.NonRoot && coversIDs(r.UIDs, IDRange{0, 1<<32 - 2})
}
