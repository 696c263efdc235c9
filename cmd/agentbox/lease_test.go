package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func TestLeaseTerms(t *testing.T) {
	for line, want := range map[string]runtime.LeaseTerms{
		"--pid 7 --for 1h":               {Owner: runtime.OwnerPid, Pid: 7, For: time.Hour},
		"--heartbeat 30s":                {Owner: runtime.OwnerHeartbeat, Interval: 30 * time.Second},
		"--for 2d":                       {For: 48 * time.Hour},
		"--heartbeat 1m --for 10m":       {Owner: runtime.OwnerHeartbeat, Interval: time.Minute, For: 10 * time.Minute},
		"--pid 0":                        {},
		"--pid -3":                       {},
		"--heartbeat 30":                 {},
		"--pid 7 --heartbeat 30s":        {},
		"--name a/b --for 1h":            {},
		"--for 0":                        {},
		"--for 1h --format table":        {},
		"":                               {},
		"--for 1h one-argument-too-many": {},
	} {
		f := newFake()
		r := try(t, f, "", append([]string{"lease", "create"}, strings.Fields(line)...)...)
		if want == (runtime.LeaseTerms{}) {
			if r.code != exitUsage {
				t.Errorf("%q: %+v", line, r)
			}
			continue
		}
		if r.want(t, 0, "1ea5e0000000000000000000000000ff\n"); f.terms != want {
			t.Errorf("%q: %+v, want %+v", line, f.terms, want)
		}
	}
}

// Lines of several members do not mix, whatever pieces they come in.
func TestMemberLines(t *testing.T) {
	var buf bytes.Buffer
	out := &memberOutput{stdout: &buf}
	a, b := &lineWriter{out: out, to: &buf, prefix: "a"}, &lineWriter{out: out, to: &buf, prefix: "b"}
	long := strings.Repeat("x", maxLine)
	for _, p := range []struct {
		w    *lineWriter
		text string
	}{{a, "one\ntw"}, {b, "\n"}, {a, "o\n\nthr"}, {b, long + "yz"}, {b, "\nend"}} {
		if n, err := p.w.Write([]byte(p.text)); n != len(p.text) || err != nil {
			t.Fatal(n, err)
		}
	}
	for _, w := range []*lineWriter{a, b, a} {
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	want := "[a] one\n[b] \n[a] two\n[a] \n[b] " + long + "\n[b] yz\n[a] thr\n[b] end\n"
	if got := buf.String(); got != want {
		t.Errorf("%q", strings.ReplaceAll(got, long, "LONG"))
	}
}

// The output of a score is bounded.
func TestBoundedScore(t *testing.T) {
	var b boundedBuffer
	for range 3 {
		if n, err := b.Write(make([]byte, maxScore-1)); n != maxScore-1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if b.Len() != maxScore {
		t.Errorf("%d bytes are kept", b.Len())
	}
}
