package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

// finder has the policies in a directory of the test's.
func finder(t *testing.T, files map[string]string) Finder {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Finder{Dirs: []string{dir}}
}

func resolved(t *testing.T, text string) *Policy {
	t.Helper()
	p, err := Finder{}.Resolve("p.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProblems(t *testing.T) {
	f := finder(t, map[string]string{"base": "lifetime: {ttl: 1d}\nnetwork: {modes: [none, filtered], default: filtered, egress: [\"*.debian.org\", pypi.org 443]}\n"})
	for _, c := range []struct{ name, text, want string }{
		{"unknown", "capabilites: []\n", "p.yaml:1:1: unknown key \"capabilites\"; did you mean capabilities?"},
		{
			"unknown below", "limits:\n  memry: {max: 1g}\n",
			"p.yaml:2:3: unknown key \"limits.memry\"; did you mean memory?",
		},
		{"hooks", "hooks: []\n", "p.yaml:1:8: hooks: not a mapping"},
		{
			"hook by path", "hooks:\n  on_failure: [{run: [/bin/true]}]\n",
			"p.yaml:2:15: hooks.on_failure: root runs hooks, and this file is named by its path",
		},
		{"hook of a shell", "hooks: {on_failure: [/bin/true]}\n", "p.yaml:1:22: hooks.on_failure: write {run: ["},
		{
			"hook without run", "hooks: {on_failure: [{timeout: 5s}]}\n",
			"p.yaml:1:22: hooks.on_failure: a hook without run",
		},
		{
			"hook of a string", "hooks: {on_failure: [{run: /bin/true}]}\n",
			"p.yaml:1:28: hooks.on_failure: run: not a list",
		},
		{
			"hook in PATH", "hooks: {on_failure: [{run: [true]}]}\n",
			"p.yaml:1:29: hooks.on_failure: run: \"true\": write the program by its absolute path",
		},
		{
			"hook for ever", "hooks: {on_failure: [{run: [/bin/true], timeout: 1h}]}\n",
			"p.yaml:1:50: hooks.on_failure: timeout: 1h is more than 10m",
		},
		{
			"hook twice", "hooks: {on_failure: [{run: [/bin/true]}, {run: [/bin/true], timeout: 30s}]}\n",
			"p.yaml:1:42: hooks.on_failure: \"/bin/true\" stands here a second time",
		},
		{
			"hook unknown", "hooks: {on_failure: [{rum: [/bin/true]}]}\n",
			"p.yaml:1:23: unknown key \"hooks.on_failure.rum\"; did you mean run?",
		},
		{
			"hook point", "hooks: {before_chekpoint: []}\n",
			"p.yaml:1:9: unknown key \"hooks.before_chekpoint\"; did you mean before_checkpoint?",
		},
		{"no list", "seccomp: default\n", "p.yaml:1:10: seccomp: not a list"},
		{
			"no value", "network:\n  modes: [nnoe]\n",
			"p.yaml:2:11: network.modes: \"nnoe\" is none of none, filtered, bridge, host; did you mean none?",
		},
		{"truth", "io_uring: yes\n", "p.yaml:1:11: io_uring: neither true nor false"},
		{"size", "limits: {memory: {max: lots}}\n", "p.yaml:1:24: limits.memory.max: \"lots\" is not a size"},
		{"twice", "labels: [a]\nlabels: [b]\n", "p.yaml:2:1: labels stands here a second time"},
		{
			"twice below", "user: {non_root: true, non_root: false}\n",
			"p.yaml:1:24: user.non_root stands here a second time",
		},
		{"alias", "labels: &a [x]\nseccomp: *a\n", "p.yaml:2:10: seccomp: not a list"},
		{"alias item", "labels:\n  - &a x\n  - *a\n", "p.yaml:2:5: labels: anchors and aliases are not for policies"},
		{"merge", "a: &a {x: 1}\n<<: *a\n", "p.yaml:2:1: unknown key \"<<\""},
		{"empty", "labels:\n", "p.yaml:1:8: labels: not a list"},
		{"documents", "labels: []\n---\nlabels: []\n", "p.yaml:2:1: a second document"},
		{"syntax", "a: [\n", "p.yaml:"},
		{"top", "- a\n", "p.yaml:1:1: a policy: not a mapping"},
		{
			"capability", "capabilities: [CAP_NET_RAV]\n",
			"p.yaml:1:16: capabilities: \"CAP_NET_RAV\" is no capability; did you mean NET_RAW?",
		},
		{"path", "mounts: {read_only: [/srv/../etc]}\n", "write the path that it means, \"/etc\""},
		{"relative", "mounts: {read_only: [srv]}\n", "no absolute path"},
		{"uid", "user: {uids: [9-1]}\n", "p.yaml:1:15: user.uids: \"9-1\" is neither a user id nor a range"},
		{"base", "base: nowhere\n", "p.yaml:1:7: base: there is no policy nowhere"},

		{"lifetime", "lifetime: {ttl: soon}\n", "p.yaml:1:17: lifetime.ttl: \"soon\" is not a duration"},
		{"lifetime of a blink", "lifetime: {idle: 10ms}\n", "p.yaml:1:18: lifetime.idle: 10ms is below 1s"},
		{
			"wider lifetime", "base: base\nlifetime: {ttl: 2d}\n",
			"p.yaml:2:17: lifetime.ttl: wider than its base base: 48h is more than 24h",
		},
		{
			"egress of nobody", "network:\n  egress: [pypi.org 443]\n",
			"p.yaml:2:11: network.egress: they have no effect while network.modes allows bridge",
		},
		{
			"wider egress", "base: base\nnetwork:\n  egress:\n  - pypi.org 443\n  - pypi.org 80\n",
			"p.yaml:5:5: network.egress: wider than its base base: pypi.org 80 (",
		},
		{
			"wider names", "base: base\nnetwork: {egress: [a.debian.org, \"*.pypi.org 443\"]}\n",
			"p.yaml:2:34: network.egress: wider than its base base: *.pypi.org 443 (",
		},
		{
			"egress of all of org", "network: {egress: [\"*.org 443\"]}\n",
			"p.yaml:1:20: network.egress: egress rule \"*.org 443\": \"*.org\" is no domain",
		},
		{
			"wider modes", "base: base\nnetwork: {modes: [filtered, bridge]}\n",
			"p.yaml:2:29: network.modes: wider than its base base: bridge",
		},
		{"egress wrong", "network:\n  egress: [1.2.3 443]\n", "p.yaml:2:12: network.egress:"},
		{
			"swap", "limits: {swap: {max: 1g}}\n",
			"p.yaml:1:22: limits.swap.max: swap has a limit only where memory has one",
		},
		{
			"storage", "limits: {storage_size: {default: 2g, max: 1g}}\n",
			"limits.storage_size.default: more than the maximum",
		},
		{"privileged", "privileged: true\n", "p.yaml:1:13: privileged: true: not supported yet"},
		{
			"profile", "seccomp: [default, /etc/x.json]\n",
			"p.yaml:1:20: seccomp: \"/etc/x.json\": the profile of a file goes by its content; write sha256:",
		},
		{
			"wider profile", "seccomp: [default, sha256:" + strings.Repeat("0", 64) + "]\n",
			"p.yaml:1:20: seccomp: wider than its base default: sha256:",
		},

		{
			"default over max", "limits: {memory: {default: 2g, max: 1g}}\n",
			"p.yaml:1:28: limits.memory.default: more than the maximum",
		},
		{
			"default user", "user: {non_root: true, default: 0}\n",
			"p.yaml:1:33: user.default: the default user 0 is not among those allowed",
		},
		{
			"default network", "network: {modes: [none]}\n",
			"p.yaml:1:18: network.modes: the default mode bridge is not among those allowed",
		},
		{
			"trigger", "checkpoints: {every: 5m, triggers: [exec]}\n",
			"checkpoints by interval are not among the triggers",
		},

		{
			"wider", "base: strict\ncapabilities: [KILL]\n",
			"p.yaml:2:15: capabilities: wider than its base strict: KILL (builtin/strict.yaml:",
		},
		{
			"wider list", "seccomp: [default, unconfined]\n",
			"p.yaml:1:20: seccomp: wider than its base default: unconfined",
		},
		{
			"wider truth", "base: strict\nuser:\n  non_root: false\n",
			"p.yaml:3:13: user.non_root: wider than its base strict: false",
		},
		{
			"wider limit", "base: strict\nlimits: {pids: {max: 2000}}\n",
			"limits.pids.max: wider than its base strict: 2000 is more than 1024",
		},
		{
			"wider mount", "base: strict\nmounts: {read_only: [/etc]}\n",
			"mounts.read_only: wider than its base strict: /etc",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := f.Resolve("p.yaml", []byte(c.text))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v\nwant %s", err, c.want)
			}
			want := fault.ErrInvalid
			if strings.Contains(c.want, "not supported yet") {
				want = fault.ErrUnsupported
			}
			if !errors.Is(err, want) {
				t.Errorf("%v is not %v", err, want)
			}
		})
	}
}

