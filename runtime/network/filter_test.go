package network

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

func TestFiltered(t *testing.T) {
	w := filtered(t)
	serve(t, "", "tcp4", ":8080")
	serve(t, internet, "tcp4", ":5432")
	serve(t, internet, "udp4", ":443")
	c := client{t, w.setup("a", egressTo("good.example 80,443,22", "*.wild.example 443", "rebind.example",
		"local.example", "metadata.example", "host.example", "broken.example",
		internetAddress+" 5432", "0.0.0.0/0 9999", "169.254.169.254"))}
	other := client{t, w.setup("b", egressTo())}
	if len(c.Nameservers) != 1 || c.Nameservers[0] != c.Gateway.String() {
		t.Errorf("resolvers %q, want the gateway", c.Nameservers)
	}
	web, secure, ssh := internetAddress+":80", internetAddress+":443", internetAddress+":22"

	t.Run("names", func(t *testing.T) {
		for _, q := range []struct {
			server, network, name string
			kind                  dnsmessage.Type
			want                  string
		}{
			{c.Gateway.String(), "udp4", "good.example.", dnsmessage.TypeA, "Success " + internetAddress},
			{c.Gateway.String(), "udp4", "GOOD.Example.", dnsmessage.TypeA, "Success " + internetAddress},
			{c.Gateway.String(), "tcp4", "good.example.", dnsmessage.TypeA, "Success " + internetAddress},
			{"8.8.8.8", "udp4", "sub.wild.example.", dnsmessage.TypeA, "Success " + internetAddress},
			{c.Gateway.String(), "udp4", "good.example.", dnsmessage.TypeAAAA, "Success"},
			{c.Gateway.String(), "udp4", "good.example.", dnsmessage.TypeTXT, "Success"},
			{c.Gateway.String(), "udp4", "other.example.", dnsmessage.TypeA, "NameError"},
			{internetAddress, "udp4", "other.example.", dnsmessage.TypeA, "NameError"},
			{c.Gateway.String(), "udp4", "wild.example.", dnsmessage.TypeA, "NameError"},
			{c.Gateway.String(), "udp4", "rebind.example.", dnsmessage.TypeA, "NameError"},
			{c.Gateway.String(), "udp4", "local.example.", dnsmessage.TypeA, "NameError"},
			{c.Gateway.String(), "udp4", "metadata.example.", dnsmessage.TypeA, "NameError"},
			{c.Gateway.String(), "udp4", "host.example.", dnsmessage.TypeA, "NameError"},
			{c.Gateway.String(), "udp4", "broken.example.", dnsmessage.TypeA, "ServerFailure"},
		} {
			said, err := c.lookUp(q.server, q.network, q.name, q.kind)
			want(t, q.name+" "+q.kind.String(), said, err, q.want)
		}
		w.mustDeny("a", "dns|other.example.||no rule allows the name")
		w.mustDeny("a", "dns|broken.example.||it cannot be looked up: ")
		w.mustDeny("a", "dns|rebind.example.||the name leads nowhere that is allowed: rebind.example is at 10.1.2.3")
	})
	t.Run("web", func(t *testing.T) {
		said, err := c.http(web, "good.example")
		want(t, "http", said, err, "200 page of good.example")
		said, err = c.https(secure, "good.example")
		want(t, "https", said, err, "200 page of good.example")
		said, err = c.https("192.0.2.1:443", "sub.wild.example")
		want(t, "https by an address of no meaning", said, err, "200 page of sub.wild.example")
		said, err = c.http(web, "other.example")
		want(t, "http to another name", said, err,
			"403 agentbox: egress denied: no rule allows the name on this port\n")
		w.mustDeny("a", "http|other.example|"+web+"|no rule allows the name on this port")
		said, err = c.http(web, internetAddress)
		want(t, "http by address", said, err,
			"403 agentbox: egress denied: no rule allows the address, and the request names no host\n")
		for name, why := range map[string]string{
			"other.example": "no rule allows the name on this port",
			"":              "no rule allows the address, and the ClientHello names no server",
		} {
			said, err = c.https(secure, name)
			refused(t, "https to "+name, said, err)
			w.mustDeny("a", "tls|"+name+"|"+secure+"|"+why)
		}
		said, err = c.http(internetAddress+":80", "sub.wild.example")
		want(t, "a port that no rule has", said, err,
			"403 agentbox: egress denied: no rule allows the name on this port\n")
		said, err = c.https(secure, "rebind.example")
		refused(t, "a name at a private address", said, err)
		w.mustDeny("a", "tls|rebind.example|"+secure+"|the name leads nowhere")
		said, err = c.raw(secure, "hello\n")
		refused(t, "neither TLS nor HTTP", said, err)
		w.mustDeny("a", "tcp||"+secure+"|on this port only TLS and HTTP")
	})
	t.Run("another sandbox comes", func(t *testing.T) {
		conn, err := c.dial("tcp4", secure)
		if err != nil {
			t.Fatal(err)
		}
		// The proxy is told of it while it does not know yet where this one leads.
		w.setup("d", egressTo())
		said, err := get(tls.Client(conn, &tls.Config{ServerName: "good.example", InsecureSkipVerify: true}),
			"good.example") //nolint:gosec // a test's server
		want(t, "https", said, err, "200 page of good.example")
		w.release("d")
	})
	t.Run("second request", func(t *testing.T) {
		conn, err := c.dial("tcp4", web)
		if err != nil {
			t.Fatal(err)
		}
		said, err := get(conn, "good.example")
		want(t, "first", said, err, "200 page of good.example")
		said, err = get(conn, "other.example")
		want(t, "second", said, err, "403 agentbox: egress denied: no rule allows the name on this port\n")
	})
	t.Run("other protocols", func(t *testing.T) {
		said, err := c.raw(ssh, "SSH-2.0-client\r\n")
		want(t, "ssh", said, err, "SSH-2.0-test")
		said, err = c.raw(ssh, "")
		want(t, "a server that begins", said, err, "SSH-2.0-test")
		said, err = c.raw("192.0.2.1:22", "SSH-2.0-client\r\n")
		refused(t, "ssh to no allowed name", said, err)
		w.mustDeny("a", "tcp||192.0.2.1:22|no rule allows the address, and it is none of an allowed name")
		said, err = c.http(ssh, "other.example")
		want(t, "http to another name on a port for ssh", said, err,
			"403 agentbox: egress denied: no rule allows the name on this port\n")
		said, err = other.raw(ssh, "SSH-2.0-client\r\n")
		refused(t, "ssh of a sandbox without rules", said, err)
		seen, err := c.raw(internetAddress+":5432", "")
		if host, _, _ := net.SplitHostPort(seen); err != nil || host != hostAddress {
			t.Errorf("an address that is allowed: %q, %v", seen, err)
		}
	})
	t.Run("never", func(t *testing.T) {
		for _, to := range []string{
			"169.254.169.254:80", c.Gateway.String() + ":8080", hostAddress + ":8080", hostAddress + ":9999",
		} {
			conn, err := c.dial("tcp4", to)
			if err == nil {
				_, err = io.WriteString(conn, "?\n")
				if err == nil {
					_, err = conn.Read(make([]byte, 1))
				}
			}
			refused(t, to, "", err)
		}
		mustNotReach(t, c.Path, "tcp4", other.Address.String()+":9999")
		w.mustDeny("a", "tcp||169.254.169.254:80|")
		w.mustDeny("a", "tcp||"+hostAddress+":8080|")
	})
	t.Run("no UDP, no ICMP", func(t *testing.T) {
		mustNotReach(t, c.Path, "udp4", secure)
		w.mustDeny("a", "udp||"+secure+"|only TCP, DNS")
		if err := in(t, c.Path, func() error {
			conn, err := net.Dial("ip4:icmp", internetAddress)
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		w.mustDeny("a", "icmp||"+internetAddress+"|")
		if err := in(t, c.Path, func() error {
			conn, err := net.DialTimeout("tcp6", "[2001:db8::1]:443", time.Second)
			if err == nil {
				conn.Close()
			}
			return err
		}); !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EADDRNOTAVAIL) {
			t.Errorf("IPv6: %v", err)
		}
	})
	t.Run("inward", func(t *testing.T) {
		serve(t, c.Path, "tcp4", ":80")
		mustReach(t, "", "tcp4", c.Address.String()+":80", "")
	})
	t.Run("not a sandbox", func(t *testing.T) {
		plain := w.setup("c", bridged)
		for _, p := range w.state().Bridges {
			if p.Proxy == nil {
				t.Fatal("no ports")
			}
			mustNotReach(t, plain.Path, "tcp4", fmt.Sprintf("%s:%d", plain.Gateway, p.Proxy.TCP))
		}
		mustReach(t, plain.Path, "udp4", secure, "")
	})
	t.Run("UDP to addresses", func(t *testing.T) {
		w.secondInternet()
		serve(t, "", "udp4", ":5353")
		serve(t, internet, "udp4", ":5353")
		e := client{t, w.setup("e", egressTo(internetAddress+"/32 443/udp,5000-5400/udp"))}
		mustReach(t, e.Path, "udp4", internetAddress+":5353", hostAddress)
		mustReach(t, e.Path, "udp4", secure, hostAddress)
		mustNotReach(t, e.Path, "udp4", "10.99.0.2:5353")
		said, err := e.raw(internetAddress+":5000", "hello\n")
		refused(t, "TCP where UDP is allowed", said, err)
		// Everything: no private network, not the host, no sandbox, no other resolver.
		change := func(rules ...string) {
			t.Helper()
			if err := w.m.SetEgress(t.Context(), "e", rules); err != nil {
				t.Fatal(err)
			}
		}
		change("0.0.0.0/0 1-65535/udp")
		mustReach(t, e.Path, "udp4", secure, hostAddress)
		serve(t, c.Path, "udp4", ":5353")
		for _, to := range []string{"10.99.0.2", hostAddress, e.Gateway.String(), c.Address.String()} {
			mustNotReach(t, e.Path, "udp4", to+":5353")
		}
		w.mustDeny("e", "udp||10.99.0.2:5353|only TCP, DNS")
		answer, err := e.lookUp(internetAddress, "udp4", "good.example.", dnsmessage.TypeA)
		want(t, "the internet's resolver", answer, err, "NameError")
		change("10.99.0.0/24 5353/udp")
		mustReach(t, e.Path, "udp4", "10.99.0.2:5353", "10.99.0.1")
		mustNotReach(t, e.Path, "udp4", secure)
		change()
		mustNotReach(t, e.Path, "udp4", "10.99.0.2:5353")
		w.release("e")
	})
	if all := strings.Join(w.denied("b"), "\n"); strings.Contains(all, "good.example") || !strings.Contains(all, ssh) {
		t.Errorf("events of the other sandbox:\n%s", all)
	}
	for _, id := range []string{"a", "b", "c"} {
		w.release(id)
	}
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// secondInternet gives the internet an address of a private network, too.
func (w *world) secondInternet() {
	w.Helper()
	host, err := openHost()
	if err != nil {
		w.Fatal(err)
	}
	defer host.Close()
	there, err := enter(internet)
	if err != nil {
		w.Fatal(err)
	}
	defer there.Close()
	if err := errors.Join(address4(host, "up0", "10.99.0.1"), address4(there, "eth0", "10.99.0.2")); err != nil &&
		!errors.Is(err, unix.EEXIST) {
		w.Fatal(err)
	}
}

func (w *world) state() *state {
	w.Helper()
	s, err := w.m.load()
	if err != nil {
		w.Fatal(err)
	}
	return s
}

// proxyPid is the process that holds the lock, workerPid the one that it has
// started.
func (w *world) proxyPid() int  { return w.pid(false) }
func (w *world) workerPid() int { return w.pid(true) }

func (w *world) pid(worker bool) int {
	w.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		w.Fatal(err)
	}
	for _, path := range found {
		b, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(b), roleEnv+"=egress "+w.m.root+"\x00") &&
			strings.Contains(string(b), workerEnv+"=1") == worker {
			var pid int
			if _, err := fmt.Sscanf(path, "/proc/%d/", &pid); err == nil {
				return pid
			}
		}
	}
	return 0
}

