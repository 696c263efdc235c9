"""A stand-in for a coding agent: it works on a git repository, turn by turn,
keeps what it has learned in memory only, and answers over HTTP.

GET /       what it remembers, as JSON
GET /rest   it finishes its turn and rests, so that its files stand still
GET /work   it goes on
GET /wreck  it goes wrong: damages the repository, plants a file, and dies
"""

import http.server
import json
import os
import shutil
import subprocess
import threading
import time

REPO = os.environ["AGENTBOX_WORKDIR"]
memory = {"turns": 0, "sandbox": os.environ["AGENTBOX_SANDBOX_NAME"], "secret": os.urandom(16).hex(), "pid": os.getpid()}
lock = threading.Lock()
working = threading.Event()
working.set()


def git(*args):
    identity = ["-c", "user.name=agent", "-c", "user.email=agent@sandbox"]
    return subprocess.run(["git", "-C", REPO, *identity, *args], check=True, capture_output=True, text=True).stdout


def turn():
    with lock:
        if not working.is_set():
            return
        memory["turns"] += 1
        with open(f"{REPO}/module{memory['turns'] % 7}.py", "a") as f:
            f.write(f"def step_{memory['turns']}():\n    return {memory['turns']}\n")
        git("add", "-A")
        git("commit", "-qm", f"turn {memory['turns']}")
        memory["head"] = git("rev-parse", "HEAD").strip()


def wreck():
    with lock:
        shutil.rmtree(f"{REPO}/.git/objects")
        os.remove(f"{REPO}/module1.py")
        os.chmod(f"{REPO}/module2.py", 0o777)
        with open(f"{REPO}/module3.py", "w") as f:
            f.write("garbage")
        with open(f"{REPO}/malicious.py", "w") as f:
            f.write("import os\n")
        os._exit(1)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/wreck":
            wreck()
        with lock:
            if self.path == "/rest":
                working.clear()
            if self.path == "/work":
                working.set()
            body = json.dumps(memory).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


git("init", "-q")
server = http.server.ThreadingHTTPServer(("", 8000), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("agent ready", flush=True)
while True:
    working.wait()
    turn()
    time.sleep(0.1)
