"""A client of agentbox's service, with nothing but Python's standard library.

    import agentbox

    with agentbox.Client().session() as session:
        box = session.run("busybox", ["sh", "-c", "while :; do date > /now; sleep 1; done"])
        first = box.checkpoint("before-the-risky-step")
        print(box.exec(["cat", "/now"]).text)
        box.restore(first)

What a session has made goes when it ends, whatever ends it. Copy this file to where your
program finds it, or have it in PYTHONPATH. docs/api.md tells of the service; Python 3.8 or
later.
"""

import base64
import hashlib
import http.client
import io
import json
import logging
import os
import socket
import ssl
import struct
import tarfile
import threading
import time
import urllib.parse
import uuid

__all__ = [
    "Client", "Session", "Sandbox", "Completed", "Readiness", "Error", "NotFound", "Exists", "State", "Denied",
    "Unsupported", "Approval", "Corrupt", "Busy", "Invalid", "Canceled", "Deadline", "Detached", "Internal", "Lost",
]

_log = logging.getLogger("agentbox")

DEFAULT_HOST = "unix:///run/agentbox/agentbox.sock"
SESSION_LABEL = "agentbox.session"  # on all that a session makes
UNDO = "undo"  # the trigger of the checkpoints that restores take by themselves


class Error(Exception):
    """What the service says went wrong. Each code of docs/api.md has a class of its own."""

    code = "internal"

    def __init__(self, detail, problem=None):
        super().__init__(detail)
        problem = problem or {}
        self.detail = detail
        self.codes = problem.get("codes") or []
        self.op = problem.get("op", "")
        self.object = problem.get("object", "")
        self.hints = problem.get("hints") or []
        self.log = problem.get("log", "")  # a file of the host that says more
        self.partial = problem.get("partial")  # what was done all the same
        self.command = problem.get("command")  # of a command that could not be started: {"command", "exit"}

    def __str__(self):
        return "\n".join([self.detail] + ["hint: " + h for h in self.hints] + (["log: " + self.log] if self.log else []))


class NotFound(Error):
    code = "not_found"


class Exists(Error):
    code = "exists"


class State(Error):
    code = "state"


class Denied(Error):
    code = "denied"


class Unsupported(Error):
    code = "unsupported"


class Approval(Error):
    code = "approval"


class Corrupt(Error):
    code = "corrupt"


class Busy(Error):
    code = "busy"


class Invalid(Error):
    code = "invalid"


class Canceled(Error):
    code = "canceled"


class Deadline(Error):
    code = "deadline"


class Detached(Error):
    code = "detached"


class Internal(Error):
    code = "internal"


class Lost(Error):
    """There is no answer: the connection was lost, or there is no service.

    Verbs are tried again by themselves, with their idempotency key. What cannot be (exec,
    put) may have been done or not.
    """

    code = "lost"


_classes = {c.code: c for c in (NotFound, Exists, State, Denied, Unsupported, Approval, Corrupt, Busy, Invalid, Canceled, Deadline, Detached, Internal)}


def _error(problem):
    return _classes.get(problem.get("code"), Internal)(problem.get("detail") or problem.get("title") or "no reason given", problem)


class Readiness:
    """Whether the host can run, checkpoint and restore sandboxes: true or false, and why."""

    def __init__(self, report):
        self.ok = report["ok"]
        self.checks = report["checks"]  # each {"name", "status", "detail", "remedy"}
        self.reasons = ["{name}: {detail}".format(**c) for c in self.checks if c["status"] == "fail"]

    def __bool__(self):
        return self.ok

    def __repr__(self):
        return "Readiness(ok=%r, reasons=%r)" % (self.ok, self.reasons)


class Completed:
    """How a command ended: exit, and what it printed, as bytes."""

    def __init__(self, exit, stdout, stderr):
        self.exit, self.stdout, self.stderr = exit, stdout, stderr

    @property
    def text(self):
        return self.stdout.decode(errors="replace")

    def __repr__(self):
        return "Completed(exit=%d, stdout=%r, stderr=%r)" % (self.exit, self.stdout, self.stderr)


class _Connection(http.client.HTTPConnection):
    """A connection to unix://PATH, or to tcp://HOST:PORT by mutual TLS."""

    def __init__(self, client):
        super().__init__("agentbox", timeout=client.timeout)
        self.client = client

    def connect(self):
        c = self.client
        if c.path:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(c.path)
            return
        self.sock = socket.create_connection(c.address, self.timeout)
        self.sock = c.tls.wrap_socket(self.sock, server_hostname=c.address[0])


