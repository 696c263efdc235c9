package api

import (
	"context"
	"crypto/tls"
	"net"
	"time"
)

// DialTLS returns a client of the service at a TCP address, which it does not
// speak to yet.
func DialTLS(address string, files TLSFiles) (*Client, error) {
	config, pool, err := files.Config()
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
