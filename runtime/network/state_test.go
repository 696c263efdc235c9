package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

func TestNames(t *testing.T) {
	root := t.TempDir()
	a, err := Open(root, root)
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	b, err := Open(link+"/", root)
	if err != nil {
		t.Fatal(err)
	}
	if a.tag != b.tag || a.bridge != b.bridge || a.table != b.table {
		t.Errorf("one root, two names: %+v, %+v", a, b)
	}
	long := strings.Repeat("f", 128)
	for _, name := range []string{a.bridge + "9999", a.veth("x"), a.veth(long)} {
		if len(name) >= unix.IFNAMSIZ {
			t.Errorf("%s is too long for a link", name)
		}
	}
	if len(a.alias(long)) > 255 {
		t.Errorf("alias %q is too long", a.alias(long))
	}
}

func TestState(t *testing.T) {
	w := open(t)
	e := w.setup("a", bridged)
	good, err := os.ReadFile(w.m.statePath())
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"empty":              "",
		"truncated":          string(good[:len(good)/2]),
		"not ours":           `{"version":1,"bridges":null,"sandboxes":{"a":{"bridge":"x","address":"1.2.3.4"}}}`,
		"foreign subnet":     strings.Replace(string(good), "/24", "/8", 1),
		"bridge of the host": strings.ReplaceAll(string(good), w.m.bridge+"0", "lo"),
		"bridge of Docker":   strings.ReplaceAll(string(good), w.m.bridge+"0", "docker0"),
		"subnet of the host": strings.ReplaceAll(string(good),
			strings.TrimSuffix(e.Prefix.String(), "0/24"), "203.0.113."),
		"path as id": strings.Replace(string(good), `"a"`, `"../a"`, 1),
	} {
		if err := os.WriteFile(w.m.statePath(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := w.m.Setup(t.Context(), "b", bridged); !errors.Is(err, fault.ErrCorrupt) ||
			len(fault.Hint(err)) == 0 {
			t.Errorf("%s: %v, want %v and a hint", name, err, fault.ErrCorrupt)
		}
	}
	// Teardown does what it can without the state.
	if err := w.m.Teardown(t.Context(), "a"); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("error %v, want %v", err, fault.ErrCorrupt)
	}
	if isNamespace(e.Path) {
		t.Error("Teardown left the namespace")
	}
	if err := os.WriteFile(w.m.statePath(), []byte(`{"version":3}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := w.m.List(t.Context()); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("error %v, want %v", err, fault.ErrUnsupported)
	}
	// The remedy works: without the file, all is made anew over what is left.
	if err := os.Remove(w.m.statePath()); err != nil {
		t.Fatal(err)
	}
	e = w.setup("a", bridged)
	serve(t, e.Path, "tcp4", ":80")
	mustReach(t, "", "tcp4", e.Address.String()+":80", "")
	w.release("a")
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestLock(t *testing.T) {
	w := open(t)
	v, err := w.m.begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := w.m.Setup(ctx, "a", bridged); !errors.Is(err, fault.ErrBusy) ||
		!errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want %v", err, fault.ErrBusy)
	}
	v.end()
	w.setup("a", bridged)
}

func TestFullBridge(t *testing.T) {
	s := &state{Sandboxes: map[string]*lease{}, Bridges: []bridge{{
		Name: "x", Subnet: netip.MustParsePrefix("10.1.2.0/24"),
	}}}
	b := &s.Bridges[0]
	for i := range 253 {
		a, ok := s.free(b)
		if !ok || a == b.gateway() || !b.Subnet.Contains(a) || a.As4()[3] == 255 {
			t.Fatalf("%d: %s, %v", i, a, ok)
		}
		s.assign(fmt.Sprint(i), &lease{}, b, a)
	}
	if a, ok := s.free(b); ok {
		t.Errorf("%s is free on a full bridge", a)
	}
	delete(s.Sandboxes, "100")
	if a, ok := s.free(b); !ok || a.String() != "10.1.2.102" {
		t.Errorf("%s, %v", a, ok)
	}
}

func TestPickSubnet(t *testing.T) {
	prefixes := func(s ...string) (p []netip.Prefix) {
		for _, s := range s {
			p = append(p, netip.MustParsePrefix(s))
		}
		return
	}
	for _, c := range []struct {
		taken []netip.Prefix
		first int
		want  string
	}{
		{nil, 0, "10.87.0.0/24"},
		{nil, 17, "10.87.17.0/24"},
		{prefixes("10.87.0.0/24", "10.87.1.128/25"), 0, "10.87.2.0/24"},
		{prefixes("10.87.255.7/32"), 255, "10.87.0.0/24"},
		{prefixes("10.87.0.0/16"), 0, "10.86.0.0/24"},
		{prefixes("10.0.0.0/8"), 0, "172.30.0.0/24"},
		{prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"), 0, "100.87.0.0/24"},
		{prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"), 0, "invalid Prefix"},
	} {
		if got, _ := pickSubnet(c.taken, c.first); got.String() != c.want {
			t.Errorf("taken %v, first %d: %s, want %s", c.taken, c.first, got, c.want)
		}
	}
}

// The host's own subnets are seen, and one that came later is an error with a remedy.
func TestHostSubnets(t *testing.T) {
	h, err := openHost()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	w := open(t)
	e := w.setup("a", bridged)
	w.teardown("a")
	if err := h.deleteLink(w.m.bridge + "0"); err != nil { // a reboot
		t.Fatal(err)
	}
	up, err := h.LinkByName("up0")
	if err != nil {
		t.Fatal(err)
	}
	addr := &netlink.Addr{IPNet: ipnet(netip.PrefixFrom(e.Gateway.Next(), 28))}
	if err := h.AddrAdd(up, addr); err != nil {
		t.Fatal(err)
	}
	_, err = w.m.Setup(t.Context(), "a", bridged)
	if !errors.Is(err, fault.ErrState) || len(fault.Hint(err)) == 0 {
		t.Errorf("error %v, want %v and a hint", err, fault.ErrState)
	}
	w.release("a")
	if e2 := w.setup("b", bridged); e2.Prefix == e.Prefix {
		t.Errorf("%s again", e2.Prefix)
	}
	if err := h.AddrDel(up, addr); err != nil {
		t.Fatal(err)
	}
}

func TestInvalid(t *testing.T) {
	w := open(t)
	port := func(ip string, host, box uint16, proto string) runtime.Network {
		return publish(runtime.Port{HostIP: ip, Host: host, Sandbox: box, Protocol: proto})
	}
	for _, c := range []struct {
		id   string
		n    runtime.Network
		want error
	}{
		{"", bridged, fault.ErrInvalid},
		{"..", bridged, fault.ErrInvalid},
		{"a/b", bridged, fault.ErrInvalid},
		{"a", runtime.Network{Mode: "macvlan"}, fault.ErrInvalid},
		{"a", runtime.Network{Mode: "none", Group: "g"}, fault.ErrInvalid},
		{"a", runtime.Network{Mode: "host", Ports: []runtime.Port{{Host: 1, Sandbox: 1}}}, fault.ErrInvalid},
		{"a", group(strings.Repeat("g", 200)), fault.ErrInvalid},
		{"a", port("", 0, 80, "tcp"), fault.ErrInvalid},
		{"a", port("", 80, 0, "tcp"), fault.ErrInvalid},
		{"a", port("", 80, 80, "sctp"), fault.ErrInvalid},
		{"a", port("localhost", 80, 80, "tcp"), fault.ErrInvalid},
		{"a", port("::1", 80, 80, "tcp"), fault.ErrUnsupported},
		{"a", port("203.0.113.9", 80, 80, "tcp"), fault.ErrInvalid}, // not the host's
		{"a", publish(runtime.Port{Host: 80, Sandbox: 80}, runtime.Port{Host: 80, Sandbox: 81}), fault.ErrInvalid},
	} {
		if _, err := w.m.Setup(t.Context(), c.id, c.n); !errors.Is(err, c.want) {
			t.Errorf("Setup(%q, %+v): %v, want %v", c.id, c.n, err, c.want)
		}
	}
	for _, verb := range []func(context.Context, string) error{w.m.Isolate, w.m.Connect, w.m.Teardown, w.m.Release} {
		if err := verb(t.Context(), "../x"); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("error %v, want %v", err, fault.ErrInvalid)
		}
		if err := verb(t.Context(), "unknown"); err != nil {
			t.Errorf("unknown id: %v", err)
		}
	}
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
