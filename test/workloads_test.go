package test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// app is a Python program for `python3 -c`.
const memoryApp = `
import hashlib, json, os, random, threading, time
memory = bytearray()
rng = random.Random(7)
while len(memory) < 64 << 20:
    memory += rng.randbytes(1 << 20)
def digest():
    return hashlib.sha256(memory).hexdigest()
counts = [0] * 4
def work(i):
    while True:
        counts[i] += 1
        time.sleep(0.02)
threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
for t in threads:
    t.start()
def publish(name, value):
    with open("/" + name + ".new", "w") as f:
        f.write(json.dumps(value))
    os.rename("/" + name + ".new", "/" + name)
publish("ready", digest())
while True:
    publish("counts", counts)
    if os.path.exists("/ask"):
        with open("/ask") as f:
            word = f.read().strip()
        os.remove("/ask")
        if word == "scribble":
            for i in range(0, len(memory), 4096):
                memory[i] ^= 255
        publish("answer", [word, digest()])
    time.sleep(0.02)
`

// ask gives the program a word and waits for its answer, a digest.
func (b *box) ask(name, word string) string {
	b.Helper()
	b.sh(name, "rm -f /answer; echo "+word+" > /ask.new; mv /ask.new /ask")
	var answer []string
	b.eventually("the program answers "+word, func() bool {
		text := b.file(name, "answer")
		if text == "" {
			return false
		}
		answer = decode[[]string](b, text)
		return answer[0] == word
	})
	return answer[1]
}

func TestPythonThreads(t *testing.T) {
	b := debianBox(t)
	b.start("py", "--network", "none", "debian", "python3", "-c", memoryApp)
	b.eventually("the program is ready", func() bool { return b.file("py", "ready") != "" })
	digest := decode[string](b, b.file("py", "ready"))
	counts := func() []int { return decode[[]int](b, b.file("py", "counts")) }
	b.eventually("the counts are there", func() bool { return b.file("py", "counts") != "" })
	b.eventually("every thread counts", func() bool {
		for _, n := range counts() {
			if n < 5 {
				return false
			}
		}
		return true
	})
	before := counts()
	ck := b.checkpoint("py")
	after := counts()
	info := decode[[]checkpoint](b, b.ok("checkpoint", "inspect", ck))[0]
	equal(b, "kind", info.Kind, "full")
	equal(b, "processes", info.Processes, 1)

	equal(b, "digest after the checkpoint", b.ask("py", "digest"), digest)
	if b.ask("py", "scribble") == digest {
		t.Fatal("the memory did not change: this test proves nothing")
	}
	for range 2 {
		b.ok("restore", "py")
		first := counts()
		for i := range first {
			// How far it got between the restore and our look is not bounded
			// by much, but it starts at the checkpoint.
			if first[i] < before[i] {
				t.Errorf("thread %d was at %d to %d and went on at %d", i, before[i], after[i], first[i])
			}
		}
		b.eventually("every thread goes on", func() bool {
			for i, n := range counts() {
				if n <= first[i] {
					return false
				}
			}
			return true
		})
		threads := b.sh("py", "grep Threads /proc/1/status")
		equal(b, "threads", strings.Fields(threads)[1], "5")
		equal(b, "digest after the restore", b.ask("py", "digest"), digest)
	}
}

func TestRedis(t *testing.T) {
	b := debianBox(t)
	b.start("redis", "--network", "none", "debian", "redis-server", "--save", "", "--appendonly",
		"no", "--bind", "127.0.0.1")
	cli := func(args ...string) string {
		t.Helper()
		out := b.ok(append([]string{"exec", "redis", "redis-cli"}, args...)...)
		if strings.Contains(out, "ERR") {
			t.Fatalf("redis-cli %q: %s", args, out)
		}
		return out
	}
	b.eventually("redis answers", func() bool {
		return strings.Contains(b.try(nil, "exec", "redis", "redis-cli", "ping").out, "PONG")
	})
	const keys = 100_000
	// The same on every version of redis; DEBUG DIGEST is not.
	digest := func() string {
		return cli("EVAL", fmt.Sprintf(`local t = {} for i = 1, %d do t[#t+1] = redis.call('GET', 'key:'..i) or 'none' end return redis.sha1hex(table.concat(t, ','))`, keys), "0")
	}
	cli("EVAL", fmt.Sprintf(`for i = 1, %d do redis.call('SET', 'key:'..i, 'value:'..(i*7)) end`, keys), "0")
	cli("RPUSH", "list", "a", "b", "c")
	want := digest()
	b.checkpoint("redis")
	equal(b, "digest after the checkpoint", digest(), want)

	cli("EVAL", fmt.Sprintf(`for i = 1, %d do if i %% 2 == 0 then redis.call('DEL', 'key:'..i) else redis.call('SET', 'key:'..i, 'lost') end end`, keys), "0")
	cli("DEL", "list")
	if digest() == want {
		t.Fatal("the keys did not change: this test proves nothing")
	}
	b.ok("restore", "redis")
	equal(b, "digest after the restore", digest(), want)
	equal(b, "keys", cli("DBSIZE"), strconv.Itoa(keys+1))
	equal(b, "list", cli("LRANGE", "list", "0", "-1"), "a\nb\nc")
	cli("SET", "key:1", "still writable")
}

