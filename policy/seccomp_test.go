package policy

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/moby/profiles/seccomp"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestParseSeccomp(t *testing.T) {
	docker, err := json.Marshal(seccomp.DefaultProfile())
	if err != nil {
		t.Fatal(err)
	}
	for _, good := range []string{
		string(docker),
		`{"defaultAction": "SCMP_ACT_LOG", "syscalls": [{"name": "read", "action": "SCMP_ACT_KILL_PROCESS", "args": [{"index": 5, "value": 1, "op": "SCMP_CMP_EQ"}]}]}`,
	} {
		if _, err := ParseSeccomp(good); err != nil {
			t.Errorf("%.100s: %v", good, err)
		}
	}
	rule := func(s string) string { return `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [` + s + `]}` }
	for text, want := range map[string]string{
		"":                                      "EOF",
		"null":                                  "no defaultAction",
		"{}":                                    "no defaultAction",
		`{"defaultAction": "SCMP_ACT_ALOW"}`:    "none of",
		`{"defaultAction": "SCMP_ACT_NOTIFY"}`:  "none of",
		`{"defaultAction": "SCMP_ACT_ALLOW"} 1`: "more after its end",
		`{"defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/x"}`:                                                  "nothing listens",
		`{"defaultAction": "SCMP_ACT_ALLOW", "syscall": []}`:                                                         "unknown field",
		`{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86"], "archMap": [{"architecture": ""}]}`: "exclude each other",
		rule(`null`):                         "syscalls[0]: null",
		rule(`{"action": "SCMP_ACT_ALLOW"}`): "either name or names",
		rule(`{"names": ["a"], "name": "b", "action": "SCMP_ACT_ALLOW"}`):                                 "either name or names",
		rule(`{"names": ["a"], "actoin": "SCMP_ACT_ALLOW"}`):                                              "unknown field",
		rule(`{"names": ["a"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 6, "op": "SCMP_CMP_EQ"}]}`): "6 arguments",
		rule(`{"names": ["a"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, "op": "="}]}`):           "none of",
		rule(`{"names": ["a"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "x"}}`):              "kernel version",
		rule(`{"names": ["a` + strings.Repeat(`","a`, maxSyscallNames) +
			`"], "action": "SCMP_ACT_ALLOW"}`): "names of system calls",
		strings.Repeat(" ", MaxSeccomp+
			1): "larger than",
	} {
		if _, err := ParseSeccomp(text); !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.120s: %v, not %s", text, err, want)
		}
	}
}

// FuzzParseSeccomp: what is taken can be resolved without a fall.
func FuzzParseSeccomp(f *testing.F) {
	f.Add(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ERRNO", "includes": {"caps": ["CAP_CHOWN"]}}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseSeccomp(text)
		if err == nil && (p == nil || p.DefaultAction == "") {
			t.Error("taken, and empty")
		}
	})
}
