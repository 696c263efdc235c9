package policy

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// drawPolicy writes a policy of which most are good.
func drawPolicy(t *rapid.T, label string) string {
	var b strings.Builder
	maybe := func(format string, draw func() any) {
		if rapid.IntRange(0, 3).Draw(t, label+format) == 0 {
			fmt.Fprintf(&b, format+"\n", draw())
		}
	}
	some := func(of ...string) func() any {
		return func() any {
			return strings.Join(rapid.SliceOfNDistinct(rapid.SampledFrom(of), 0, 3,
				rapid.ID).Draw(t, label+"list"), ", ")
		}
	}
	one := func(of ...string) func() any {
		return func() any { return rapid.SampledFrom(of).Draw(t, label+"one") }
	}
	maybe("images: {references: [%s]}", some(`"**"`, `"*"`, `"debian:*"`, "debian", `"d*"`))
	maybe("mounts: {read_write: [%s]}", some("/", "/usr", "/usr/bin", "/etc"))
	maybe("user: {%s}", one("non_root: true", "non_root: false", "uids: [0-10]", "uids: [5, 6-9]",
		"{uids: [1-20], default: 3", "uids: [1-20], default: 3", "non_root: true, default: 7", "namespace: optional",
		"namespace: preferred", "namespace: required"))
	maybe("capabilities: [%s]", some("ALL", "DEFAULT", "KILL", "SYS_ADMIN", "CHOWN"))
	maybe("no_new_privileges: %s", one("true", "false"))
	maybe("seccomp: [default%s]", one("", ", unconfined"))
	maybe("io_uring: %s", one("true", "false"))
	maybe("network: {%s}", one("modes: [none], default: none", "modes: [none, bridge]",
		"modes: [host, bridge], default: host", "modes: [none, filtered], default: none",
		"modes: [filtered], default: filtered, egress: [a.org, 10.0.0.0/8 1-99]",
		"modes: [filtered], default: filtered, egress: []", "groups: false", "publish: [1-100]",
		`publish: ["127.0.0.1:80"]`))
	maybe("limits: {%s}", one("memory: {max: 1g}", "memory: {default: 512m}",
		"memory: {default: 64m, max: 2g}, pids: {max: 5}", "cpus: {max: 1}", "cpus: {default: 2}",
		"memory: {max: 1g}, swap: {max: 1g}", "memory: {default: 1g}, swap: {default: 1m}",
		"io: {default: 1m}, storage_size: {max: 1g}"))
	maybe("lifetime: {%s}", one("ttl: 1h", "idle: 1m", "ttl: 2h, idle: 1h"))
	maybe("checkpoints: {%s}", one("every: 5m", "triggers: [exec]", "triggers: [exec], every: exec", "triggers: []",
		"keep_last: 3", "max_bytes: 1g", "every: 'exec,5m'", "automatic: {keep_last: 3}",
		"automatic: {keep_daily: -1}, keep_last: 2"))
	maybe("labels: [%s]", some("a", "b=x*"))
	return b.String()
}

