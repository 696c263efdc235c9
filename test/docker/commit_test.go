package docker

// commits: a container of Docker's, and a sandbox without any engine, become
// images that Docker runs.
func commits(b *box) {
	b.run("web", "bt", "sh", "-c", "echo kept > /kept; rm /etc/base; mkdir /sub; chmod 1770 /sub; chown 3:4 /sub; exec sleep 1000")
	b.eventually("it has begun", func() bool {
		out, _ := b.Try("exec", "web", "ls", "-d", "/sub")
		return out == "/sub"
	})
	b.ok("commit", "-c", `CMD ["sh"]`, "-m", "why", "docker://web", "app:1")
	if out, err := b.Try("run", "--rm", "app:1", "sh", "-c",
		"cat /kept; stat -c %a:%u:%g /sub; ls /etc/base 2>/dev/null || echo gone"); out != "kept\n1770:3:4\ngone" {
		b.Errorf("app:1 says %q, %v", out, err)
	}
	if out := b.Docker(b.T, "inspect", "-f", "{{len .RootFS.Layers}} {{.Comment}} {{index .Config.Cmd 0}}",
		"app:1"); out != "2  sh" && out != "2 why sh" {
		b.Errorf("app:1 is %q", out)
	}
	// From Docker's image, to a place of files, and back by way of agentbox's own.
	oci := "oci:" + b.root + "/layout:app"
	b.ok("commit", "docker://web", oci)
	b.ok("--backend", "oci", "image", "pull", oci)
	if out := b.ok("--backend", "oci", "run", "--rm", "--network", "none", oci, "cat", "/kept"); out != "kept" {
		b.Errorf("agentbox runs it: %q", out)
	}
	b.ok("--backend", "oci", "run", "-d", "--name", "own", "--network", "none", "busybox", "sh", "-c",
		"echo own > /own; exec sleep 1000")
	b.eventually("it has begun", func() bool { return b.try(nil, "exec", "own", "cat", "/own").out == "own\n" })
	b.ok("--backend", "oci", "commit", "own", "docker-daemon:own:1")
	if out := b.Docker(b.T, "run", "--rm", "own:1", "cat", "/own"); out != "own" {
		b.Errorf("own:1 says %q", out)
	}
}
