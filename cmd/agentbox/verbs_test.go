package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"context"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/runtime"
)

func boxes() *fakeService {
	f := newFake()
	id := func(s string) string { return s + strings.Repeat("0", 32-len(s)) }
	spec := runtime.Spec{Args: []string{"sh", "-c", "i=0; while :; do sleep 1; done"},
		Network: runtime.Network{Ports: []runtime.Port{
			{Host: 8080, Sandbox: 80, Protocol: "tcp"}, {HostIP: "::1", Host: 53, Sandbox: 53, Protocol: "udp"}}}}
	f.sandboxes = []runtime.Sandbox{
		{
			ID: id("a1"), Name: "new", Status: runtime.Created, Image: "busybox", Created: epoch,
			Spec: runtime.Spec{Args: []string{"true"}},
		},
		{
			ID: id("b2"), Name: "run", Status: runtime.Running, Pid: 42, Image: "busybox", Created: epoch,
			Started: epoch, Spec: spec,
		},
		{
			ID: id("c3"), Name: "ice", Status: runtime.Paused, Pid: 43, Image: "busybox", Created: epoch,
			Started: epoch, Spec: runtime.Spec{Args: []string{"a", "b\n\x1b[31m"}},
		},
		{
			ID: id("d4"), Name: "end", Status: runtime.Exited, ExitCode: 137, Image: "debian",
			Created: epoch.Add(-48 * time.Hour), Finished: epoch.Add(-2 * time.Second),
			Labels: map[string]string{"k": "v"},
		},
	}
	f.checkpoints = []runtime.Checkpoint{{ID: strings.Repeat("3f2a", 8), Name: "before", Sandbox: id("b2"),
		SandboxName: "run", Kind: runtime.KindFull,
		Status: runtime.CheckpointReady, Trigger: "manual", Created: epoch, Files: 12, Processes: 3, Bytes: 1_234_567}}
	f.images = []runtime.Image{{
		Name: "busybox", Digest: "sha256:" + strings.Repeat("ab", 32), Builtin: true, Bytes: 2_000_000,
	}}
	return f
}

func TestPs(t *testing.T) {
	running := `ID             NAME   IMAGE     COMMAND                  CREATED         STATUS                  PORTS
b20000000000   run    busybox   "sh -c i=0; while :;…"   3 seconds ago   Up 3 seconds            0.0.0.0:8080->80/tcp, [::1]:53->53/udp
c30000000000   ice    busybox   "a b\n\x1b[31m"          3 seconds ago   Up 3 seconds (Paused)   
`
	try(t, boxes(), "", "ps").want(t, 0, running)
	try(t, boxes(), "", "ps", "-q").want(t, 0, "b20000000000\nc30000000000\n")
	r := try(t, boxes(), "", "ps", "-a", "--no-trunc")
	for _, s := range []string{
		"a1000000000000000000000000000000", "Created", "Exited (137) 5 seconds ago", "2 days ago",
		`"sh -c i=0; while :; do sleep 1; done"`,
	} {
		if !strings.Contains(r.stdout, s) {
			t.Errorf("no %q in:\n%s", s, r.stdout)
		}
	}
	try(t, newFake(), "", "ps", "--format", "json").want(t, 0, "[]\n")
	try(t, newFake(), "", "ps", "-q").want(t, 0, "")
	try(t, boxes(), "", "ps", "-q", "--format", "json").want(t, exitUsage, "", "exclude each other",
		"See 'agentbox ps --help'.")
	try(t, boxes(), "", "ps", "--format", "xml").want(t, exitUsage, "", "must be one of table, json")
	var got []map[string]any
	if err := json.Unmarshal([]byte(try(t, boxes(), "", "ps", "-a", "--format", "json").stdout),
		&got); err != nil || len(got) != 4 {
		t.Errorf("%v: %v", err, got)
	}
}

