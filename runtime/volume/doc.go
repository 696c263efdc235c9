// Package volume owns copy-on-write volumes: a directory that stays as it is,
// and an upperdir that holds what the users of the volume change.
//
//	ROOT/volumes/NAME/volume.json   how it was requested
//	ROOT/volumes/NAME/upper, work   the changes
//	ROOT/volumes/NAME/merged        where it is mounted while in use
//	ROOT/volumes/NAME/lower         in place of the directory, if there is none
//	ROOT/volumes/NAME/refs.json     callers that have mounted it since boot
//	ROOT/volumes/NAME/paused.json   which containers a checkpoint holds frozen
//	ROOT/volumes/NAME/apply         an apply under way, undo: the last one done
//
// Docker's volume plugin (package dockerplugin/volume) turns the daemon's calls
// into Create, Mount, Unmount and Remove. To the Engine a volume is a sandbox
// without processes: Backend implements runtime.Backend, and what it freezes
// for a checkpoint are the containers that use the volume. The way back into the
// directory is in apply.go, by package apply.
//
// A process that changes a volume locks its directory and first finishes or
// rolls back what a killed one left there. A kill releases the lock.
package volume
