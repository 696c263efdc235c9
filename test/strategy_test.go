package test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// checkRecreated: "s" is as it was, or stopped with the files it had, or gone and can
// be brought back, or at base.
func (s *sweep) checkRecreated(r result) {
	s.Helper()
	now, ok := s.find("s")
	switch {
	case !ok:
		if r.code == 0 {
			s.Errorf("s is gone: %s", r)
		}
		s.ok("restore", "s", "base")
		equal(s.box, "marker", s.file("s", "marker"), "base")
	case now.Status == "running" && slices.Contains([]string{s.token, "base"}, s.file("s", "marker")):
	case now.Status == "exited" && s.file("s", "marker") == s.token:
		s.ok("start", "s")
	default:
		s.Errorf("s is %s with marker %q", now.Status, s.file("s", "marker"))
	}
	s.counts()
}

// checkHeld: "s" is stopped with the files it had, and cannot be used if that came to be on
// record.
func (s *sweep) checkHeld(r result) {
	s.Helper()
	now := s.inspect("s")
	equal(s.box, "status of s", now.Status, "exited")
	equal(s.box, "marker", s.file("s", "marker"), s.token)
	if now.Held != "" {
		for _, args := range [][]string{{"start", "s"}, {"cp", "scenes_test.go", "s:/x"}} {
			if said := s.fails(4, args...); !strings.Contains(said, "it is held: a restore to checkpoint") ||
				!strings.Contains(said, "agentbox release s") {
				s.Errorf("%q says: %s", args, said)
			}
		}
		s.ok("release", "s")
	}
	s.ok("start", "s")
	s.counts()
}

// TestStrategies makes restores fail in one way and succeed in another.
func TestStrategies(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	id := b.inspect("s").ID
	b.sh("s", "echo base > /marker")
	base := b.checkpoint("--name", "base", "s")
	b.reaches("s", 2)
	type restored struct {
		Strategy, Undo      string
		Degraded, Recreated bool
		Compensated         []effect
		Attempts            []struct {
			Strategy, Error, Next string
			Try                   int
		}
	}
	restore := func(env, strategy string) (restored, result) {
		t.Helper()
		b.sh("s", "echo now > /marker")
		r := b.try([]string{"AGENTBOX_FAILPOINT=" + env}, "restore", "--strategy", strategy,
			"--format", "json", "s", "base")
		if r.code != 0 {
			t.Fatalf("%s", r)
		}
		now := b.inspect("s")
		equal(b, "id", now.ID, id)
		equal(b, "head", now.Head, base)
		equal(b, "status", now.Status, "running")
		equal(b, "marker after "+strategy, b.file("s", "marker"), "base")
		return decode[restored](b, r.out), r
	}
	back := func(undo string) {
		t.Helper()
		list := b.undos("s")
		equal(b, "undo checkpoints", strings.Join(list, " "), undo)
		b.ok("restore", "--undo", "s")
		equal(b, "marker after an undo", b.file("s", "marker"), "now")
	}

	got, _ := restore("", "auto")
	if got.Strategy != "full" || got.Degraded || len(got.Attempts) > 0 {
		t.Errorf("%+v", got)
	}
	back(got.Undo)
	b.reaches("s", b.count("s")+100) // what follows takes a while, too
	n := b.count("s")
	got, _ = restore("", "recreate")
	if got.Strategy != "recreate" || !got.Recreated || got.Degraded {
		t.Errorf("%+v", got)
	}
	if b.count("s") > n {
		t.Error("the processes of the checkpoint are not those that run")
	}
	b.reaches("s", b.count("s")+1)
	back(got.Undo)
	if said := b.ok("exec", "s", "sh", "-c", "tr '\\0' '\\n' < /proc/1/environ"); !strings.Contains(said,
		"AGENTBOX_SANDBOX="+id) {
		t.Errorf("it is told: %s", said)
	}
	b.ok("restore", "--strategy", "recreate", "--no-undo", "s", "base")
	equal(b, "undo checkpoints of --no-undo", len(b.undos("s")), 0) // that of before went with the sandbox
	b.sh("s", "echo now > /marker")

	// The processes cannot be restored: three times, then without. The undo checkpoint is the
	// one that was taken before all that, with processes.
	n = b.count("s")
	log := filepath.Join(b.root, "log")
	b.ok("effect", "add", "--label", "mail", "s", "--", "sh", "-c", "echo run >> "+log)
	got, r := restore("restore.after-stage=error", "auto")
	equal(b, "runs of the undo command", b.read(log), "run")
	if len(got.Compensated) != 1 || got.Compensated[0].Label != "mail" || got.Compensated[0].Status != "compensated" {
		t.Errorf("compensated: %+v", got.Compensated)
	}
	if got.Strategy != "files" || !got.Degraded || got.Recreated || len(got.Attempts) != 3 ||
		got.Attempts[2].Next != "files" || got.Attempts[1].Try != 2 {
		t.Errorf("%+v", got)
	}
	if !strings.Contains(r.err, "warning: the processes of the checkpoint could not be restored") ||
		!strings.Contains(r.err, "tried full (3 times): failpoint restore.after-stage") {
		t.Errorf("it says: %s", r.err)
	}
	if said := b.ok("events", "--type", "restore", "s"); strings.Count(said, "by full failed") != 3 {
		t.Errorf("events: %s", said)
	}
	back(got.Undo)
	if c := b.count("s"); c < n {
		t.Errorf("counts from %d, was at %d", c, n)
	}
	equal(b, "what comes of one way that fails", b.try(failpoint("restore.after-stage", "error"), "restore",
		"--strategy", "full", "s", "base").code, 1)
	equal(b, "held", b.inspect("s").Held, "")
	b.ok("restore", "--undo", "s")
	b.fails(4, "restore", "--strategy", "full", "s", b.checkpoint("--files-only", "s"))
}

