package test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// A scene is a verb at which agentbox is broken. Every scene leaves the sandbox
// "s" running, at "base" or somewhere after it, so that the next can go on
// from there; "r" is a sandbox that comes and goes.
type scene struct {
	name    string
	prepare func(*sweep)
	verb    func(*sweep) []string
	env     string // failpoints besides the one that is tried
	check   func(*sweep, result)
}

// scenes by the beginnings of the failpoints' names they are for. A failpoint
// is tried in every scene of its longest entry; one that no entry knows is
// tried in all of them, so that a new one cannot be forgotten.
var scenesOf = map[string][]string{
	"audit.":                    {"checkpoint", "restore", "exec", "rm"},
	"audit.after-sync":          {"restore", "rm"},
	"audit.before-end":          {"restore", "rm"},
	"create.":                   {"run", "recreate"},
	"create.after-base":         {"run workspace"},
	"start.":                    {"start", "run"},
	"checkpoint.":               {"checkpoint"},
	"checkpoint.before-waits":   {"checkpoint", "checkpoint --stop"},
	"checkpoint.after-dump":     {"checkpoint", "checkpoint --stop", "restore"},
	"checkpoint.after-commit":   {"checkpoint", "checkpoint --stop", "restore"},
	"restore.":                  {"restore"},
	"restore.after-layout":      {"restore", "undo"},
	"restore.after-apply":       {"restore", "undo", "recreate"},
	"restore.after-proof":       {"restore aside", "restore"},
	"restore.after-start":       {"restore", "recreate"},
	"restore.aside.":            {"restore aside"},
	"restore.recreate.":         {"restore recreate"},
	"restore.hold.":             {"restore in vain"},
	"restore.attached.":         {"restore attached", "restore attached --no-undo"},
	"restore.aside.back":        {"failing restore aside"},
	"effect.":                   {"restore effects"},
	"effect.add.":               {"effect add"},
	"fork.":                     {"fork"},
	"overlay.update.":           {"restore", "restore aside"},
	"overlay.update.end":        {"restore aside", "restore"},
	"overlay.update.op":         {"restore", "undo", "restore aside"},
	"remove.":                   {"rm", "rm --checkpoints"},
	"lease.":                    {"lease release"},
	"stop.":                     {"stop"},
	"oci.create.":               {"run", "recreate"},
	"oci.start.":                {"start", "restore"},
	"oci.start.after-attach":    {"start", "restore", "run attached"},
	"oci.stop.":                 {"stop", "restore"},
	"oci.stop.after-strays":     {"failing start"},
	"oci.stop.after-kill":       {"stop", "restore", "checkpoint --stop"},
	"oci.stop.after-unmount":    {"stop", "checkpoint --stop", "failing start"},
	"oci.remove.":               {"rm", "rm running"},
	"oci.exec.":                 {"exec"},
	"network.setup.":            {"run bridge"},
	"network.teardown.":         {"stop bridge"},
	"network.release.":          {"rm bridge"},
	"store.journal.":            {"run", "checkpoint", "restore", "rm"},
	"store.sandbox.":            {"run", "rm"},
	"store.begin.":              {"checkpoint", "import"},
	"store.commit.":             {"checkpoint"},
	"store.commit.after-rename": {"checkpoint", "checkpoint --stop", "restore", "import"},
	"store.pack.":               {"checkpoint", "prune"},
	"store.abort.":              {"failing checkpoint"},
	"store.sweep.":              {"recover renamed", "recover packed"},
	"reconcile.":                {"recover ended"},
	"store.remove.":             {"checkpoint rm", "prune"},
	"store.reclaim.":            {"prune"},
	"portable.export.":          {"export"},
	"portable.import.":          {"import"},
	"commit.":                   {"commit"},
	"update.":                   {"update"},
	"oci.egress.":               {"update"},
	"image":                     {"image import", "image rm"},
}