// The documented keys: they may be added to, never taken away.
func TestJSONKeys(t *testing.T) {
	keys := func(m map[string]any) []string { return slices.Sorted(maps.Keys(m)) }
	one := func(args ...string) map[string]any {
		t.Helper()
		var got []map[string]any
		r := try(t, boxes(), "", args...)
		if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || len(got) != 1 || r.code != 0 {
			t.Fatalf("%v: %s %s", err, r.stdout, r.stderr)
		}
		return got[0]
	}
	sb := one("inspect", "end")
	want := []string{
		"attempt", "backend", "created", "exit_code", "finished", "head", "id", "image", "image_digest", "labels",
		"name", "pid", "spec", "status", "upperdir",
	}
	if d := cmp.Diff(want, keys(sb)); d != "" {
		t.Error(d)
	}
	if sb["exit_code"] != 137.0 || sb["status"] != "exited" {
		t.Error(sb)
	}
	if sb := one("inspect", "run"); fmt.Sprint(sb["labels"]) != "map[]" || sb["pid"] != 42.0 || sb["started"] == nil {
		t.Error(sb)
	}
	ck := one("checkpoint", "inspect", "3f2a")
	want = []string{
		"added", "bytes", "created", "digest", "files", "frozen_ns", "id", "image_digest", "kind", "labels", "name",
		"parent", "pinned", "processes", "sandbox", "sandbox_name", "status", "trigger", "unchanged",
	}
	if d := cmp.Diff(want, keys(ck)); d != "" {
		t.Error(d)
	}
	if ck := one("checkpoint", "ls", "--format", "json"); ck["name"] != "before" {
		t.Error(ck)
	}
	im := one("image", "ls", "--format", "json")
	if d := cmp.Diff([]string{
		"builtin", "bytes", "created", "digest", "layers", "name", "repo_digests",
	}, keys(im)); d != "" {
		t.Error(d)
	}
	var re map[string]any
	if err := json.Unmarshal([]byte(try(t, boxes(), "", "restore", "--format", "json",
		"run").stdout), &re); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{
		"changed", "checkpoint", "down_ns", "files_ns", "recreated", "sandbox", "verified",
	}, keys(re)); d != "" {
		t.Error(d)
	}
	try(t, newFake(), "", "checkpoint", "ls", "--format", "json").want(t, 0, "[]\n")
	try(t, newFake(), "", "image", "ls", "--format", "json").want(t, 0, "[]\n")
	var rec map[string]any
	if err := json.Unmarshal([]byte(try(t, newFake(), "", "recover", "--format", "json").stdout), &rec); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"actions", "counts", "failed", "findings", "sandboxes", "took_ns"}, keys(rec)); d != "" {
		t.Error(d)
	}
}

func TestInspectPartly(t *testing.T) {
	r := try(t, boxes(), "", "inspect", "run", "nope")
	var got []map[string]any
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || len(got) != 1 {
		t.Errorf("%v: %s", err, r.stdout)
	}
	r.want(t, exitNotFound, r.stdout, "agentbox: find nope: sandbox not found\n",
		"hint: 'agentbox ps -a' lists all sandboxes.\n")
	try(t, boxes(), "", "inspect", "nope").want(t, exitNotFound, "[]\n", "not found")
}

// Verbs with several arguments go on after an error; the first one counts.
func TestManyArguments(t *testing.T) {
	f := boxes()
	f.fail["RemoveCheckpoint"] = nil
	r := try(t, f, "", "rm", "-f", "nope", "run", "nope2", "end")
	r.want(t, exitNotFound, "run\nend\n", "find nope:", "find nope2:")
	if got := len(f.sandboxes); got != 2 {
		t.Errorf("%d sandboxes left", got)
	}
	for verb, want := range map[string]string{
		"stop": "Stop", "start": "Start", "kill": "Kill", "pause": "Pause", "unpause": "Unpause", "restart": "Restart",
	} {
		f := boxes()
		try(t, f, "", verb, "run", "nope", "end").want(t, exitNotFound, "run\nend\n", "find nope:")
		if !strings.HasPrefix(f.calls[0], want+" run") {
			t.Errorf("%s: %q", verb, f.calls)
		}
	}
	f = boxes()
	f.fail["Restart"] = runtime.ErrBusy
	try(t, f, "", "restart", "run", "end").want(t, exitBusy, "", "busy")
	try(t, boxes(), "", "wait", "end", "end").want(t, 0, "137\n137\n")
	try(t, boxes(), "", "checkpoint", "rm", "x", "y").want(t, 0, "x\ny\n")
	try(t, boxes(), "", "image", "rm", "x", "y").want(t, 0, "x\ny\n")
}

