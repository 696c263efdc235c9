// Package api is the client of the service: a Client is the runtime.Service of an `agentbox
// serve`, over HTTP on a unix socket or by mutual TLS.
//
// It has what a Go program needs to drive agentbox, and nothing that works on a host. Package
// server is the other side; both share the words of package wire. A method is one route there;
// its body and its answer are the JSON of the very types that the method takes and returns.
// Every stream says how it ended, so a truncated one is detected, and errors are the same
// sentinels as those of the engine.
package api
