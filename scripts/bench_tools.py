"""What the benchmarks share: commands that are timed, a filesystem of their own, and a table of the figures."""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
AGENTBOX = os.path.join(HERE, "bin/agentbox")


def run(*cmd, check=True, env=None, **kw):
    done = subprocess.run(cmd, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, **kw)
    if check and done.returncode != 0:
        sys.exit(f"bench: {' '.join(cmd[:6])}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def timed(fn):
    start = time.monotonic()
    out = fn()
    return time.monotonic() - start, out


class Took(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, user and system, with all descendants that were waited for
    memory: int  # bytes, the peak of the largest process; at least this script's own
    out: str


def took(*cmd, env=None, cwd=None):
    """Runs a command to its end and says what that took."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(cmd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        for f in (out, err):
            f.seek(0)
        if process.returncode != 0:
            sys.exit(f"bench: {' '.join(cmd[:6])}: exit {process.returncode}\n{err.read().decode()}")
        return Took(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10, out.read().decode())


def size(path):
    return int(run("du", "-s", "-B1", "--apparent-size", path).split()[0])


def wait_for(done, seconds=60, what="the workload is ready"):
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            sys.exit(f"bench: waited {seconds} s, in vain, until {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def filesystem(gigabytes, inodes=None, dir="/var/tmp"):
    """A journaling ext4 of its own, so that figures of different machines do not
    differ by the state and the options of their filesystems. The file behind it is
    sparse. Everything mounted beneath it is unmounted at the end."""
    # Directly below a short path: the length of a unix socket's path is bounded.
    work = tempfile.mkdtemp(prefix="ab-bench.", dir=dir)
    image = work + ".img"
    try:
        run("truncate", "-s", f"{gigabytes}G", image)
        run("mkfs.ext4", "-q", *(["-N", str(inodes)] if inodes else []), image)
        run("mount", "-o", "loop", image, work)
        yield work
    finally:
        with open("/proc/self/mounts") as mounts:
            beneath = [m for m in (line.split()[1] for line in mounts) if m == work or m.startswith(work + "/")]
        for mount in reversed(beneath):
            # What watched a sandbox may take a moment to end.
            wait_for(lambda: subprocess.run(["umount", mount], stderr=subprocess.DEVNULL).returncode == 0, what="nobody uses " + mount)
        os.rmdir(work)
        os.remove(image)


def settle(work):
    """Nobody is to pay for what others have written."""
    run("sync", "-f", work)


class Table:
    """Rows of a name, a figure and, where the project has set one, a goal."""

    def __init__(self):
        self.rows, self.values = [], {}

    def head(self, text):
        self.rows.append((text, None, None))

    def time(self, what, list, key=None):
        """A row of (wall, cpu) pairs, or of plain seconds; returns the median."""
        pairs = [(t.wall, t.cpu) if hasattr(t, "wall") else (t, None) for t in list]
        wall = statistics.median(p[0] for p in pairs)
        text = f"{wall * 1000:.1f} ms"
        if pairs[0][1] is not None:
            text += f" ({statistics.median(p[1] for p in pairs) * 1000:.0f})"
        if len(pairs) > 1:
            text += f", least {min(p[0] for p in pairs) * 1000:.1f}"
        self.add(what, wall, text)
        return wall

    def add(self, what, value, text, goal=None, met=None):
        self.rows.append((what, text, goal and f"{goal}: {'met' if met else 'MISSED'}"))
        self.values[what] = value

    def ratio(self, what, value, goal, least=True, unit="x"):
        limit = f"{'at least' if least else 'at most'} {goal:g}{unit}"
        self.add(what, value, f"{value:.2f}{unit}", limit, value >= goal if least else value <= goal)

    def print(self):
        wide = max(len(r[0]) for r in self.rows if r[1])
        for what, text, goal in self.rows:
            print(f"  {what:{wide}}  {text:38} {goal or ''}".rstrip() if text else f"\n{what}")
