"""The process of `bench packing` that has the block in its memory and gives it, message by message.

It is asked over the channel alone. Lines only say when to end: with its standard input.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from livescale.lab.bench.peers.line_server import Job, serve_lines
from livescale.lab.bench.transfer.packing_wire import (
    DIGEST,
    PREPARE,
    STAMP,
    STEPS,
    WORD,
    Step,
    messages,
    offsets,
    tcp_carrier,
)
from livescale.transfer.carriers.tcp import TcpCarrier, TcpChannel
from livescale.transfer.formats.carrier import ChannelClosedError
from livescale.transfer.memory.arena import Arena


class _Sender:
    def __init__(self, tensor_bytes: Sequence[int], seed: int) -> None:
        self._tensor_bytes = tensor_bytes
        size = sum(tensor_bytes)
        self._block = Arena(size)
        self._bytes = self._block.view(0, size)
        stream = np.random.Generator(np.random.PCG64(seed))
        np.frombuffer(self._bytes, np.uint8)[:] = stream.integers(0, 256, size, np.uint8)
        # What copies are sent from: in steps that take memory before, by what a message is.
        self._staging = {
            is_packed: [Arena(size) for size in messages(tensor_bytes, is_packed)]
            for is_packed in (False, True)
        }
        self._taken: list[Arena] = []
        self.carrier: TcpCarrier = tcp_carrier(self._block)

    def serve(self) -> None:
        """Answer one channel until it ends, in whatever way: the other process tells of it."""
        channel = self.carrier.accept()
        try:
            while True:
                what, step, number = WORD.unpack(channel.receive(WORD.size))
                if what == PREPARE:
                    channel.send(DIGEST.pack(self._prepare(number)))
                else:
                    self._give(channel, STEPS[step], number)
        except ChannelClosedError:
            pass
        finally:
            channel.close()

    def _prepare(self, number: int) -> int:
        """The next block, which differs from others; its digest."""
        for arena in self._taken:
            arena.close()
        self._taken.clear()
        for start in offsets(self._tensor_bytes):
            STAMP.pack_into(self._bytes, start, number)
        return xxhash.xxh3_64_intdigest(self._bytes)

    def _give(self, channel: TcpChannel, step: Step, number: int) -> None:
        sizes = messages(self._tensor_bytes, step.is_packed)
        start, size = offsets(sizes)[number], sizes[number]
        if step.is_in_place:
            channel.send_range(b"", start, size)
            return
        if step.has_memory:
            copy = self._staging[step.is_packed][number]
        else:
            copy = Arena(size)
            self._taken.append(copy)
        place = copy.view(0, size)
        place[:] = self._bytes[start : start + size]
        channel.send_paced(b"", place)


def load(job: Job) -> tuple[Job, Callable[[Job], Job]]:
    """All memory is taken, and a port listens: the settings say which."""
    sender = _Sender(job["tensor_bytes"], job["seed"])
    threading.Thread(target=sender.serve, name="giving", daemon=True).start()
    return {"address": sender.carrier.address}, lambda _: {}


if __name__ == "__main__":
    serve_lines(load)
