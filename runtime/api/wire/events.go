package wire

import (
	"unicode/utf8"

	"github.com/agentbox/agentbox/runtime"
)

// EventStream is the media type of server-sent events.
const EventStream = "text/event-stream"

// Events of a stream. The last one is a result, an end or a problem; a stream
// without one was cut short.
const (
	EventProgress = "progress" // of a verb
	EventResult   = "result"   // of a verb: what it answers without events
	EventStdout   = "stdout"   // of logs: Text
	EventStderr   = "stderr"
	EventEvent    = "event" // of events
	EventFiles    = "files" // of files: a Files
	EventEnd      = "end"
	EventProblem  = "problem"
)

// Files is a part of a list of files.
type Files struct {
	Files []runtime.FileEntry `json:"files"`
}

// Text is a piece of output.
type Text struct {
	Text string `json:"text,omitempty"`
	B64  []byte `json:"b64,omitempty"` // what is not UTF-8, in base64
}

// NewText returns output as a Text.
func NewText(p []byte) Text {
	if utf8.Valid(p) {
		return Text{Text: string(p)}
	}
	return Text{B64: p}
}

// Bytes returns the output.
func (t Text) Bytes() []byte {
	if t.B64 != nil {
		return t.B64
	}
	return []byte(t.Text)
}
