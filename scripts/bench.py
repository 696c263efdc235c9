#!/usr/bin/env python3
"""Compares agentbox with the raw tools it stands on, with podman and with docker, in one run.

The workload is one Python process with 256 MB of memory and 10,000 files of
4 KiB over a Debian image. Each figure is the median of several rounds in which
the candidates take turns; ratios are of medians. Times are wall clock and
include process start. Run it through `make bench`, as root.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

from bench_tools import AGENTBOX, HERE, filesystem, run, size, timed, wait_for

MEMORY_MB = 256
FILES = 10_000
WORKLOAD = f"""
import os, sys, time
memory = [bytearray(os.urandom(1 << 20)) for _ in range({MEMORY_MB})]
os.makedirs('/work', exist_ok=True)
for i in range({FILES}):
    d = '/work/%02d' % (i % 100)
    os.makedirs(d, exist_ok=True)
    with open('%s/%d' % (d, i), 'wb') as f:
        f.write(os.urandom(4096))
print('ready', flush=True)
while True:
    time.sleep(0.05)
"""


class Agentbox:
    name = "agentbox"

    def __init__(self, work, rootfs):
        self.root = os.path.join(work, "ab")
        self.env = dict(os.environ, AGENTBOX_ROOT=self.root, AGENTBOX_BACKEND="oci", AGENTBOX_HOST="none")
        self.call("image", "import", "bench", rootfs)

    def close(self):
        pass

    def call(self, *args):
        return run(AGENTBOX, *args, env=self.env)

    def hello(self):
        assert self.call("run", "--rm", "--network", "none", "bench", "echo", "hi") == "hi\n"

    def start(self):
        self.call("run", "-d", "--name", "work", "--network", "none", "bench", "python3", "-c", WORKLOAD)
        wait_for(lambda: "ready" in self.call("logs", "work"))

    def checkpoint(self, full):
        args = [] if full else ["--files-only"]
        took, ck = timed(lambda: self.call("checkpoint", *args, "work").strip())
        info = json.loads(self.call("checkpoint", "inspect", ck))[0]
        return {"time": took, "frozen": info["frozen_ns"] / 1e9, "bytes": info["bytes"], "id": ck}

    def restore(self, ck):
        took, _ = timed(lambda: self.call("restore", "work", ck["id"]))
        return took

    def drop(self, ck):
        self.call("checkpoint", "rm", ck["id"])

    def stop(self):
        self.call("rm", "-f", "work")


class Daemon:
    """A dockerd of our own, with the runtime registered and checkpoints (experimental) on."""

    def __init__(self, work, rootfs=None):
        self.dir = os.path.join(work, "d")
        os.makedirs(self.dir)
        self.run = os.path.join(self.dir, "ab")
        self.env = dict(os.environ, DOCKER_HOST=f"unix://{self.dir}/s", DOCKER_CONFIG=self.dir, AGENTBOX_RUN=self.run)
        config = {
            "data-root": self.dir + "/data", "exec-root": self.dir + "/x", "pidfile": self.dir + "/pid",
            "hosts": [self.env["DOCKER_HOST"]], "storage-driver": "overlay2", "experimental": True,
            "bridge": "none", "iptables": False, "ip-masq": False,
            "runtimes": {"agentbox": {"path": os.path.join(HERE, "bin/agentbox-runtime")}},
        }
        with open(self.dir + "/daemon.json", "w") as f:
            json.dump(config, f)
        self.log = open(self.dir + "/log", "w")
        self.process = subprocess.Popen(["dockerd", "--config-file", self.dir + "/daemon.json"], env=self.env,
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        wait_for(lambda: subprocess.run(["docker", "version"], env=self.env, capture_output=True).returncode == 0)
        if rootfs:
            self.docker("import", rootfs, "bench")

    def docker(self, *args):
        return run("docker", *args, env=self.env)

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


class AgentboxDocker(Agentbox):
    name = "agentbox on docker"

    def __init__(self, work, daemon):
        self.daemon = daemon
        self.root = os.path.join(work, "abd")
        self.env = dict(daemon.env, AGENTBOX_ROOT=self.root, AGENTBOX_BACKEND="docker", AGENTBOX_HOST="none")


class Docker:
    """docker's own: checkpoint create and commit; create, checkpoint files and start --checkpoint."""

    name = "docker"
    flags = []

    def __init__(self, daemon):
        self.docker, self.data, self.n = daemon.docker, daemon.dir + "/data", 0

    def hello(self):
        assert self.docker("run", "--rm", "--network", "none", *self.flags, "bench", "echo", "hi") == "hi\n"

    def start(self):
        self.docker("run", "-d", "--name", "dw", "--network", "none", "bench", "python3", "-c", WORKLOAD)
        wait_for(lambda: "ready" in self.docker("logs", "dw"))

    def images(self, container):
        return os.path.join(self.data, "containers", self.docker("inspect", "-f", "{{.Id}}", container).strip(), "checkpoints")

    def checkpoint(self, full):
        if not full:
            took, _ = timed(lambda: self.docker("commit", "dw", "files"))
            return {"time": took, "id": "files", "bytes": 0}
        self.n += 1
        name = f"ck{self.n}"

        def work():
            self.docker("checkpoint", "create", "dw", name)
            self.docker("commit", "dw", name)

        took, _ = timed(work)
        layer = int(self.docker("image", "inspect", "-f", "{{.Size}}", name)) - int(self.docker("image", "inspect", "-f", "{{.Size}}", "bench"))
        return {"time": took, "id": name, "bytes": size(self.images("dw")) + layer}

    def restore(self, ck):
        images = self.images("dw")

        def work():
            self.docker("create", "--name", "dw2", "--network", "none", ck["id"], "python3", "-c", WORKLOAD)
            run("cp", "-a", images, os.path.dirname(self.images("dw2")))
            self.docker("start", "--checkpoint", ck["id"], "dw2")

        took, _ = timed(work)
        self.docker("rm", "-f", "dw")
        self.docker("rename", "dw2", "dw")
        return took

    def drop(self, ck):
        pass

    def stop(self):
        self.docker("rm", "-f", "dw")
        for name in self.docker("image", "ls", "--format", "{{.Repository}}").split():
            if name != "bench":
                self.docker("image", "rm", "-f", name)

    def close(self):
        pass