func TestExitCodes(t *testing.T) {
	for err, code := range map[error]int{
		errors.New("plain"): exitFailure, runtime.ErrInvalid: exitUsage, runtime.ErrNotFound: exitNotFound,
		runtime.ErrExists: exitState,
		runtime.ErrState:  exitState, runtime.ErrBusy: exitBusy, runtime.ErrCorrupt: exitCorrupt,
		runtime.ErrDenied: exitDenied, runtime.ErrUnsupported: exitUnsupported,
	} {
		f := boxes()
		f.fail["Pause"] = &runtime.Error{Op: "pause", ID: "run", Err: fmt.Errorf("told: %w", err), Hint: "Do it again."}
		r := try(t, f, "", "pause", "run")
		r.want(t, code, "", "agentbox: pause run: told: "+err.Error()+"\n", "hint: Do it again.\n")

		f = boxes()
		f.fail["Create"] = err
		try(t, f, "", "run", "busybox").want(t, exitAgentbox, "", err.Error())
		f.fail["Exec"] = err
		try(t, f, "", "exec", "run", "true").want(t, exitAgentbox, "", err.Error())
	}
	// The first of joined errors decides.
	f := boxes()
	f.fail["Pause"] = errors.Join(errors.New("x"), fmt.Errorf("y: %w", runtime.ErrCorrupt), runtime.ErrInvalid)
	try(t, f, "", "pause", "run").want(t, exitCorrupt, "", "x\n")
	// Text from a sandbox must not reach the terminal as it is.
	f.fail["Pause"] = errors.New("file \x1b]0;owned\a")
	if r := try(t, f, "", "pause", "run"); strings.ContainsAny(r.stderr, "\x1b\a") {
		t.Errorf("%q", r.stderr)
	}
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"--bogus", 2, "unknown flag: --bogus"},
		{"frobnicate", 2, `unknown command "frobnicate"`},
		{"pss", 2, "did you mean ls or ps"},
		{"image frob", 2, `unknown command "frob"`},
		{"ps extra", 2, `takes no argument, but was given "extra"`},
		{"ps --bogus", 2, "See 'agentbox ps --help'."},
		{"stop", 2, "SANDBOX is missing"},
		{"stop -t -1 run", 2, "must not be negative"},
		{"stop -t x run", 2, "invalid"},
		{"checkpoint run extra", 2, `unexpected argument "extra"`},
		{"checkpoint --tcp maybe run", 2, "must be one of established, close, refuse"},
		{"checkpoint --timeout -1s run", 2, "must not be negative"},
		{"checkpoint --label x run", 2, "the value is missing"},
		{"checkpoint --name a/b run", 2, "a name is"},
		{"checkpoint ls a b", 2, `unexpected argument "b"`},
		{"restore a b c", 2, `unexpected argument "c"`},
		{"image import x", 2, "TARBALL|DIR|- is missing"},
		{"kill -s NOPE run", 2, "unknown signal"},
		{"logs --tail x run", 2, "--tail"},
		{"logs --since x run", 2, "--since"},
		{"cp a b", 2, "one of SRC and DST must be SANDBOX:PATH"},
		{"cp a:/x b:/y", 2, "must be on the host"},
		{"cp run: /y", 2, "the path is empty"},
		{"completion tcsh", 2, "unknown shell"},
		{"--backend lxd ps", 2, "unknown backend"},
		{"--log-level loud ps", 2, "must be one of"},
		{"start -a run end", 2, "takes one sandbox"},
		{"create", 2, "IMAGE is missing"},
		{"create --name ../x busybox", 2, "a name is"},
		{"create --memory 0 busybox", 2, "--memory"},
		{"run", 125, "IMAGE is missing"},
		{"run --bogus busybox", 125, "unknown flag"},
		{"run --cpus 0 busybox", 125, "--cpus"},
		{"run --network what busybox", 125, "must be one of none, host, bridge, filtered"},
		{"run --network none -p 80:80 busybox", 125, "needs --network bridge"},
		{"run --network host --network-group g busybox", 125, "needs --network bridge"},
		{"run --network bridge --egress pypi.org busybox", 125, "needs --network filtered"},
		{"run --egress pypi.org --network-group g busybox", 125, "past the filter"},
		{"update run", 2, "nothing to change"},
		{"run -w rel busybox", 125, "absolute path"},
		{"run -v /a:/x --tmpfs /x busybox", 125, "two mounts at /x"},
		{"run -it busybox", 125, "the input device is not a TTY"},
		{"exec run", 125, "COMMAND is missing"},
		{"exec -it run sh", 125, "the input device is not a TTY"},
		{"exec -w rel run sh", 125, "absolute path"},
	} {
		f := boxes()
		r := try(t, f, "", strings.Fields(c.args)...)
		if r.code != c.code || !strings.Contains(r.stderr, c.want) || r.stdout != "" {
			t.Errorf("agentbox %s: code %d, want %d; stderr %q, want %q; stdout %q", c.args, r.code, c.code,
				r.stderr, c.want, r.stdout)
		}
		if len(f.calls) > 0 {
			t.Errorf("agentbox %s: the service was called: %q", c.args, f.calls)
		}
	}
}

