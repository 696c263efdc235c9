package network

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestResolvers(t *testing.T) {
	for _, c := range []struct {
		name            string
		general, system string // the two files; empty: not there
		local           bool
		want            Endpoint
		warning         string
	}{
		{
			name:    "plain",
			general: "# mine\nnameserver 192.0.2.53\nnameserver 192.0.2.54\nsearch a.example b.example\noptions ndots:2 rotate\n",
			want: Endpoint{Nameservers: []string{"192.0.2.53", "192.0.2.54"},
				Search:  []string{"a.example", "b.example"},
				Options: []string{"ndots:2", "rotate"}},
		},
		{
			name:    "stub",
			general: "nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch a.example\n",
			system:  "nameserver 192.0.2.1\nnameserver 2001:db8::1\nsearch c.example\n",
			want: Endpoint{
				Nameservers: []string{"192.0.2.1"}, Search: []string{"a.example"},
				Options: []string{"edns0", "trust-ad"},
			},
		},
		{
			name: "stub for the host", general: "nameserver 127.0.0.53\n", system: "nameserver 192.0.2.1\n",
			local: true, want: Endpoint{Nameservers: []string{"127.0.0.53"}},
		},
		{
			name: "mixed", general: "nameserver 127.0.0.1\nnameserver 192.0.2.53\n",
			want: Endpoint{Nameservers: []string{"192.0.2.53"}},
		},
		{name: "loopback only", general: "nameserver 127.0.0.1\nnameserver ::1\n", warning: "loopback"},
		{name: "IPv6 only", general: "nameserver fe80::1%eth0\nnameserver 2001:db8::1\n", warning: "no IPv4 resolver"},
		{name: "nonsense", general: "nameserver\nnameserver x;y\nsearch\n\x00\xff", warning: "no IPv4 resolver"},
		{name: "none", warning: "no IPv4 resolver"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			m := &Manager{}
			for name, text := range map[string]string{"a": c.general, "b": c.system} {
				if text != "" {
					if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			m.resolv = []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
			var got Endpoint
			m.resolvers(&got, c.local)
			warnings := strings.Join(got.Warnings, " ")
			if (c.warning == "") != (warnings == "") || !strings.Contains(warnings, c.warning) {
				t.Errorf("warnings %q, want %q", warnings, c.warning)
			}
			got.Warnings = nil
			if d := cmp.Diff(c.want.Nameservers, got.Nameservers) + cmp.Diff(c.want.Search, got.Search) +
				cmp.Diff(c.want.Options, got.Options); d != "" {
				t.Error(d)
			}
		})
	}
}