class DockerWrapped(Docker):
    """What the wrapper adds to docker run."""

    name = "docker, our runtime"
    flags = ["--runtime", "agentbox"]
    start = None


class Raw:
    """runc, CRIU and tar by hand: what a careful script would do."""

    name = "raw tools"

    def __init__(self, work, rootfs):
        self.dir = os.path.join(work, "raw")
        self.lower = os.path.join(self.dir, "lower")
        os.makedirs(self.lower)
        run("tar", "--xattrs", "--xattrs-include=*", "-xf", rootfs, "-C", self.lower)
        self.state = os.path.join(self.dir, "runc")
        self.pipes = []

    def runc(self, *args, **kw):
        return run("runc", "--root", self.state, *args, **kw)

    def close(self):
        pass

    def bundle(self, args):
        bundle = os.path.join(self.dir, "bundle")
        shutil.rmtree(bundle, ignore_errors=True)
        os.makedirs(bundle)
        self.upper, self.merged = os.path.join(bundle, "upper"), os.path.join(bundle, "rootfs")
        for d in (self.upper, bundle + "/workdir", self.merged):
            os.makedirs(d)
        self.mount(bundle)
        run("runc", "spec", cwd=bundle)
        path = os.path.join(bundle, "config.json")
        with open(path) as f:
            config = json.load(f)
        config["process"].update(terminal=False, args=args)
        config["root"]["readonly"] = False
        del config["process"]["rlimits"]
        with open(path, "w") as f:
            json.dump(config, f)
        return bundle

    def mount(self, bundle):
        options = f"lowerdir={self.lower},upperdir={bundle}/upper,workdir={bundle}/workdir,redirect_dir=off,metacopy=off,index=off"
        run("mount", "-t", "overlay", "overlay", "-o", options, self.merged)

    def hello(self):
        bundle = self.bundle(["echo", "hi"])
        took, out = timed(lambda: self.runc("run", "-b", bundle, "hello"))
        assert out == "hi\n"
        run("umount", self.merged)
        return took

    def detached(self, *args):
        # The container's output must be a pipe that stays open: CRIU cannot dump a host file.
        r, w = os.pipe()
        self.pipes.append(r)
        done = subprocess.run(["runc", "--root", self.state, *args], stdin=subprocess.DEVNULL, stdout=w, stderr=w)
        os.close(w)
        if done.returncode:
            sys.exit(f"bench: runc {args[0]} failed: {os.read(r, 65536).decode()}")
        return r

    def start(self):
        self.b = self.bundle(["python3", "-c", WORKLOAD])
        os.set_blocking(self.detached("run", "-d", "-b", self.b, "w"), True)
        wait_for(lambda: os.read(self.pipes[-1], 64).startswith(b"ready"))

    def checkpoint(self, full):
        images = tempfile.mkdtemp(dir=self.dir)

        def work():
            self.runc("pause", "w")
            frozen, _ = timed(lambda: self.frozen(full, images))
            self.runc("resume", "w")
            return frozen

        took, frozen = timed(work)
        return {"time": took, "frozen": frozen, "bytes": size(images), "id": images}

    def frozen(self, full, images):
        if full:
            self.runc("checkpoint", "--leave-running", "--tcp-established", "--image-path", images + "/criu", "w")
        run("tar", "--xattrs", "--xattrs-include=*", "-cf", images + "/files.tar", "-C", self.upper, ".")

    def restore(self, ck):
        def work():
            self.runc("kill", "w", "KILL")
            wait_for(lambda: '"stopped"' in self.runc("state", "w"))
            self.runc("delete", "w")
            run("umount", self.merged)
            for d in (self.upper, self.b + "/workdir"):
                shutil.rmtree(d)
                os.makedirs(d)
            run("tar", "--xattrs", "--xattrs-include=*", "-xf", ck["id"] + "/files.tar", "-C", self.upper)
            self.mount(self.b)
            self.detached("restore", "-d", "-b", self.b, "--tcp-established", "--image-path", ck["id"] + "/criu", "w")

        return timed(work)[0]

    def drop(self, ck):
        shutil.rmtree(ck["id"])

    def stop(self):
        self.runc("delete", "-f", "w")
        run("umount", self.merged)
        for r in self.pipes:
            os.close(r)
        self.pipes = []


