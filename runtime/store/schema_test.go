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
	const n, want = 11, "09ddaf05ad11e1d637bd38145980216859e0b44ba2069c494556315b3fa92f27"
	if got := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(migrations[:n], "\x00")))); got != want || len(migrations) != n {
		t.Errorf("the first %d migrations of %d have sum %s, want %s", n, len(migrations), got, want)
	}
}
