package portable

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// engines is a place with a Podman and a runc of its own, in mount and network
// namespaces of their own, and an image of a busybox in a directory.
type engines struct {
	testing.TB
	dir, pid string
}

func newEngines(t testing.TB) *engines {
	t.Helper()
	dir, err := os.MkdirTemp("", "abpt") // short: runc has a socket in it
	must(t, err)
	p := &engines{TB: t, dir: dir}
	const setUp = `set -e
for d in /run /var/lib/cni /var/lib/containers /etc/containers /etc/cni; do mkdir -p $d; mount -t tmpfs tmpfs $d; done
echo '{"default":[{"type":"insecureAcceptAnything"}]}' > /etc/containers/policy.json
cat > /etc/containers/containers.conf <<X
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
events_logger = "file"
cgroup_manager = "cgroupfs"
runtime = "runc"
X
ip link set lo up
echo ready
exec cat > /dev/null`
	holder := exec.Command("unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", setUp)
	// It ends with its input, and so with this process. A death signal would come at the end
	// of the thread that starts it.
	if _, err := holder.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	holder.Stderr = os.Stderr
	out, err := holder.StdoutPipe()
	must(t, err)
	must(t, holder.Start())
	p.pid = strconv.Itoa(holder.Process.Pid)
	t.Cleanup(func() {
		_, _ = p.try(`podman rm --all --force --time 0; runc --root /run/r kill c KILL; sleep 0.1; runc --root /run/r delete --force c
umount ` + dir + `/root; for g in /sys/fs/cgroup/*/libpod_parent /sys/fs/cgroup/libpod_parent; do rmdir $g/conmon $g; done`)
		_ = holder.Process.Kill()
		_ = holder.Wait()
		must(t, os.RemoveAll(dir))
	})
	line := make([]byte, 6)
	if _, err := io.ReadFull(out, line); err != nil || string(line) != "ready\n" {
		t.Fatalf("namespaces: %q, %v", line, err)
	}
	p.sh(`mkdir -p image/bin image/etc image/tmp image/root image/dir; cp $(command -v busybox) image/bin/busybox
for a in $(busybox --list); do test $a = busybox || ln -s busybox image/bin/$a; done
echo root:x:0:0::/root:/bin/sh > image/etc/passwd; echo old > image/dir/old; echo old > image/deleted; echo old > image/modified
tar -C image -cf image.tar .; podman import image.tar bb`)
	return p
}

// try runs a script in the namespaces, in the directory.
func (p *engines) try(script string) (string, error) {
	cmd := exec.Command("nsenter", "-t", p.pid, "--net", "--mount", "--", "sh", "-c", "cd "+p.dir+"\n"+script)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, stderr.String())
	}
	return strings.TrimSpace(stdout.String()), nil
}

func (p *engines) sh(script string) string {
	p.Helper()
	out, err := p.try("set -e\n" + script)
	if err != nil {
		p.Fatalf("%s: %v", script, err)
	}
	return out
}

// counts waits until a command prints a number of at least n.
func (p *engines) counts(n int, script string) (now int) {
	p.Helper()
	for end := time.Now().Add(2 * time.Minute); now < n; time.Sleep(20 * time.Millisecond) {
		out, err := p.try(script)
		now, _ = strconv.Atoi(out)
		if now < n && time.Now().After(end) {
			p.Fatalf("%s says %q, %v; it should come to %d", script, out, err, n)
		}
	}
	return now
}

// counterScript changes files of each kind and then counts, in memory and in files.
const counterScript = `rm /deleted; rm -r /dir; mkdir /dir; echo new > /dir/new; echo new > /modified; mkdir /made; echo x > /made/a; ln /made/a /made/b
exec 3>/dev/shm/open; echo shm >&3; n=0; while :; do n=$((n+1)); echo $n >> /log; echo $n > /count.new; mv /count.new /count; sleep 0.05; done`

// filesAfter shows them, but for the one that is there at times.
const filesAfter = `ls / | grep -vx count.new; cat /dir/new /modified /made/b /dev/shm/open; ls /dir; stat -c %h /made/a`

// contiguous checks that a log of the counter has every number once: that
// processes went on with the files of their own instant.
func (p *engines) contiguous(script string, least int) {
	p.Helper()
	last := 0
	for line := range strings.Lines(p.sh(script)) {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if n != last+1 {
			p.Errorf("the log goes on from %d with %q, %v", last, line, err)
		}
		last = n
	}
	if last < least {
		p.Errorf("the log ends at %d, and not at %d or later", last, least)
	}
}

