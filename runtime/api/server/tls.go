package server

import (
	"crypto/tls"
	"net"

	"github.com/agentbox/agentbox/runtime/api/wire"
)

// ListenTLS listens at a TCP address for clients with a certificate of the authority. It
// serves as many connections as the socket does, without taking any from it.
func ListenTLS(address string, files wire.TLSFiles) (net.Listener, error) {
	config, pool, err := files.Config()
	if err != nil {
		return nil, err
	}
	config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, pool
	// Each connection shows its certificate anew.
	config.SessionTicketsDisabled = true
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	limit := newLimited(l, maxConns, nil)
	return &secured{tls.NewListener(limit, config), limit}, nil
}

// secured is a listener whose connections are by TLS.
type secured struct {
	net.Listener
	limited *limited
}

// limit says, before the first connection, which may make room for others.
func (s *secured) limit(q *quiet) { s.limited.quiet = q }
