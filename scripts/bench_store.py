#!/usr/bin/env python3
"""Measures the store beside tar, zstd and restic, in one run: what a checkpoint costs, what it stores, and what a restore costs.

Times are wall clock and include process start; in brackets is the CPU time, user and system, which says more on a busy
machine. Figures are medians of the rounds, in which the candidates take turns. Whatever the figures say, the exit code
is 0. Run it through `make bench`, as root.
"""

import argparse
import contextlib
import glob
import hashlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from http import client

from bench_tools import AGENTBOX, HERE, Table, filesystem, run, settle, took, wait_for

FILES, FILE_SIZE, CHANGED = 10_000, 4096, 10
FILL = """
import os, random
r = random.Random(1)
for i in range({files}):
    d = '/work/%03d' % (i % {dirs})
    if i < {dirs}:
        os.makedirs(d)
    fd = os.open('%s/%d' % (d, i), os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(fd, r.randbytes({size}))
    os.close(fd)
"""
EDIT = """
import random
r = random.Random({seed})
for i in r.sample(range({files}), {changed}):
    with open('/work/%03d/%d' % (i % {dirs}, i), 'wb') as f:
        f.write(r.randbytes({size}))
"""
MEMORY_MB, PAGES = 1024, 5  # per cent that change
MEMORY = f"""
import os, random, signal
memory = bytearray().join(os.urandom(1 << 20) for _ in range({MEMORY_MB}))
def change(*_):
    pages = len(memory) >> 12
    for i in random.Random(1).sample(range(pages), pages * {PAGES} // 100):
        memory[i << 12:(i << 12) + 8] = os.urandom(8)
    print('changed', flush=True)
signal.signal(signal.SIGUSR1, change)
print('ready', flush=True)
while True:
    signal.pause()
"""
IDLE = ["sleep", "infinity"]


class Agentbox:
    def __init__(self, work, rootfs):
        self.root = os.path.join(work, "ab")
        # Commands are to be measured whole, not as clients of the service.
        self.env = dict(os.environ, AGENTBOX_ROOT=self.root, AGENTBOX_BACKEND="oci", AGENTBOX_HOST="none")
        self.call("image", "import", "bench", rootfs)

    def call(self, *args, **kw):
        return run(AGENTBOX, *args, env=self.env, **kw)

    def took(self, *args):
        t = took(AGENTBOX, *args, env=self.env)
        return t, json.loads(t.out)

    def run(self, name, *command):
        id = self.call("run", "-d", "--name", name, "--network", "none", "bench", *command).strip()
        return os.path.join(self.root, "sandboxes", id, "upper")

    def python(self, name, code, **values):
        self.call("exec", name, "python3", "-c", code.format(**values))

    def checkpoint(self, name, *flags):
        return self.took("checkpoint", "--format", "json", *flags, name)

    def restore(self, name, checkpoint):
        return self.took("restore", "--no-undo", "--format", "json", name, checkpoint)

    @contextlib.contextmanager
    def service(self):
        """`agentbox serve`, and what posts a body to it; the answer comes with the seconds that it took."""
        process = subprocess.Popen([AGENTBOX, "serve"], env=self.env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: os.path.exists(self.root + "/run/agentbox.sock"), what="the service listens")
            yield self.post
        finally:
            process.terminate()
            process.wait()

    def post(self, path, body):
        start = time.monotonic()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.root + "/run/agentbox.sock")
            http = client.HTTPConnection("agentbox")
            http.sock = connection
            http.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = http.getresponse()
            content = json.loads(answer.read())
        if answer.status != 200:
            sys.exit(f"bench: {path}: {content}")
        return time.monotonic() - start, content

    def stored(self):
        """Bytes of packs and manifests."""
        found = glob.glob(self.root + "/packs/??/*") + glob.glob(self.root + "/checkpoints/*/manifest.json")
        return sum(os.path.getsize(f) for f in found)

    def close(self):
        for sandbox in json.loads(self.call("ps", "-a", "--format", "json")):
            self.call("rm", "-f", sandbox["id"])


