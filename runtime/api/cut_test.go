package api

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// dying is a client of a service that is killed when it has answered so much of a request.
func dying(t *testing.T, answer string) *Client {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), SocketName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if req, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				_, _ = io.Copy(io.Discard, req.Body)
				_, _ = io.WriteString(conn, answer)
			}
			conn.Close()
		}
	}()
	c := Dial(l.Addr().String())
	t.Cleanup(func() { c.Close() })
	return c
}

// A service that is killed while it answers is told as that, with what is known of
// the verb.
func TestCutShort(t *testing.T) {
	const (
		json    = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"id\""
		chunked = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nevent:\r\n"
		refused = "HTTP/1.1 404 Not Found\r\nContent-Type: application/problem+json\r\nContent-Length: 100\r\n\r\n{"
		upgrade = "HTTP/1.1 101 Switching Protocols\r\n"

		look, verb, keyed = "Nothing was to be changed: ask again.", "Look with 'agentbox ps' and 'agentbox audit ls' before you ask again", "ask again with the same idempotency key"
	)
	pause := func(ctx context.Context, c *Client) error { return c.Pause(ctx, "c") }
	list := func(ctx context.Context, c *Client) error { _, err := c.Sandboxes(ctx); return err }
	prune := func(ctx context.Context, c *Client) error {
		_, err := do[None](ctx, c, at("prune"), None{}, func([]byte) error { return nil })
		return err
	}
	logs := func(ctx context.Context, c *Client) error {
		return c.Logs(ctx, "c", runtime.LogOptions{}, io.Discard, io.Discard)
	}
	fetch := func(ctx context.Context, c *Client) error { return c.CopyFrom(ctx, "c", "/", io.Discard) }
	put := func(ctx context.Context, c *Client) error { return c.CopyTo(ctx, "c", "/", strings.NewReader("")) }
	exec := func(ctx context.Context, c *Client) error {
		_, err := c.Exec(ctx, "c", runtime.Process{Args: []string{"true"}}, runtime.Streams{})
		return err
	}
	for _, tc := range []struct {
		name, answer string
		ask          func(context.Context, *Client) error
		key, hint    string
	}{
		{"a verb, before its answer", "", pause, "", verb},
		{"a verb with a key", "", pause, "k", keyed},
		{"a verb, in its answer", json, pause, "", verb},
		{"a verb, in its events", chunked, prune, "", verb},
		{"a verb with a key, in its events", chunked, prune, "k", keyed},
		{"a verb, in its problem", refused, pause, "", verb},
		{"a list, before its answer", "", list, "", look},
		{"a list, in its answer", json, list, "", look},
		{"a stream", chunked, logs, "", look},
		{"a download", chunked, fetch, "", look},
		{"a download without its last word", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", fetch, "", look},
		{"an upload, which no key keeps from being done twice", "", put, "k", verb},
		{"a session", upgrade, exec, "", verb},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, ctx := dying(t, tc.answer), t.Context()
			if tc.key != "" {
				ctx = WithKey(ctx, tc.key)
			}
			err := tc.ask(ctx, c)
			if err == nil || !strings.HasPrefix(err.Error(), "service "+c.where+": it ended, or was cut off, before all of its answer was there: ") {
				t.Fatalf("%v", err)
			}
			if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
				t.Errorf("%v is no end of file", err)
			}
			hints := strings.Join(fault.Hint(err), "\n")
			if !strings.Contains(hints, tc.hint) || !strings.Contains(hints, "'journalctl -u agentbox' tells why.") {
				t.Errorf("%q does not say %q", hints, tc.hint)
			}
		})
	}
}