def _tls():
    files = [os.environ.get("AGENTBOX_TLS_" + name, "") for name in ("CERT", "KEY", "CA")]
    if not all(files):
        raise Invalid("over TCP AGENTBOX_TLS_CERT, AGENTBOX_TLS_KEY and AGENTBOX_TLS_CA name files with certificate, key and authority")
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=files[2])
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files[0], files[1])
    return context


def _usual_host():
    # Where the command looks for it, too.
    root = os.environ.get("AGENTBOX_ROOT")
    return "unix://" + urllib.parse.quote(os.path.join(os.path.abspath(root), "run", "agentbox.sock")) if root else DEFAULT_HOST


def _environment_trace():
    parent = os.environ.get("TRACEPARENT")
    return {"traceparent": parent, "tracestate": os.environ.get("TRACESTATE", "")} if parent else {}


class Client:
    """The service at a host: unix:///PATH, or tcp://HOST:PORT; else AGENTBOX_HOST, else the socket of AGENTBOX_ROOT, else the usual one.

    timeout is how long it may say nothing, in seconds; None: as long as it likes. retry is
    for how long a verb is tried again whose connection was lost. trace returns the headers
    that make a request part of a trace; else TRACEPARENT and TRACESTATE do. A client may
    be used by several threads.
    """

    def __init__(self, host=None, timeout=None, retry=30.0, trace=None):
        self.host = host or os.environ.get("AGENTBOX_HOST") or _usual_host()
        self.timeout, self.retry, self.trace = timeout, retry, trace or _environment_trace
        self.path, self.address, self.tls = "", None, None
        self._met = False  # it has answered before
        at = urllib.parse.urlsplit(self.host)
        if at.scheme == "unix" and at.path.startswith("/") and not at.netloc:
            self.path = urllib.parse.unquote(at.path)
        elif at.scheme == "tcp" and at.hostname and at.port and not at.path:
            self.address, self.tls = (at.hostname, at.port), _tls()
        else:
            raise Invalid("host %r: write unix:///PATH or tcp://HOST:PORT" % self.host)

    # Requests.

    def _lost(self, err):
        return Lost("the service at %s does not answer: %s" % (self.host, str(err) or type(err).__name__))

    def _send(self, method, path, query=None, body=None, headers=None):
        """One request on a connection of its own; the caller closes that. Errors of the service are raised."""
        target = path
        if query:
            pairs = [(k, v) for k, v in query if v not in (None, "", False)]
            if pairs:
                target += "?" + urllib.parse.urlencode([(k, "true" if v is True else v) for k, v in pairs])
        conn = _Connection(self)
        try:
            try:
                conn.connect()
            except OSError as err:
                lost = self._lost(err)
                lost.unsent = True
                raise lost from err
            try:
                conn.request(method, target, body=body, headers=dict(self.trace(), **(headers or {})))
            except (BrokenPipeError, ConnectionResetError):
                pass  # it may have answered before it had read all
            response = conn.getresponse()
            if response.status // 100 != 2 and response.status != 101:
                raise self._problem(response.read())
            self._met = True
            return conn, response
        except (OSError, http.client.HTTPException) as err:
            conn.close()
            raise self._lost(err) from err
        except BaseException:
            conn.close()
            raise

    def _problem(self, data):
        try:
            return _error(json.loads(data.decode()))
        except ValueError:
            return Internal("the service answers %r" % data[:200])

    def _json(self, method, path, query=None, body=None, headers=None):
        conn, response = self._send(method, path, query, body, headers)
        try:
            return json.loads(response.read().decode())
        except (OSError, http.client.HTTPException) as err:
            raise self._lost(err) from err
        finally:
            conn.close()

    def _patiently(self, call):
        """Tries again what can be, while the service is away or is still at the first try."""
        until, wait, lost = time.monotonic() + self.retry, 0.05, False
        while True:
            try:
                return call()
            except Lost as err:
                if time.monotonic() > until or (getattr(err, "unsent", False) and not self._met and not lost):
                    raise
                lost = True
            except Busy as err:
                # Our own first try, or a service that is about to end.
                if time.monotonic() > until or not (lost or err.op == "serve"):
                    raise
            time.sleep(wait)
            wait = min(wait * 2, 1.0)

    def get(self, path, *query):
        """The answer to a GET: get("sandboxes/c")."""
        return self._patiently(lambda: self._json("GET", "/v1/" + path, query))

    def post(self, path, body=None, key=None):
        """The answer to a verb. It is done once, though it may be asked for more than once."""
        data = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": key or uuid.uuid4().hex}
        return self._patiently(lambda: self._json("POST", "/v1/" + path, None, data, headers))

    def _list(self, path, *query):
        begun = 0
        while True:
            items, cursor = [], ""
            try:
                while True:
                    page = self.get(path, ("cursor", cursor), *query)
                    items += page["items"]
                    cursor = page.get("next", "")
                    if not cursor:
                        return items
            except NotFound:
                begun += 1
                if not cursor or begun > 3:  # else what the cursor stood at has gone: once more
                    raise

    # The host.

    def info(self):
        return self.get("info")

    def ready(self):
        """Is this host able to checkpoint, and if not, why?"""
        return Readiness(self.get("ready"))

    def approvals(self):
        """The applies that a person has to approve, newest first; see Approval."""
        return self._list("approvals")

    def approve(self, approval):
        """Lets an apply pass, once and until it expires, by the id of its approval: for a program that a
        person uses. An agent must not have it.
        """
        return self.post("approvals/%s/approve" % _segment(approval), {})

    # Sandboxes.

    def sandbox(self, name):
        """A sandbox by name, id, or the beginning of its id; that there is one is not asked."""
        return Sandbox(self, name)

    def sandboxes(self):
        """What is known of every sandbox, newest first."""
        return self._list("sandboxes")

    def stats(self, *names, disk=False):
        """What sandboxes use: those named, or all that run (docs/observability.md). disk counts their files, too."""
        return self.post("stats", {"sandboxes": list(names), "all": False, "disk": disk})

    def create(self, image, args=None, name="", policy="", labels=None, env=None, network=None, workspaces=(),
               **spec):
        """A new sandbox, not started. spec has further members of Spec (openapi.json), such as
        checkpoint_every: "exec", "10m", or "exec,10m" for both; or steps: "on" or "off", for a checkpoint
        after each exec that has changed a file (on by default with a workspace).

        network is "none", "host", "bridge", "filtered", or an object as in Spec; env a dict. workspaces
        are directories of the host, "DIR" or "DIR:PATH", absolute, which the sandbox changes for itself
        alone (docs/workspace.md).
        """
        if workspaces:
            spec["mounts"] = list(spec.get("mounts", ()))
            for workspace in [workspaces] if isinstance(workspaces, str) else workspaces:
                source, _, target = workspace.partition(":")
                spec["mounts"].append({"type": "workspace", "source": source, "target": target or source})
        spec.update({"image": image, "name": name, "labels": dict(labels or {})})
        if args is not None:
            spec["args"] = [args] if isinstance(args, str) else list(args)
        if env:
            spec["env"] = ["%s=%s" % kv for kv in env.items()]
        if network:
            spec["network"] = {"mode": network} if isinstance(network, str) else network
        return Sandbox(self, self.post("sandboxes", {"spec": spec, "policy_name": policy})["id"])

    def run(self, image, args=None, **options):
        """A new sandbox that runs. One that cannot be started is removed."""
        box = self.create(image, args, **options)
        try:
            box.start()
        except BaseException:
            box.remove()
            raise
        return box

    def open(self, name, image, args=None, trigger="", match=None, **options):
        """The sandbox at its newest ready checkpoint that matches, or a fresh one of this image.

        It matches by trigger and labels (match). One that was removed is made again. A sandbox
        that is there and has no such checkpoint is left alone: that is Exists.
        """
        return self._open(name, image, args, trigger, match, options)[0]

    def _open(self, name, image, args, trigger, match, options):
        box = Sandbox(self, name)
        try:
            return box, box.restore(trigger=trigger, labels=match)
        except NotFound:
            return self.run(image, args, name=name, **options), None

    # Checkpoints.

    def checkpoints(self, policy="", labels=None, trigger="", sandbox="", ready_only=True):
        """Checkpoints that match, newest first; with ready_only=False pending, failed and undo ones, too."""
        return self._list("checkpoints", ("policy", policy), ("trigger", trigger), ("sandbox", sandbox), ("all", not ready_only),
                          *[("label", "%s=%s" % kv) for kv in (labels or {}).items()])

    def checkpoint(self, ref):
        """One by id, the beginning of its id, SANDBOX@NAME, SANDBOX@HEAD~1 or SANDBOX@{5m}."""
        return self.get("checkpoints/" + _segment(ref))

    def delete(self, *ids, policy="", labels=None, trigger="", sandbox=""):
        """Deletes checkpoints and says how many: by ids, or all that match, in every state.

        Labels and triggers need a policy, or a sandbox, that they are looked for in. Pinned ones
        stay unless they are named. Error.partial of what goes wrong tells what went all the same.
        """
        where = {"policy": policy, "labels": labels or {}, "trigger": trigger, "sandbox": sandbox}
        if not ids:
            return len(self.post("checkpoints/remove", where)["removed"])
        if any(where.values()):
            raise Invalid("ids and filters exclude each other")
        first, gone = None, 0
        for ref in ids:
            try:
                self.post("checkpoints/%s/remove" % _segment(ref))
                gone += 1
            except Error as err:
                first = first or err
        if first:
            first.partial = {"removed": gone}
            raise first
        return gone

    def session(self):
        return Session(self)