// elsewhere are the beginnings of the failpoints that no sandbox of the backend
// oci passes, and the tests that break agentbox at each of them.
var elsewhere = map[string]string{
	"apply.":                         "workspaceapply_test.go",
	"apply.after-canary":             "workspacecanary_test.go",
	"apply.before-canary":            "workspacecanary_test.go",
	"approve.":                       "workspaceapprove_test.go",
	"containerd.":                    "containerd/containerd_test.go",
	"docker.":                        "docker/sandbox_test.go",
	"mount.":                         "mount_test.go",
	"podman.":                        "../runtime/podman/address_test.go",
	"restart.":                       "restart_test.go",
	"restore.attached.before-return": "attached_test.go",
	"restore.before-mend":            "mapped_test.go",
	"prune.":                         "reconcile_test.go",
	"images.pull.":                   "../images/pull_test.go",
	"portable.import.after-mounts":   "../runtime/portable/failpoint_test.go", // of archives by Podman
	"registry.":                      "../runtime/registry/failpoint_test.go",
	"stopped.":                       "stopped_test.go",
	"store.reindex.":                 "../runtime/store/rearrange_failpoint_test.go",
	"unaccepted.":                    "unaccepted_test.go",
	"undo.paths.":                    "steps_test.go",
	"validate.":                      "workspacevalidate_test.go",
	"volume.":                        "../runtime/volume/failpoint_test.go",
	"volume.pause.":                  "../runtime/dockerplugin/volume/dockerd_test.go",
}

