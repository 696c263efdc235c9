package wire

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/agentbox/agentbox/runtime"
)

// A session is a process with its streams, over a websocket. Binary messages are
// data: input as it is; output behind one byte, 1 for stdout and 2 for stderr.
// Text messages are JSON, a Message each. The caller's first is what to do
// (Open); it may then send as much input as Window bytes, and as much more as was
// acknowledged. The service's last is an exit, an end or a problem; a session
// without one was cut short.

// Window is how much input may be on its way.
const Window = 256 << 10

// MaxMessage bounds one message.
const MaxMessage = 1 << 20

// Subprotocol names the above.
const Subprotocol = "agentbox.v1"

// The kinds of messages.
const (
	MsgOpen    = "open"    // from the caller: Open
	MsgResize  = "resize"  // from the caller: Size
	MsgEOF     = "eof"     // from the caller: the end of its input
	MsgStarted = "started" // it runs
	MsgAck     = "ack"     // Bytes of input were taken
	MsgExit    = "exit"    // the last of an exec
	MsgEnd     = "end"     // the last of start and attach
	MsgProblem = "problem" // the last that went wrong
)

// Message is one text message.
type Message struct {
	Kind    string        `json:"kind"`
	Open    *Open         `json:"open,omitempty"`
	Size    *runtime.Size `json:"size,omitempty"`
	Bytes   int           `json:"bytes,omitempty"`
	Exit    int           `json:"exit,omitempty"`
	Problem *Problem      `json:"problem,omitempty"`
}

// Open says what a session connects.
type Open struct {
	Process    *runtime.Process `json:"process,omitempty"` // of an exec
	Stdin      bool             `json:"stdin"`
	Stdout     bool             `json:"stdout"`
	Stderr     bool             `json:"stderr"`
	Resize     bool             `json:"resize"`                // the terminal's size will come, and its changes
	DetachKeys []byte           `json:"detach_keys,omitempty"` // in base64
	SecretValues
}

// LastTime is how long a service that has ended waits for callers to take their last
// answers, and how long it drains an upload that is no longer read.
const LastTime = 5 * time.Second

// A Line is one side of a session.
type Line struct {
	Conn  *websocket.Conn
	Stall time.Duration // how long the other side may take none of a message; 0: for ever
	mu    sync.Mutex
}

// Send sends a message.
func (l *Line) Send(ctx context.Context, m Message) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return l.Write(ctx, websocket.MessageText, data)
}

// Write sends a message of a kind.
func (l *Line) Write(ctx context.Context, kind websocket.MessageType, data []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Stall == 0 {
		return l.Conn.Write(ctx, kind, data)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// A message that ends halfway ends the line, and there is a last one to come.
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.Stall)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(LastTime, cancel) })()
	return l.Conn.Write(bound, kind, data)
}

// Read returns the next message, or data.
func (l *Line) Read(ctx context.Context) (m Message, data []byte, err error) {
	kind, data, err := l.Conn.Read(ctx)
	if err != nil || kind == websocket.MessageBinary {
		return m, data, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, nil, fmt.Errorf("%w: message: %v", runtime.ErrInvalid, err)
	}
	return m, nil, nil
}
