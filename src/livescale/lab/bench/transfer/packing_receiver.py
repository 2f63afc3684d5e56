"""The process of `bench packing` that pulls blocks, and has the clock.

It asks for one message at a time, as a reader over RDMA does (λScale §6).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import xxhash

from livescale.lab.bench.peers.line_server import Job, serve_lines
from livescale.lab.bench.transfer.packing_wire import (
    DIGEST,
    PREPARE,
    PULL,
    STEPS,
    WORD,
    messages,
    tcp_carrier,
)
from livescale.transfer.formats.carrier import WritePermit
from livescale.transfer.memory.arena import Arena

_CONNECT_S = 30.0


class _Receiver:
    def __init__(self, tensor_bytes: Sequence[int], address: tuple[str, int]) -> None:
        self._tensor_bytes = tensor_bytes
        #: where a block comes to in one piece; registered with the carrier
        self._block = Arena(sum(tensor_bytes))
        self._places = [Arena(size) for size in tensor_bytes]
        self._permit = WritePermit()
        self._carrier = tcp_carrier(self._block)
        self._channel = self._carrier.connect(address, _CONNECT_S)

    def pull(self, job: Job) -> Job:
        """One block by one step: the time from before its memory is taken, if that is part of the
        step, until its last byte is in place; and whether its bytes are right.

        Giving the memory back is no part of the time.
        """
        number, step = job["step"], STEPS[job["step"]]
        self._channel.send(WORD.pack(PREPARE, number, job["block"]))
        (digest,) = DIGEST.unpack(self._channel.receive(DIGEST.size))
        began_ns = time.perf_counter_ns()
        if step.is_packed:
            arenas = [self._block]
        elif step.has_memory:
            arenas = self._places
        else:
            arenas = [Arena(size) for size in self._tensor_bytes]
        sizes = messages(self._tensor_bytes, step.is_packed)
        places = [arena.view(0, size) for arena, size in zip(arenas, sizes, strict=True)]
        for message, place in enumerate(places):
            self._channel.send(WORD.pack(PULL, number, message))
            if step.is_packed:
                self._channel.receive_range(0, len(place), self._permit, lambda _: None)
            else:
                self._channel.receive_paced(place)
        took_ns = time.perf_counter_ns() - began_ns
        found = xxhash.xxh3_64()
        for place in places:
            found.update(place)
        if not step.has_memory:
            for place, arena in zip(places, arenas, strict=True):
                place.release()
                arena.close()
        return {"took_ns": took_ns, "is_right": found.intdigest() == digest}


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """All memory is taken and the channel is open."""
    host, port = job["address"]
    return "", _Receiver(job["tensor_bytes"], (host, port)).pull


if __name__ == "__main__":
    serve_lines(load)