// TestSafeStop has nothing bring a sandbox back: it is frozen, cannot be used, and the alert is
// sent.
func TestSafeStop(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.checkpoint("--name", "base", "s")
	key := filepath.Join(b.root, "key")
	if err := os.WriteFile(key, []byte("0123456789abcdef0123\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	type alert struct {
		Hook, Verb, Error string
		Held              bool
		Sandbox           struct{ Name string }
		Attempts          []struct{ Strategy string }
	}
	told := make(chan alert, 10)
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		at, sum, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("Agentbox-Signature"), "t="), ",v1=")
		mac := hmac.New(sha256.New, []byte("0123456789abcdef0123"))
		mac.Write([]byte(at + "."))
		mac.Write(body)
		equal(b, "signature", sum, hex.EncodeToString(mac.Sum(nil)))
		var a alert
		if err := json.Unmarshal(body, &a); err != nil {
			t.Error(err)
		}
		told <- a
		if r.URL.Path == "/moved" {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}
	}))
	defer hook.Close()
	env := []string{"AGENTBOX_FAILPOINT=restore.before-layout=error,restore.recreate.after-keep=error"}
	restore := func(args ...string) result {
		t.Helper()
		r := b.try(env, append([]string{"restore", "--strategy", "auto", "s", "base"}, args...)...)
		if r.code == 0 {
			t.Fatalf("%s", r)
		}
		return r
	}
	r := restore("--alert", hook.URL+"/s3cret", "--alert-secret", key)
	equal(b, "of a key that anybody can read", r.code, 7)
	if err := os.Chmod(key, 0o600); err != nil {
		t.Fatal(err)
	}
	equal(b, "held by a refusal", b.inspect("s").Held, "")
	r = restore("--alert", hook.URL+"/s3cret", "--alert-secret", key)
	equal(b, "code", r.code, 4)
	for _, want := range []string{
		"no strategy has restored it:", "full (3 times): failpoint restore.before-layout",
		"hint: The sandbox is stopped, with the files it had before, and no verb may use it.", "agentbox release s",
	} {
		if !strings.Contains(r.err, want) {
			t.Errorf("it does not say %q: %s", want, r.err)
		}
	}
	a := <-told
	if a.Hook != "alert" || a.Verb != "restore" || !a.Held || a.Sandbox.Name != "s" || len(a.Attempts) < 3 ||
		!strings.Contains(a.Error, "no strategy") {
		t.Errorf("told: %+v", a)
	}
	for i, want := range []string{"full", "files", "recreate", "recreate-files"} {
		if !slices.ContainsFunc(a.Attempts, func(x struct{ Strategy string }) bool { return x.Strategy == want }) {
			t.Errorf("%s, way %d, is not among the attempts: %+v", want, i, a.Attempts)
		}
	}
	if said := b.ok("ps", "-a"); !strings.Contains(said, ", held") {
		t.Errorf("ps: %s", said)
	}
	if said := b.ok("events", "--type", "held", "s"); !strings.Contains(said, "stopped: a restore to checkpoint") {
		t.Errorf("events: %s", said)
	}
	b.fails(4, "start", "s")
	// It can be restored again, which lets it go.
	b.ok("restore", "s", "base")
	equal(b, "held", b.inspect("s").Held, "")
	b.sh("s", "true")

	equal(b, "code of a single way", b.try(failpoint("restore.before-layout", "error"), "restore", "--strategy",
		"files", "s", "base").code, 1)
	equal(b, "status then", b.inspect("s").Status, "running")
	equal(b, "held then", b.inspect("s").Held, "")

	// One that was not touched is frozen.
	env = []string{"AGENTBOX_FAILPOINT=restore.before-layout=error,restore.recreate.before-proof=error"}
	if r := restore(); !strings.Contains(r.err, "hint: The sandbox is frozen") {
		t.Errorf("it says: %s", r.err)
	}
	equal(b, "status", b.inspect("s").Status, "paused")
	if said := b.fails(125, "exec", "s", "true"); !strings.Contains(said, "it is held") {
		t.Errorf("exec says: %s", said)
	}
	if said := b.fails(4, "unpause", "s"); !strings.Contains(said, "it is held") {
		t.Errorf("unpause says: %s", said)
	}
	b.checkpoint("--name", "evidence", "s")
	equal(b, "held after a checkpoint", b.inspect("s").Held != "", true)
	b.ok("release", "s")
	b.ok("unpause", "s")
	b.sh("s", "true")
	b.fails(4, "release", "s")

	// A redirect is not followed; what fails of an alert is told, too.
	r = restore("--alert", hook.URL+"/moved", "--alert-secret", key)
	<-told
	if !strings.Contains(r.err, "the alert failed: 127.0.0.1:") || !strings.Contains(r.err, "answers 307") ||
		strings.Contains(r.err, "/moved") {
		t.Errorf("it says: %s", r.err)
	}
	select {
	case a := <-told:
		t.Errorf("told once more: %+v", a)
	default:
	}
	for _, bad := range []string{"relative", "http://user:pw@host/", "http://", filepath.Join(b.root, "nobody")} {
		if r := b.try(nil, "restore", "--strategy", "auto", "--alert", bad, "s", "base"); r.code == 0 ||
			strings.Contains(r.err, "pw") {
			t.Errorf("%s", r)
		}
	}
	b.fails(2, "restore", "--strategy", "other", "s", "base")
}
