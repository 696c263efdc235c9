package store

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
)

// Roots of earlier versions have been through these migrations, in this order: none may
// change, go or come in between. A new one is added at the end, and then here.
func TestReleasedMigrationsStay(t *testing.T) {
	const n, want = 12, "5dfa8b383393e5cd3a0b9b0df788233f6352c20f9d0daa7180697eadd8bf5eda"
	if got := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(migrations[:n], "\x00")))); got != want || len(migrations) != n {
		t.Errorf("the first %d migrations of %d have sum %s, want %s", n, len(migrations), got, want)
	}
}