var scenes = []scene{
	{
		name: "run", verb: words("run -d --name r --network none --secret s=file:/etc/passwd busybox sleep 1000"),
		check: (*sweep).checkComer,
	},
	{name: "run workspace", prepare: func(s *sweep) { s.dir = s.T.TempDir() }, verb: func(s *sweep) []string {
		return strings.Fields("run -d --name r --network none --workspace " + s.dir + ":/w busybox sleep 1000")
	}, check: (*sweep).checkComer},
	{name: "run attached", verb: words("run --name r --network none busybox true"), check: (*sweep).checkComer},
	{name: "run bridge", verb: published, check: (*sweep).checkComer},
	{
		name: "stop bridge", prepare: comer("--network bridge busybox sleep 1000"), verb: words("stop -t 0 r"),
		check: (*sweep).checkComer,
	},
	{
		name: "rm bridge", prepare: comer("--network bridge busybox sleep 1000"), verb: words("rm -f r"),
		check: (*sweep).checkComer,
	},
	{
		name: "rm running", prepare: comer("--network none --secret s=file:/etc/passwd busybox sleep 1000"),
		verb: words("rm -f r"), check: (*sweep).checkComer,
	},
	{name: "failing start", prepare: func(s *sweep) {
		s.ok("create", "--name", "r", "--network", "none", "busybox", "no-such-command")
	}, verb: words("start r"), check: (*sweep).checkComer},
	{name: "start", prepare: func(s *sweep) {
		s.ok("stop", "-t", "0", "s")
	}, verb: words("start s"), check: (*sweep).checkSame},
	{name: "stop", verb: words("stop -t 0 s"), check: (*sweep).checkSame},
	{name: "exec", verb: words("exec s true"), check: (*sweep).checkSame},
	{name: "checkpoint", verb: words("checkpoint --name new s"), check: (*sweep).checkUnmoved},
	{name: "checkpoint --stop", verb: words("checkpoint --name new --stop s"), check: (*sweep).checkStopped},
	{
		name: "failing checkpoint", env: "checkpoint.after-capture=error", verb: words("checkpoint --name new s"),
		check: (*sweep).checkUnmoved,
	},
	{
		name: "recover renamed", prepare: interrupted("store.commit.after-rename"), verb: words("recover"),
		check: (*sweep).checkUnmoved,
	},
	{
		name: "recover packed", prepare: interrupted("store.commit.after-pack"), verb: words("recover"),
		check: (*sweep).checkUnmoved,
	},
	{name: "recover ended", prepare: ended, verb: words("recover"), check: (*sweep).checkComer},
	{name: "checkpoint rm", prepare: func(s *sweep) {
		s.checkpoint("--files-only", "--name", "new", "s")
	}, verb: words("checkpoint rm s@new"), check: (*sweep).checkUnmoved},
	{name: "restore", verb: words("restore s base"), check: (*sweep).checkRestored},
	{name: "restore aside", prepare: stopped, verb: words("restore --no-undo s base"), check: (*sweep).checkAside},
	{
		name: "failing restore aside", prepare: stopped, env: "restore.after-proof=error",
		verb: words("restore --no-undo s base"), check: (*sweep).checkAside,
	},
	{name: "undo", prepare: func(s *sweep) {
		s.ok("restore", "s", "base")
		s.before = s.inspect("s")
	}, verb: words("restore --undo s"), check: (*sweep).checkUndone},
	{name: "effect add", verb: words("effect add s -- true"), check: (*sweep).checkEffectAdded},
	{name: "restore recreate", verb: words("restore --strategy recreate s base"), check: (*sweep).checkRecreated},
	{
		name: "restore in vain", env: "restore.after-proof=error,restore.recreate.after-keep=error",
		verb: words("restore --strategy auto s base"), check: (*sweep).checkHeld,
	},
	{name: "restore attached", prepare: attached, verb: words("restore s attached"), check: (*sweep).checkAttached},
	{
		name: "restore attached --no-undo", prepare: attached, verb: words("restore --no-undo s attached"),
		check: (*sweep).checkAttached,
	},
	{name: "restore effects", prepare: compensable, verb: words("restore s base"), check: (*sweep).checkCompensated},
	{name: "fork", verb: words("fork -n 2 --name f s@base"), check: (*sweep).checkForks},
	{name: "prune", prepare: wasted, verb: words("prune -f --keep-last 1"), check: (*sweep).checkPruned},
	{name: "export", prepare: func(s *sweep) { s.dir = s.T.TempDir() }, verb: func(s *sweep) []string {
		return []string{"checkpoint", "export", "s@base", s.dir + "/x.tar.zst"}
	}, check: (*sweep).checkExported},
	{name: "import", prepare: exported, verb: func(s *sweep) []string {
		return []string{"checkpoint", "import", s.dir + "/x.tar.zst"}
	}, check: (*sweep).checkImported},
	{name: "recreate", prepare: func(s *sweep) {
		s.ok("rm", "-f", "s")
	}, verb: words("restore s base"), check: (*sweep).checkBack},
	{name: "rm", verb: words("rm -f s"), check: (*sweep).checkBack},
	{name: "rm --checkpoints", verb: words("rm -f --checkpoints s"), check: (*sweep).checkBack},
	{name: "lease release", prepare: leased, verb: words("lease release l"), check: (*sweep).checkFreed},
	{
		name: "update", prepare: comer("--egress good.invalid busybox sleep 1000"),
		verb: words("update r --egress-add evil.invalid"), check: (*sweep).checkUpdated,
	},
	{name: "commit", verb: words("commit s i"), check: (*sweep).checkUnmoved},
	{name: "image import", prepare: imported, verb: func(s *sweep) []string {
		return []string{"image", "import", "i", s.dir}
	}, check: (*sweep).checkUnmoved},
	{name: "image rm", prepare: func(s *sweep) {
		imported(s)
		s.ok("image", "import", "i", s.dir)
	}, verb: words("image rm i"), check: (*sweep).checkUnmoved},
}

func words(line string) func(*sweep) []string {
	return func(*sweep) []string { return strings.Fields(line) }
}

// stopped is a sandbox of which something was replaced, added and removed.
func stopped(s *sweep) {
	s.sh("s", "mkdir -p /more/dir; echo 1 > /more/dir/file; rm -rf /gone; chmod 0700 /home")
	s.ok("stop", "-t", "0", "s")
}

func comer(line string) func(*sweep) {
	return func(s *sweep) { s.ok(append([]string{"run", "-d", "--name", "r"}, strings.Fields(line)...)...) }
}

