#!/usr/bin/env python3
"""What a sandbox may do, beside what `docker run` allows: the same program looks
around and tries to get out in a sandbox of agentbox, in one with the policy
strict, and in a container of a dockerd that is started for it. Prints a table in
Markdown; with --write FILE it replaces the one in FILE.

Needs root, go, docker.io and what agentbox needs. Everything lives in a temporary
directory and is removed at the end.

usage: compare_security.py [--write docs/security.md]
"""
import argparse, os, shutil, signal, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = "<!-- compare_security.py begins -->", "<!-- compare_security.py ends -->"

CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST "
    "NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE "
    "SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM "
    "BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
).split()


def run(*args, check=True, **kwargs):
    done = subprocess.run(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
    if check and done.returncode != 0:
        sys.exit(f"compare_security.py: {' '.join(args)}: {done.stderr}")
    return done.stdout


def dockerd(top):
    """Starts a daemon and returns it with the command line of its client."""
    sock = f"unix://{top}/docker.sock"
    with open(f"{top}/daemon.json", "w") as f:
        f.write("{}")  # not the one of the host
    log = open(f"{top}/dockerd.log", "w")
    daemon = subprocess.Popen(
        ["dockerd", "--host", sock, "--data-root", f"{top}/data", "--exec-root", f"{top}/exec", "--pidfile", f"{top}/pid",
         "--config-file", f"{top}/daemon.json", "--bridge", "none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"],
        stdout=log, stderr=log, start_new_session=True)
    client = ["docker", "--host", sock]
    for _ in range(300):
        if subprocess.run(client + ["version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return daemon, client
        if daemon.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit("compare_security.py: dockerd does not start: " + open(f"{top}/dockerd.log").read()[-2000:])


def lines(text):
    """Reads the report of testdata/escape."""
    return dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)


def capabilities(mask):
    names = [name for bit, name in enumerate(CAPABILITIES) if int(mask, 16) >> bit & 1]
    return f"{len(names)}: {' '.join(names)}" if names else "none"


def table(columns, host):
    """columns: a name, what it listed and what its tries ended with."""
    rows = [
        ("capabilities of root, at most", lambda c: capabilities(c["CapBnd"])),
        ("capabilities it has", lambda c: "all of these" if c["CapEff"] == c["CapBnd"] else capabilities(c["CapEff"])),
        ("seccomp", lambda c: {"0": "off", "2": "filter"}.get(c["Seccomp"], c["Seccomp"])),
        ("no new privileges", lambda c: {"0": "no", "1": "yes"}[c["NoNewPrivs"]]),
        ("namespaces of its own", lambda c: " ".join(k[3:] for k in c if k.startswith("ns ") and c[k] != host[k[3:]])),
        ("namespaces of the host's", lambda c: " ".join(k[3:] for k in c if k.startswith("ns ") and c[k] == host[k[3:]])),
        ("masked", lambda c: c["masked"] or "none"),
        ("read-only", lambda c: c["read-only"] or "none"),
        ("`/sys`", lambda c: c["/sys"]),
        ("devices", lambda c: c["devices"]),
        ("files of the host left open", lambda c: c["open files"] or "none"),
    ]
    out = ["| | " + " | ".join(name for name, _, _ in columns) + " |", "| --- |" + " --- |" * len(columns)]
    for title, show in rows:
        out.append(f"| {title} | " + " | ".join(show(listed) for _, listed, _ in columns) + " |")
    tries = columns[0][2]
    same = [what for what in tries if len({tried[what] for _, _, tried in columns}) == 1]
    for what in tries:
        if what not in same:
            out.append(f"| try: {what} | " + " | ".join(tried[what] for _, _, tried in columns) + " |")
    out.append("")
    by = {}
    for what in same:
        by.setdefault(tries[what], []).append(what)
    out.append(f"The other {len(same)} of {len(tries)} tries end in the same way in all of them:")
    out.append("")
    for result, whats in by.items():
        out.append(f"- {result}: {', '.join(whats)}")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="replace the table in FILE")
    opts = parser.parse_args()
    top = tempfile.mkdtemp(prefix="ab")
    os.chmod(top, 0o711)  # or the sandboxes would have the host's user ids
    daemon = witness = None
    agentbox = [f"{top}/bin/agentbox", "--root", f"{top}/root"]
    try:
        env = dict(os.environ, CGO_ENABLED="0", GOFLAGS="-buildvcs=false")
        os.makedirs(f"{top}/bin")
        run("go", "build", "-o", f"{top}/bin/", "./cmd/agentbox", "./cmd/agentbox-runtime", cwd=HERE, env=env)
        for name in ("image/tmp", "image/etc"):
            os.makedirs(f"{top}/{name}")
        run("go", "build", "-o", f"{top}/image/escape", "./test/testdata/escape", cwd=HERE, env=env)
        with open(f"{top}/secret", "w") as f:
            f.write("of the host")
        witness = subprocess.Popen(["sleep", "1000"])
        disk = os.stat("/").st_dev
        tries = ["/escape", "try", str(witness.pid), str(os.major(disk)), str(os.minor(disk)), f"{top}/secret"]

        run(*agentbox, "image", "import", "escape", f"{top}/image")
        run("tar", "-cf", f"{top}/image.tar", "-C", f"{top}/image", ".")
        daemon, docker = dockerd(top)
        run(*docker, "import", f"{top}/image.tar", "escape")
        columns = []
        for name, command in (
            ("agentbox", agentbox + ["run", "--rm", "--network", "none", "escape"]),
            ("agentbox, `--policy strict`", agentbox + ["run", "--rm", "--policy", "strict", "escape"]),
            ("docker run", docker + ["run", "--rm", "--network", "none", "escape"]),
        ):
            columns.append((name, lines(run(*command, "/escape", "list")), lines(run(*command, *tries))))
        host = {ns: os.readlink(f"/proc/self/ns/{ns}") for ns in os.listdir("/proc/self/ns")}
        versions = [line for line in run(*docker, "version", "--format", "Docker {{.Server.Version}}").splitlines() if line]
        made = f"Linux {os.uname().release.split('-')[0]}, cgroup {'v2' if os.path.exists('/sys/fs/cgroup/cgroup.controllers') else 'v1'}, {run('runc', '--version').splitlines()[0]}, {versions[0]}:"
        text = made + "\n\n" + table(columns, host)
    finally:
        if daemon:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
        if witness:
            witness.kill()
            witness.wait()
        for name in subprocess.run(agentbox + ["ps", "-aq"], stdout=subprocess.PIPE, text=True).stdout.split() if os.path.exists(agentbox[0]) else []:
            run(*agentbox, "rm", "-f", name, check=False)
        shutil.rmtree(top, ignore_errors=True)
    if not opts.write:
        print(text)
        return
    with open(opts.write) as f:
        old = f.read()
    head, rest = old.split(BEGIN)
    _, tail = rest.split(END)
    with open(opts.write, "w") as f:
        f.write(f"{head}{BEGIN}\n{text}\n{END}{tail}")


main()