def files(t, ab, work, rounds):
    """Checkpoints and restores of 10,000 files of which ten changed."""
    size = {"files": FILES, "dirs": 100, "size": FILE_SIZE}
    upper, bare = ab.run("work", *IDLE), ab.run("bare", *IDLE)
    ab.run("still", *IDLE)
    for name in ("work", "still"):
        ab.python(name, FILL, **size)
    ab.call("stop", "-t", "0", "still")
    ab.call("create", "--name", "empty", "--network", "none", "bench", *IDLE)
    base = {name: ab.checkpoint(name, "--files-only")[1]["id"] for name in ("work", "bare", "still", "empty")}
    ab.checkpoint("bare", "--files-only")
    assert len(glob.glob(upper + "/work/*/*")) == FILES and not os.path.exists(bare + "/work")

    tar, plain = os.path.join(work, "files.tar"), os.path.join(work, "plain")
    run("tar", "-cf", tar, "-C", upper, ".")
    os.mkdir(plain)
    run("tar", "-xf", tar, "-C", plain)
    got = {}

    def add(key, value):
        got.setdefault(key, []).append(value)

    for i in range(rounds):
        ab.python("work", EDIT, seed=2 * i, changed=CHANGED, **size)
        settle(work)
        took_, ck = ab.checkpoint("work", "--files-only")
        add("checkpoint", took_)
        add("frozen", ck["frozen_ns"] / 1e9)
        took_, ck = ab.checkpoint("bare", "--files-only")
        add("checkpoint bare", took_)
        add("frozen bare", ck["frozen_ns"] / 1e9)
        settle(work)
        add("tar", took("tar", "-cf", work + "/now.tar", "-C", upper, "."))
        settle(work)
        add("zstd", took("sh", "-c", f"tar -cf - -C {upper} . | zstd -q -1 -T0 -f -o {work}/now.tar.zst"))
        settle(work)

        # What changed since `base` is what the round changed, as the restore took back what the others did.
        took_, re = ab.restore("work", base["work"])
        assert re["changed"] >= CHANGED, re
        add("restore running", took_)
        add("down", re["down_ns"] / 1e9)
        took_, re = ab.restore("bare", base["bare"])
        add("restore bare", took_)
        add("down bare", re["down_ns"] / 1e9)

        edit_stopped(ab, work, i)
        settle(work)
        took_, re = ab.restore("still", base["still"])
        assert re["changed"] >= CHANGED, re
        add("restore", took_)
        add("restore files", re["files_ns"] / 1e9)
        add("restore empty", ab.restore("empty", base["empty"])[0])

        edit_stopped(ab, work, rounds + i)
        with ab.service() as post:
            settle(work)
            took_, re = post("/v1/sandboxes/still/restore", {"checkpoint": base["still"], "no_undo": True})
        assert re["changed"] >= CHANGED, re
        add("restore request", took_)
        settle(work)
        add("clear and extract", took("sh", "-c", f"rm -rf {plain} && mkdir {plain} && tar -xf {tar} -C {plain}"))
        add("synced", took("sync", "-f", plain))
        print(f"files: round {i + 1} of {rounds}", file=sys.stderr)
    same = run("diff", "-r", "--no-dereference", plain + "/work", upper + "/work", check=False)
    assert same == "", same

    t.head(f"A checkpoint of {FILES} files of {FILE_SIZE} bytes after {CHANGED} changed")
    frozen, engine = t.time("frozen", got["frozen"]), t.time("of which without any files (pause, resume)", got["frozen bare"])
    part = frozen - engine
    least = min(got["frozen"]) - min(got["frozen bare"])
    t.add("frozen for the files part", part, f"{part * 1000:.1f} ms, of the least {least * 1000:.1f}", "under 15 ms", part < 0.015)
    t.time("whole", got["checkpoint"])
    t.time("whole, of a sandbox without files", got["checkpoint bare"])
    full = t.time("tar -cf of the same", got["tar"])
    t.time("tar | zstd -1 -T0 of the same", got["zstd"])
    t.ratio("tar / frozen", full / frozen, 10)
    t.ratio("tar / frozen for the files part", full / part if part > 0 else float("inf"), 10)

    t.head(f"restore --no-undo after {CHANGED} of them changed")
    mine, fixed = t.time("stopped sandbox, whole", got["restore"]), t.time("of which without any files", got["restore empty"])
    request = t.time("stopped sandbox, by a request to the service", got["restore request"])
    t.time("running sandbox, whole", got["restore running"])
    t.time("of which without any files ", got["restore bare"])
    t.time("running sandbox, down", got["down"])
    t.time("of which without any files  ", got["down bare"])
    extract, synced = t.time("rm -rf and tar -xf of the same", got["clear and extract"]), t.time("and sync -f, as a restore does", got["synced"])
    t.ratio("rm and tar / stopped, whole", extract / mine, 10)
    t.ratio("rm, tar and sync / stopped, whole", (extract + synced) / mine, 10)
    t.ratio("rm and tar / by a request", extract / request, 10)
    t.ratio("rm, tar and sync / by a request", (extract + synced) / request, 10)
    part = t.time("stopped sandbox, the files' part (files_ns)", got["restore files"])
    t.ratio("rm and tar / the files' part", extract / part, 10)
    t.ratio("rm, tar and sync / the files' part", (extract + synced) / part, 10)
    for name in ("work", "bare", "still", "empty"):
        ab.call("rm", "-f", "--checkpoints", name)


