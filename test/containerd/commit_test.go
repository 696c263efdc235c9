package containerd

import "strings"

// committed: a sandbox becomes an image of containerd's, and one in a directory.
func committed(b *box) {
	b.ok("run", "-d", "--name", "c", "--network", "none", "bt", "sleep", "1000")
	b.ok("exec", "c", "sh", "-c", "echo kept > /kept; rm /etc/base; mkdir /sub; chmod 1770 /sub; chown 3:4 /sub")
	b.ok("commit", "-m", "why", "c", "app:1")
	b.ok("commit", "c", "app:2")
	if out := b.ok("run", "--rm", "--network", "none", "app:1", "sh", "-c",
		"cat /kept; stat -c %a:%u:%g /sub; ls /etc/base 2>/dev/null || echo gone"); out != "kept\n1770:3:4\ngone" {
		b.Errorf("app:1 says %q", out)
	}
	if out := b.ok("image", "inspect", "app:1"); !strings.Contains(out, `"layers": 2`) ||
		!strings.Contains(out, `"comment": "why"`) {
		b.Errorf("app:1 is %s", out)
	}
	b.ok("image", "tag", "app:1", "app:3")
	b.ok("image", "verify", "app:3")
	b.ok("image", "push", "app:3", "oci:"+b.root+"/layout:app")
	b.ok("rm", "-f", "c")
	b.ok("image", "rm", "app:1", "app:2", "app:3")
	if r := b.try(nil, "run", "--rm", "--pull", "never", "app:1", "true"); r.code != 125 {
		b.Errorf("it was removed: %+v", r)
	}
}