const serverApp = `
import http.server, threading, http.client, time, os, sys
connections = [0]
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def setup(self):
        super().setup()
        connections[0] += 1
        self.seq = 0
    def do_GET(self):
        self.seq += 1
        body = ("%d %d %d" % (self.seq, self.client_address[1], connections[0])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
if os.fork() == 0:
    # The client, in a process of its own, with one connection for ever.
    c = http.client.HTTPConnection("127.0.0.1", 8000, timeout=30)
    last, port = 0, None
    try:
        while True:
            c.request("GET", "/")
            seq, mine, accepted = map(int, c.getresponse().read().split())
            if port is None:
                port = mine
            if seq != last + 1 or mine != port or c.sock is None:
                raise Exception("seq %d after %d, port %d and was %d" % (seq, last, mine, port))
            last = seq
            with open("/seq.new", "w") as f:
                f.write("%d %d %d" % (seq, mine, accepted))
            os.rename("/seq.new", "/seq")
            time.sleep(0.02)
    except BaseException as e:
        with open("/broken", "w") as f:
            f.write(repr(e))
        raise
server.serve_forever()
`

func TestLoopbackConnection(t *testing.T) {
	b := debianBox(t)
	b.start("http", "--network", "none", "debian", "python3", "-c", serverApp)
	type state struct{ seq, port, accepted int }
	look := func() (s state) {
		_, _ = fmt.Sscan(b.file("http", "seq"), &s.seq, &s.port, &s.accepted)
		return s
	}
	b.eventually("requests are answered", func() bool { return look().seq >= 20 })
	low := look()
	b.checkpoint("http")
	high := look()
	b.eventually("requests go on after the checkpoint", func() bool { return look().seq > high.seq+20 })
	later := look()
	for range 3 {
		b.ok("restore", "http")
		b.eventually("requests go on after the restore", func() bool {
			s := look()
			return s.seq > high.seq+5 || b.file("http", "broken") != ""
		})
		equal(b, "what broke", b.file("http", "broken"), "")
		s := look()
		equal(b, "the client's port", s.port, low.port)
		equal(b, "connections the server ever took", s.accepted, 1)
		if s.seq < low.seq {
			t.Errorf("the connection is at request %d and was at %d at the checkpoint", s.seq, low.seq)
		}
		b.eventually("it gets further than before", func() bool { return look().seq > later.seq })
	}
}

func TestTmux(t *testing.T) {
	b := debianBox(t)
	b.start("tmux", "--network", "none", "-e", "TERM=xterm", "-e", "LC_ALL=C.UTF-8", "debian", "bash", "-c",
		"tmux -L s new-session -d -x 80 -y 24 bash && exec sleep infinity")
	keys := func(text string) { b.ok("exec", "tmux", "tmux", "-L", "s", "send-keys", text, "Enter") }
	n := 0
	// value has the shell in tmux tell what a variable of it is.
	value := func(name string) string {
		n++
		file := fmt.Sprintf("said-%d", n)
		keys("echo $" + name + " > /" + file)
		b.eventually("the shell answers", func() bool { return b.file("tmux", file) != "" })
		return b.file("tmux", file)
	}
	b.eventually("tmux answers", func() bool {
		return b.try(nil, "exec", "tmux", "tmux", "-L", "s", "has-session").code == 0
	})
	keys("COLOUR=blue; cd /var/tmp")
	equal(b, "before", value("COLOUR"), "blue")
	shell := value("$")
	b.checkpoint("tmux")
	keys("COLOUR=red; cd /")
	equal(b, "changed", value("COLOUR"), "red")
	keys("exit")
	b.eventually("the shell is gone", func() bool {
		return b.try(nil, "exec", "tmux", "tmux", "-L", "s", "has-session").code != 0
	})
	b.ok("restore", "tmux")
	equal(b, "after the restore", value("COLOUR"), "blue")
	equal(b, "the shell's pid", value("$"), shell)
	equal(b, "the shell's directory", value("PWD"), "/var/tmp")
	screen := b.ok("exec", "tmux", "tmux", "-L", "s", "capture-pane", "-p")
	if !strings.Contains(screen, "COLOUR=blue") || strings.Contains(screen, "COLOUR=red") {
		t.Errorf("the screen after the restore:\n%s", screen)
	}
}

