package engine

import (
	"testing"
	"time"
)

// ShortenHostAnswer has recovery wait less for the filesystems of host files.
func ShortenHostAnswer(t *testing.T, wait time.Duration) {
	was := hostAnswer
	hostAnswer = wait
	t.Cleanup(func() { hostAnswer = was })
}
