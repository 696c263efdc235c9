#!/usr/bin/env python3
"""A counter that is put back twice: to the later of two checkpoints, then to the earlier one.

    agentbox serve &
    clients/python/example.py
"""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import agentbox

COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /count.new; mv /count.new /count; sleep 0.05; done"


def count(box):
    return int(box.exec(["cat", "/count"]).text)


def reaches(box, n):
    while count(box) < n:
        time.sleep(0.05)


def main():
    client = agentbox.Client()
    ready = client.ready()
    if not ready:
        sys.exit("this host cannot checkpoint: " + "; ".join(ready.reasons))
    with client.session() as session:
        box = session.run("busybox", ["sh", "-c", COUNTER], network="none")
        reaches(box, 10)
        first = box.checkpoint("at-10")
        reaches(box, 20)
        second = box.checkpoint("at-20")
        for name, ref in (("second", second), ("first", first)):
            box.restore(ref)
            print("at the %s checkpoint the counter goes on from %d" % (name, count(box)))
    print("nothing of it is left")


if __name__ == "__main__":
    main()