func TestGitRebase(t *testing.T) {
	b := debianBox(t)
	b.start("git", "--network", "none", "debian", "sleep", "infinity")
	b.sh("git", `set -e
mkdir /repo; cd /repo
git init -q -b main .
git config user.email agent@example.com; git config user.name agent; git config gc.auto 0
for i in 1 2 3; do echo line $i >> file; git add .; git commit -qm "main $i"; done
git checkout -qb feature HEAD~1
echo feature line > file; echo more > other; git add .; git commit -qm "feature 1"
echo second > second; git add .; git commit -qm "feature 2"
git rebase main > /dev/null 2>&1 && exit 9
test -d .git/rebase-merge`)
	status := b.sh("git", "cd /repo; git status; git stash list; ls -a")
	if !strings.Contains(status, "rebase in progress") {
		t.Fatalf("not in the middle of a rebase: %s", status)
	}
	before := b.tree(b.inspect("git").Upperdir)
	b.checkpoint("git")
	b.sh("git", `cd /repo
rm -rf .git/rebase-merge .git/refs file
find .git/objects -type f | head -n 3 | while read f; do chmod u+w "$f"; echo garbage > "$f"; done
echo evil > malicious.py; echo 'ref: nowhere' > .git/HEAD; chmod 000 other`)
	if b.try(nil, "exec", "git", "git", "-C", "/repo", "status").code == 0 {
		t.Fatal("the repository still works: this test proves nothing")
	}
	b.ok("restore", "git")
	b.sameTree("the upperdir after the restore", b.tree(b.inspect("git").Upperdir), before)
	equal(b, "status after the restore", b.sh("git", "cd /repo; git status; git stash list; ls -a"), status)
	b.sh("git", `set -e; cd /repo
git fsck --full --strict
echo resolved > file; git add file
GIT_EDITOR=true git rebase --continue
git fsck --full --strict
test "$(git log --format=%s | tr '\n' ',')" = "feature 2,feature 1,main 3,main 2,main 1,"
test -z "$(git status --porcelain)"`)
}

func TestAptUndone(t *testing.T) {
	b := debianBox(t)
	b.start("apt", "--network", "none", "debian", "sleep", "infinity")
	// A package and a repository of our own: no network is needed.
	b.sh("apt", `set -e
mkdir -p /tmp/pkg/DEBIAN /tmp/pkg/usr/bin /tmp/pkg/etc/greeter /repo
cat > /tmp/pkg/DEBIAN/control <<E
Package: greeter
Version: 1.0
Architecture: all
Maintainer: Agent <agent@example.com>
Description: says hello
E
printf '#!/bin/sh\necho hello\n' > /tmp/pkg/usr/bin/greeter; chmod 755 /tmp/pkg/usr/bin/greeter
echo x > /tmp/pkg/etc/greeter/conf; echo /etc/greeter/conf > /tmp/pkg/DEBIAN/conffiles
printf '#!/bin/sh\necho configured > /var/lib/greeter-state\n' > /tmp/pkg/DEBIAN/postinst; chmod 755 /tmp/pkg/DEBIAN/postinst
dpkg-deb --root-owner-group -b /tmp/pkg /repo/greeter.deb > /dev/null
cd /repo && apt-ftparchive packages . > Packages
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:/repo ./' > /etc/apt/sources.list
apt-get -qq update`)
	install := func() {
		b.sh("apt", "apt-get -qq install greeter > /dev/null 2>&1")
		equal(b, "the installed program", b.sh("apt", "greeter && cat /var/lib/greeter-state"), "hello\nconfigured")
	}
	before := b.tree(b.inspect("apt").Upperdir)
	b.checkpoint("apt")
	install()
	b.ok("restore", "--verify", "apt")
	b.sameTree("the upperdir after the restore", b.tree(b.inspect("apt").Upperdir), before)
	if r := b.try(nil, "exec", "apt", "dpkg", "-s", "greeter"); r.code == 0 {
		t.Errorf("dpkg still knows the package: %s", r)
	}
	for _, path := range []string{
		"usr/bin/greeter", "etc/greeter", "var/lib/greeter-state", "var/lib/dpkg/info/greeter.list",
	} {
		if _, err := os.Lstat(b.inspect("apt").Upperdir + "/" + path); err == nil {
			t.Errorf("/%s is still there", path)
		}
	}
	b.sh("apt", "dpkg --audit && apt-get check -qq")
	install()
}
