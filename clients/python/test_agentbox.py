"""Tests of agentbox.py, over the service at AGENTBOX_HOST, which nobody else uses meanwhile."""

import hashlib
import io
import os
import socket
import tarfile
import tempfile
import threading
import time
import unittest
import unittest.mock

import agentbox

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /count.new; mv /count.new /count; sleep 0.05; done"


class TestService(unittest.TestCase):
    def setUp(self):
        self.client = agentbox.Client()
        self.addCleanup(self.nothing)

    def nothing(self):
        self.assertEqual(self.client.sandboxes(), [])
        self.assertEqual(self.client.checkpoints(ready_only=False), [])

    def run_box(self, session, *args, **options):
        return session.run("busybox", args or ["sleep", "1000"], network="none", **options)

    def count(self, box):
        return int(box.read("/count"))

    def reaches(self, box, n):
        until = time.monotonic() + 60
        while True:
            try:
                now = self.count(box)
            except agentbox.NotFound:
                now = 0
            if now >= n:
                return now
            self.assertLess(time.monotonic(), until, "the counter stands at %d" % now)
            time.sleep(0.02)

    def test_stats(self):
        with self.client.session() as session:
            box = self.run_box(session)
            idle = self.run_box(session)
            idle.stop(0)
            self.assertEqual([s["sandbox"] for s in self.client.stats()], [box.inspect()["id"]])
            both = {s["name"]: s for s in self.client.stats(box.inspect()["name"], idle.inspect()["name"], disk=True)}
            self.assertEqual(len(both), 2)
            self.assertGreater(both[box.inspect()["name"]]["pids"], 0)
            with self.assertRaises(agentbox.NotFound):
                self.client.stats("nobody")

    def test_workspaces(self):
        with tempfile.TemporaryDirectory() as project, self.client.session() as session:
            with open(project + "/file", "w") as f:
                f.write("the owner's")
            box = self.run_box(session, workspaces=[project + ":/work"])
            self.assertEqual(box.read("/work/file"), b"the owner's")
            box.write("/work/file", b"the agent's")
            box.write("/work/new", b"new")
            self.assertEqual(box.read("/work/file"), b"the agent's")
            self.assertEqual(os.listdir(project), ["file"])
            with open(project + "/file") as f:
                self.assertEqual(f.read(), "the owner's")

    def test_three_phases(self):
        self.assertTrue(self.client.ready(), self.client.ready())
        with self.client.session() as session:
            box = self.run_box(session, "sh", "-c", COUNTER)
            self.reaches(box, 10)
            first = box.checkpoint("at-10")
            self.reaches(box, 20)
            second = box.checkpoint("at-20")
            self.assertEqual([c["id"] for c in box.checkpoints()], [second, first])
            self.assertEqual([c["trigger"] for c in session.checkpoints(trigger="at-10")], ["at-10"])
            at = self.reaches(box, 30)
            self.assertEqual(box.restore(second)["checkpoint"]["id"], second)
            box.pause()  # where it stands does not depend on how fast we look
            self.assertTrue(20 <= self.count(box) < at + 10, self.count(box))
            box.unpause()
            self.reaches(box, self.count(box) + 1)  # and it goes on
            at = self.reaches(box, 60)
            box.restore(first)
            box.pause()
            self.assertTrue(10 <= self.count(box) < at, self.count(box))
            box.unpause()
            self.reaches(box, 21)

    def test_refs(self):
        with self.client.session() as session:
            box = self.run_box(session)
            with self.assertRaises(agentbox.NotFound):
                box.restore()
            ids = []
            for name in "a", "b":
                box.write("/state", name.encode())
                ids.append(box.checkpoint(name="name-" + name, files_only=True))
            name = box.inspect()["name"]
            for ref, want in {"HEAD": 1, "HEAD~1": 0, "{0s}": 1, "@{0s}~": 0, "name-b~1": 0}.items():
                self.assertEqual(self.client.checkpoint(name + "@" + ref)["id"], ids[want], ref)
            self.assertEqual(box.restore("HEAD~1")["checkpoint"]["id"], ids[0])
            box.write("/state", b"work")
            self.assertEqual(box.restore()["checkpoint"]["id"], ids[0])
            self.assertEqual(box.read("/state"), b"a")
            with self.assertRaises(agentbox.NotFound) as caught:
                box.restore("HEAD~1")
            self.assertIn("%s@HEAD~1: the history of %s has 1 checkpoint" % (name, name), str(caught.exception))
            with self.assertRaises(agentbox.Invalid):
                self.client.checkpoint(name + "@HEAD^")

    def test_exec(self):
        with self.client.session() as session:
            box = self.run_box(session)
            done = box.exec("echo out; echo err >&2; echo $X; pwd; exit 3", env={"X": "y z"}, workdir="/tmp")
            self.assertEqual((done.exit, done.stdout, done.stderr), (3, b"out\ny z\n/tmp\n", b"err\n"))
            data = os.urandom(3 << 20)  # far more than the window
            self.assertEqual(box.exec(["sha256sum"], input=data).text.split()[0], hashlib.sha256(data).hexdigest())
            into = io.BytesIO()
            self.assertEqual(box.exec(["cat"], input=io.BytesIO(data), stdout=into).exit, 0)
            self.assertEqual(into.getvalue(), data)
            self.assertEqual(box.exec(["true"], input=data).exit, 0)  # it reads nothing of that
            with self.assertRaises(agentbox.Error) as caught:
                box.exec(["/nope"])
            self.assertEqual(caught.exception.command, {"command": "/nope", "exit": 127})
            with self.assertRaises(agentbox.NotFound):
                session.sandbox("nope").exec(["true"])
            box.spawn(["sh", "-c", "echo ran > /ran; sleep 1000"])
            self.assertEqual(box.exec("while ! [ -s /ran ]; do sleep 0.02; done; cat /ran").text, "ran\n")
            noisy = self.run_box(session, "sh", "-c", "echo one; echo two >&2; printf '\\377'")
            self.assertEqual(noisy.wait(), 0)
            self.assertEqual(noisy.logs(), (b"one\n\xff", b"two\n"))

    def test_files(self):
        with self.client.session() as session:
            box = self.run_box(session)
            data = os.urandom(100000)
            box.write("/a b", data, mode=0o600, uid=7)
            self.assertEqual(box.read("/a b"), data)
            self.assertEqual(box.exec(["stat", "-c", "%a %u", "/a b"]).text, "600 7\n")
            tar = box.get("/etc")
            self.assertIn("etc/passwd", tarfile.open(fileobj=io.BytesIO(tar)).getnames())
            box.exec(["mkdir", "/to"])
            box.put("/to", io.BytesIO(tar))
            self.assertEqual(box.read("/to/etc/passwd"), box.read("/etc/passwd"))
            with self.assertRaises(agentbox.NotFound):
                box.get("/nope")
            with self.assertRaises(agentbox.Error):
                box.put("/to", b"this is no tar archive" * 1000)
            with self.assertRaises(agentbox.Invalid):
                box.read("/etc")

            before = box.checkpoint("before", files_only=True)
            box.write("/a b", b"other")
            box.write("/c", b"new")
            self.assertEqual(box.read("/a b", checkpoint=before), data)
            self.assertEqual(box.read("/a b"), b"other")
            found = {f["path"]: f for f in box.files("/", checkpoint=before)}
            self.assertEqual((found["/a b"]["size"], found["/a b"]["mode"], found["/a b"]["uid"]), (100000, "0600", 7))
            self.assertNotIn("/c", found)
            self.assertIn("/c", [f["path"] for f in box.files()])
            self.assertIn("/to/etc/passwd", [f["path"] for f in box.files("/to", recursive=True, checkpoint=before)])
            self.assertNotIn("/a b", [f["path"] for f in box.files(checkpoint="image")])
            with self.assertRaises(agentbox.NotFound):
                box.read("/c", checkpoint=before)
            with self.assertRaises(agentbox.NotFound):
                list(box.files("/nope", checkpoint=before))

    def test_apply(self):
        with tempfile.TemporaryDirectory() as directory, self.client.session() as session:
            made = os.path.join(directory, "made")
            box = session.run("busybox", ["sleep", "1000"], name="worker", network="none",
                              mounts=[{"type": "workspace", "source": directory, "target": "/work"}])
            box.checkpoint("before")
            box.write("/work/made", b"inside")
            report = box.apply(dry_run=True)
            self.assertEqual([c["path"] for c in report["changes"]], ["/work/made"])
            self.assertFalse(os.path.exists(made))
            box.write("/work/made", b"later")
            box.apply(checkpoint=report["checkpoint"], paths=["/work/made"])
            with open(made, "rb") as f:
                self.assertEqual(f.read(), b"inside")
            self.assertTrue(box.apply(undo=True)["undone"])
            self.assertFalse(os.path.exists(made))
            with open(made, "wb") as f:
                f.write(b"the owner's")
            with self.assertRaises(agentbox.State):
                box.apply()
            box.apply(theirs=True)
            with open(os.path.join(directory, ".agentbox.yaml"), "w") as f:
                f.write("apply: {approve: {paths: [made]}, validators: ['grep -q once made']}\n")
            box.write("/work/made", b"once more")
            with self.assertRaises(agentbox.Approval):
                box.apply()
            (asked,) = self.client.approvals()
            self.assertEqual((asked["sandbox_name"], asked["some"]), ("worker", ["M /work/made"]))
            self.client.approve(asked["id"])
            report = box.apply()
            self.assertEqual((report["approval"]["id"], report["validators"][0]["exit"]), (asked["id"], 0))
            self.assertEqual(self.client.approvals(), [])

    def test_list_and_delete(self):
        with self.client.session() as session:
            state = "while ! grep -qE ':270F [0-9A-F:]+ %s' /proc/net/tcp /proc/net/tcp6; do sleep 0.02; done"
            connected = "sleep 1000 | nc -l -p 9999 & " + state % "0A" + "; sleep 1000 | nc 127.0.0.1 9999"
            one = self.run_box(session, name="one")
            two = self.run_box(session, "sh", "-c", connected, policy="strict", user="1000")
            for box in one, two:
                for turn in "1", "2":
                    box.checkpoint("tool", labels={"turn": turn}, files_only=True)
            with self.assertRaises(agentbox.Exists):
                one.checkpoint(name="named") and one.checkpoint(name="named")
            self.assertEqual(two.exec(["timeout", "60", "sh", "-c", state % "01"]).exit, 0)
            with self.assertRaises(agentbox.Error):
                two.checkpoint("broken", tcp="refuse")
            self.assertEqual([c["policy"] for c in session.checkpoints(trigger="tool")], ["strict", "strict", "default", "default"])
            self.assertEqual([c["labels"]["turn"] for c in session.checkpoints(policy="strict", trigger="tool")], ["2", "1"])
            self.assertEqual(len(session.checkpoints(labels={"turn": "1"})), 2)
            self.assertEqual([c["status"] for c in session.checkpoints(trigger="broken", ready_only=False)], ["failed"])
            self.assertEqual(session.checkpoints(trigger="broken"), [])
            for wrong in {"labels": {"turn": "1"}}, {"trigger": "tool"}, {}:
                with self.assertRaises(agentbox.Invalid):
                    session.delete(**wrong)
            self.assertEqual(session.delete(policy="strict", labels={"turn": "1"}), 1)
            pinned = session.checkpoints(policy="strict", labels={"turn": "2"})[0]["id"]
            session.post("checkpoints/%s/pin" % pinned, {"pinned": True})
            self.assertEqual(session.delete(policy="strict"), 1)  # the failed one
            self.assertEqual([c["id"] for c in session.checkpoints(policy="strict", ready_only=False)], [pinned])
            ids = [c["id"] for c in one.checkpoints()]
            self.assertEqual(len(ids), 3)
            with self.assertRaises(agentbox.NotFound) as caught:
                session.delete("one@nope", *ids)
            self.assertEqual(caught.exception.partial, {"removed": 3})
            self.assertEqual(session.delete(pinned), 1)

    def test_open(self):
        with self.client.session() as session:
            box = session.open("kept", "busybox", ["sleep", "1000"], trigger="save", network="none")  # fresh
            box.exec("echo 1 > /state")
            box.checkpoint("save", labels={"n": "1"}, keep=True)
            box.exec("echo 2 > /state")
            box.checkpoint("save", labels={"n": "2"}, keep=True)
            box.exec("echo 3 > /state")
            box.checkpoint("other")
            with self.assertRaises(agentbox.Exists):
                session.open("kept", "busybox", trigger="never")
            box.restore(trigger="save")
            self.assertEqual(box.read("/state"), b"2\n")
            box.restore(labels={"n": "1"})
            self.assertEqual(box.read("/state"), b"1\n")
        self.assertEqual(self.client.sandboxes(), [])
        self.assertEqual([c["labels"]["n"] for c in self.client.checkpoints(ready_only=False)], ["2", "1"])
        with self.client.session() as session:
            box = session.open("kept", "busybox", trigger="save")
            self.assertEqual(box.read("/state"), b"2\n")
            box.checkpoint("mine")
        self.assertEqual(self.client.sandboxes(), [])
        self.assertEqual(len(self.client.checkpoints(ready_only=False)), 2)
        self.assertEqual(self.client.delete(sandbox="kept"), 2)

    def test_session(self):
        """What is not the session's stays; what is goes, though the work in it fails."""
        other = self.client.run("busybox", ["sleep", "1000"], name="other", network="none")
        try:
            mine = other.checkpoint("before")
            with self.assertRaisesRegex(RuntimeError, "the work"):
                with self.client.session() as session:
                    session.sandbox("other").checkpoint("in-session")
                    self.run_box(session).fork(2)
                    session.sandbox("other").fork()
                    raise RuntimeError("the work")
            self.assertEqual([s["name"] for s in self.client.sandboxes()], ["other"])
            self.assertEqual([c["id"] for c in self.client.checkpoints(ready_only=False)], [mine])
            # A cleanup step that fails does not keep the others from being done.
            session = self.client.session()
            self.run_box(session)
            self.run_box(session).checkpoint("in-session")
            post = session.post
            first = []

            def failing(path, body=None, key=None):
                if path.startswith("sandboxes/"):
                    first.append(agentbox.Internal("cleanup of " + path))
                    raise first[-1]
                return post(path, body, key)

            session.post = failing
            with self.assertRaises(agentbox.Internal) as caught, self.assertLogs("agentbox", "ERROR") as logged:
                session.close()
            self.assertIs(caught.exception, first[0])
            self.assertEqual((len(first), len(logged.output)), (2, 1))
            self.assertEqual(len(self.client.sandboxes()), 3)
            self.assertEqual([c["id"] for c in self.client.checkpoints(ready_only=False)], [mine])
            session.post = post
            session.close()
            self.assertEqual(len(self.client.sandboxes()), 1)
        finally:
            other.remove(checkpoints=True)

    def test_threads(self):
        with self.client.session() as session:
            box = self.run_box(session)
            outs = {}

            def work(n):
                outs[n] = box.exec(["echo", str(n)]).text

            threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            self.assertEqual(outs, {n: "%d\n" % n for n in range(8)})


