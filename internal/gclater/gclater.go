// Package gclater, when imported, makes the first garbage collection happen at 64 MiB of heap
// instead of 4. Most verbs end before that. After the first collection the pace is Go's own.
// It must be initialised before most other packages.
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
