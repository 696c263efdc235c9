//go:build !amd64

package criu

import "golang.org/x/sys/unix"

// makesProcess are the calls that make one.
var makesProcess = []int{unix.SYS_CLONE, unix.SYS_CLONE3}
