package api

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// TLSFiles are the PEM files of one side of mutual TLS. There is no other TCP.
type TLSFiles struct {
	Cert, Key string
	CA        string // the authority that signs the other side's certificates
}

// config returns the configuration that both sides share.
func (f TLSFiles) config() (*tls.Config, *x509.CertPool, error) {
	if f.Cert == "" || f.Key == "" || f.CA == "" {
		return nil, nil, fmt.Errorf("%w: TCP needs a certificate, its key, and the authority of the other side's certificates", runtime.ErrInvalid)
	}
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
	}
	data, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, nil, fmt.Errorf("%w: %s has no certificate", runtime.ErrInvalid, f.CA)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}}, pool, nil
}

// ListenTLS listens at a TCP address for clients with a certificate of the authority. It
// serves as many connections as the socket does, without taking any from it.
func ListenTLS(address string, files TLSFiles) (net.Listener, error) {
	config, pool, err := files.config()
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

// DialTLS returns a client of the service at a TCP address, which it does not
// speak to yet.
func DialTLS(address string, files TLSFiles) (*Client, error) {
	config, pool, err := files.config()
	if err != nil {
		return nil, err
	}
	config.RootCAs = pool
	dialer := &tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: config}
	return dial("tcp://"+address, func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second) // the handshake too
		defer cancel()
		return dialer.DialContext(ctx, "tcp", address)
	}), nil
}