func TestCreateRequest(t *testing.T) {
	t.Setenv("FROM_CALLER", "yes")
	f := newFake()
	r := try(t, f, "", strings.Fields(`create -i -t --rm --name c -e A=1 -e FROM_CALLER -w /w -u 1:2 -v /a:/b:ro --tmpfs /t:size=1m
		--label k=v -l x= -h host -m 512m --cpus 1.5 --pids-limit 10 --network bridge --network-group g -p 8080:80 --read-only --init
		--entrypoint /e --stop-signal INT --pull always --platform linux/arm64 --insecure busybox sh -c true -x --name not-a-flag`)...)
	r.want(t, 0, fmt.Sprintf("%032x\n", 0xabc0))
	want := runtime.CreateRequest{
		Spec: runtime.Spec{
			Name: "c", Image: "busybox", Args: []string{"sh", "-c", "true", "-x", "--name", "not-a-flag"},
			Env:     []string{"A=1", "FROM_CALLER=yes"},
			Workdir: "/w", User: "1:2", Hostname: "host", Terminal: true, OpenStdin: true, Init: true, ReadOnly: true,
			AutoRemove: true, StopSignal: "INT",
			Mounts: []runtime.Mount{
				{Type: "bind", Source: "/a", Target: "/b", ReadOnly: true},
				{Type: "tmpfs", Target: "/t", Options: "size=1m"},
			},
			Network: runtime.Network{
				Mode: "bridge", Group: "g", Ports: []runtime.Port{{Host: 8080, Sandbox: 80, Protocol: "tcp"}},
			},
			Resources: runtime.Resources{Memory: 512 << 20, CPUs: 1.5, Pids: 10},
			Labels:    map[string]string{"k": "v", "x": ""},
		},
		Entrypoint: []string{"/e"},
	}
	if d := cmp.Diff(want, f.created[0], cmpopts.IgnoreFields(runtime.CreateRequest{}, "Pull")); d != "" {
		t.Error(d)
	}
	if p := f.created[0].Pull; p.Policy != image.PullAlways ||
		p.Source.Platform != "linux/arm64" || !p.Source.Insecure {
		t.Errorf("%+v", p)
	}
	try(t, f, "", "create", "--entrypoint", "", "busybox", "x")
	if e := f.created[1].Entrypoint; e == nil || len(e) != 0 {
		t.Errorf("an empty entrypoint is none, not the image's: %#v", e)
	}
	try(t, f, "", "create", "busybox")
	if f.created[2].Entrypoint != nil {
		t.Error("an entrypoint that was not given is the image's")
	}
}

