// Package server is agentbox over HTTP: it offers every method of runtime.Service to callers on
// a unix socket, and by mutual TLS. Package api is its client, package wire what both share.
//
// A method is one route of the tables in routes.go, effects.go, leases.go and health.go; its
// body and its answer are the JSON of the very types that the method takes and returns.
// Open-ended data is streamed: logs, events and progress are server-sent events (events.go), the
// terminal of an exec is a websocket (session.go), files are plain bodies (bodies.go). Every
// stream says how it ended, so a truncated one is detected. Errors are problems (problem.go),
// which become the same sentinels again in the client. requests.go records what was done for an
// idempotency key, listen.go identifies the peer of a connection.
//
// openapi.json is made from the table by the tests (go test -run OpenAPI -update),
// so that the program does not carry what makes it.
package server