// leased is "r" with a checkpoint, both of which go with a lease.
func leased(s *sweep) {
	s.ok("lease", "create", "--name", "l", "--for", "1h")
	comer("--lease l --network none busybox sleep 1000")(s)
	s.checkpoint("--temporary", "r")
}

// ended is a sandbox that has ended, with its monitor.
func ended(s *sweep) {
	comer("--network bridge busybox sleep 1000")(s)
	r := s.inspect("r")
	for _, p := range processesOf(s.root) {
		var pid int
		if _, _ = fmt.Sscanf(p, "process %d", &pid); strings.Contains(p, "conmon") && strings.Contains(p, r.ID) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	_ = unix.Kill(r.Pid, unix.SIGKILL)
	s.noProcess(r.Pid)
}

// published is a sandbox with a published port that is free just now.
func published(s *sweep) []string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	defer l.Close()
	return []string{"run", "-d", "--name", "r", "-p", l.Addr().String() + ":80", "busybox", "sleep", "1000"}
}

// interrupted leaves a checkpoint that was killed at a point.
func interrupted(point string) func(*sweep) {
	return func(s *sweep) {
		if r := s.try(failpoint(point, "kill"), "checkpoint", "--name", "new", "s"); !r.killed {
			s.Fatalf("the checkpoint was not killed at %s: %s", point, r)
		}
	}
}

func imported(s *sweep) {
	s.try(nil, "image", "rm", "i")
	s.dir = s.T.TempDir()
	if err := os.WriteFile(filepath.Join(s.dir, "f"), []byte("x"), 0o600); err != nil {
		s.Fatal(err)
	}
}

// wasted leaves a pack of which nothing is needed once all but the last
// checkpoint are gone, one of which half is, and one of which all is.
func wasted(s *sweep) {
	for _, step := range []string{
		"dd if=/dev/urandom of=/waste bs=64k count=4 2>/dev/null; mkdir -p /keep",
		"rm /waste; for i in 1 2; do dd if=/dev/urandom of=/keep/$i bs=64k count=4 2>/dev/null; done",
		"rm /keep/1",
	} {
		s.sh("s", step)
		s.checkpoint("--files-only", "s")
	}
}

// exported leaves an archive whose checkpoint is not in the store any more, nor
// any of its pieces.
func exported(s *sweep) {
	s.dir = s.T.TempDir()
	s.sh("s", "dd if=/dev/urandom of=/big bs=64k count=4 2>/dev/null")
	id := s.checkpoint("--name", "new", "s")
	s.ok("checkpoint", "export", id, s.dir+"/x.tar.zst")
	s.ok("checkpoint", "rm", id)
	s.ok("prune", "-f")
}

// hostFiles are three files of the host, of which a checkpoint has others, or none.
var hostFiles = map[string][2]string{"a": {"then", "now"}, "b": {"then", ""}, "c": {"", "now"}}

// attached is a sandbox with a checkpoint that has host files, and all else now.
func attached(s *sweep) {
	s.dir = s.T.TempDir()
	args := []string{"--name", "attached"}
	write := func(i int) {
		for name, text := range hostFiles {
			path := filepath.Join(s.dir, name)
			_ = os.Remove(path)
			if err := os.WriteFile(path, []byte(text[i]), 0o640); text[i] != "" && err != nil {
				s.Fatal(err)
			}
			if text[i] == "" {
				_ = os.Remove(path)
			}
			if i == 0 {
				args = append(args, "--attach", path)
			}
		}
	}
	write(0)
	s.checkpoint(append(args, "s")...)
	write(1)
	s.sh("s", "echo later > /marker")
}

// compensable is a sandbox with two effects; their undo commands leave traces.
func compensable(s *sweep) {
	s.dir = s.T.TempDir()
	for _, name := range []string{"one", "two"} {
		s.ok("effect", "add", "--label", name, "s", "--", "sh", "-c", "echo "+name+" >> "+s.dir+"/log")
	}
}