def edit_stopped(ab, work, i):
    r, out = random.Random(-1 - i), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for n in r.sample(range(FILES), CHANGED):
            member = tarfile.TarInfo(f"{n % 100:03}/{n}")
            member.size, member.mode = FILE_SIZE, 0o644
            archive.addfile(member, io.BytesIO(r.randbytes(FILE_SIZE)))
    path = os.path.join(work, "edit")
    shutil.rmtree(path, ignore_errors=True)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        archive.extractall(path)
    ab.call("cp", path + "/.", "still:/work")


class Unique:
    """All that was ever in a file of a tree, each content once, in files of their own."""

    def __init__(self, into):
        self.into, self.seen, self.known, self.raw = into, set(), set(), 0

    def look(self, tree):
        for dir, _, names in os.walk(tree):
            for name in names:
                path = os.path.join(dir, name)
                st = os.lstat(path)
                stamp = (path, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns)
                if stamp in self.seen or not os.path.isfile(path) or os.path.islink(path):
                    continue
                self.seen.add(stamp)
                with open(path, "rb") as f:
                    data = f.read()
                id = hashlib.blake2b(data, digest_size=32).hexdigest()
                if id not in self.known and data:
                    self.known.add(id)
                    self.raw += len(data)
                    with open(os.path.join(self.into, id), "wb") as f:
                        f.write(data)

    def compressed(self, level):
        out = self.into + ".zst"
        os.mkdir(out)
        run("zstd", "-q", f"-{level}", "--no-check", "-r", "--output-dir-flat", out, self.into)
        total = 0
        for id in self.known:
            total += min(os.path.getsize(os.path.join(out, id + ".zst")), os.path.getsize(os.path.join(self.into, id)))
        shutil.rmtree(out)
        return total


def session(t, ab, work, steps):
    """As many checkpoints as steps of a coding session, and as many backups."""
    upper = ab.run("session", *IDLE)
    with open(os.path.join(HERE, "scripts/bench_session.py")) as f:
        script = f.read()
    restic = dict(os.environ, RESTIC_REPOSITORY=work + "/restic", RESTIC_PASSWORD="bench", RESTIC_CACHE_DIR=work + "/restic-cache")
    other = shutil.which("restic")
    if other:
        run("restic", "init", env=restic)
    before, mine, theirs, opened = ab.stored(), [], [], []
    # Not on the filesystem that is measured.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as scratch:
        unique = Unique(os.path.join(scratch, "u"))
        os.mkdir(unique.into)
        for step in range(steps):
            ab.call("exec", "session", "python3", "-c", script, str(step))
            turns = [lambda: mine.append(ab.checkpoint("session", "--files-only")[0])]
            if other:
                turns.append(lambda: theirs.append(took("restic", "backup", "--quiet", upper, env=restic)))
            for turn in turns if step % 2 else reversed(turns):
                settle(work)
                turn()
            if other and step % 10 == 9:
                opened.append(took("restic", "cat", "config", env=restic))
            unique.look(upper)
            if step % 10 == 9:
                print(f"session: step {step + 1} of {steps}", file=sys.stderr)
        packed = unique.compressed(1)
    stored, tree = ab.stored() - before, int(run("du", "-s", "-B1", "--apparent-size", upper).split()[0])
    ab.call("verify", "--all", "--read-data")

    mb = lambda n: f"{n / 1e6:.1f} MB"
    t.head(f"{steps} checkpoints of a coding session; at its end {mb(tree)} in {sum(len(f) for *_, f in os.walk(upper))} files")
    t.add("unique contents", unique.raw, f"{mb(unique.raw)} in {len(unique.known)} files")
    t.add("each once by zstd -1", packed, mb(packed))
    t.add("packs and manifests", stored, mb(stored))
    t.ratio("stored / unique compressed", stored / packed, 1.1, least=False)
    total = lambda list: (sum(x.wall for x in list), sum(x.cpu for x in list))
    wall, cpu = total(mine)
    t.add("all checkpoints", wall, f"{wall:.2f} s ({cpu * 1000:.0f})")
    t.time("one checkpoint", mine)
    if other:
        repository = int(run("du", "-s", "-B1", "--apparent-size", work + "/restic").split()[0])
        t.add("restic's repository", repository, mb(repository))
        wall2, cpu2 = total(theirs)
        t.add("all restic backups", wall2, f"{wall2:.2f} s ({cpu2 * 1000:.0f})")
        t.time("one restic backup", theirs)
        password = t.time("of which opening the repository", opened)
        t.ratio("checkpoints / backups", wall / wall2, 0.5, least=False)
        t.add("the same without opening it", wall / (wall2 - steps * password), f"{wall / (wall2 - steps * password):.2f}x")
    ab.call("rm", "-f", "--checkpoints", "session")


