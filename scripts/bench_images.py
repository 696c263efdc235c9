#!/usr/bin/env python3
"""Pulls a Debian image from a registry on this machine with agentbox and with its peers, in one run.

The image is one layer of some 100 MB, 270 MB unpacked, and the registry is Debian's docker-registry on loopback.
Every pull is a first one: into an empty store, layers unpacked. Candidates take turns; figures are medians. Times are
wall clock and include process start; in brackets is the CPU time, which is not known of a daemon. Run it through
`make bench`, as root.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess

from bench import Daemon, Podman
from bench_tools import AGENTBOX, HERE, Table, Took, filesystem, run, settle, timed, took, wait_for

GOAL = 0.7


@contextlib.contextmanager
def registry(work):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % s.getsockname()[1]
    config = os.path.join(work, "registry.yml")
    with open(config, "w") as f:
        json.dump({"version": 0.1, "log": {"level": "error"}, "http": {"addr": address},
                   "storage": {"filesystem": {"rootdirectory": os.path.join(work, "registry")}}}, f)
    with open(os.path.join(work, "registry.log"), "w") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            host, port = address.split(":")
            wait_for(lambda: socket.socket().connect_ex((host, int(port))) == 0, what="the registry answers")
            yield address
        finally:
            process.terminate()
            process.wait()


def publish(work, rootfs, ref):
    """Puts the image into the registry, by tools that are not ours."""
    layout = os.path.join(work, "layout")
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", layout + ":bench")
    run("umoci", "raw", "add-layer", "--image", layout + ":bench", rootfs)
    run("skopeo", "copy", "--dest-tls-verify=false", f"oci:{layout}:bench", "docker://" + ref)
    shutil.rmtree(layout)


class Agentbox:
    name = "agentbox"

    def __init__(self, work):
        self.root = os.path.join(work, "ab")
        self.env = dict(os.environ, AGENTBOX_ROOT=self.root, AGENTBOX_BACKEND="oci", AGENTBOX_HOST="none")

    def pull(self, ref):
        return took(AGENTBOX, "image", "pull", ref, env=self.env)

    def drop(self, ref):
        shutil.rmtree(self.root)

    def close(self):
        pass


class SkopeoUmoci:
    name = "skopeo copy + umoci unpack"

    def __init__(self, work):
        self.layout, self.bundle = os.path.join(work, "oci"), os.path.join(work, "bundle")

    def pull(self, ref):
        a = took("skopeo", "copy", "--src-tls-verify=false", "docker://" + ref, f"oci:{self.layout}:x")
        b = took("umoci", "unpack", "--image", self.layout + ":x", self.bundle)
        return Took(a.wall + b.wall, a.cpu + b.cpu, max(a.memory, b.memory), "")

    def drop(self, ref):
        shutil.rmtree(self.layout)
        shutil.rmtree(self.bundle)

    def close(self):
        pass


class PodmanPull:
    name = "podman pull"

    def __init__(self, work):
        self.podman = Podman(work)

    def pull(self, ref):
        return took(*self.podman.global_args, "pull", "-q", "--tls-verify=false", ref)

    def drop(self, ref):
        self.podman.call("rmi", "-f", ref)

    def close(self):
        pass


class DockerPull:
    name = "docker pull"

    def __init__(self, work):
        self.daemon = Daemon(work)

    def pull(self, ref):
        return timed(lambda: self.daemon.docker("pull", "-q", ref))[0]

    def drop(self, ref):
        self.daemon.docker("rmi", "-f", ref)

    def close(self):
        self.daemon.close()


def pulls(table, candidates, ref, work, rounds):
    got = {c.name: [] for c in candidates}
    for i in range(rounds + 1):
        for c in candidates:
            settle(work)
            t = c.pull(ref)
            if i > 0:  # the first round warms caches up
                got[c.name].append(t)
            if not (c.name == "agentbox" and i == rounds):
                c.drop(ref)
    table.head("pull and unpack")
    medians = {name: table.time(name, times) for name, times in got.items()}
    fastest = min((wall, name) for name, wall in medians.items() if name != "agentbox")
    table.ratio(f"agentbox / the fastest peer ({fastest[1]})", medians["agentbox"] / fastest[0], GOAL, least=False)


def second(table, ab, ref):
    """A sandbox more of an image that is here."""
    images = os.path.join(ab.root, "images")
    listing = lambda: sorted(os.path.join(d, f) for d, _, files in os.walk(images) for f in files)
    took(AGENTBOX, "create", "--name", "first", "--network", "none", ref, "true", env=ab.env)
    before = listing()
    times = [took(AGENTBOX, "create", "--name", f"s{i}", "--network", "none", ref, "true", env=ab.env) for i in range(5)]
    table.head("a second sandbox of the image")
    table.time("agentbox create", times)
    table.add("files that this adds to the images", len(listing()) - len(before), str(len(listing()) - len(before)), "none", listing() == before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=3, metavar="ROUNDS", help="rounds that are counted (default 3)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    opts = parser.parse_args()
    rootfs = run(os.path.join(HERE, "scripts/debian-image.sh")).strip()
    table = Table()
    with filesystem(16) as work, registry(work) as address:
        ref = address + "/debian:bench"
        publish(work, rootfs, ref)
        candidates = [Agentbox(work), SkopeoUmoci(work)]
        if shutil.which("podman"):
            candidates.append(PodmanPull(work))
        if shutil.which("dockerd"):
            candidates.append(DockerPull(work))
        try:
            pulls(table, candidates, ref, work, opts.n)
            second(table, candidates[0], ref)
        finally:
            for c in candidates:
                c.close()
    if opts.format == "json":
        print(json.dumps(table.values, indent=1))
        return
    print("\nwall clock, in brackets CPU time in ms")
    table.print()


if __name__ == "__main__":
    main()