func TestRun(t *testing.T) {
	exit := func(code int) func(context.Context, runtime.Streams, <-chan string) (int, error) {
		return func(_ context.Context, s runtime.Streams, _ <-chan string) (int, error) {
			fmt.Fprintln(s.Stdout, "to stdout")
			fmt.Fprintln(s.Stderr, "to stderr")
			return code, nil
		}
	}
	f := newFake()
	f.program = exit(3)
	try(t, f, "", "run", "--name", "c", "busybox", "x").want(t, 3, "to stdout\n", "to stderr\n")
	if len(f.sandboxes) != 1 {
		t.Error("without --rm the sandbox stays")
	}
	f = newFake()
	f.program = exit(0)
	try(t, f, "", "run", "--rm", "--name", "c", "busybox", "x").want(t, 0, "to stdout\n", "to stderr\n")
	if len(f.sandboxes) != 0 {
		t.Error("with --rm the sandbox goes")
	}
	f = newFake()
	try(t, f, "", "run", "-d", "--rm", "busybox").want(t, 0, fmt.Sprintf("%032x\n", 0xabc0))
	if len(f.sandboxes) != 1 {
		t.Error("a detached sandbox goes at its own end")
	}
	// A failing removal is told, and does not hide the command's code.
	f = newFake()
	f.program = exit(3)
	f.fail["Remove"] = errors.New("stuck")
	try(t, f, "", "run", "--rm", "busybox").want(t, 3, "to stdout\n", "stuck")
	f.program = exit(0)
	try(t, f, "", "run", "--rm", "busybox").want(t, exitAgentbox, "to stdout\n", "stuck")
}

func TestRunCannotStart(t *testing.T) {
	for code, rm := range map[int]bool{exitNotExecutable: false, exitNoCommand: true} {
		for _, detach := range []bool{false, true} {
			f := newFake()
			f.fail["Start"] = &runtime.Error{
				Op: "start", Err: &runtime.ExecError{Command: "x", Code: code, Err: errors.New("no x here")},
			}
			args := []string{"run"}
			if rm {
				args = append(args, "--rm")
			}
			if detach {
				args = append(args, "-d")
			}
			try(t, f, "", append(args, "busybox", "x")...).want(t, code, "", "no x here")
			if gone := len(f.sandboxes) == 0; gone != rm {
				t.Errorf("rm %v: gone %v", rm, gone)
			}
		}
	}
	f := newFake()
	f.fail["Start"] = runtime.ErrUnsupported
	try(t, f, "", "run", "busybox").want(t, exitAgentbox, "", "not supported")
	// start is not a verb that passes codes through.
	f = boxes()
	f.fail["Start"] = &runtime.ExecError{Code: 127, Err: errors.New("no x here")}
	try(t, f, "", "start", "end").want(t, exitFailure, "", "no x here")
	try(t, f, "", "start", "-a", "end").want(t, 127, "", "no x here")
}

func TestStdin(t *testing.T) {
	cat := func(_ context.Context, s runtime.Streams, _ <-chan string) (int, error) {
		if s.Stdin == nil {
			fmt.Fprint(s.Stdout, "no stdin")
			return 0, nil
		}
		var line string
		_, err := fmt.Fscanln(s.Stdin, &line)
		fmt.Fprint(s.Stdout, line)
		return 0, err
	}
	f := boxes()
	f.program = cat
	try(t, f, "hello\n", "run", "-i", "busybox", "cat").want(t, 0, "hello")
	try(t, f, "hello\n", "run", "busybox", "cat").want(t, 0, "no stdin")
	try(t, f, "hello\n", "exec", "-i", "run", "cat").want(t, 0, "hello")
	try(t, f, "hello\n", "exec", "run", "cat").want(t, 0, "no stdin")
	// A terminal for the command needs none for the caller, unless it types.
	try(t, f, "hello\n", "exec", "-t", "run", "cat").want(t, 0, "no stdin")
	if p := f.execed[len(f.execed)-1]; !p.Terminal {
		t.Error("no terminal")
	}
}

func TestExec(t *testing.T) {
	f := boxes()
	try(t, f, "", "exec", "-d", "-e", "A=1", "-w", "/w", "-u", "u", "run", "ls", "-d").want(t, 0, "")
	want := runtime.Process{Args: []string{"ls", "-d"}, Env: []string{"A=1"}, Workdir: "/w", User: "u", Detach: true}
	if d := cmp.Diff(want, f.execed[0]); d != "" {
		t.Error(d)
	}
	f.program = func(context.Context, runtime.Streams, <-chan string) (int, error) { return 137, nil }
	try(t, f, "", "exec", "run", "x").want(t, 137, "")
	f.program = func(context.Context, runtime.Streams, <-chan string) (int, error) {
		return 0, &runtime.ExecError{Code: 126, Err: errors.New("permission denied")}
	}
	try(t, f, "", "exec", "run", "x").want(t, 126, "", "permission denied")
	try(t, f, "", "exec", "nope", "x").want(t, exitAgentbox, "", "not found")
}

