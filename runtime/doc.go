// Package runtime has the types that all packages of agentbox share: sandboxes, checkpoints
// and images (Sandbox, Checkpoint, Image, Spec), the operations on them (Service), the driver
// of a container engine (Backend), and the errors.
//
// It has no implementation. Package runtime/engine implements Service on this host, and
// package runtime/api is a client of the service that package runtime/api/server runs. A Go
// program can use either; package runtime/session removes what the program has created when
// it ends.
package runtime
