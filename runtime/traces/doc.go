// Package traces reports what agentbox does to OpenTelemetry, where the environment
// asks for it.
//
// Open reads the standard variables and starts the exporter of spans (OTLP over HTTP);
// Observer gives each verb of an Engine a span, with the audit log inside of it; the api
// package makes one of each request, and hands the caller's trace on (W3C trace context);
// Command is the span of a command line. A verb that only reads is a span only of its
// caller's trace: a client that polls each second would fill the collector. No span is
// made inside the Engine, which measures its phases (frozen, down, files) itself.
//
// Only what this package writes down gets into a span: ids, names, kinds, sizes, times and
// the codes of errors, but no arguments, environments, contents, or texts of errors. These
// may contain secrets, and a collector belongs to others.
//
// Spans are collected in memory and sent in the background. Spans that cannot be sent
// are dropped, with one warning; only the end of the process waits for them, for
// FlushTime at most.
package traces
