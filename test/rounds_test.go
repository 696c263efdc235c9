//go:build soak

package test

import (
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// rounds is how often each workload is checkpointed and restored.
var rounds = soakNumber("ROUNDS", 200)

// A roundWork is a program that repeats one piece of work for ever, proves each result itself,
// and counts in /n. It leaves /failed, with the reason, and ends when a result is wrong.
type roundWork struct {
	name    string
	image   string
	setup   string // run once, before the work
	command []string
	proof   string        // run after each restore; it has to succeed
	frozen  time.Duration // bound on the time that the sandbox stands still; 0: none
	lost    string        // how warnings about what is not kept may begin; empty: there are to be none
}

// spawner starts a command, and a command in a subshell, at every turn.
const spawner = `n=0
while :; do
	/bin/true || { echo true failed > /failed; exit 1; }
	x=$(/bin/echo $n | /bin/cat) || { echo pipe failed > /failed; exit 1; }
	[ "$x" = "$n" ] || { echo "$x is not $n" > /failed; exit 1; }
	n=$((n+1)); echo $n > /n.new; mv /n.new /n
done`

// writer adds rows to a database in WAL mode, and holds each commit of its own against what
// the database has.
const writer = `
import os, sqlite3, sys, traceback
me = sys.argv[1]
try:
    db = sqlite3.connect("/db", isolation_level=None, timeout=60)
    db.execute("pragma journal_mode=wal")
    db.execute("create table if not exists t(who, n)")
    n = 0
    while True:
        db.execute("begin immediate")
        db.execute("insert into t values(?, ?)", (me, n))
        db.execute("commit")
        n += 1
        have = db.execute("select count(*), max(n) from t where who = ?", (me,)).fetchone()
        if have != (n, n - 1):
            raise Exception(f"{n} rows committed, the database has {have}")
        if me == "1":
            with open("/n.new", "w") as f:
                f.write(str(n))
            os.rename("/n.new", "/n")
except BaseException:
    with open("/failed", "a") as f:
        f.write(me + ": " + traceback.format_exc())
`

// registry serves packages from files, over HTTP, as npm asks for them.
const registry = `set -e
mkdir -p /pkg /registry /project
for i in $(seq 20); do
	rm -rf /pkg/*; mkdir -p /pkg/package/lib
	for j in $(seq 20); do echo "module.exports = $i * $j" > /pkg/package/lib/$j.js; done
	next=; [ $i = 20 ] || next="\"p$((i+1))\": \"1.0.0\""
	echo "{\"name\": \"p$i\", \"version\": \"1.0.0\", \"main\": \"lib/1.js\", \"dependencies\": {$next}}" > /pkg/package/package.json
	tar -C /pkg -czf /registry/p$i.tgz package
	sum=$(sha512sum /registry/p$i.tgz | cut -d' ' -f1 | xxd -r -p | base64 -w0)
	echo "{\"name\": \"p$i\", \"dist-tags\": {\"latest\": \"1.0.0\"}, \"versions\": {\"1.0.0\": {\"name\": \"p$i\", \"version\": \"1.0.0\", \"dependencies\": {$next}, \"dist\": {\"tarball\": \"http://127.0.0.1:4873/p$i.tgz\", \"integrity\": \"sha512-$sum\"}}}}" > /registry/p$i
done
cat > /work.sh <<'W'
cd /registry && python3 -m http.server --bind 127.0.0.1 4873 > /dev/null 2>&1 &
cd /project; n=0; want=
while ! python3 -c 'import socket; socket.create_connection(("127.0.0.1", 4873))' 2> /dev/null; do sleep 0.1; done
while :; do
	rm -rf node_modules package.json package-lock.json /root/.npm
	npm install --no-audit --no-fund --registry http://127.0.0.1:4873 p1 > /log 2>&1 || { cat /log /root/.npm/_logs/* > /failed.new; mv /failed.new /failed; exit 1; }
	sum=$(find node_modules -name '*.js' | sort | xargs sha256sum | sha256sum)
	[ "${want:=$sum}" = "$sum" ] || { echo "other files: $sum" > /failed; exit 1; }
	[ "$(find node_modules -name '*.js' | wc -l)" = 400 ] || { echo files are missing > /failed; exit 1; }
	n=$((n+1)); echo $n > /n.new; mv /n.new /n
done
W
`

// upgrades is a repository with two versions of ten packages.
const upgrades = `set -e
mkdir -p /repo; rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*
for v in 1 2; do for i in $(seq 10); do
	rm -rf /tmp/pkg; mkdir -p /tmp/pkg/DEBIAN /tmp/pkg/usr/bin /tmp/pkg/etc
	printf 'Package: p%s\nVersion: %s.0\nArchitecture: all\nMaintainer: Agent <agent@example.com>\nDescription: one\n' $i $v > /tmp/pkg/DEBIAN/control
	printf '#!/bin/sh\necho %s\n' $v > /tmp/pkg/usr/bin/p$i; chmod 755 /tmp/pkg/usr/bin/p$i
	echo $v > /tmp/pkg/etc/p$i.conf; echo /etc/p$i.conf > /tmp/pkg/DEBIAN/conffiles
	printf '#!/bin/sh\necho %s > /var/lib/p%s.state\n' $v $i > /tmp/pkg/DEBIAN/postinst; chmod 755 /tmp/pkg/DEBIAN/postinst
	dpkg-deb --root-owner-group -b /tmp/pkg /repo/p${i}_$v.deb > /dev/null
done; done
cd /repo && apt-ftparchive packages . > Packages
echo 'deb [trusted=yes] file:/repo ./' > /etc/apt/sources.list
apt-get -qq update
cat > /work.sh <<'W'
n=0; old=
for i in $(seq 10); do old="$old p$i=1.0"; done
export DEBIAN_FRONTEND=noninteractive
is() {
	[ "$(for i in $(seq 10); do p$i; cat /etc/p$i.conf /var/lib/p$i.state; done | sort | uniq -c | tr -s ' ')" = " 30 $1" ] && [ -z "$(dpkg --audit)" ] && return
	echo "not all at $1" > /failed; exit 1
}
apt() { apt-get -qq -y --allow-downgrades -o Dpkg::Options::=--force-confnew "$@" > /log 2>&1 || { cp /log /failed; exit 1; }; }
while :; do
	apt install $old; is 1
	apt upgrade; is 2
	n=$((n+1)); echo $n > /n.new; mv /n.new /n
done
W
`

// TestRounds checkpoints and restores programs that work without a pause, again and again:
// none fails, loses what it has done, or finds anything that it did not leave.
func TestRounds(t *testing.T) {
	b := debianBox(t)
	node, err := exec.Command("../scripts/debian-image.sh", "--node").Output()
	if err != nil {
		t.Fatal(err)
	}
	b.ok("image", "import", "node", strings.TrimSpace(string(node)))
	for _, w := range []roundWork{
		{name: "shell", image: "debian", command: []string{"sh", "-c", spawner}, frozen: time.Second},
		{name: "wal", image: "debian", setup: "cat > /writer.py <<'E'\n" + writer + "\nE",
			command: []string{"sh", "-c", "python3 /writer.py 1 & python3 /writer.py 2 & wait"},
			proof:   `python3 -c 'import sqlite3; assert sqlite3.connect("/db").execute("pragma integrity_check").fetchone()[0] == "ok"'`},
		{name: "npm", image: "node", setup: registry, command: []string{"sh", "/work.sh"}},
		// apt gives dpkg a terminal, and dpkg-deb has that of dpkg's session, which it does not use.
		{name: "apt", image: "debian", setup: upgrades, command: []string{"sh", "/work.sh"},
			lost: "after a restore only the leader of a session has its terminal"},
	} {
		t.Run(w.name, func(t *testing.T) { w.run(&box{T: t, root: b.root, shared: true}) })
	}
}

func (w *roundWork) run(b *box) {
	name := w.name
	defer func() { b.ok("rm", "-f", "--checkpoints", name) }()
	b.start(name, "--network", "none", w.image, "sh", "-c", "while [ ! -e /go ]; do sleep 0.1; done; exec "+w.shell())
	if w.setup != "" {
		b.sh(name, w.setup)
	}
	b.sh(name, "touch /go")
	count := func() int {
		b.Helper()
		if failed := b.file(name, "failed"); failed != "" {
			b.Fatalf("the work failed: %s", failed)
		}
		n, _ := strconv.Atoi(b.file(name, "n"))
		return n
	}
	goesOn := func(from int) {
		b.Helper()
		b.eventually("the work goes on", func() bool { return count() > from })
	}
	goesOn(0)
	var longest, frozen, restored time.Duration
	for i := range rounds {
		start := time.Now()
		id := b.checkpoint(name)
		longest = max(longest, time.Since(start))
		c := decode[[]runtime.Checkpoint](b, b.ok("checkpoint", "inspect", id))[0]
		if frozen = max(frozen, c.Frozen); w.frozen > 0 && c.Frozen > w.frozen {
			b.Errorf("round %d: frozen for %v", i, c.Frozen)
		}
		for _, lost := range c.Warnings {
			if w.lost == "" || !strings.HasPrefix(lost, w.lost) {
				b.Errorf("round %d: not kept: %s", i, lost)
			}
		}
		start = time.Now()
		b.ok("restore", name, id)
		restored = max(restored, time.Since(start))
		if w.proof != "" {
			b.sh(name, w.proof)
		}
		if i%5 == 4 {
			goesOn(count()) // a whole turn, and its proof
		}
		if i%20 == 19 {
			b.ok("prune", "--force", "--keep-last", "1", name)
			b.Logf("%s: %d of %d rounds, %d turns of the work; at most: checkpoint %v, frozen %v, restore %v",
				name, i+1, rounds, count(), longest, frozen, restored)
		}
	}
	goesOn(count())
}

// shell is the command as a shell reads it.
func (w *roundWork) shell() string {
	quoted := make([]string, len(w.command))
	for i, arg := range w.command {
		quoted[i] = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}
