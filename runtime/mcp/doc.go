// Package mcp gives an agent the tools of one or a few sandboxes: a server of the
// Model Context Protocol over stdin and stdout, or over HTTP.
//
// A call enters at its tool (files.go, search.go, commands.go, undo.go,
// boxes.go), which turns the arguments into one or two methods of
// runtime.Service and the result into a text that an agent can act upon. What
// all tools have in common is done once, in tool.go: which sandbox is meant, the
// checkpoint before a change, bounds of the output, errors as results that say
// what to do.
//
// File tools work on the sandbox's files from outside, through a policy.Scope,
// with the rights of the sandbox's user (user.go); a hostile process inside
// gains nothing by it. Commands run inside.
//
// The session is the server's life, not a connection's: over HTTP a client may
// reconnect, and newer versions of the protocol have no connection at all. What
// was made in a session (sandboxes, forks, running commands) ends with it.
package mcp
