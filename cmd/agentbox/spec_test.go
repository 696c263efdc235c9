package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/internal/exitcode"
	"github.com/agentbox/agentbox/runtime"
)

// usage fails unless err is a usage error whose text contains want.
func usage(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one with %q", want)
		return
	}
	if exitcode.Of(err) != exitUsage {
		t.Errorf("%v is no usage error", err)
	}
	if !strings.Contains(err.Error(), want) {
		t.Errorf("error %q does not contain %q", err, want)
	}
}

func TestParseEnv(t *testing.T) {
	lookup := func(k string) (string, bool) {
		v, ok := map[string]string{"HOME": "/root", "EMPTY": ""}[k]
		return v, ok
	}
	file := filepath.Join(t.TempDir(), "env")
	text := "\xef\xbb\xbf# comment\n\n  A=1\nB=\"quoted # not a comment\" \nHOME\nMISSING\nC=\nE=a=b\r\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := parseEnv([]string{file}, []string{"A=2", "HOME", "EMPTY", "MISSING", "D=x,y"}, lookup)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"A=2", "B=\"quoted # not a comment\" ", "HOME=/root", "C=", "E=a=b", "EMPTY=", "D=x,y"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for text, msg := range map[string]string{
		"=x\n":        "line 1: the name is missing",
		"OK=1\na b=c": "line 2: the name \"a b\" contains white space",
		"A=\xff":      "not UTF-8",
		"A=\x00":      "NUL",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := parseEnv([]string{file}, nil, lookup)
		usage(t, err, msg)
	}
	_, err = parseEnv([]string{file + "-missing"}, nil, lookup)
	usage(t, err, "no such file")
	_, err = parseEnv(nil, []string{"=x"}, lookup)
	usage(t, err, "name is missing")
}

func TestParseVolume(t *testing.T) {
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]runtime.Mount{
		"/a:/b":      {Type: "bind", Source: "/a", Target: "/b"},
		"/a/:/b/:ro": {Type: "bind", Source: "/a", Target: "/b", ReadOnly: true},
		"x/y:/b:rw":  {Type: "bind", Source: filepath.Join(wd, "x/y"), Target: "/b"},
		".:/src":     {Type: "bind", Source: wd, Target: "/src"},
	} {
		got, err := parseVolume("--volume", in)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", in, got, err, want)
		}
	}
	for in, msg := range map[string]string{
		"/data":     "two or three parts",
		"/a:/b:c:d": "two or three parts",
		"/a:b":      "not absolute",
		"/a:/":      "over the sandbox's /",
		"/a:/../":   "over the sandbox's /",
		"/a:/b:z":   "unknown option",
		":/b":       "source is empty",
		"":          "two or three parts",
	} {
		_, err := parseVolume("--volume", in)
		usage(t, err, msg)
	}
}

func TestParseTmpfs(t *testing.T) {
	got, err := parseTmpfs("/tmp:size=64m,mode=1777")
	if want := (runtime.Mount{
		Type: "tmpfs", Target: "/tmp", Options: "size=64m,mode=1777",
	}); err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = parseTmpfs("tmp")
	usage(t, err, "not absolute")
}

func TestParseWorkspace(t *testing.T) {
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]runtime.Mount{
		"/src":            {Type: "workspace", Source: "/src", Target: "/src"},
		"/src:/work":      {Type: "workspace", Source: "/src", Target: "/work"},
		"/src:/work:ro":   {Type: "workspace", Source: "/src", Target: "/work", ReadOnly: true},
		"/src:readonly":   {Type: "workspace", Source: "/src", Target: "/src", ReadOnly: true},
		"/src:/work:rw":   {Type: "workspace", Source: "/src", Target: "/work"},
		".":               {Type: "workspace", Source: here, Target: here},
		"../x:/work":      {Type: "workspace", Source: filepath.Join(filepath.Dir(here), "x"), Target: "/work"},
		"/src/:/work/":    {Type: "workspace", Source: "/src", Target: "/work"},
		"/src:/work/../x": {Type: "workspace", Source: "/src", Target: "/x"},
	} {
		if got, err := parseWorkspace(in); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", in, got, err, want)
		}
	}
	for _, in := range []string{"", ":/work", "/src:work", "/src:/a:/b", "/src:/work:no", "/src:/"} {
		_, err := parseWorkspace(in)
		usage(t, err, "--workspace")
	}
}

func TestParsePort(t *testing.T) {
	for in, want := range map[string]runtime.Port{
		"8080:80":           {Host: 8080, Sandbox: 80, Protocol: "tcp"},
		"53:53/udp":         {Host: 53, Sandbox: 53, Protocol: "udp"},
		"127.0.0.1:8080:80": {HostIP: "127.0.0.1", Host: 8080, Sandbox: 80, Protocol: "tcp"},
		"[::1]:8080:80/tcp": {HostIP: "::1", Host: 8080, Sandbox: 80, Protocol: "tcp"},
	} {
		got, err := parsePort(in)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", in, got, err, want)
		}
	}
	for in, msg := range map[string]string{
		"80":          "host's port is missing",
		"0:80":        "is not a port",
		"80:65536":    "is not a port",
		"x:80":        "is not a port",
		"a.b.c:80:80": "not an IP address",
		"80:80/sctp":  "unknown protocol",
		"80-90:80-90": "is not a port",
	} {
		_, err := parsePort(in)
		usage(t, err, msg)
	}
}

