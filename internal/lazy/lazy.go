// Package lazy postpones work at program start: Regexp compiles a pattern at its first use.
// All verbs share one program, and most verbs need few of its patterns.
package lazy

import (
	"regexp"
	"sync"
)

// Regexp returns a function that compiles text, which must be valid, once.
func Regexp(text string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })
}