// All that is wrong is told at once, in order.
func TestProblemsAll(t *testing.T) {
	_, err := Finder{}.Resolve("p.yaml", []byte("labels: 1\nuser: {uids: [x, 1, y]}\nbase: default\nfoo: 1\n"))
	var list Problems
	if !errors.As(err, &list) || len(list) != 4 {
		t.Fatalf("%v", err)
	}
	var at []int
	for _, p := range list {
		at = append(at, p.Line*100+p.Column)
	}
	if !slices.Equal(at, []int{109, 215, 221, 401}) {
		t.Errorf("%v", at)
	}
}

func TestFileTooLarge(t *testing.T) {
	if _, err := (Finder{}).Resolve("p.yaml", slices.Repeat([]byte("#"),
		maxFile+1)); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

func TestBuiltin(t *testing.T) {
	names, err := Finder{}.List()
	if err != nil || !slices.Equal(names, []string{"default", "strict", "trusted"}) {
		t.Fatalf("%v, %v", names, err)
	}
	for _, name := range names {
		p, err := Finder{}.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		if p.Description == "" {
			t.Errorf("%s has no description", name)
		}
		// The printed form is a policy that says the same.
		text, err := yaml.Marshal(p.Rules.Tree())
		if err != nil {
			t.Fatal(err)
		}
		for _, form := range [][]byte{text, p.Rules.Canonical()} {
			again, err := ParseCanonical(name, form)
			if err != nil {
				t.Fatalf("%v in\n%s", err, form)
			}
			if again.Rules.Digest() != p.Rules.Digest() {
				t.Errorf("%s changed:\n%s\n%s", name, p.Rules.Canonical(), again.Rules.Canonical())
			}
		}
	}
}

// A file of the name of a built-in policy stands before that one, and narrows it.
func TestShadow(t *testing.T) {
	f := finder(t, map[string]string{"default": "labels: [owner]\n", "mine": "io_uring: false\n"})
	p, err := f.Find("mine")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(p.Base, []string{"default", "default", "trusted"}) ||
		!slices.Equal(p.Rules.Labels, []string{"owner"}) {
		t.Errorf("%v %v", p.Base, p.Rules.Labels)
	}
	// The other built-in ones stay what they are, and possible.
	f = finder(t, map[string]string{"default": "limits: {memory: {max: 20m}}\n"})
	if p, err := f.Find("strict"); err != nil || p.Rules.Memory.Max != 4<<30 {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestLoop(t *testing.T) {
	f := finder(t, map[string]string{"a": "base: b\n", "b": "base: a\n"})
	if _, err := f.Find("a"); err == nil || !strings.Contains(err.Error(), "narrows itself") {
		t.Errorf("%v", err)
	}
}

// A user that can write a policy can allow anything.
func TestFindRefusesOthersFiles(t *testing.T) {
	f := finder(t, map[string]string{"p": "labels: []\n"})
	file := filepath.Join(f.Dirs[0], "p.yaml")
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Find("p"); !errors.Is(err, fault.ErrDenied) {
		t.Errorf("%v", err)
	}
	if _, err := f.Find("../etc/passwd"); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

// A policy that narrows another one runs its hooks, too, and before its own.
func TestHooksAdd(t *testing.T) {
	f := finder(t, map[string]string{
		"base": "hooks: {before_start: [{run: [/bin/true, a]}], on_failure: [{run: [/bin/true]}]}\n",
		"none": "base: base\nhooks: {before_start: []}\n",
		"more": "base: base\nhooks: {before_start: [{run: [/bin/true, b]}, {run: [/bin/true, a]}]}\n",
		"gone": "hooks: {before_start: [{run: [/bin/nosuch]}]}\n",
	})
	for name, want := range map[string]string{
		"base": "[/bin/true a]", "none": "[/bin/true a]", "more": "[/bin/true a /bin/true b]",
	} {
		p, err := f.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(p.Rules.Hooks[BeforeStart]); got != want || len(p.Rules.Hooks[OnFailure]) != 1 {
			t.Errorf("%s: %v", name, p.Rules.Hooks)
		}
		again, err := ParseCanonical(name, p.Rules.Canonical())
		if err != nil || again.Rules.Digest() != p.Rules.Digest() {
			t.Errorf("%s: %v, %v", name, again, err)
		}
	}
	if _, err := f.Find("gone"); err == nil || !strings.Contains(err.Error(),
		"gone.yaml:1:24: hooks.before_start: lstat /bin/nosuch") && !strings.Contains(err.Error(), "/usr/bin/nosuch") {
		t.Errorf("%v", err)
	}
	if err := os.Chmod(f.Dirs[0], 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Find("base"); err == nil || !strings.Contains(err.Error(),
		"others than root can change "+f.Dirs[0]) {
		t.Errorf("%v", err)
	}
}

// Each step to a trusted file must be trusted: a user that can change one redirects it.
func TestTrusted(t *testing.T) {
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(dir+"/open", 0o755))
	must(os.Chmod(dir+"/open", 0o777))
	must(os.Mkdir(dir+"/sticky", 0o755))
	must(os.Chmod(dir+"/sticky", 0o777|os.ModeSticky))
	for _, name := range []string{"file", "open/file", "sticky/file", "sticky/theirs"} {
		must(os.WriteFile(filepath.Join(dir, name), nil, 0o755))
	}
	must(os.Chown(dir+"/sticky/theirs", 1000, 1000))
	for name, target := range map[string]string{
		"link": "sticky/../file", "through": "open/../file", "loop": "loop",
		"sticky/link": dir + "/file", "foreign": "file",
	} {
		must(os.Symlink(target, filepath.Join(dir, name)))
	}
	must(os.Lchown(dir+"/foreign", 1000, 1000))
	for name, want := range map[string]string{
		"file": "", "sticky/file": "", "link": "", "sticky/link": "", "nosuch": "no such file",
		"open/file": dir + "/open:", "through": dir + "/open:", "sticky/theirs": "theirs:", "foreign": "foreign:",
		"loop": "too many levels",
	} {
		real, err := Trusted(filepath.Join(dir, name))
		if want == "" && (err != nil || filepath.Base(real) != "file") {
			t.Errorf("%s: %s, %v", name, real, err)
		}
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %s, %v", name, real, err)
		}
	}
}

// The schema and the documentation name the same keys as the parser.
func TestSchemaHasAllKeys(t *testing.T) {
	type node struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	var list []string
	var walk func(prefix string, raw json.RawMessage)
	walk = func(prefix string, raw json.RawMessage) {
		var n node
		if err := json.Unmarshal(raw, &n); err != nil {
			t.Fatal(err)
		}
		if n.Properties == nil {
			list = append(list, prefix)
		}
		for name, sub := range n.Properties {
			walk(strings.TrimPrefix(prefix+"."+name, "."), sub)
		}
	}
	walk("", Schema)
	want := []string{"base", "description"}
	for _, k := range keys {
		want = append(want, k.name)
	}
	slices.Sort(list)
	slices.Sort(want)
	if !slices.Equal(list, want) {
		t.Errorf("schema has\n%v\nthe parser\n%v", list, want)
	}
	doc, err := os.ReadFile("../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range want {
		if !strings.Contains(string(doc), "`"+name+"`") {
			t.Errorf("docs/policy.md says nothing of %s", name)
		}
	}
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		pattern, text string
		want          bool
	}{
		{"debian", "debian", true},
		{"debian:*", "debian:12", true},
		{"debian:*", "debian", false},
		{"*", "a/b", false},
		{"**", "a/b", true},
		{"r.example/**", "r.example/a/b:c", true},
		{"r.example/*/b", "r.example/a/b", true},
		{"r.example/*/b", "r.example/a/c/b", false},
		{"*é*", "caféx", true},
		// patterns within patterns
		{"**", "*", true},
		{"*", "**", false},
		{"*", "a*", true},
		{"a*", "*", false},
		{"a**", "ab/**", true},
		{"a*", "a**", false},
		{"*b", "**b", false},
		{"ab", "a*", false},
		{"*", "***", false},
	} {
		if got := matches(c.pattern, c.text); got != c.want {
			t.Errorf("matches(%q, %q) = %v", c.pattern, c.text, got)
		}
	}
}

// A pattern that covers another one covers what that one stands for.
func TestMatchesIsSound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outer := rapid.StringMatching(`[ab/*]{0,6}`).Draw(t, "outer")
		inner := rapid.StringMatching(`[ab/*]{0,6}`).Draw(t, "inner")
		text := rapid.StringMatching(`[ab/]{0,6}`).Draw(t, "text")
		if matches(outer, inner) && matches(inner, text) && !matches(outer, text) {
			t.Fatalf("%q covers %q, but not its %q", outer, inner, text)
		}
	})
}