class Session(Client):
    """A client whose sandboxes and checkpoints go with it: `with client.session() as session`.

    A cleanup that fails does not keep the others from being tried; the first error is raised,
    unless what was done in the session has failed, too: then that.
    """

    def __init__(self, client):
        self.__dict__.update(client.__dict__)
        self.id = uuid.uuid4().hex
        self._kept = set()
        self._lock = threading.Lock()
        self._remade = set()  # sandboxes that a restore has made again, without our label

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        try:
            self.close()
        except Error as err:
            if kind is None:
                raise
            _log.error("the session's cleanup: %s", err)
        return False

    def _own(self, labels):
        return dict(labels or {}, **{SESSION_LABEL: self.id})

    def create(self, image, args=None, labels=None, **options):
        return super().create(image, args, labels=self._own(labels), **options)

    def _open(self, name, image, args, trigger, match, options):
        box, restored = super()._open(name, image, args, trigger, match, options)
        if restored and restored["recreated"]:
            with self._lock:
                self._remade.add(restored["sandbox"]["id"])
        return box, restored

    def close(self):
        """Removes what the session has made, but for the checkpoints it was to keep. It may be called again."""
        errors = []

        def attempt(call):
            try:
                return call()
            except NotFound:
                return None
            except Error as err:
                if errors:
                    _log.error("the session's cleanup: %s", err)
                errors.append(err)
                return None

        # What the service knows: the answer that told us of something may have been lost.
        made = {s["id"] for s in attempt(self.sandboxes) or [] if s["labels"].get(SESSION_LABEL) == self.id}
        gone = {c["id"] for c in attempt(lambda: self.checkpoints(labels={SESSION_LABEL: self.id}, ready_only=False)) or []}
        for box in made | self._remade:
            # One that was made again has checkpoints from before; undo checkpoints are nobody's any more.
            for c in attempt(lambda: self.checkpoints(sandbox=box, ready_only=False)) or []:
                if box in made or c["trigger"] == UNDO:
                    gone.add(c["id"])
        for box in made | self._remade:
            attempt(lambda: self.post("sandboxes/%s/remove" % box, {"force": True}))
        for ref in gone - self._kept:
            attempt(lambda: self.delete(ref))
        if errors:
            raise errors[0]
        self._remade.clear()