func TestStopTimeout(t *testing.T) {
	for args, want := range map[string]time.Duration{
		"stop run": -1, "stop -t 0 run": 0, "stop --time 3 run": 3 * time.Second, "restart -t 2 run": 2 * time.Second,
	} {
		f := boxes()
		if r := try(t, f, "", strings.Fields(args)...); r.code != 0 || f.stopTimeout != want {
			t.Errorf("%s: %+v, %v", args, r, f.stopTimeout)
		}
	}
}

func TestLogs(t *testing.T) {
	f := boxes()
	try(t, f, "", "logs", "-f", "--tail", "20", "-t", "--since", "1m", "run").want(t, 0, "out\n", "err\n")
	want := runtime.LogOptions{Follow: true, Tail: 20, Timestamps: true, Since: epoch.Add(3*time.Second - time.Minute)}
	if d := cmp.Diff(want, f.logOpts); d != "" {
		t.Error(d)
	}
	try(t, f, "", "logs", "run")
	if f.logOpts.Tail != -1 {
		t.Error(f.logOpts)
	}
}

func TestRestore(t *testing.T) {
	f := boxes()
	try(t, f, "", "restore", "--verify", "--files-only", "run", "before").want(t, 0, "run\n")
	if want := (runtime.RestoreOptions{
		Checkpoint: "before", FilesOnly: true, Verify: true, Pull: f.reOpts.Pull,
	}); !reflect.DeepEqual(f.reOpts, want) {
		t.Error(f.reOpts)
	}
	try(t, f, "", "restore", "run").want(t, 0, "run\n")
	if want := (runtime.RestoreOptions{Pull: f.reOpts.Pull}); !reflect.DeepEqual(f.reOpts, want) {
		t.Error(f.reOpts)
	}
	try(t, f, "", "restore", "run", "").want(t, exitUsage, "", "CHECKPOINT is empty")
	f.fail["Restore"] = runtime.ErrCorrupt
	try(t, f, "", "restore", "run").want(t, exitCorrupt, "", "corrupt")
}