class TestNobody(unittest.TestCase):
    def test_hosts(self):
        for wrong in "unix://relative", "http://x", "tcp://x", "nope":
            with self.assertRaises(agentbox.Invalid):
                agentbox.Client(wrong)
        with tempfile.TemporaryDirectory() as directory:
            began = time.monotonic()
            with self.assertRaises(agentbox.Lost):
                agentbox.Client("unix://%s/s" % directory).sandboxes()
            self.assertLess(time.monotonic() - began, 5)  # it was never there
            # The service of a root is where the command finds it, too.
            with unittest.mock.patch.dict(os.environ, {"AGENTBOX_ROOT": directory + "/a b"}):
                self.assertEqual(agentbox.Client("unix:///s").path, "/s")
                os.environ["AGENTBOX_HOST"] = "unix:///h"
                self.assertEqual(agentbox.Client().path, "/h")
                os.environ["AGENTBOX_HOST"] = ""
                self.assertEqual(agentbox.Client().path, directory + "/a b/run/agentbox.sock")

    def test_trace(self):
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        with tempfile.TemporaryDirectory() as directory:
            listener = socket.socket(socket.AF_UNIX)
            self.addCleanup(listener.close)
            listener.bind(directory + "/s")
            listener.listen()
            asked = []

            def serve():
                for _ in range(3):
                    conn = listener.accept()[0]
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += conn.recv(1 << 16)
                    lines = [line.decode().lower().partition(": ") for line in data.split(b"\r\n")]
                    asked.append({name: value for name, _, value in lines if name.startswith("trace")})
                    conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    conn.close()

            thread = threading.Thread(target=serve)
            thread.start()
            with unittest.mock.patch.dict(os.environ, {"TRACEPARENT": parent, "TRACESTATE": "a=b"}):
                agentbox.Client("unix://%s/s" % directory).info()
            with unittest.mock.patch.dict(os.environ):
                os.environ.pop("TRACEPARENT", None)
                agentbox.Client("unix://%s/s" % directory).info()
                agentbox.Client("unix://%s/s" % directory, trace=lambda: {"traceparent": parent}).info()
            thread.join()
            self.assertEqual(asked, [{"traceparent": parent, "tracestate": "a=b"}, {}, {"traceparent": parent}])

    def test_cut(self):
        """An answer that is cut short is no answer, and a verb has the same key each time."""
        with tempfile.TemporaryDirectory() as directory:
            listener = socket.socket(socket.AF_UNIX)
            self.addCleanup(listener.close)
            listener.bind(directory + "/s")
            listener.listen()
            keys = []

            def serve():
                for answer in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{\"id\":\"x\"}"):
                    conn = listener.accept()[0]
                    data = b""
                    while b"{}" not in data:
                        data += conn.recv(1 << 16)
                    keys.extend(line for line in data.split(b"\r\n") if line.lower().startswith(b"idempotency-key"))
                    conn.sendall(answer)
                    conn.close()

            thread = threading.Thread(target=serve)
            thread.start()
            self.assertEqual(agentbox.Client("unix://%s/s" % directory).post("sandboxes"), {"id": "x"})
            thread.join()
            self.assertEqual((len(keys), len(set(keys))), (3, 1))


if __name__ == "__main__":
    unittest.main()