class Podman:
    name = "podman"

    def __init__(self, work, rootfs=None):
        self.dir = os.path.join(work, "podman")
        self.global_args = [
            "podman", "--root", self.dir + "/root", "--runroot", self.dir + "/run", "--cgroup-manager", "cgroupfs",
            "--runtime", "runc", "--storage-driver", "overlay",
        ]
        # Limits that any machine allows: setting others takes CAP_SYS_RESOURCE.
        self.flags = ["--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
        if rootfs:
            self.call("import", rootfs, "bench")

    def close(self):
        pass

    def call(self, *args):
        return run(*self.global_args, *args)

    def hello(self):
        assert self.call("run", "--rm", *self.flags, "bench", "echo", "hi") == "hi\n"

    def start(self):
        self.call("run", "-d", "--name", "w", *self.flags, "bench", "python3", "-c", WORKLOAD)
        wait_for(lambda: "ready" in self.call("logs", "w"))

    def checkpoint(self, full):
        if not full:
            return None
        out = tempfile.mktemp(suffix=".tar", dir=self.dir)
        took, _ = timed(lambda: self.call("container", "checkpoint", "--leave-running", "--export", out, "w"))
        return {"time": took, "bytes": size(out), "id": out}

    def restore(self, ck):
        def work():
            self.call("rm", "-f", "-t", "0", "w")
            self.call("container", "restore", "--import", ck["id"])

        return timed(work)[0]

    def drop(self, ck):
        os.remove(ck["id"])

    def stop(self):
        self.call("rm", "-f", "-t", "0", "w")


def measure(candidate, into):
    def add(key, value):
        if value is not None:
            into.setdefault(key, {}).setdefault(candidate.name, []).append(value)

    took, inner = timed(candidate.hello)
    add("run to first output", inner or took)
    if not candidate.start:
        return
    candidate.start()
    try:
        ck = candidate.checkpoint(full=False)
        if ck:
            add("files-only checkpoint", ck["time"])
            candidate.drop(ck)
        ck = candidate.checkpoint(full=True)
        add("full checkpoint", ck["time"])
        add("frozen by a full checkpoint", ck.get("frozen"))
        add("archive", ck["bytes"] / 1e6)
        restored = candidate.restore(ck)
        add("full restore", restored)
        add("checkpoint and restore", ck["time"] + restored)
        candidate.drop(ck)
    finally:
        candidate.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    opts = parser.parse_args()
    rootfs = run(os.path.join(HERE, "scripts/debian-image.sh")).strip()
    results, closing = {}, []
    with filesystem(12) as work:
        try:
            candidates = [Agentbox(work, rootfs), Raw(work, rootfs)]
            if shutil.which("podman"):
                candidates.append(Podman(work, rootfs))
            if shutil.which("dockerd"):
                daemon = Daemon(work, rootfs)
                closing.append(daemon)
                candidates += [AgentboxDocker(work, daemon), Docker(daemon), DockerWrapped(daemon)]
            for i in range(opts.n):
                for c in candidates:
                    measure(c, results)
                print(f"round {i + 1} of {opts.n}", file=sys.stderr)
        finally:
            for daemon in closing:
                daemon.close()

    medians = {k: {c: statistics.median(v) for c, v in row.items()} for k, row in results.items()}
    if opts.format == "json":
        print(json.dumps({"rounds": opts.n, "medians": medians, "all": results}, indent=1))
        return
    print(f"\nmedians of {opts.n} rounds; {MEMORY_MB} MB of memory, {FILES} files of 4 KiB; in brackets: the first column / this one")
    names = [c.name for c in candidates]
    table(medians, [n for n in names if n in ("agentbox", "raw tools", "podman")])
    if "docker" in names:
        table(medians, [n for n in names if n not in ("agentbox", "raw tools")], first="agentbox on docker")


def table(medians, names, first="agentbox"):
    names.sort(key=lambda n: n != first)
    print(f"\n{'':30}" + "".join(f"{n:>24}" for n in names))
    for key, row in medians.items():
        cells = []
        for n in names:
            if n not in row:
                cells.append(f"{'-':>24}")
                continue
            unit = f"{row[n]:.0f} MB" if key == "archive" else f"{row[n] * 1000:.0f} ms"
            ratio = "" if n == first else f" ({row[first] / row[n]:.2f})"
            cells.append(f"{unit + ratio:>24}")
        print(f"{key:30}" + "".join(cells))


if __name__ == "__main__":
    main()