func TestJudge(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"work/sub", "data", "other"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../other", filepath.Join(dir, "work/escape")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("work", filepath.Join(dir, "worklink")); err != nil {
		t.Fatal(err)
	}
	digest := "sha256:" + strings.Repeat("a", 64)
	p := resolved(t, `
images: {references: [debian, "r.example/team/**"], digests: ["`+digest+`"]}
mounts: {read_write: [`+dir+`/work], read_only: [`+dir+`/data]}
user: {uids: [1000-1999, 5], default: 1000}
capabilities: [CHOWN, KILL]
network: {modes: [none, bridge], publish: ["127.0.0.1:8000-8099"]}
limits: {memory: {default: 512m, max: 1g}, pids: {max: 100}}
checkpoints: {triggers: [interval]}
labels: [owner, "team=a*"]
`)
	labels := map[string]string{"owner": "", "team": "ab"}
	for _, c := range []struct {
		name string
		ask  Request
		want string // the one denial; empty: none
	}{
		{"nothing", Request{}, ""},
		{"image", Request{Image: "debian:12"}, ""},
		{"image of a team", Request{Image: "docker://r.example/team/x/y:1"}, ""},
		{"other image", Request{Image: "debianx"}, ""}, // until its digest is known
		{"other digest", Request{Image: "debianx", Digests: []string{"sha256:b"}}, "images.digests"},
		{"digest", Request{Image: "debianx", Digests: []string{digest}}, ""},
		{"beneath", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/work/sub"}}}, ""},
		{"by a link", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/worklink/sub"}}}, ""},
		{"a workspace", Request{Mounts: []Mount{{Type: "workspace", Source: dir + "/work/sub"}}}, ""},
		{"a workspace elsewhere", Request{Mounts: []Mount{{Type: "workspace", Source: dir + "/other"}}}, "mounts.read_only"},
		{"escape", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/work/escape"}}}, "mounts.read_write"},
		{"dots", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/work/../other"}}}, "mounts.read_write"},
		{"beside", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/other"}}}, "mounts.read_write"},
		{"above", Request{Mounts: []Mount{{Type: "bind", Source: dir}}}, "mounts.read_write"},
		{"missing", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/work/none"}}}, "mounts.read_write"},
		{"read-only", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/data", ReadOnly: true}}}, ""},
		{"not read-only", Request{Mounts: []Mount{{Type: "bind", Source: dir + "/data"}}}, "mounts.read_only"},
		{"tmpfs", Request{Mounts: []Mount{{Type: "tmpfs", Target: "/t"}}}, ""},
		{"user", Request{User: "1999:0"}, ""},
		{"root", Request{User: "0"}, "user.uids"},
		{"root by zeros", Request{User: "000"}, "user.uids"},
		{"root by name", Request{User: "root"}, "user.uids"},
		{"cap", Request{CapAdd: []string{"cap_kill"}}, ""},
		{"cap not allowed", Request{CapAdd: []string{"SYS_ADMIN"}}, "capabilities"},
		{"all", Request{CapAdd: []string{"ALL"}}, "capabilities"},
		{"privileged", Request{Privileged: true}, "privileged"},
		{"unconfined", Request{Seccomp: "unconfined"}, "seccomp"},
		{"io_uring", Request{IOUring: true}, "io_uring"},
		{"host", Request{Network: "host"}, "network.modes"},
		{"port", Request{Ports: []Port{{"127.0.0.1", 8001, "tcp"}}}, ""},
		{"port elsewhere", Request{Ports: []Port{{"", 8001, "tcp"}}}, "network.publish"},
		{"udp", Request{Ports: []Port{{"127.0.0.1", 8001, "udp"}}}, "network.publish"},
		{"memory", Request{Memory: 1 << 30}, ""},
		{"too much memory", Request{Memory: 1<<30 + 1}, "limits.memory.max"},
		{"exec", Request{Every: "exec"}, "checkpoints.triggers"},
		{"interval", Request{Every: "5m0s"}, ""},
		{"label", Request{Labels: map[string]string{"team": "a", "x": ""}}, "labels"},
		{"label's value", Request{Labels: map[string]string{"owner": "", "team": "b"}}, "labels"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.ask.Labels == nil {
				c.ask.Labels = labels
			}
			_, findings := p.Judge(c.ask)
			denied := map[string]bool{}
			for _, f := range findings {
				if f.Verdict == Denied {
					key, _, _ := strings.Cut(f.Rule, ":")
					denied[key] = true
					if f.Origin.Policy == "" {
						t.Errorf("nobody denies it: %+v", f)
					}
				}
			}
			if c.want == "" && len(denied) > 0 || c.want != "" && (len(denied) != 1 || !denied[c.want]) {
				t.Errorf("%+v", findings)
			}
			if err := Denials(findings); errors.Is(err, fault.ErrDenied) != (c.want != "") {
				t.Errorf("%v", err)
			}
		})
	}
	got, _ := p.Judge(Request{Mounts: []Mount{{Type: "bind", Source: dir + "/worklink"}}, Labels: labels})
	if got.User != "1000" || got.Memory != 512<<20 || got.Pids != 100 ||
		!slices.Equal(got.Capabilities, []string{"CHOWN", "KILL"}) || got.Mounts[0].Source != dir+"/work" {
		t.Errorf("%+v", got)
	}
}

// A policy decides whether a sandbox may do without a user namespace; whether
// there can be one it does not know.
func TestJudgeNamespace(t *testing.T) {
	for _, c := range []struct{ rule, ask, got, denied string }{
		{"", "", "", ""}, {"", userNSHost, userNSHost, ""}, {"", userNSAuto, userNSAuto, ""},
		{NamespaceOptional, userNSHost, userNSHost, ""},
		{NamespacePreferred, "", "", ""}, {NamespacePreferred, userNSAuto, userNSAuto, ""},
		{NamespacePreferred, userNSHost, "", "user.namespace: preferred"},
		{NamespaceRequired, "", userNSAuto, ""}, {NamespaceRequired, userNSHost, "", "user.namespace: required"},
	} {
		text := ""
		if c.rule != "" {
			text = "user: {namespace: " + c.rule + "}\n"
		}
		p := resolved(t, text)
		got, findings := p.Judge(Request{UserNS: c.ask})
		err := Denials(findings)
		if c.denied == "" && (err != nil || got.UserNS != c.got) ||
			c.denied != "" && (!errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), c.denied)) {
			t.Errorf("%+v: %+v, %v", c, got, err)
		}
	}
	p := resolved(t, "user: {namespace: required}\n")
	if err := p.NoNamespace("the kernel is old"); !errors.Is(err, fault.ErrDenied) ||
		!strings.Contains(err.Error(), "user.namespace: required: the kernel is old") {
		t.Error(err)
	}
	f := finder(t, map[string]string{"p": "base: strict\nuser: {namespace: optional}\n"})
	if _, err := f.Find("p"); err == nil || !strings.Contains(err.Error(), "optional asks for less than preferred") {
		t.Error(err)
	}
}

// Requests that work without a policy work with the default one.
func TestDefaultAllows(t *testing.T) {
	p, err := Finder{}.Find(Default)
	if err != nil {
		t.Fatal(err)
	}
	ask := Request{
		Image: "any/thing:1", Digests: []string{"sha256:x"}, User: "www-data", Network: "host",
		Group: "g", Every: "exec",
		Mounts: []Mount{{Type: "bind", Source: "/"}, {Type: "volume", Source: "v"}, {Type: "tmpfs"}},
		Ports:  []Port{{"", 1, "tcp"}, {"::1", 65535, "udp"}}, Memory: 1 << 40, CPUs: 64, Pids: 1 << 20,
	}
	got, findings := p.Judge(ask)
	if err := Denials(findings); err != nil {
		t.Error(err)
	}
	if got, findings := p.Judge(Request{NewPrivileges: true}); Denials(findings) != nil || got.NoNewPrivileges {
		t.Errorf("%+v: %+v", findings, got)
	}
	// A spec of an older version has more than there is unasked today.
	older, findings := p.Judge(Request{Capabilities: DockerCapabilities})
	if err := Denials(findings); err != nil || !slices.Equal(older.Capabilities, DockerCapabilities) {
		t.Errorf("%v: %+v", err, older)
	}
	if got.Capabilities != nil || got.User != "www-data" || got.Memory != 1<<40 || !got.NoNewPrivileges {
		t.Errorf("%+v", got)
	}
}

// The examples of the documentation are policies.
func TestDocumentedExamples(t *testing.T) {
	doc, err := os.ReadFile("../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	_, examples, _ := strings.Cut(string(doc), "\n## An example\n")
	large, small, _ := strings.Cut(examples, "\nOne for code")
	p := resolved(t, strings.ReplaceAll(large, "\n    ", "\n"))
	if p.Rules.Retention.KeepLast != 20 || p.Rules.User != "1000:1000" {
		t.Errorf("%+v", p.Rules)
	}
	_, small, _ = strings.Cut(small, "\n\n")
	if p := resolved(t, strings.ReplaceAll("\n"+small, "\n    ", "\n")); len(p.Rules.Egress) != 3 ||
		p.Rules.Network != "filtered" {
		t.Errorf("%+v", p.Rules)
	}
}