// drawRequest asks for a few things, most of which most policies allow.
func drawRequest(t *rapid.T) Request {
	r := Request{
		Image:   rapid.SampledFrom([]string{"debian", "debian:12", "x/y"}).Draw(t, "image"),
		Digests: []string{"sha256:1"}, Labels: map[string]string{"a": "", "b": "xy"},
	}
	ask := func(label string) bool { return rapid.IntRange(0, 4).Draw(t, label) == 0 }
	if ask("user") {
		r.User = rapid.SampledFrom([]string{"0", "3", "5", "7", "15", "x"}).Draw(t, "who")
	}
	if ask("namespace") {
		r.UserNS = rapid.SampledFrom([]string{userNSHost, userNSAuto}).Draw(t, "userns")
	}
	if ask("caps") {
		r.CapAdd = rapid.SliceOfN(rapid.SampledFrom([]string{"KILL", "SYS_ADMIN", "ALL"}), 0, 2).Draw(t, "add")
		r.CapDrop = rapid.SliceOfN(rapid.SampledFrom([]string{"ALL", "CHOWN"}), 0, 1).Draw(t, "drop")
	}
	r.NoNewPrivileges, r.NewPrivileges, r.IOUring = ask("nnp"), ask("new privileges"), ask("io_uring")
	if ask("seccomp") {
		r.Seccomp = rapid.SampledFrom([]string{"default", "unconfined"}).Draw(t, "profile")
	}
	if ask("network") {
		r.Network = rapid.SampledFrom([]string{"none", "bridge", "host"}).Draw(t, "mode")
	}
	if ask("egress") {
		r.Network = networkFiltered
		if r.Egress = rapid.SliceOfN(rapid.SampledFrom([]string{
			"a.org 443", "10.1.0.0/16 80", "10.1.2.3 80", "10.0.0.0/8 53/udp",
		}), 0, 2).Draw(t, "rules"); len(r.Egress) == 0 {
			r.Egress = nil
		}
	}
	if ask("limits") {
		r.Memory = rapid.SampledFrom([]int64{6 << 20, 1 << 30, 1 << 33}).Draw(t, "memory")
		r.Swap = rapid.SampledFrom([]int64{0, -1, 1 << 20, 1 << 31}).Draw(t, "swap")
		r.Storage = rapid.SampledFrom([]int64{0, 1 << 20, 1 << 31}).Draw(t, "storage")
		r.CPUs = rapid.SampledFrom([]float64{0, 0.5, 3}).Draw(t, "cpus")
	}
	if ask("lifetime") {
		r.TTL = rapid.SampledFrom([]time.Duration{0, time.Hour, 3 * time.Hour}).Draw(t, "ttl")
		r.Idle = rapid.SampledFrom([]time.Duration{0, time.Minute, 3 * time.Hour}).Draw(t, "idle")
	}
	if ask("every") {
		r.Every = rapid.SampledFrom([]string{"exec", "5m0s", "exec,5m0s"}).Draw(t, "when")
	}
	if ask("labels") {
		r.Labels = map[string]string{"a": ""}
	}
	if ask("mount") {
		source := rapid.SampledFrom([]string{"/etc", "/usr/bin", "/usr", "/bin"}).Draw(t, "source")
		r.Mounts = []Mount{{Type: "bind", Source: source, ReadOnly: rapid.Bool().Draw(t, "ro")}}
	}
	if ask("publish") {
		ip := rapid.SampledFrom([]string{"", "127.0.0.1"}).Draw(t, "ip")
		r.Ports = []Port{{IP: ip, Host: rapid.SampledFrom([]uint16{80, 200}).Draw(t, "port"), Protocol: "tcp"}}
	}
	return r
}

// A request that a policy grants is granted by its base, as it is.
func TestNarrowing(t *testing.T) {
	granted := 0
	rapid.Check(t, func(t *rapid.T) {
		base, err := Finder{}.Resolve("base.yaml", []byte("base: trusted\n"+drawPolicy(t, "base")))
		if err != nil {
			return
		}
		d, err := parse("own", "own.yaml", []byte(drawPolicy(t, "own")))
		if err != nil || len(d.widenings(base)) > 0 || len(d.impossible(base)) > 0 {
			return
		}
		own := &Policy{Name: "own", origin: map[string]Origin{}}
		d.inherit(own, base)
		got, findings := own.Judge(drawRequest(t))
		if Denials(findings) != nil {
			return
		}
		granted++
		for _, p := range []*Policy{own, base} {
			again, findings := p.Judge(got)
			if err := Denials(findings); err != nil {
				t.Fatalf("%s denies what was granted: %v", p.Name, err)
			}
			// Nothing is added and nothing taken away.
			if !reflect.DeepEqual(again, got) {
				t.Fatalf("%s grants\n%+v\nnot\n%+v", p.Name, again, got)
			}
		}
	})
	t.Log("granted", granted)
	if granted == 0 {
		t.Error("nothing was ever granted")
	}
}

// FuzzParse: whatever it is given it ends, and what it takes comes back.
func FuzzParse(f *testing.F) {
	for _, name := range []string{"default", "strict", "trusted"} {
		data, err := builtin.ReadFile("builtin/" + name + ".yaml")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("hooks:\n  before_start: [{run: [/bin/a, '-b'], timeout: 1m30s}, {run: [/c]}]\n  on_failure: []\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := parse("p", "p.yaml", data)
		if err != nil {
			for _, p := range err.(Problems) {
				if p.Line < 1 || p.Column < 1 || p.Unwrap() == nil {
					t.Errorf("%+v", p)
				}
			}
			return
		}
		if len(d.impossible(&Policy{})) > 0 {
			return // nor does it become a policy
		}
		again, err := ParseCanonical("p", d.rules.Canonical())
		if err != nil {
			t.Fatalf("%v in %s", err, d.rules.Canonical())
		}
		if again.Rules.Digest() != d.rules.Digest() {
			t.Errorf("%s became %s", d.rules.Canonical(), again.Rules.Canonical())
		}
	})
}
