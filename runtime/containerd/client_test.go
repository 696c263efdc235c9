package containerd

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A deadline is one too when the daemon is the first to see it pass.
func TestDaemonSeesDeadline(t *testing.T) {
	for _, code := range []codes.Code{codes.DeadlineExceeded, codes.Unknown} {
		err := plain(status.Error(code, "context deadline exceeded: unknown"))
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", code, err)
		}
	}
}
