package criu

import "golang.org/x/sys/unix"

// makesProcess are the calls that make one.
var makesProcess = []int{unix.SYS_CLONE, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_CLONE3}