// sandboxSpec is the bundle of a sandbox of the oci backend, as far as CRIU is
// concerned.
func (p *engines) sandboxSpec(hostname string) *specs.Spec {
	s := podmanSpec(&manifest{}, boxSpec{
		Args: []string{"sh", "-c", counterScript}, Env: []string{"PATH=/bin"}, Hostname: hostname,
	})
	s.Root.Path = filepath.Join(p.dir, "root")
	s.Mounts = append(s.Mounts[:5:5], specs.Mount{
		Destination: "/dev/shm", Type: "tmpfs", Source: "shm",
		Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=67108864"},
	})
	for _, name := range []string{"hosts", "hostname", "resolv.conf"} {
		must(p, os.WriteFile(filepath.Join(p.dir, name), []byte(name+"\n"), 0o644))
		s.Mounts = append(s.Mounts, specs.Mount{
			Destination: "/etc/" + name, Type: "bind", Source: filepath.Join(p.dir, name),
			Options: []string{"rbind", "rprivate"},
		})
	}
	s.Linux.CgroupsPath = "/" + filepath.Base(p.dir)
	last := len(s.Linux.Namespaces) - 1
	s.Linux.Namespaces[last].Path = "/run/box-net"
	return s
}

// mountRoot mounts an overlay and writes the bundle.
func (p *engines) bundle(hostname string) {
	p.Helper()
	data, err := json.Marshal(p.sandboxSpec(hostname))
	must(p, err)
	must(p, os.WriteFile(filepath.Join(p.dir, "config.json"), data, 0o600))
	p.sh(`mkdir -p upper work root; mount -t overlay overlay -o lowerdir=image,upperdir=upper,workdir=work,redirect_dir=nofollow,metacopy=off,index=off root
touch /run/box-net; unshare --net=/run/box-net ip link set lo up`)
}

// A checkpoint of ours goes on in Podman, with its files, in memory and on the disk.
func TestPodmanRestoresOurs(t *testing.T) {
	p := newEngines(t)
	must(t, os.Mkdir(filepath.Join(p.dir, "upper"), 0o755))
	p.bundle("box")
	p.sh(`runc --root /run/r run -d -b . c < /dev/null > /dev/null 2>&1`)
	p.counts(10, "cat root/count")
	p.sh(`mkdir images w; runc --root /run/r checkpoint --image-path images --work-path w c; umount root`)
	m := newMemory(t)
	m.put(t, filepath.Join(p.dir, "upper"))
	high, err := os.ReadFile(filepath.Join(p.dir, "upper/count"))
	must(t, err)
	last, err := strconv.Atoi(strings.TrimSpace(string(high)))
	must(t, err)
	m.dir = filepath.Join(p.dir, "images")
	must(t, m.PutImages(t.Context()))
	lower := func(path string) (list []LowerEntry, err error) {
		all, err := os.ReadDir(filepath.Join(p.dir, "image", path))
		for _, e := range all {
			list = append(list, LowerEntry{e.Name(), e.IsDir()})
		}
		return list, err
	}
	archive := exported(t, Checkpoint{
		Manifest: m.manifest(t), Data: m, Lower: lower, ImageID: p.sh("podman image inspect --format '{{.Id}}' bb"),
	}, Options{})
	must(t, os.WriteFile(filepath.Join(p.dir, "ours.tar.zst"), archive, 0o600))

	out, err := p.try(`podman container restore --import ours.tar.zst`)
	if err != nil {
		said, _ := p.try(`grep -h Error $(find /var/lib/containers -name restore.log) | tail -5`)
		t.Fatalf("podman restore: %v; CRIU: %s %s", err, said, out)
	}
	n, err := strconv.Atoi(p.sh(`podman exec box cat /count`))
	if err != nil || n < last {
		t.Errorf("it goes on at %d, was at %d at the checkpoint: %v", n, last, err)
	}
	p.counts(n+3, `podman exec box cat /count`)
	p.contiguous(`podman exec box cat /log`, n+3)
	got := p.sh(`podman exec box sh -c '` + filesAfter + `'`)
	want := "bin\ncount\ndev\ndir\netc\nlog\nmade\nmodified\nproc\nroot\nrun\nsys\ntmp\nnew\nnew\nx\nshm\nnew\n2"
	if got != want && got != strings.Replace(want, "run\n", "", 1) {
		t.Errorf("in Podman's container: %q", got)
	}
	if got := p.sh(`podman inspect --format '{{.ImageName}} {{.State.Status}} {{.Config.Hostname}}' box`); got != "localhost/bb:latest running box" {
		t.Errorf("podman inspect: %s", got)
	}
	if got := p.sh(`podman exec box ip link`); strings.Count(got, ": ") > 2 || !strings.Contains(got, "lo:") {
		t.Errorf("its network: %s", got)
	}
}