class Sandbox:
    """One sandbox, by its name or id."""

    def __init__(self, client, name):
        self.client, self.name = client, name

    def __repr__(self):
        return "Sandbox(%r)" % self.name

    def _at(self, verb="", checkpoint=""):
        name = self.name + "@" + checkpoint if checkpoint else self.name
        return "sandboxes/" + _segment(name) + ("/" + verb if verb else "")

    def _verb(self, verb, body=None):
        return self.client.post(self._at(verb), body)

    def inspect(self):
        return self.client.get(self._at())

    def start(self):
        self._verb("start")

    def stop(self, timeout=None):
        """Asks with the stop signal, and kills after timeout seconds, 10 unless told."""
        self._verb("stop", {} if timeout is None else {"timeout_ns": int(timeout * 1e9)})

    def restart(self, timeout=None):
        """Stops it as stop does, and starts it; one that could not start is not stopped."""
        self._verb("restart", {} if timeout is None else {"timeout_ns": int(timeout * 1e9)})

    def pause(self):
        self._verb("pause")

    def unpause(self):
        self._verb("unpause")

    def kill(self, signal="KILL"):
        self._verb("kill", {"signal": signal})

    def wait(self):
        """Waits for the exit of the first process, and returns its code."""
        return self.client.get(self._at("wait"))["exit"]

    def remove(self, checkpoints=False):
        """Kills and removes it; its checkpoints stay unless told otherwise."""
        try:
            self._verb("remove", {"force": True, "checkpoints": checkpoints})
        except NotFound:
            pass

    # Checkpoints.

    def checkpoint(self, trigger="", name="", labels=None, keep=False, **options):
        """Takes a checkpoint, waits until it is ready, and returns its id.

        One that fails is on record as failed, and raised. keep: it outlives the session.
        options are further members of CheckpointOptions (openapi.json), like files_only.
        """
        own = self.client._own(labels) if isinstance(self.client, Session) else dict(labels or {})
        options.update({"trigger": trigger, "name": name, "labels": own})
        made = self._verb("checkpoints", options)
        if keep and isinstance(self.client, Session):
            with self.client._lock:
                self.client._kept.add(made["id"])
        return made["id"]

    def checkpoints(self, labels=None, trigger="", ready_only=True):
        return self.client.checkpoints(sandbox=self.name, labels=labels, trigger=trigger, ready_only=ready_only)

    def restore(self, checkpoint="", trigger="", labels=None, **options):
        """Puts it back to a checkpoint: a name, a tag, an id, "HEAD~1" or "{5m}".

        Without one that is HEAD, the one that it was last at, or, with a trigger or labels,
        the newest ready one that matches; NotFound: there is none.

        Returns the service's report: "checkpoint", "undo" (the id of the state that was
        replaced), "changed", "warnings" and so on. options are further members of RestoreOptions, like
        undo=True, which takes the last restore back.
        """
        options.update({"checkpoint": checkpoint, "trigger": trigger, "labels": labels or {}})
        return self._verb("restore", options)

    def undo(self, steps=1, **options):
        """Puts it back by so many steps: to its last checkpoint if files have changed since, else to
        the one before it, and so on. options are further members of UndoOptions (openapi.json), like
        files_only. Returns the service's report, as restore does; "redo": how many steps redo can go."""
        options["steps"] = steps
        return self._verb("undo", options)

    def redo(self, steps=1, **options):
        """Goes forward again to what undo has left, until there is a new checkpoint or another restore."""
        options["steps"] = steps
        return self._verb("redo", options)

    def apply(self, checkpoint="", paths=(), **options):
        """Brings its changes into the directories that its workspaces, or the volume, lie over.

        Of workspaces, what comes is what a checkpoint has, and one is taken unless it is named;
        paths limits it. State is raised if both sides have changed something, Denied for what
        must be allowed by name or what a validator refuses, Approval for what a person has to
        approve first. Returns the service's report: "changes", "conflicts", "merged",
        "checkpoint" and so on. options are further members of ApplyOptions, like dry_run, undo,
        workspace, markers, ours, theirs and allow; a dry_run with patch shows what picks can name.
        """
        options["paths"] = list(paths)
        return self.client.post(self._at("apply", checkpoint), options)

    def fork(self, count=1, checkpoint="", labels=None, **options):
        """New sandboxes that start at a checkpoint, or where this one is now."""
        own = dict(labels or {})
        if isinstance(self.client, Session):
            own = self.client._own(labels)
            checkpoint = checkpoint or self.checkpoint("fork")
        options.update({"count": count, "checkpoint": checkpoint, "labels": own})
        return [Sandbox(self.client, f["sandbox"]["id"]) for f in self._verb("fork", options)]

    # Commands.

    def exec(self, args, input=None, env=None, workdir="", user="", stdout=None, stderr=None):
        """Runs one more command with its output, and returns how it ended.

        stdout and stderr may be binary files that take the output as it comes; it is collected
        otherwise. A command that cannot be started is an Error with .command.
        """
        process = {"args": ["sh", "-c", args] if isinstance(args, str) else list(args), "workdir": workdir, "user": user,
                   "env": ["%s=%s" % kv for kv in (env or {}).items()]}
        outs = [stdout or io.BytesIO(), stderr or io.BytesIO()]
        message = {"kind": "open", "open": {"process": process, "stdin": input is not None, "stdout": True, "stderr": True}}
        exit = _exec(self.client, "/v1/" + self._at("exec"), message, input, outs)
        return Completed(exit, *(b"" if given else out.getvalue() for given, out in zip((stdout, stderr), outs)))

    def spawn(self, args, env=None, workdir="", user=""):
        """Starts one more command, and does not wait for it; its output is dropped."""
        self._verb("exec", {"args": list(args), "workdir": workdir, "user": user, "detach": True,
                            "env": ["%s=%s" % kv for kv in (env or {}).items()]})

    def logs(self, tail=None):
        """What the first process has printed: (stdout, stderr), as bytes."""
        conn, response = self.client._send("GET", "/v1/" + self._at("logs"), [("tail", tail)], None, {"Accept": "text/event-stream"})
        outs = {"stdout": io.BytesIO(), "stderr": io.BytesIO()}
        try:
            for name, event in _events(response):
                if name in outs:
                    outs[name].write(base64.b64decode(event["b64"]) if event.get("b64") else event.get("text", "").encode())
                elif name == "problem":
                    raise _error(event)
                elif name == "end":
                    return outs["stdout"].getvalue(), outs["stderr"].getvalue()
            raise self.client._lost("the logs were cut short")
        except (OSError, http.client.HTTPException) as err:
            raise self.client._lost(err) from err
        finally:
            conn.close()

    # Files.

    # With a checkpoint, which may be "image", they are read as it has them; nothing is restored.

    def files(self, path="/", recursive=False, checkpoint=""):
        """What is at a path, and what is in that if it is a directory: an iterator of dicts."""
        query = [("path", path), ("recursive", str(recursive).lower())]
        conn, response = self.client._send("GET", "/v1/" + self._at("files", checkpoint), query, None,
                                           {"Accept": "text/event-stream"})
        try:
            for name, event in _events(response):
                if name == "files":
                    yield from event["files"]
                elif name == "problem":
                    raise _error(event)
                elif name == "end":
                    return
            raise self.client._lost("the list was cut short")
        except (OSError, http.client.HTTPException) as err:
            raise self.client._lost(err) from err
        finally:
            conn.close()

    def get(self, path, out=None, checkpoint=""):
        """A file or directory as a tar archive: bytes, or written to a binary file."""
        # Without trailers a stream that is cut short is no whole chunked message.
        conn, response = self.client._send("GET", "/v1/" + self._at("archive", checkpoint), [("path", path)])
        into = out or io.BytesIO()
        try:
            while True:
                data = response.read(1 << 16)
                if not data:
                    return None if out else into.getvalue()
                into.write(data)
        except (OSError, http.client.HTTPException) as err:
            raise self.client._lost(err) from err
        finally:
            conn.close()

    def put(self, path, tar):
        """Extracts a tar archive, bytes or a binary file, into the directory path."""
        body = tar if isinstance(tar, (bytes, bytearray)) else iter(lambda: tar.read(1 << 16), b"")
        conn, response = self.client._send("PUT", "/v1/" + self._at("archive"), [("path", path)], body, {"Content-Type": "application/x-tar"})
        try:
            response.read()
        except (OSError, http.client.HTTPException) as err:
            raise self.client._lost(err) from err
        finally:
            conn.close()

    def read(self, path, checkpoint=""):
        """The content of one file."""
        with tarfile.open(fileobj=io.BytesIO(self.get(path, checkpoint=checkpoint))) as archive:
            member = archive.next()
            if member and member.isreg():
                return archive.extractfile(member).read()
        raise Invalid("%s is no regular file" % path)

    def write(self, path, data, mode=0o644, uid=0, gid=0):
        """Makes, or replaces, one file; its directory has to be there."""
        directory, _, name = path.rpartition("/")
        if not name or not path.startswith("/"):
            raise Invalid("%r is no absolute path of a file" % path)
        member, out = tarfile.TarInfo(name), io.BytesIO()
        member.size, member.mode, member.uid, member.gid, member.mtime = len(data), mode, uid, gid, int(time.time())
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.addfile(member, io.BytesIO(data))
        self.put(directory or "/", out.getvalue())


