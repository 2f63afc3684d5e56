"""Which feed brings which chunk of an order, and which chunks are in place.

State only, guarded by the reception's lock.
"""

import array
import collections
import time
from collections.abc import Iterable

from livescale.chunks import Feed
from livescale.transfer.connection import Connection
from livescale.transfer.intake import Intake
from livescale.transfer.orders import holder_of
from livescale.types import WorkerRef

_MISSING, _ARRIVING, _PRESENT = 0, 1, 2
_NO_INTAKE = -1


class ChunkSources:
    """The chunks of one order and their intakes, by index."""

    def __init__(self, chunks: int) -> None:
        self.intakes: list[Intake] = []
        self._state = bytearray(chunks)
        # By chunk: the intake that is to bring it, and the one that brought it.
        self._owner = array.array("i", [_NO_INTAKE]) * chunks
        self._source = array.array("i", [_NO_INTAKE]) * chunks

    def assign(self, feeds: tuple[Feed, ...]) -> list[tuple[Intake, list[int]]]:
        """These feeds, and no others, bring what is missing: every chunk comes from the first feed
        that lists it. Returns, by intake, chunks that were asked for and that others are to bring
        now."""
        self._owner = array.array("i", [_NO_INTAKE]) * len(self._owner)
        listed: dict[int, collections.deque[int]] = {}
        for feed in feeds:
            index = self._index_of_open(holder_of(feed))
            intake = self.intakes[index]
            intake.window = feed.window
            to_ask = listed.setdefault(index, collections.deque())
            for chunk in (chunk for part in feed.chunks for chunk in part):
                if self._owner[chunk] == _NO_INTAKE:
                    self._owner[chunk] = index
                    if self._state[chunk] == _MISSING and chunk not in intake.asked:
                        to_ask.append(chunk)
        for index, intake in enumerate(self.intakes):
            intake.to_ask = listed.get(index, collections.deque())
            intake.is_closed = index not in listed
        return [(i, self._drop_unowned(index, i)) for index, i in enumerate(self.intakes)]

    def _index_of_open(self, upstream: WorkerRef) -> int:
        """The intake that gets chunks from this holder; a holder that failed may try again."""
        for index, intake in enumerate(self.intakes):
            if intake.upstream == upstream and not intake.is_closed:
                return index
        self.intakes.append(Intake(upstream, time.monotonic_ns()))
        return len(self.intakes) - 1

    def _drop_unowned(self, index: int, intake: Intake) -> list[int]:
        dropped = [
            chunk
            for chunk in sorted(intake.asked)
            if self._owner[chunk] != index and chunk != intake.arriving
        ]
        intake.asked.difference_update(dropped)
        return dropped

    # -- chunks -----------------------------------------------------------------------------------

    def index_asked(self, connection: Connection, chunk: int) -> int | None:
        """The intake that asked for the chunk on this connection."""
        for index, intake in enumerate(self.intakes):
            if intake.connection is connection and chunk in intake.asked:
                return index
        return None

    def begin(self, index: int, chunk: int) -> bool:
        """The chunk begins to arrive. False if it is not missing: it is thrown away."""
        if self._state[chunk] != _MISSING:
            self.intakes[index].took(chunk)
            return False
        self._state[chunk] = _ARRIVING
        self.intakes[index].arriving = chunk
        return True

    def end(self, index: int, chunk: int) -> None:
        """The intake has brought the chunk."""
        self._state[chunk] = _PRESENT
        self._source[chunk] = index
        self.intakes[index].arriving = None
        self.intakes[index].took(chunk)

    def is_there(self, chunk: int) -> bool:
        """The chunk's bytes are in place. May be asked without the lock."""
        return self._state[chunk] == _PRESENT

    def set_there(self, chunk: int) -> None:
        """The chunk's bytes are in place without any feed."""
        self._state[chunk] = _PRESENT

    def sources(self, chunks: Iterable[int]) -> list[int]:
        """Indices of the intakes that brought these chunks, in order."""
        return sorted({self._source[chunk] for chunk in chunks})

    def lose(self, chunks: Iterable[int]) -> None:
        """What was in place was wrong: it is asked for again."""
        for chunk in chunks:
            self._state[chunk] = _MISSING
        self._give_back(chunks)

    # -- intakes ----------------------------------------------------------------------------------

    def open_from(self, peer: WorkerRef) -> list[Intake]:
        return [i for i in self.intakes if i.upstream == peer and not i.is_closed]

    def asking(self) -> list[Intake]:
        """Intakes that have something to ask for."""
        return [i for i in self.intakes if i.to_ask and not i.is_closed]

    def hanging(self) -> list[Connection]:
        """On these a chunk has begun and does not go on that somebody else is to bring: nobody can
        be asked for it before it is certain that the rest does not come."""
        return [
            intake.connection
            for index, intake in enumerate(self.intakes)
            if intake.connection is not None
            and intake.arriving is not None
            and intake.is_stalled
            and self._owner[intake.arriving] != index
        ]

    def take_back(self, intake: Intake) -> None:
        """Nothing that it was asked for comes; the feeds that are to bring the chunks ask."""
        chunks = set(intake.asked)
        if intake.arriving is not None:
            chunks.add(intake.arriving)
            self._state[intake.arriving] = _MISSING
            intake.arriving = None
        intake.asked.clear()
        self._give_back(sorted(chunks))

    def _give_back(self, chunks: Iterable[int]) -> None:
        """Missing chunks are asked for next: of their owner, else of the one that brought them,
        else of any that is open; if none is, they wait for new feeds."""
        opened = [index for index, intake in enumerate(self.intakes) if not intake.is_closed]
        again: dict[int, list[int]] = {}
        for chunk in chunks:
            for index in (self._owner[chunk], self._source[chunk], *opened):
                if index != _NO_INTAKE and not self.intakes[index].is_closed:
                    again.setdefault(index, []).append(chunk)
                    break
        for index, given in again.items():
            self.intakes[index].to_ask.extendleft(reversed(given))