// A checkpoint of Podman's goes on in a sandbox, exactly.
func TestWeRestorePodmans(t *testing.T) {
	p := newEngines(t)
	p.sh(`podman run -d --name c --network none bb sh -c '` + counterScript + `'`)
	low := p.counts(10, "podman exec c cat /count")
	p.sh(`podman container checkpoint --export theirs.tar.gz --compress gzip c; podman rm -f c`)
	archive, err := os.ReadFile(filepath.Join(p.dir, "theirs.tar.gz"))
	must(t, err)
	lower := func(path string) (got overlay.Entry, err error) {
		if st, err := os.Stat(filepath.Join(p.dir, "image", path)); err != nil || !st.IsDir() {
			return got, fault.ErrNotFound
		}
		err = overlay.Walk(t.Context(), filepath.Join(p.dir, "image", path), overlay.WalkOptions{},
			func(e overlay.Entry) error {
				if e.Path == "." {
					got = e
				}
				return nil
			})
		return got, err
	}
	m, f, res := imported(t, archive, OpenOptions{}, ImportOptions{Lower: lower})
	if len(res.Notes) > 0 {
		t.Errorf("notes: %q", res.Notes)
	}
	p.unpack(m)
	p.bundle(f.Hostname)
	p.sh(`chmod 700 images; mkdir w; runc --root /run/r restore -d -b . --image-path images --work-path w c < /dev/null > /dev/null 2>&1 || { grep Error w/restore.log >&2; exit 1; }`)
	n := p.counts(low, "cat root/count")
	p.counts(n+3, "cat root/count")
	p.contiguous("cat root/log", n+3)
	got := p.sh(`runc --root /run/r exec c sh -c '` + filesAfter + `'`)
	// Podman leaves out a modified file that its host has no file of the name of.
	want := "bin\ncount\ndev\ndir\netc\nlog\nmade\nmodified\nproc\nroot\nsys\ntmp\nnew\nold\nx\nshm\nnew\n2"
	if got != want {
		t.Errorf("in the sandbox: %q", got)
	}
	if got := p.sh(`runc --root /run/r exec c ip link`); !strings.Contains(got, "lo: <LOOPBACK,UP") {
		t.Errorf("it is not in the network namespace that was made for it: %s", got)
	}
}

// unpack lays an import out as an upperdir and a directory of images.
func (p *engines) unpack(m *memory) {
	p.Helper()
	must(p, os.Mkdir(filepath.Join(p.dir, "images"), 0o700))
	for name, data := range m.images {
		must(p, os.WriteFile(filepath.Join(p.dir, "images", name), data, 0o600))
	}
	var archive bytes.Buffer
	w := overlay.NewTarWriter(&archive)
	for _, e := range m.entries(p, 0) {
		must(p, w.Header(e))
		if e.DataSize() == 0 {
			continue
		}
		r, err := m.Source().Data(p.Context(), e)
		must(p, err)
		_, err = io.Copy(w, r)
		must(p, err)
	}
	must(p, w.Close())
	upper := filepath.Join(p.dir, "upper")
	must(p, os.Mkdir(upper, 0o755))
	_, err := overlay.Apply(p.Context(), &archive, upper, overlay.ApplyOptions{})
	must(p, err)
}

// checkpointctl, where the machine has it, reads our archives as Podman's.
func TestCheckpointctl(t *testing.T) {
	tool, err := exec.LookPath("checkpointctl")
	if err != nil {
		t.Skip("this machine has no checkpointctl")
	}
	_, c := full(t)
	path := filepath.Join(t.TempDir(), "ours.tar.zst")
	must(t, os.WriteFile(path, exported(t, c, Options{}), 0o600))
	out, err := exec.Command(tool, "show", path).CombinedOutput()
	must(t, err)
	for _, want := range []string{"box", "localhost/bb:latest", "Podman", "2026-03-04T05:06:07Z"} {
		if !bytes.Contains(out, []byte(want)) {
			t.Errorf("%q is not in %s", want, out)
		}
	}
}
