package server

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/agentbox/agentbox/runtime/api/wire"
)

// maxUnread bounds what is read of an upload after its answer.
const maxUnread = 64 << 20

// writer bounds how long the caller may take none of what is written.
func (h *Handler) writer(w http.ResponseWriter) io.Writer {
	return stallWriter{w, http.NewResponseController(w), h.opts.Stall, h.end}
}

// Deadlines cannot be set in tests without a connection.

type stallWriter struct {
	w   io.Writer
	ctl *http.ResponseController
	max time.Duration
	end context.Context
}

func (s stallWriter) Write(p []byte) (int, error) {
	max := s.max
	if s.end.Err() != nil {
		max = min(max, wire.LastTime)
	}
	_ = s.ctl.SetWriteDeadline(time.Now().Add(max))
	stop := context.AfterFunc(s.end, func() { _ = s.ctl.SetWriteDeadline(time.Now().Add(wire.LastTime)) })
	n, err := s.w.Write(p)
	if stop() {
		_ = s.ctl.SetWriteDeadline(time.Time{})
	}
	return n, err
}

// stallReader bounds how long the caller may send none of what is read. When the
// service has ended nothing more is.
type stallReader struct {
	r   io.Reader
	ctl *http.ResponseController
	max time.Duration
	end context.Context
}

func (s stallReader) Read(p []byte) (int, error) {
	if err := s.end.Err(); err != nil {
		return 0, err
	}
	_ = s.ctl.SetReadDeadline(time.Now().Add(s.max))
	stop := context.AfterFunc(s.end, func() { _ = s.ctl.SetReadDeadline(time.Now()) })
	n, err := s.r.Read(p)
	if stop() && (err == nil || err == io.EOF) {
		_ = s.ctl.SetReadDeadline(time.Time{})
	}
	if err != nil && err != io.EOF && s.end.Err() != nil {
		err = s.end.Err()
	}
	return n, err
}

// discard reads what a caller still sends, so that it comes to read its answer,
// but not for ever.
func (s stallReader) discard() {
	bound, cancel := context.WithTimeout(s.end, min(s.max, wire.LastTime))
	defer cancel()
	s.end = bound
	_, _ = io.CopyN(io.Discard, s, maxUnread)
}
