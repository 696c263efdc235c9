package server

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

const (
	tarStream  = "application/x-tar"
	byteStream = "application/octet-stream"
)

// download is a verb that answers with a stream of bytes. An error before the first of
// them is a problem; a later one is reported in a trailer to callers that take trailers,
// and to others by cutting the connection.
func (h *Handler) download(
	path, summary, media string, do func(context.Context, *request[wire.None], io.Writer) error, params ...string,
) route {
	heavy := new(bool)
	return route{method: http.MethodGet, path: path, summary: summary, query: params, stream: media, heavy: heavy,
		serve: func(w http.ResponseWriter, r *http.Request) {
			trailers := strings.Contains(r.Header.Get("TE"), "trailers")
			out := &lateWriter{w: h.writer(w), ctx: r.Context(), first: func() {
				w.Header().Set("Content-Type", media)
				if trailers {
					w.Header().Set("Trailer", wire.TrailerStatus)
				}
			}}
			ctx, done, err := h.inTurn(r.Context(), *heavy)
			if err == nil {
				defer done()
				_, _, err = kept(ctx, h, func() (wire.None, error) {
					return wire.None{}, do(ctx, &request[wire.None]{Request: r, ref: ref(r)}, asideWriter{out, ctx})
				})
				done()
			}
			if err != nil {
				failedWith(w, problem(err).Code)
			}
			switch {
			case err != nil && !out.begun:
				writeProblem(w, err)
			case err != nil && !trailers:
				panic(http.ErrAbortHandler)
			default:
				out.begin()
				w.Header().Set(wire.TrailerStatus, encodeStatus(err))
			}
		}}
}

// lateWriter calls first before the first byte, and takes none when ctx has ended.
type lateWriter struct {
	w     io.Writer
	ctx   context.Context
	first func()
	begun bool
}

func (l *lateWriter) begin() {
	if !l.begun {
		l.begun = true
		l.first()
	}
}

func (l *lateWriter) Write(p []byte) (int, error) {
	if err := l.ctx.Err(); err != nil {
		return 0, err
	}
	l.begin()
	return l.w.Write(p)
}

// encodeStatus encodes how a stream ended, in a form that a header can hold.
func encodeStatus(err error) string {
	if err == nil {
		return "ok"
	}
	data, e := json.Marshal(problem(err))
	if e != nil {
		return url.QueryEscape(e.Error())
	}
	return url.QueryEscape(string(data))
}

// upload is a verb that takes a stream of bytes. Such a one is not repeated by key.
func upload[O any](
	h *Handler, method, path, summary, media string, do func(context.Context, *request[wire.None], io.Reader) (O,
		error), params ...string,
) route {
	heavy := new(bool)
	return route{method: method, path: path, summary: summary, query: params, stream: media, out: reflect.TypeFor[O](),
		heavy: heavy, serve: func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get(wire.HeaderKey) != "" {
				writeProblem(w, fmt.Errorf("%w: %s with a stream", runtime.ErrUnsupported, wire.HeaderKey))
				return
			}
			_ = h.before(r.Context()) // it has logged
			ctl := http.NewResponseController(w)
			in := stallReader{r.Body, ctl, h.opts.Stall, h.end}
			ctx, cancel := context.WithCancel(r.Context())
			defer cancel()
			var out O
			ctx, done, err := h.inTurn(ctx, *heavy)
			if err == nil {
				defer done()
				out, _, err = kept(ctx, h, func() (O, error) {
					return do(ctx, &request[wire.None]{Request: r, ref: ref(r)}, asideReader{in, ctx})
				})
				done()
			}
			if err != nil {
				w.Header().Set("Connection", "close") // what comes yet may be endless
				writeProblem(w, err)
			} else {
				h.writeJSON(w, r, out)
			}
			_ = ctl.Flush()
			in.discard()
		}}
}

// identities puts a file of keys from the request into memory, where only its path leads
// to it.
func identities(r *http.Request) (path string, done func() error, err error) {
	none := func() error { return nil }
	text := r.Header.Get(wire.HeaderIDs)
	if text == "" {
		return "", none, nil
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return "", none, fmt.Errorf("%w: %s: %v", runtime.ErrInvalid, wire.HeaderIDs, err)
	}
	fd, err := unix.MemfdCreate("identities", unix.MFD_CLOEXEC)
	if err != nil {
		return "", none, err
	}
	f := os.NewFile(uintptr(fd), "identities")
	if _, err := f.Write(data); err != nil {
		return "", none, errors.Join(err, f.Close())
	}
	return fmt.Sprintf("/proc/self/fd/%d", fd), f.Close, nil
}
