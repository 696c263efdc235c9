// Package traces tells OpenTelemetry what agentbox does, where the environment
// asks for it.
//
// Open reads the standard variables and starts what sends spans (OTLP over HTTP);
// Observer gives each verb of an Engine a span, with the audit log inside of it; the api
// package makes one of each request, and hands the caller's
// trace on (W3C trace context); Command is the span of a command line.
//
// Only what this package writes down gets into a span: ids, names, kinds, sizes,
// times and the codes of errors, but no arguments, environments, contents, or texts
// of errors.
//
// Spans are collected in memory and sent beside all else. What cannot be sent is
// said once and dropped; nothing waits for it but the end of the process, for
// FlushTime at most.
package traces