func TestImage(t *testing.T) {
	f := boxes()
	try(t, f, "", "image", "ls").want(t, 0,
		"NAME      DIGEST                CREATED    SIZE\nbusybox   sha256:abababababab   built in   2MB\n")
	try(t, f, "", "image", "ls", "-q").want(t, 0, "busybox\n")
	t.Chdir(t.TempDir())
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	try(t, f, "", "image", "import", "deb", "x.tar").want(t, 0, "sha256:"+strings.Repeat("ab", 32)+"\n")
	if got, want := f.calls[len(f.calls)-2], "ImportImage deb "+filepath.Join(wd, "x.tar"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	try(t, f, "a tar", "image", "import", "deb", "-").want(t, 0, "sha256:"+strings.Repeat("cd", 32)+"\n")
	if string(f.stdin) != "a tar" {
		t.Errorf("%q", f.stdin)
	}
}

func TestDoctor(t *testing.T) {
	try(t, newFake(), "", "doctor").want(t, exitFailure, `ok    overlayfs  mounted
fail  criu       not found
                 remedy: Run scripts/install-deps.sh.
agentbox cannot do its job here: see the lines that say fail
`)
	r := try(t, newFake(), "", "doctor", "--format", "json")
	var got map[string]any
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || r.code != exitFailure || got["ok"] != false {
		t.Error(err, got, r)
	}
}

func TestEgressVerbs(t *testing.T) {
	f := boxes()
	try(t, f, "", "update", "run", "--egress-add", "a.example 1,2", "--egress-rm", "b.example").want(t, 0,
		"pypi.org 443\na.example 1,2\n")
	if want := []string{"UpdateEgress run [a.example 1,2] [b.example]", "Close"}; !slices.Equal(f.calls, want) {
		t.Errorf("calls %q, want %q", f.calls, want)
	}
	f = newFake()
	try(t, f, "", "create", "--egress", "pypi.org 443", "--egress", "10.0.0.0/8", "busybox").want(t, 0,
		fmt.Sprintf("%032x\n", 0xabc0))
	if got := f.created[0].Spec.Network; got.Mode != runtime.NetworkFiltered ||
		!slices.Equal(got.Egress, []string{"pypi.org 443", "10.0.0.0/8"}) {
		t.Errorf("network %+v", got)
	}
}

func TestReapAndRecover(t *testing.T) {
	f := newFake()
	try(t, f, "", "reap", "abc").want(t, 0, "")
	if d := cmp.Diff([]string{"abc"}, f.reaped); d != "" {
		t.Error(d)
	}
	try(t, f, "", "recover").want(t, 0, "nothing to recover\n")
	if f.calls[len(f.calls)-1] != "Close" {
		t.Errorf("the service stays open: %q", f.calls)
	}
}

func TestComplete(t *testing.T) {
	f := boxes()
	f.lease = runtime.Lease{ID: "1ea5e000", Name: "sess", Owner: runtime.LeaseOwner{Kind: runtime.OwnerPid, Pid: 7}}
	for args, want := range map[string]string{
		"stop ":               "run\trunning\n",
		"start ":              "new\tcreated\nend\texited\n",
		"rm new ":             "run\trunning\nice\tpaused\nend\texited\n",
		"exec ":               "run\trunning\n",
		"exec run ":           "",
		"restore ":            "new\tcreated\nrun\trunning\nice\tpaused\nend\texited\n",
		"restore run ":        "before\tfull of run\n",
		"checkpoint verify ":  "new\tcreated\nrun\trunning\nice\tpaused\nend\texited\nrun@before\tfull of run\n",
		"run ":                "busybox\n",
		"image rm ":           "",
		"run --network ":      "none\nhost\nbridge\nfiltered\n",
		"checkpoint --tcp ":   "established\nclose\nrefuse\n",
		"ps --format ":        "table\njson\n",
		"run --lease ":        "sess\tpid 7\n",
		"checkpoint --lease ": "sess\tpid 7\n",
		"completion ":         "bash\nzsh\nfish\npowershell\n",
	} {
		words := strings.Split(args, " ")
		r := try(t, f, "", append([]string{"__complete"}, words...)...)
		got, _, _ := strings.Cut(r.stdout, ":")
		if got != want || r.code != 0 {
			t.Errorf("%q: %q, want %q (%s)", args, got, want, r.stderr)
		}
	}
	f.fail["Sandboxes"] = runtime.ErrBusy
	if r := try(t, f, "", "__complete", "stop", ""); r.code != 0 {
		t.Errorf("completion fails: %+v", r)
	}
}

// TestPsFilter: of one key any, of several keys all, as with Docker, where a status
// is shown without -a, too.
func TestPsFilter(t *testing.T) {
	for filters, want := range map[string]string{
		"":                                    "run ice ",
		"status=exited":                       "end ",
		"status=exited status=created":        "new end ",
		"name=n status=running status=exited": "run end ",
		"name=n name=ic":                      "run ice ",
		"name=nobody":                         "",
	} {
		args := []string{"ps", "--format", "json"}
		for _, f := range strings.Fields(filters) {
			args = append(args, "--filter", f)
		}
		r := try(t, boxes(), "", args...)
		var list []runtime.Sandbox
		if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || r.code != 0 {
			t.Fatalf("%q: %v %+v", filters, err, r)
		}
		got := ""
		for _, sb := range list {
			got += sb.Name + " "
		}
		if got != want {
			t.Errorf("%q: %q, want %q", filters, got, want)
		}
	}
}

func TestHelpTellsExitCodes(t *testing.T) {
	root := newRootCommand(newApp())
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			continue
		}
		if c.Annotations["exit"] == "" || c.Short == "" || c.Long == "" && !c.Hidden || c.Example == "" && !c.Hidden {
			t.Errorf("%s: exit codes, Short, Long or Example is missing", c.Name())
		}
		if c.Args == nil {
			t.Errorf("%s does not check its arguments", c.Name())
		}
	}
}
