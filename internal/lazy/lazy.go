// Package lazy makes what most commands never use when it is first used: agentbox
// is one program of many verbs, each of which waits for all that is made at its start.
package lazy

import (
	"regexp"
	"sync"
)

// Regexp returns a function that compiles text, which must be valid, once.
func Regexp(text string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })
}