def _segment(name):
    """A name as one segment of a path."""
    if not name:
        raise Invalid("the name is empty")
    return name.replace(".", "%2E") if name in (".", "..") else urllib.parse.quote(name, safe="")


def _events(response):
    """The events of a stream: pairs of name and value."""
    name, data = "", []
    for line in response:
        line = line.decode().rstrip("\r\n")
        if not line:
            if data:
                yield name, json.loads("\n".join(data))
            name, data = "", []
        elif line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].lstrip(" "))


# Sessions of commands: websockets, as far as they are needed (RFC 6455).

_WINDOW = 256 << 10  # how much input may be on its way
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10


class _Socket:
    def __init__(self, client, path):
        key = base64.b64encode(os.urandom(16)).decode()
        self.conn, response = client._send("GET", path, None, None, {
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key,
            "Sec-WebSocket-Protocol": "agentbox.v1"})
        want = base64.b64encode(hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
        if response.status != 101 or response.getheader("Sec-WebSocket-Accept") != want:
            self.conn.close()
            raise Internal("the service does not speak websocket")
        self.response = response  # it closes what is read from when it goes
        self.sock, self.reader = self.conn.sock, response.fp
        self.lock = threading.Lock()

    def close(self):
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # whoever is in the middle of sending comes back
        except OSError:
            pass
        self.response.close()
        self.conn.close()

    def send(self, kind, data):
        mask = os.urandom(4)
        n = len(data)
        head = bytes([0x80 | kind])
        if n < 126:
            head += bytes([0x80 | n])
        elif n < 1 << 16:
            head += bytes([0x80 | 126]) + struct.pack(">H", n)
        else:
            head += bytes([0x80 | 127]) + struct.pack(">Q", n)
        masked = (int.from_bytes(data, "big") ^ int.from_bytes((mask * (n // 4 + 1))[:n], "big")).to_bytes(n, "big") if n else b""
        with self.lock:
            self.sock.sendall(head + mask + masked)

    def _exactly(self, n):
        data = self.reader.read(n)
        if len(data) < n:
            raise ConnectionError("the session was cut")
        return data

    def receive(self):
        """The next message: its kind and its bytes."""
        kind, whole = 0, b""
        while True:
            first, second = self._exactly(2)
            n = second & 0x7F
            if n == 126:
                n = struct.unpack(">H", self._exactly(2))[0]
            elif n == 127:
                n = struct.unpack(">Q", self._exactly(8))[0]
            if n > 1 << 20:
                raise ConnectionError("a message of %d bytes" % n)
            data = self._exactly(n)
            if first & 0x0F == _PING:
                self.send(_PONG, data)
            elif first & 0x0F == _CLOSE:
                raise ConnectionError("the session was closed")
            elif first & 0x0F != _PONG:
                kind, whole = first & 0x0F or kind, whole + data
                if first & 0x80:
                    return kind, whole


def _exec(client, path, message, input, outs):
    """One command with its streams; returns its exit code."""
    line = _Socket(client, path)
    credit, ended = threading.Condition(), False
    free = _WINDOW

    def feed():
        nonlocal free
        source = io.BytesIO(input) if isinstance(input, (bytes, bytearray)) else input
        try:
            while True:
                data = source.read(32 << 10)
                if not data:
                    line.send(_TEXT, b'{"kind":"eof"}')
                    return
                with credit:
                    credit.wait_for(lambda: ended or free >= len(data))
                    if ended:
                        return
                    free -= len(data)
                line.send(_BINARY, data)
        except OSError:
            pass  # whoever receives knows why

    feeder = threading.Thread(target=feed, daemon=True)
    try:
        line.send(_TEXT, json.dumps(message).encode())
        if input is not None:
            feeder.start()
        while True:
            kind, data = line.receive()
            if kind == _BINARY:
                if data[:1] in (b"\1", b"\2"):
                    outs[data[0] - 1].write(data[1:])
                continue
            said = json.loads(data.decode())
            if said["kind"] == "ack":
                with credit:
                    free += said["bytes"]
                    credit.notify()
            elif said["kind"] in ("exit", "end"):
                return said.get("exit", 0)
            elif said["kind"] == "problem":
                raise _error(said["problem"])
    except (OSError, http.client.HTTPException) as err:
        raise client._lost(err) from err
    finally:
        with credit:
            ended = True
            credit.notify()
        line.close()
