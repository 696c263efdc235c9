#!/usr/bin/env python3
"""Measures workspaces beside cp, git worktree and try, in one run: a sandbox over a large repository, a step, its undo, a diff, an apply.

Times are wall clock and include process start; in brackets is the CPU time, user and system. Figures are medians of
the rounds, in which the candidates take turns. `try` takes part if it is installed. Whatever the figures say, the exit
code is 0. Run it through `make bench`, as root.
"""

import argparse
import json
import os
import random
import shutil
import sys

from bench_store import Agentbox, IDLE
from bench_tools import AGENTBOX, HERE, Table, filesystem, run, settle, took

CHANGED = 10
AUTHOR = ["-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "gc.auto=0"]
EDIT = """
import os
for i in range({changed}):
    with open('%s/%03d/%d' % ({dir!r}, i % 100, i), 'w') as f:
        f.write('round {round}, file %d\\n' % i)
"""


def repository(path, files, size):
    """A git repository of so many files of so many bytes, a tenth of them text."""
    r = random.Random(1)
    text = b"".join(b"line %d of a source\n" % i for i in range(size // 20 + 1))[:size]
    for i in range(files):
        d = f"{path}/{i % 100:03}"
        if i < 100:
            os.makedirs(d)
        with open(f"{d}/{i}", "wb") as f:
            f.write(text if i % 10 == 0 else r.randbytes(size))
    run("git", "init", "-q", path)
    run("git", "-C", path, *AUTHOR, "add", "-A")
    run("git", "-C", path, *AUTHOR, "commit", "-q", "-m", "bench")


class Project:
    """A sandbox over the repository, and what is done in it."""

    def __init__(self, ab, path):
        self.ab, self.path = ab, path

    def start(self, name):
        """To the first output of a command in a sandbox over the repository."""
        workspace = f"{self.path}:/work"
        return took(AGENTBOX, "run", "--name", name, "--network", "none", "--workspace", workspace, "bench", "echo", "ready",
                    env=self.ab.env)

    def edit(self, number):
        self.ab.call("exec", "work", "python3", "-c", EDIT.format(dir="/work", changed=CHANGED, round=number))

    def took(self, *args):
        return took(AGENTBOX, *args, env=self.ab.env, cwd=self.path)


def starts(t, ab, project, work, rounds):
    first = project.start("first")  # it stays, and with it what it has read of the repository
    beside = os.path.join(work, "beside")
    mine, copies, trees, tries = [], [], [], []
    for i in range(rounds):
        settle(work)
        mine.append(project.start(f"start{i}"))
        ab.call("rm", f"start{i}")
        settle(work)
        trees.append(took("git", "-C", project.path, "worktree", "add", "-q", "--detach", beside))
        run("git", "-C", project.path, "worktree", "remove", "--force", beside)
        settle(work)
        copies.append(took("cp", "-a", project.path, beside))
        shutil.rmtree(beside)
        if shutil.which("try"):
            settle(work)
            tries.append(took("try", "-n", "echo", "ready", cwd=project.path))
    t.head("A sandbox over the repository, to the first output of a command")
    t.time("agentbox run --workspace, the first time", [first])
    own = t.time("agentbox run --workspace, later", mine)
    t.time("cp -a", copies)
    t.time("git worktree add", trees)
    if tries:
        t.time("try", tries)
    t.add("agentbox run --workspace, later: goal", own, f"{own * 1000:.0f} ms", "under 150 ms", own < 0.15)
    ab.call("rm", "--checkpoints", "first")


def steps(t, ab, project, work, rounds):
    ab.call("run", "-d", "--name", "work", "--network", "none", "--steps=off", "--workspace", f"{project.path}:/work", "bench", *IDLE)
    taken, frozen, undone, diffs, applied = [], [], [], [], []
    for i in range(rounds + 1):  # the first is not counted
        project.edit(i)
        settle(work)
        step = project.took("checkpoint", "--files-only", "--format", "json")
        diff = project.took("diff", "--stat")
        apply = project.took("apply", "--yes")
        project.edit(f"{i}, again")
        settle(work)
        paths = [f"--path=/work/{n:03}" for n in range(CHANGED)]
        undo = project.took("undo", *paths, "work")
        if i:
            taken.append(step)
            frozen.append(json.loads(step.out)["frozen_ns"] / 1e9)
            diffs.append(diff)
            applied.append(apply)
            undone.append(undo)
    t.head(f"Steps in which {CHANGED} files change")
    for what, list, goal in (
        ("a step", taken, 25),
        ("a step: frozen", frozen, 12),
        ("its undo, processes left alone", undone, 25),
        ("diff --stat", diffs, 100),
        ("apply", applied, 50),
    ):
        wall = t.time(what, list)
        t.rows[-1] = (*t.rows[-1][:2], f"under {goal} ms: {'met' if wall * 1000 < goal else 'MISSED'}")
    ab.call("rm", "-f", "--checkpoints", "work")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, metavar="ROUNDS", help="rounds (default 5)")
    parser.add_argument("--files", type=int, default=100_000, help="files of the repository (default 100,000)")
    parser.add_argument("--size", type=int, default=20_000, help="bytes of each (default 20,000)")
    parser.add_argument("--dir", default="/var/tmp", help="a short path for the filesystem's file, of up to 24 GB (default /var/tmp)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    opts = parser.parse_args()
    rootfs = run(os.path.join(HERE, "scripts/debian-image.sh")).strip()
    table = Table()
    with filesystem(24, inodes=8 * opts.files + 1_000_000, dir=opts.dir) as work:
        ab = Agentbox(work, rootfs)
        path = os.path.join(work, "repository")
        repository(path, opts.files, opts.size)
        settle(work)
        try:
            project = Project(ab, path)
            starts(table, ab, project, work, opts.n)
            steps(table, ab, project, work, opts.n)
        finally:
            ab.close()
    if opts.format == "json":
        print(json.dumps(table.values, indent=1))
        return
    print(f"\n{opts.files} files of {opts.size} bytes; wall clock, in brackets CPU time in ms", file=sys.stdout)
    table.print()


if __name__ == "__main__":
    main()
