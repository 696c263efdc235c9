package criu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Connections with a process that came in by an exec: the dump succeeds, they go on,
// and after a restore they are closed, with what was sent still to be read.
func TestDumpConnectedStray(t *testing.T) { eachBundle(t, testDumpConnectedStray) }

func testDumpConnectedStray(t *testing.T, edit func(*specs.Spec)) {
	ctx := context.Background()
	talk := filepath.Join(t.TempDir(), "talk")
	build(t, talk, "talk")
	name := fmt.Sprintf("abtest-%d", os.Getpid())
	ns := netns(t, name)
	b, rt := start(t, []string{
		"sh", "-c", "while [ ! -e /start ]; do sleep 0.02; done; exec talk serve",
	}, func(s *specs.Spec) {
		edit(s)
		for i := range s.Linux.Namespaces {
			if s.Linux.Namespaces[i].Type == specs.NetworkNamespace {
				s.Linux.Namespaces[i].Path = ns
			}
		}
	})
	at := func(name string) string { return filepath.Join(b.Files, name) }
	there := func(name string) func() bool {
		return func() bool { _, err := os.Stat(at(name)); return err == nil }
	}
	touch := func(name string) {
		t.Helper()
		if err := os.WriteFile(at(name), []byte("a note"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	install(t, b, talk, "talk")
	touch("note")
	touch("start")
	b.Until("it listens", there("listening"))
	if err := b.Cmd(nil, "exec", "--detach", b.ID, "talk", "call").Run(); err != nil {
		t.Fatal(err)
	}
	b.Until("they are connected", there("ready"))
	if err := rt.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	res, err := Dump(ctx, rt, DumpOptions{ImageDir: b.Images, WorkDir: b.Work, LeaveRunning: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(res.Processes) != 1 {
		t.Errorf("%+v", res.Processes)
	}
	for _, sock := range []string{
		"/s", "@a", "/q", "/fds", "/r", "/dg", "/late, which process", "/r2, which process", "process",
	} {
		if !slices.ContainsFunc(res.Warnings, func(w string) bool {
			return strings.HasPrefix(w, "the connection of process ") && strings.Contains(w, "(talk ") &&
				strings.Contains(w, " to "+sock+" ") && strings.HasSuffix(w, " is closed by a restore")
		}) {
			t.Errorf("nothing is said of %s: %q", sock, res.Warnings)
		}
	}
	if !slices.ContainsFunc(res.Warnings, func(w string) bool {
		return strings.HasPrefix(w, "the TCP connection of process ") &&
			strings.HasSuffix(w, " with 127.0.0.1:7777 has no peer after a restore")
	}) {
		t.Errorf("nothing is said of the TCP connection: %q", res.Warnings)
	}
	if err := rt.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	touch("live")
	b.Until("the caller has gone on", there("lived"))
	b.End()
	if out, err := exec.Command("ip", "netns", "del", name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	netns(t, name)
	restore(t, b, rt, Options{})
	touch("go")
	b.Until("the server has looked", there("result"))
	got, err := os.ReadFile(at("result"))
	want := strings.Join([]string{
		"flown: [a note] end", "flown: [] invalid argument",
		"stream: [hello] end (broken pipe)", "abstract: [hidden] end (broken pipe)",
		"packets: [one two] end (broken pipe)", "files: [] end (broken pipe)",
		"pair: [datagram] resource temporarily unavailable (transport endpoint is not connected)",
		"dialed: [dialed] end (broken pipe)", "unaccepted: [] end (broken pipe)",
		"datagram: [] resource temporarily unavailable (transport endpoint is not connected)", "",
	}, "\n")
	if err != nil || string(got) != want {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
}

// Only what strays alone hold is cut.
func TestSeveranceOf(t *testing.T) {
	server, caller := Stray{10, "server"}, Stray{20, "psql"}
	inside, outside := map[uint32]Stray{1: server, 2: server, 3: server}, map[uint32]Stray{7: caller, 8: caller}
	for _, c := range []struct {
		name  string
		socks []unixSocket
		cut   []uint32
		warns []string
	}{
		{"both inside", []unixSocket{{ino: 1, peer: 2}, {ino: 2, peer: 1}}, nil, nil},
		{"elsewhere", []unixSocket{{ino: 1, peer: 99}}, nil, nil},
		{
			"half", []unixSocket{{ino: 1, peer: 7, name: "/s"}, {ino: 7, peer: 1}}, []uint32{1},
			[]string{"the connection of process 20 (psql) to /s is closed by a restore"},
		},
		{
			"a pair", []unixSocket{{ino: 1, peer: 7}, {ino: 7, peer: 1}}, []uint32{1},
			[]string{"the connection of process 20 (psql) to process 10 (server) is closed by a restore"},
		},
		{
			"twice", []unixSocket{{ino: 1, peer: 7, name: "\x00ab\x00"}, {ino: 2, peer: 8, name: "\x00ab\x00"}},
			[]uint32{1, 2}, []string{"the connection of process 20 (psql) to @ab is closed by a restore"},
		},
		{
			"in flight", []unixSocket{{ino: 50, peer: 7}}, []uint32{50},
			[]string{"the connection of process 20 (psql) with a socket that is on its way to another process is closed by a restore"},
		},
		{"a stray's own", []unixSocket{{ino: 7, peer: 8}}, []uint32{7}, nil},
	} {
		got := severanceOf(c.socks, inside, outside)
		if !slices.Equal(got.inodes, c.cut) || !slices.Equal(got.warnings, c.warns) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

func TestKernelAddress(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:1F40":                         "127.0.0.1:8000",
		"0000000000000000FFFF00000100007F:0050": "127.0.0.1:80",
		"00000000000000000000000001000000:0050": "[::1]:80",
		"7F:1":                                  "",
	} {
		if got, ok := kernelAddress(text); ok != (want != "") || ok && got.String() != want {
			t.Errorf("%s: %v, %v", text, got, ok)
		}
	}
}
