"""One step of a coding session, run inside a sandbox: python3 bench_session.py STEP.

Step 0 makes a repository of 240 sources, 1,200 files of packages and a whole build;
each later step edits a few sources, sometimes adds one, rebuilds what changed, links
and runs the tests now and then, and commits. The same step does the same on every
machine. It needs Python and git, nothing else.
"""

import os
import random
import subprocess
import sys

ROOT = "/work/project"
WORDS = [f"{a}_{b}" for a in ("read", "write", "parse", "open", "close", "merge", "split", "find") for b in
         ("node", "token", "entry", "line", "block", "header", "index", "table", "buffer", "state", "path", "user")]


def git(*args):
    env = dict(os.environ, GIT_AUTHOR_DATE="@1700000000 +0000", GIT_COMMITTER_DATE="@1700000000 +0000", HOME="/work")
    for who in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{who}_NAME"] = env[f"GIT_{who}_EMAIL"] = "bench"
    subprocess.run(["git", "-c", "pack.threads=1", "-c", "gc.auto=0", *args], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write(path, data, mode="wb"):
    path = os.path.join(ROOT, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, mode) as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def read(path):
    with open(os.path.join(ROOT, path), "rb") as f:
        return f.read()


def function(r):
    name = f"{r.choice(WORDS)}_{r.randrange(10_000)}"
    body = [f"def {name}({', '.join(r.sample(WORDS, 3))}):"]
    for _ in range(r.randrange(4, 30)):
        a, b, c = r.choices(WORDS, k=3)
        body.append(r.choice((f"    {a} = {b}({c}, {r.randrange(1000)})", f"    if {a} > {r.randrange(100)}:\n        return {b}", f"    {a}.append({c}[{r.randrange(64)}:])")))
    return "\n".join(body) + "\n\n\n"


def source(i):
    return f"src/mod{i % 16:02}/file{i:03}.py"


def build(path):
    """Something like an object file: operations from a small set, then the names."""
    text = read(path)
    r = random.Random(text)
    ops = [r.randbytes(4) for _ in range(400)]
    weights = [1 / (i + 1) for i in range(400)]
    code = b"".join(r.choices(ops, weights, k=len(text)))
    write("build/" + path.replace("/", "-") + ".o", b"\x7fOBJ" + len(code).to_bytes(8, "little") + code + bytes(512) + text[: len(text) // 4])


def link():
    names = sorted(os.listdir(ROOT + "/build"))
    write("out/app", b"".join(read("build/" + n) for n in names if n.endswith(".o"))[: 3 << 20])


def begin():
    r = random.Random(0)
    for i in range(240):
        write(source(i), "".join(function(r) for _ in range(r.randrange(3, 16))))
    for i in range(1200):
        text = "".join(function(r) for _ in range(r.choice((1, 2, 4, 8, 30))))
        write(f"packages/p{i // 30:02}/lib/f{i}.py", text)
    for i in range(6):
        write(f"packages/bin/tool{i}", r.randbytes(1 << 20))
    write("cache/tests.db", r.randbytes(64) * 8192)
    write(".gitignore", "build/\nout/\ncache/\npackages/\n*.log\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "begin")
    for i in range(240):
        build(source(i))
    link()


def go_on(step):
    r = random.Random(step)
    changed = []
    for i in r.sample(range(240), r.randrange(1, 6)):
        lines = read(source(i)).decode().split("\n")
        for _ in range(r.randrange(1, 8)):
            lines[r.randrange(len(lines))] = f"    {r.choice(WORDS)} = {r.randrange(10_000)}  # {r.choice(WORDS)}"
        write(source(i), "\n".join(lines) + (function(r) if r.random() < 0.3 else ""))
        changed.append(source(i))
    if r.random() < 0.3:
        changed.append(source(240 + step))
        write(changed[-1], "".join(function(r) for _ in range(6)))
    for path in changed:
        build(path)
    write("build.log", "".join(f"[{step}] compiled {p} in {r.random():.3f} s\n" for p in changed) * 8, "ab")
    if step % 4 == 0:
        link()
    if step % 2 == 0:  # the tests' database is written in place, page by page
        with open(ROOT + "/cache/tests.db", "r+b") as f:
            for _ in range(6):
                f.seek(r.randrange(128) * 4096)
                f.write(r.randbytes(2048) + bytes(2048))
    if step % 3 == 0:
        git("add", "-A")
        git("commit", "-q", "-m", f"step {step}")
    if step % 25 == 10:  # a package comes, another goes
        subprocess.run(["rm", "-r", f"{ROOT}/packages/p{step // 25:02}"], check=True)
        for i in range(30):
            write(f"packages/n{step}/f{i}.py", "".join(function(r) for _ in range(8)))
    if step == 60:
        git("gc", "-q")


if __name__ == "__main__":
    begin() if sys.argv[1] == "0" else go_on(int(sys.argv[1]))
