package mcp

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agentbox/agentbox/internal/guard"
)

// Endpoint is the path of the server over HTTP.
const Endpoint = "/mcp"

const (
	maxBody     = 16 << 20  // bytes of a request: a file of maxFile, quoted
	idleSession = time.Hour // after which a connection's state is dropped; the session's is not
)

// HTTPOptions restrict the use of the server over HTTP.
type HTTPOptions struct {
	Token   string   // what callers must have as their bearer token; empty: nothing
	Origins []string // web pages that may use it; all others, which browsers name, are refused
}

// Handler serves the session over streamable HTTP.
func (s *Server) Handler(opts HTTPOptions) http.Handler {
	serve := sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return s.sdk }, &sdk.StreamableHTTPOptions{
		Logger: s.log, SessionTimeout: idleSession, MaxRequestBodyBytes: maxBody, PropagateRequestCancellation: true,
	})
	want := sha256.Sum256([]byte(opts.Token))
	mux := http.NewServeMux()
	mux.HandleFunc(Endpoint, func(w http.ResponseWriter, r *http.Request) {
		if origin := r.Header.Get("Origin"); origin != "" && !slices.Contains(opts.Origins, origin) {
			http.Error(w, "this web page may not use the server", http.StatusForbidden)
			return
		}
		if opts.Token != "" {
			scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
			got := sha256.Sum256([]byte(strings.TrimSpace(token)))
			if !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
				w.Header().Set("WWW-Authenticate", "Bearer")
				http.Error(w, "the bearer token is missing or wrong", http.StatusUnauthorized)
				return
			}
		}
		serve.ServeHTTP(w, r)
	})
	return mux
}

// ServeHTTP serves clients on l until ctx ends, which is no error.
func (s *Server) ServeHTTP(ctx context.Context, l net.Listener, opts HTTPOptions) error {
	server := &http.Server{Handler: s.Handler(opts), ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10}
	ended := guard.Start(func() error { return server.Serve(l) })
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	// Answers under way may go out; streams have no end of their own.
	short, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := server.Shutdown(short); err != nil {
		_ = server.Close()
	}
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
