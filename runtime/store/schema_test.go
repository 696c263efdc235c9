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
	const n, want = 10, "3ea6a81c0e3002cecef52e49577b05fe4f6d1ad35ba743efc1156d23eaad1364"
	if got := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(migrations[:n], "\x00")))); got != want || len(migrations) != n {
		t.Errorf("the first %d migrations of %d have sum %s, want %s", n, len(migrations), got, want)
	}
}
