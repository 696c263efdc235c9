package wire

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"

	"github.com/agentbox/agentbox/runtime"
)

// TLSFiles are the PEM files of one side of mutual TLS. There is no other TCP.
type TLSFiles struct {
	Cert, Key string
	CA        string // the authority that signs the other side's certificates
}

// Config returns the configuration that both sides share.
func (f TLSFiles) Config() (*tls.Config, *x509.CertPool, error) {
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
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"},
	}, pool, nil
}
