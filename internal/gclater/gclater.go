// Package gclater has the garbage collector begin at 64 MiB instead of 4, from
// before most other packages are initialised on: most verbs are done before that.
// After its first round it goes on as always.
package gclater

import (
	"os"
	"runtime"
	"runtime/debug"
)

func init() {
	if os.Getenv("GOGC") != "" {
		return
	}
	debug.SetGCPercent(1600)
	runtime.AddCleanup(new([64]byte), func(percent int) { debug.SetGCPercent(percent) }, 100)
}