func TestFilterOutlives(t *testing.T) {
	w := filtered(t)
	c := client{t, w.setup("a", egressTo("good.example"))}
	secure := internetAddress + ":443"
	works := func(when string) {
		t.Helper()
		said, err := c.https(secure, "good.example")
		want(t, when, said, err, "200 page of good.example")
	}
	works("at first")

	// Killed, nothing passes, and the next verb has it back.
	pid, worker := w.proxyPid(), w.workerPid()
	kill(t, pid)
	ended(t, worker) // by itself
	said, err := c.https(secure, "good.example")
	refused(t, "with the proxy dead", said, err)
	said, err = c.raw(internetAddress+":22", "SSH-2.0-x\r\n")
	refused(t, "an address", said, err)
	for _, server := range []string{c.Gateway.String(), internetAddress} {
		said, err = c.lookUp(server, "tcp4", "good.example.", dnsmessage.TypeA)
		refused(t, "a name", said, err)
	}
	if dead, err := w.m.Revive(t.Context()); err != nil || !dead {
		t.Fatalf("dead %v, %v", dead, err)
	}
	if dead, err := w.m.Revive(t.Context()); err != nil || dead {
		t.Fatalf("dead %v, %v", dead, err)
	}
	if again := w.proxyPid(); again == pid || again == 0 {
		t.Errorf("proxy %d, was %d", again, pid)
	}
	works("revived")

	// Rules change while it is up: what they no longer allow ends.
	held, err := c.dial("tcp4", internetAddress+":22")
	if err != nil {
		t.Fatal(err)
	}
	hello := bufio.NewReader(held)
	if _, err := hello.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	c.Endpoint = w.setup("a", egressTo("other.example 443"))
	if _, err := hello.ReadString('\n'); err == nil {
		t.Error("a connection outlives its rule")
	}
	said, err = c.https(secure, "good.example")
	refused(t, "without its rule", said, err)
	said, err = c.https(secure, "other.example")
	want(t, "with a new rule", said, err, "200 page of other.example")

	// Stopped and started, it finds the proxy there: it may have connections to go on with.
	pid = w.proxyPid()
	w.teardown("a")
	c.Endpoint = w.setup("a", egressTo("good.example"))
	works("started again")
	if again := w.proxyPid(); again != pid {
		t.Errorf("proxy %d, was %d", again, pid)
	}

	// Flushed rules come back.
	serve(t, "", "tcp4", ":8080")
	nft, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	table := &nftables.Table{Name: w.m.table, Family: nftables.TableFamilyIPv4}
	for what, flush := range map[string]func(){
		"the table deleted": func() { nft.DelTable(table) },
		"the rules deleted": func() { nft.FlushTable(table) }, // its sets stay
		"a chain emptied":   func() { nft.FlushChain(&nftables.Chain{Name: "lead", Table: table}) },
	} {
		flush()
		if err := nft.Flush(); err != nil {
			t.Fatal(what, err)
		}
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			if _, err := c.https(secure, "good.example"); err == nil || time.Now().After(end) {
				break
			}
		}
		works("after a flush: " + what)
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			if err := (&server{m: w.m}).complete(nft); err == nil || time.Now().After(end) {
				break
			}
		}
		mustNotReach(t, c.Path, "tcp4", c.Gateway.String()+":8080")
	}

	// Cut off for a restore, and connected.
	if err := w.m.Isolate(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	e, err := w.m.Prepare(t.Context(), "a", egressTo("good.example"))
	if err != nil {
		t.Fatal(err)
	}
	if err := w.m.Connect(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	c.Endpoint = e
	works("restored")
	w.release("a")
	gone(t, w)
	if left := leftovers(t, w.m.root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(t, pid)
}

// ended waits for the end of a process.
func ended(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10000); err != nil || n == 0 {
		t.Fatalf("process %d goes on (%v)", pid, err)
	}
}

// The worker, killed, is restarted automatically, and until then nothing passes. Its ports
// may be taken by then.
func TestWorkerComesBack(t *testing.T) {
	w := filtered(t)
	c := client{t, w.setup("a", egressTo("good.example"))}
	pid, ports := w.proxyPid(), *w.state().Bridges[0].Proxy
	for i := range 2 {
		if i == 1 { // the kernel's choice leaves this one alone
			unix.Kill(pid, unix.SIGSTOP)
		}
		old := w.workerPid()
		kill(t, old)
		if i == 1 {
			said, err := c.https(internetAddress+":443", "good.example")
			refused(t, "with the worker dead", said, err)
			l, err := net.Listen("tcp4", netip.AddrPortFrom(c.Gateway, ports.TCP).String())
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() { // clients led there meanwhile need not wait
				for c, err := l.Accept(); err == nil; c, err = l.Accept() {
					_ = c.Close()
				}
			}()
			unix.Kill(pid, unix.SIGCONT)
		}
		var said string
		err := errors.New("not tried")
		for end := time.Now().Add(20 * time.Second); err != nil &&
			time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			said, err = c.https(internetAddress+":443", "good.example")
		}
		want(t, "with another worker", said, err, "200 page of good.example")
		if again := w.workerPid(); again == old || again == 0 || w.proxyPid() != pid {
			t.Errorf("worker %d, was %d", again, old)
		}
		said, err = c.https(internetAddress+":443", "other.example")
		refused(t, "by its rules", said, err)
	}
	if now := *w.state().Bridges[0].Proxy; now.TCP == ports.TCP {
		t.Errorf("it listens at %d", now.TCP)
	}
	w.release("a")
	gone(t, w)
}

// gone waits for the proxy's end.
func gone(t *testing.T, w *world) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); w.proxyPid() != 0 ||
		w.workerPid() != 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the proxy stays")
		}
	}
}

// Before the proxy listens, and with one that cannot start, nothing is up.
func TestFilterFailsClosed(t *testing.T) {
	theInternet(t)
	w := open(t)
	if _, err := w.m.Setup(t.Context(), "a", egressTo("good.example")); err == nil {
		t.Error("filtered without a proxy")
	}
	w.m.UseProxy(func() *exec.Cmd { return exec.Command("/bin/false") }, (*exec.Cmd).Start)
	if _, err := w.m.Setup(t.Context(), "a", egressTo("good.example")); err == nil {
		t.Error("filtered with a proxy that does not start")
	}
	if ids, err := w.m.List(t.Context()); err != nil || len(ids) > 0 {
		t.Errorf("left: %q, %v", ids, err)
	}
}
