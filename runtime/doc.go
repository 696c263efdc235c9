// Package runtime has the words that all packages of agentbox share: what a sandbox, a
// checkpoint and an image are (Sandbox, Checkpoint, Image, Spec), what can be asked for
// (Service), what drives a container engine (Backend), and the errors.
//
// It does nothing itself. Package runtime/engine implements Service on this host, and
// package runtime/api through a socket. A Go program takes either; package
// runtime/session removes what the program made when it ends.
package runtime
