//go:build vm

package test

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// serversApp starts PostgreSQL and nginx as Debian does, and a session of the
// database that is in the middle of a transaction until it is told to commit.
const serversApp = `set -e
pg_ctlcluster "$(ls /etc/postgresql)" main start
sed -i 's/^worker_processes.*/worker_processes 2;/' /etc/nginx/nginx.conf
nginx
su postgres -c 'psql -q -c "create table made (n int primary key, what text)" -c "insert into made select n, md5(n::text) from generate_series(1, 20000) n"'
(echo 'begin;'; echo "insert into made values (0, 'open');"; while [ ! -e /commit ]; do sleep 0.2; done; echo 'commit;') |
	su postgres -c 'psql -q' > /session 2>&1 &
until su postgres -c 'psql -Atc "select count(*) from pg_stat_activity where state = '"'idle in transaction'"'"' | grep -qx 1; do sleep 0.5; done
echo one > /var/www/html/index.html
touch /ready
exec sleep infinity`

// TestServers has processes of three users, which share memory and talk to one another, come
// back: a database in the middle of a transaction, and a web server with its workers.
func TestServers(t *testing.T) {
	tarball, err := exec.Command("../scripts/debian-image.sh", "--servers").Output()
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t)
	b.ok("image", "import", "servers", strings.TrimSpace(string(tarball)))
	for _, userns := range []string{"host", "auto"} {
		t.Run(userns, func(t *testing.T) {
			outer := b.T
			b.T = t
			defer func() { b.T = outer }()
			b.servers(userns)
		})
	}
}

func (b *box) servers(userns string) {
	name := "servers-" + userns
	b.ok("run", "-d", "--name", name, "--network", "none", "--userns", userns, "servers", "sh", "-c", serversApp)
	ready := func() bool { return b.try(nil, "exec", name, "test", "-e", "/ready").code == 0 }
	b.eventually("the servers are up", func() bool {
		if s := b.inspect(name); s.Status != "running" {
			b.Fatalf("it is %s: %s", s.Status, b.ok("logs", name))
		}
		return ready()
	})
	sql := func(query string) string {
		b.Helper()
		return b.ok("exec", "--user", "postgres", name, "psql", "-Atc", query)
	}
	const digest = "select count(*), md5(string_agg(what, ',' order by n)) from made"
	page := func() string {
		b.Helper()
		return b.sh(name, "curl -fsS http://127.0.0.1/")
	}
	// Those that live as long as the servers, with their users.
	processes := func() string {
		b.Helper()
		var list []string
		for line := range strings.Lines(b.sh(name, "ps -eo pid=,user=,args=")) {
			line = strings.Join(strings.Fields(line), " ")
			lasts := slices.ContainsFunc([]string{
				" postgres postgres: ", "/postgres ", " nginx: ", "/bin/psql -q", " sleep infinity",
			},
				func(mark string) bool { return strings.Contains(line, mark) })
			// of a query of this test's
			ours := strings.Contains(line, "[local]") && !strings.HasSuffix(line, " idle in transaction")
			if lasts && !ours && !strings.Contains(line, "autovacuum worker") {
				list = append(list, line)
			}
		}
		slices.Sort(list)
		return strings.Join(list, "\n")
	}
	want, wereThere := sql(digest), processes()
	for _, of := range []string{
		" root nginx: master", " www-data nginx: worker", " postgres postgres: ", "/bin/psql -q",
	} {
		if !strings.Contains(wereThere, of) {
			b.Fatalf("no process%q among these, so that this proves nothing:\n%s", of, wereThere)
		}
	}
	equal(b, "the page", page(), "one")
	id := b.checkpoint(name)
	equal(b, "its kind", decode[[]checkpoint](b, b.ok("checkpoint", "inspect", id))[0].Kind, "full")
	equal(b, "the rows after the checkpoint", sql(digest), want)

	row := "select what from made where n = 0"
	spoil := func() {
		b.Helper()
		b.sh(name, "echo two > /var/www/html/index.html; touch /commit")
		b.eventually("the transaction is committed", func() bool { return sql(row) == "open" })
		sql("delete from made where n % 2 = 1")
		b.sh(name, "nginx -s reload; rm -r /var/lib/postgresql/*/main/base")
	}
	for n := range 2 {
		spoil()
		b.ok("restore", name, id)
		equal(b, fmt.Sprintf("the processes after restore %d", n+1), processes(), wereThere)
		equal(b, "the rows after the restore", sql(digest), want)
		equal(b, "the row that is not committed", sql(row), "")
		equal(b, "the page after the restore", page(), "one")
	}
	// The transaction that was open is, still.
	b.sh(name, "touch /commit")
	b.eventually("the transaction that was open is committed", func() bool { return sql(row) == "open" })
	equal(b, "what the session said", b.sh(name, "cat /session"), "")
	sql("insert into made values (-1, 'later')")
	b.ok("rm", "-f", "--checkpoints", name)
}
