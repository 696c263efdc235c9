//go:build !amd64

package criu

import "context"

// continueWaits knows the registers of x86-64 only.
func (r Runtime) continueWaits(context.Context, []int) error { return nil }