def memory(t, ab):
    """Full checkpoints of a process of which little changed."""
    ab.run("memory", "python3", "-c", MEMORY)
    wait_for(lambda: "ready" in ab.call("logs", "memory"))
    first, a = ab.checkpoint("memory")
    ab.call("kill", "-s", "USR1", "memory")
    wait_for(lambda: "changed" in ab.call("logs", "memory"))
    second, b = ab.checkpoint("memory")
    t.head(f"Full checkpoints of {MEMORY_MB} MB of random bytes, {PAGES} % of the pages changed between them")
    for name, took_, ck in (("first", first, a), ("second", second, b)):
        t.time(f"{name} checkpoint", [took_])
        t.add(f"{name}: frozen", ck["frozen_ns"], f"{ck['frozen_ns'] / 1e6:.0f} ms")
        t.add(f"{name}: added", ck["added"], f"{ck['added'] / 1e6:.1f} MB")
        t.add(f"{name}: peak memory", took_.memory, f"{took_.memory / 1e6:.0f} MB")
    t.ratio("added by the second / the first", b["added"] / a["added"] * 100, 8, least=False, unit=" %")
    ab.call("rm", "-f", "--checkpoints", "memory")


def million(t, ab, work, count):
    """A tree that nobody should have, beside one of a tenth of its files: time and memory."""
    tenth, whole = (many(t, ab, work, n) for n in (count // 10, count))
    t.head(f"Seconds per file with {count} files / with {count // 10}")
    for what in whole:
        t.ratio(what, whole[what] / count / (tenth[what] / (count // 10)), 1.5, least=False)


def many(t, ab, work, count):
    """All verbs on that many files; returns what each took."""
    size = {"files": count, "dirs": 1000, "size": 200}
    ab.run("million", *IDLE)
    ab.python("million", FILL, **size)
    settle(work)
    t.head(f"{count} files of {size['size']} bytes")
    walls = {}

    def add(what, result):
        took_, info = result
        print(f"{count} files: {what}: {took_.wall:.1f} s ({took_.cpu:.1f}), {took_.memory / 1e6:.0f} MB", file=sys.stderr)
        walls[what] = took_.wall
        row = f"{what}, {count} files"
        t.time(row, [took_])
        if isinstance(info, dict) and info.get("frozen_ns"):
            t.add(row + ": frozen", info["frozen_ns"] / 1e9, f"{info['frozen_ns'] / 1e6:.0f} ms")
        t.add(row + ": peak memory", took_.memory, f"{took_.memory / 1e6:.0f} MB", "under 500 MB", took_.memory < 500e6)
        settle(work)
        return info

    base = add("first checkpoint", ab.checkpoint("million", "--files-only"))["id"]
    ab.python("million", EDIT, seed=1, changed=CHANGED, **size)
    settle(work)
    add("second checkpoint", ab.checkpoint("million", "--files-only"))
    add("restore", ab.restore("million", base))
    add("fork", ab.took("fork", "--no-start", "--name", "copy", "--format", "json", "million@" + base))
    ab.call("rm", "-f", "copy")
    ab.call("rm", "-f", "million")
    settle(work)
    add("restore of the removed sandbox", ab.took("restore", "--format", "json", "million", base))
    ab.call("rm", "-f", "--checkpoints", "million")
    return walls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, metavar="ROUNDS", help="rounds over the 10,000 files (default 5)")
    parser.add_argument("--steps", type=int, default=100, help="steps of the coding session (default 100)")
    parser.add_argument("--only", choices=["files", "session", "memory", "million"], action="append", help="measure only this; may be repeated")
    parser.add_argument("--million", type=int, nargs="?", const=1_000_000, metavar="COUNT", help="also measure a tree of so many files (default 1,000,000)")
    parser.add_argument("--dir", default="/var/tmp", help="a short path for the filesystem's file, of up to 32 GB (default /var/tmp)")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    opts = parser.parse_args()
    wanted = opts.only or ["files", "session", "memory"] + (["million"] if opts.million else [])
    count = opts.million or 1_000_000
    rootfs = run(os.path.join(HERE, "scripts/debian-image.sh")).strip()
    table = Table()
    with filesystem(32, inodes=2 * count + 1_000_000 if "million" in wanted else None, dir=opts.dir) as work:
        ab = Agentbox(work, rootfs)
        try:
            if "files" in wanted:
                files(table, ab, work, opts.n)
            if "session" in wanted:
                session(table, ab, work, opts.steps)
            if "memory" in wanted:
                memory(table, ab)
            if "million" in wanted:
                million(table, ab, work, count)
        finally:
            ab.close()
    if opts.format == "json":
        print(json.dumps(table.values, indent=1))
        return
    print("\nwall clock, in brackets CPU time in ms")
    table.print()


if __name__ == "__main__":
    main()
