"""What a Ray cluster itself believes of its nodes and actors, and since when: a driver of it that
asks its GCS again and again, in a process of its own.

A line comes out when it watches, then one for each line that comes in: all changes so far. It ends
when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import ray
from ray._private.state import actors

_LOOK_S = 0.05
_ALIVE = "ALIVE"
_Known = dict[tuple[str, str], str]


class StateWatch:
    """States by kind ("node" or "actor") and address of the node; `look` notes what has changed.
    An actor that is not on a node any more is noted as what it is where it was."""

    def __init__(self) -> None:
        self.changes: list[dict[str, object]] = []
        self._known: _Known = {}
        #: where an actor was last alive
        self._places: dict[str, str] = {}

    def look(self) -> None:
        """Times are CLOCK_MONOTONIC, when the answers had come."""
        nodes, table = ray.nodes(), actors()
        now_ns = time.monotonic_ns()
        found: _Known = {}
        addresses = {}
        for node in nodes:
            address = addresses[node["NodeID"]] = node["NodeManagerAddress"]
            # A node that was started again has a new entry beside the dead one's.
            if node["Alive"] or found.get(("node", address)) != _ALIVE:
                found["node", address] = _ALIVE if node["Alive"] else "DEAD"
        for key, actor in table.items():
            if actor["State"] == _ALIVE:
                self._places[key] = addresses.get(actor["Address"]["NodeID"], "")
        for key, place in self._places.items():
            state = table[key]["State"] if key in table else "DEAD"
            if state == _ALIVE or found.get(("actor", place)) != _ALIVE:
                found["actor", place] = state
        for (kind, address), state in found.items():
            if self._known.get((kind, address)) != state:
                note = {"at_ns": now_ns, "kind": kind, "address": address, "state": state}
                self.changes.append(note)
        self._known = found


def main(address: str) -> int:
    """Watch the cluster with this address."""
    # Ray prints its own words for drivers to the standard output: they go to the log.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    watch = StateWatch()
    watch.look()
    print(json.dumps({"watching": address}), file=lines)
    threading.Thread(target=_keep_looking, args=(watch,), daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps({"changes": watch.changes}), file=lines)
    return 0


def _keep_looking(watch: StateWatch) -> None:
    while True:
        time.sleep(_LOOK_S)
        watch.look()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