func TestParseLimits(t *testing.T) {
	for _, c := range []struct {
		s            string
		memory, want int64
		bad          bool
	}{
		{"", 0, 0, false}, {"0", 1 << 20, 0, false}, {"-1", 0, -1, false}, {"3m", 1 << 20, 2 << 20, false},
		{"1m", 1 << 20, 0, false},
		{"1m", 0, 0, true}, {"1m", 1 << 21, 0, true}, {"-2", 1 << 20, 0, true},
	} {
		if got, err := parseSwap(c.s, c.memory); got != c.want || (err != nil) != c.bad {
			t.Errorf("--memory-swap %s, --memory %d: %d, %v", c.s, c.memory, got, err)
		}
	}
	if n, err := parseSize("--memory", "512m"); err != nil || n != 512<<20 {
		t.Errorf("512m: %d, %v", n, err)
	}
	for _, s := range []string{"", "0", "-1", "lots", "1x"} {
		_, err := parseSize("--memory", s)
		usage(t, err, "--memory")
	}
	if n, err := parseCPUs("1.5"); err != nil || n != 1.5 {
		t.Errorf("1.5: %v, %v", n, err)
	}
	for _, s := range []string{"", "0", "-1", "NaN", "Inf", "two"} {
		_, err := parseCPUs(s)
		usage(t, err, "--cpus")
	}
	if n, err := parsePids(-1); err != nil || n != 0 {
		t.Errorf("-1: %d, %v", n, err)
	}
	_, err := parsePids(-2)
	usage(t, err, "--pids-limit")
}

func TestParseLabels(t *testing.T) {
	got, err := parseLabels("--label", []string{"a=1", "b=", "c=x=y", "a=2"})
	if d := cmp.Diff(map[string]string{"a": "2", "b": "", "c": "x=y"}, got); err != nil || d != "" {
		t.Error(err, d)
	}
	for _, s := range []string{"a", "=1", "", "a b=1", "a=\xff"} {
		_, err := parseLabels("--label", []string{s})
		usage(t, err, "--label")
	}
}

func TestCheckName(t *testing.T) {
	for _, s := range []string{"c", "C-1_x.y", "0", strings.Repeat("x", 128)} {
		if err := checkName("--name", s); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []string{"", ".", "..", "../x", "a/b", "-a", "a b", "a\n", "ü", strings.Repeat("x", 129)} {
		usage(t, checkName("--name", s), "--name")
	}
}

func TestParseDetachKeys(t *testing.T) {
	for in, want := range map[string]string{
		"ctrl-p,ctrl-q": "\x10\x11", "": "", "a": "a", "ctrl-@,ctrl-[,ctrl-_": "\x00\x1b\x1f", "CTRL-A": "\x01",
	} {
		got, err := parseDetachKeys(in)
		if err != nil || string(got) != want {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"ctrl-", "ctrl-1", "ab", "a,,b"} {
		_, err := parseDetachKeys(in)
		usage(t, err, "--detach-keys")
	}
}

func TestParseSignal(t *testing.T) {
	for _, s := range []string{"TERM", "SIGTERM", "term", "15", "RTMIN+1"} {
		if _, err := parseSignal("--signal", s); err != nil {
			t.Error(err)
		}
	}
	for _, s := range []string{"", "NOPE", "0", "-1"} {
		_, err := parseSignal("--signal", s)
		usage(t, err, "--signal")
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for in, want := range map[string]time.Time{
		"":                     {},
		"10m":                  now.Add(-10 * time.Minute),
		"1767323045":           time.Unix(1767323045, 0),
		"2026-01-02T03:04:05Z": now,
	} {
		got, err := parseSince(in, now)
		if err != nil || !got.Equal(want) {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	_, err := parseSince("yesterday", now)
	usage(t, err, "--since")
}

func TestParseSecret(t *testing.T) {
	for text, want := range map[string]runtime.Secret{
		"tok=file:/a,b:c=d":         {Name: "tok", File: "/a,b:c=d"},
		"tok=env:TOKEN":             {Name: "tok", Env: "TOKEN"},
		"id=file:/a":                {Name: "id", File: "/a"},
		"id=tok,src=/a":             {Name: "tok", File: "/a"},
		"type=env,id=tok,env=TOKEN": {Name: "tok", Env: "TOKEN"},
	} {
		if got, err := parseSecret(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for text, why := range map[string]string{
		"tok": "where the value comes from", "tok=value": "where the value comes from",
		"tok=file:": "where the value comes from",
		"=env:A":    "the name is missing", "id=tok,src=/a,mode=0400": "unknown field mode",
	} {
		_, err := parseSecret(text)
		usage(t, err, why)
	}
}
