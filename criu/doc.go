// Package criu takes the processes of a container out of the kernel and looks
// at what was taken: it controls one container of an OCI runtime (Runtime),
// dumps it (Dump), says why a dump or restore failed (Diagnose), reads images
// (Processes), finds what a dump would leave out (Strays) and what the host
// can do (Check).
//
// A dump runs CRIU through the OCI runtime, which knows the container's
// mounts and namespaces. Options that the runtime's command line lacks travel
// in a CRIU configuration file, which the bundle's annotation org.criu.config
// names, or else the environment; all of them are in options.go. A restore is done by the OCI runtime
// wrapper, cmd/agentbox-runtime, which finds it staged by package criu/stage.
// Neither is to be seen by the calls that processes wait in: see waits.go.
//
// The package knows paths, pids and container ids, nothing of sandboxes.
package criu
