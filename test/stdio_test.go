package test

import (
	"slices"
	"strings"
	"testing"
)

// TestStdioByName: what a process prints to /dev/stdout and /dev/stderr, opened by
// name, arrives, whichever user it runs as and however it came into its sandbox.
func TestStdioByName(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"default": nil, "user": {"-u", "1000:1001"}, "host": {"--userns", "host"},
		"host user": {"--userns", "host", "-u", "1000:1001"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBox(t)
			const say = "echo hi >/dev/stdout && echo ho >/dev/stderr && echo ho >>/proc/self/fd/2"
			with := func(args ...string) []string {
				return append(append(append([]string{args[0]}, flags...), "--network", "none"), args[1:]...)
			}
			said := func(what string, r result) {
				b.Helper()
				if r.code != 0 || r.out != "hi\n" || r.err != "ho\nho\n" {
					b.Errorf("%s: %+v", what, r)
				}
			}
			said("run", b.try(nil, with("run", "--rm", "busybox", "sh", "-c", say)...))
			b.start("c", append(slices.Clone(flags), "--network", "none", "busybox", "sh", "-c",
				"n=0; while n=$((n+1)); do echo out $n >/dev/stdout; echo err $n >/dev/stderr; sleep 0.05; done")...)
			goesOn := func(name string) {
				b.Helper()
				logs := func() string { r := b.try(nil, "logs", name); return r.out + r.err }
				n := len(logs())
				b.eventually("both streams go on", func() bool {
					now := logs()[n:]
					return strings.Count(now, "out ") > 1 && strings.Count(now, "err ") > 1
				})
			}
			execs := func(name string) {
				b.Helper()
				said("exec", b.try(nil, "exec", name, "sh", "-c", say))
				said("exec as another user", b.try(nil, "exec", "-u", "7:8", name, "sh", "-c", say))
				said("exec as a user by name", b.try(nil, "exec", "-u", "nobody", name, "sh", "-c", say))
				if r := b.input([]byte("in"), nil, "exec", "-i", "-u", "7", name, "cat",
					"/dev/stdin"); r.code != 0 || r.out != "in" {
					b.Errorf("the input by name: %+v", r)
				}
				b.ok("exec", "-d", "-u", "7", name, "sh", "-c", say+" && touch /tmp/detached")
				b.eventually("what was detached goes on", func() bool {
					return b.try(nil, "exec", "-u", "0", name, "rm", "/tmp/detached").code == 0
				})
			}
			goesOn("c")
			execs("c")
			if name == "host user" {
				return // its checkpoint takes a right that root has not on every machine
			}
			one := b.checkpoint("c")
			b.ok("restore", "c", one)
			goesOn("c")
			execs("c")
			b.ok("fork", "c@"+one, "--name", "f")
			b.own("f")
			goesOn("f")
			execs("f")
		})
	}
}
