package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func TestEvents(t *testing.T) {
	f := boxes()
	r := try(t, f, "", "events", "--format", "json", "--type", "oom", "--type", "denied", "--since", "1h", "run")
	const at = `{"time":"2026-01-02T03:04:05.000006789Z","sandbox":"run",`
	r.want(t, 0, at+`"type":"denied","protocol":"tls","name":"evil.example","address":"192.0.2.1:443","reason":"no rule allows the name on this port","missed":3}`+"\n"+
		at+`"type":"oom","count":1,"total":2,"started":"2026-01-02T03:04:05.000006789Z","limit":16777216}`+"\n"+
		at+`"type":"pids-limit","count":3,"total":3,"started":"2026-01-02T03:04:05.000006789Z"}`+"\n"+
		at+`"type":"storage-limit","used":3145728,"limit":2097152}`+"\n"+
		at+`"type":"expired","after_ns":3600000000000}`+"\n"+
		at+`"type":"idle","after_ns":61234000000}`+"\n")
	if f.since.IsZero() {
		t.Error("--since was not passed on")
	}
	r = try(t, f, "", "events", "-f", "run")
	day := epoch.Local().Format(time.DateTime)
	r.want(t, 0, strings.ReplaceAll(`@ denied        tls  evil.example 192.0.2.1:443: no rule allows the name on this port (+3)
@ oom           1 killed for memory, 2 since its start (limit 16MiB)
@ pids-limit    3 not made, 3 since its start
@ storage-limit killed: its files take 3MiB (limit 2MiB)
@ expired       stopped: its time of 1h0m0s was over
@ idle          stopped: nothing went on for 1m1.2s
`, "@", day))
	try(t, f, "", "events", "--type", "ooms", "run").want(t, exitUsage, "", "must be one of denied, oom")
	if want := []string{
		"Events run false [oom denied]", "Close", "Events run true []", "Close",
	}; !slices.Equal(f.calls, want) {
		t.Errorf("calls %q, want %q", f.calls, want)
	}
}

func TestLifetimeFlags(t *testing.T) {
	f := boxes()
	try(t, f, "", "update", "run", "--ttl", "2h").want(t, 0,
		"expires "+epoch.Add(2*time.Hour).Local().Format(time.RFC3339)+"\n")
	try(t, f, "", "update", "run", "--ttl", "none", "--idle", "1d").want(t, 0, "")
	for _, args := range [][]string{{}, {"--ttl", "0s"}, {"--ttl", "10ms"}, {"--idle", "soon"}} {
		try(t, f, "", append([]string{"update", "run"}, args...)...).want(t, exitUsage, "", "update --help")
	}
	if want := []string{
		"UpdateLifetime run 2h0m0s -", "Close", "UpdateLifetime run 0s 24h0m0s", "Close",
	}; !slices.Equal(f.calls, want) {
		t.Errorf("calls %q, want %q", f.calls, want)
	}
	f = newFake()
	try(t, f, "", "create", "--ttl", "1d", "--idle", "15m", "busybox").want(t, 0, fmt.Sprintf("%032x\n", 0xabc0))
	if got := f.created[0].Spec.Lifetime; got != (runtime.Lifetime{TTL: 24 * time.Hour, Idle: 15 * time.Minute}) {
		t.Errorf("lifetime %+v", got)
	}
	try(t, f, "", "create", "--ttl", "1x", "busybox").want(t, exitUsage, "", "--ttl")
}
