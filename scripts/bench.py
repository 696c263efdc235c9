#!/usr/bin/env python3
"""Compares agentbox with the raw tools it stands on, and with podman, in one run.

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
import time

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
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(*cmd, check=True, env=None, **kw):
    done = subprocess.run(cmd, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, **kw)
    if check and done.returncode != 0:
        sys.exit(f"bench: {' '.join(cmd[:6])}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def timed(fn):
    start = time.monotonic()
    out = fn()
    return time.monotonic() - start, out


def size(path):
    return int(run("du", "-s", "-B1", "--apparent-size", path).split()[0])


def wait_for(what, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            sys.exit("bench: the workload did not become ready")
        time.sleep(0.02)


class Agentbox:
    name = "agentbox"

    def __init__(self, work, rootfs):
        self.root = os.path.join(work, "ab")
        self.env = dict(os.environ, AGENTBOX_ROOT=self.root)
        self.call("image", "import", "bench", rootfs)

    def call(self, *args):
        return run(os.path.join(HERE, "bin/agentbox"), *args, env=self.env)

    def hello(self):
        assert self.call("run", "--rm", "--network", "none", "bench", "echo", "hi") == "hi\n"

    def start(self):
        self.call("run", "-d", "--name", "w", "--network", "none", "bench", "python3", "-c", WORKLOAD)
        wait_for(lambda: "ready" in self.call("logs", "w"))

    def checkpoint(self, full):
        args = [] if full else ["--files-only"]
        took, ck = timed(lambda: self.call("checkpoint", *args, "w").strip())
        info = json.loads(self.call("checkpoint", "inspect", ck))[0]
        return {"time": took, "frozen": info["frozen_ns"] / 1e9, "bytes": info["bytes"], "id": ck}

    def restore(self, ck):
        took, _ = timed(lambda: self.call("restore", "w", ck["id"]))
        return took

    def drop(self, ck):
        self.call("checkpoint", "rm", ck["id"])

    def stop(self):
        self.call("rm", "-f", "w")


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

    def __init__(self, work, rootfs):
        self.dir = os.path.join(work, "podman")
        self.global_args = [
            "podman", "--root", self.dir + "/root", "--runroot", self.dir + "/run", "--cgroup-manager", "cgroupfs",
            "--runtime", "runc", "--storage-driver", "overlay",
        ]
        # Limits that any machine allows: setting others takes CAP_SYS_RESOURCE.
        self.flags = ["--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
        self.call("import", rootfs, "bench")

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
        add("full restore", candidate.restore(ck))
        candidate.drop(ck)
    finally:
        candidate.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    opts = parser.parse_args()
    rootfs = run(os.path.join(HERE, "scripts/debian-image.sh")).strip()
    # Directly below a short path: the length of a unix socket's path is bounded.
    work = tempfile.mkdtemp(prefix="ab-bench.", dir="/var/tmp")
    image = work + ".img"
    results = {}
    try:
        # A journaling ext4 of its own, so that figures of different machines
        # do not differ by the state and the options of their filesystems.
        run("truncate", "-s", "12G", image)
        run("mkfs.ext4", "-q", image)
        run("mount", "-o", "loop", image, work)
        candidates = [Agentbox(work, rootfs), Raw(work, rootfs)]
        if shutil.which("podman"):
            candidates.append(Podman(work, rootfs))
        for i in range(opts.n):
            for c in candidates:
                measure(c, results)
            print(f"round {i + 1} of {opts.n}", file=sys.stderr)
    finally:
        for mount in reversed([line.split()[1] for line in open("/proc/self/mounts")]):
            if mount.startswith(work):
                subprocess.run(["umount", mount])
        os.rmdir(work)
        os.remove(image)

    medians = {k: {c: statistics.median(v) for c, v in row.items()} for k, row in results.items()}
    if opts.format == "json":
        print(json.dumps({"rounds": opts.n, "medians": medians, "all": results}, indent=1))
        return
    names = [c.name for c in candidates]
    print(f"\nmedians of {opts.n} rounds; {MEMORY_MB} MB of memory, {FILES} files of 4 KiB; agentbox / other in brackets\n")
    print(f"{'':30}" + "".join(f"{n:>22}" for n in names))
    for key, row in medians.items():
        cells = []
        for n in names:
            if n not in row:
                cells.append(f"{'-':>22}")
                continue
            unit = f"{row[n]:.0f} MB" if key == "archive" else f"{row[n] * 1000:.0f} ms"
            ratio = "" if n == "agentbox" else f" ({row['agentbox'] / row[n]:.2f})"
            cells.append(f"{unit + ratio:>22}")
        print(f"{key:30}" + "".join(cells))


if __name__ == "__main__":
    main()
