// Package api is agentbox over HTTP: a server that hands every method of
// runtime.Service to callers on a unix socket, and a client that is one.
//
// A method is one route of the table in routes.go; its body and its answer are
// the JSON of the very types that the method takes and returns. What runs on is a
// stream: logs, events and progress are server-sent events (events.go), the
// terminal of an exec is a websocket (session.go), files are plain bodies
// (bodies.go). No stream that was cut short is taken for a whole one: each says
// how it ended. Errors are problems (problem.go), which become the same sentinels
// again in the client. requests.go remembers what was done for an idempotency
// key, listen.go knows who is at the other end of the socket.
//
// openapi.json is made from the table by the tests (go test -run OpenAPI -update),
// so that the program does not carry what makes it.
package api
