// Package thorough scales tests: `make test` must end soon, `make test-long` tries everything.
// Asked reports whether it is the latter, Checks limits the rounds of a random test otherwise,
// and Patience is the factor by which time limits are longer on slow machines.
package thorough

import (
	"flag"
	"os"
	"strconv"
	"testing"
	"time"
)

// Asked reports whether all is to be tried that can be: `make test-long`.
func Asked() bool { return os.Getenv("AGENTBOX_LONG") != "" }

// Patience is how many times longer than elsewhere what only bounds a test may take:
// the machine of `make test-vm` may be emulated, and its host busy.
func Patience() time.Duration {
	if os.Getenv("AGENTBOX_VM") != "" {
		return 6
	}
	return 1
}

// Checks has rapid.Check go n rounds for the rest of a test, for properties of
// which a round is dear; not if all is to be tried, nor if the command line says
// how many. The test must not be parallel.
func Checks(t testing.TB, n int) {
	t.Helper()
	checks := flag.Lookup("rapid.checks")
	if Asked() || checks.Value.String() != checks.DefValue {
		return
	}
	set := func(value string) {
		if err := checks.Value.Set(value); err != nil {
			t.Fatal(err)
		}
	}
	set(strconv.Itoa(n))
	t.Cleanup(func() { set(checks.DefValue) })
}
