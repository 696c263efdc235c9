package remote

import "testing"

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.9.9.9": true, "::1": true, "::ffff:127.0.0.1": true, "127.0.0.1.example": false,
		"10.0.0.1": false, "localhost.example": false, "0.0.0.0": false,
	} {
		if loopback(host) != want {
			t.Errorf("%s: %v", host, !want)
		}
	}
}
