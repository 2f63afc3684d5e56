"""Tokens of one answer as the backend brings them, until they become pieces of its text.

What a piece is stands in `choices.py`; when pieces are wanted is decided in `streaming.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from livescale.gateway.contract.backend import TokenChunk, TokenStream
from livescale.gateway.requests.choices import UNFINISHED, Choice, Piece, joined

JOINED_TOKENS_MAX = 32
"""Tokens that leave together at most: how large an event may become behind a slow client."""


class Arrivals:
    """What has come for the choices of one answer, in order, and has not been taken yet.

    A client that reads slowly leaves it here as tokens, which are small, with the time of the clock
    `now_s` at which they came: how fast it reads is not the pool's latency. `notify` is called when
    something comes where nothing was, and must not raise.
    """

    __slots__ = ("came", "notify", "now_s", "unfinished")

    def __init__(
        self, notify: Callable[[], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.notify = notify
        self.now_s = now_s
        #: nothing but `take` takes it away
        self.came: list[tuple[Choice, TokenChunk | Exception | None, float]] = []
        #: choices whose last piece has not been taken
        self.unfinished = 0

    def add(self, choice: Choice, stream: TokenStream) -> None:
        """The stream's tokens are those of this choice. Call it in the turn of its `submit`."""
        self.unfinished += 1
        stream.pour(_Inlet(self, choice))

    def take(self) -> Sequence[Piece]:
        """The pieces that some of the tokens make, oldest tokens first: one per choice at most.

        Raises, when it is its turn, what cut a choice short: an ApiError, or a bug.
        """
        came = self.came
        if len(came) == 1:  # the usual case
            piece = self._piece(*came.pop())
            return () if piece is None else (piece,)
        by_choice: dict[int, list[Piece]] = {}
        taken = 0
        for choice, what, at_s in came[:JOINED_TOKENS_MAX]:
            is_end = what is None or isinstance(what, Exception)
            if by_choice and is_end and choice.outcome is UNFINISHED:
                break  # what came before the failure still leaves
            taken += 1
            piece = self._piece(choice, what, at_s)
            if piece is not None:
                by_choice.setdefault(piece.choice, []).append(piece)
        # Pieces may have ended streams, whose ends have come meanwhile.
        del came[:taken]
        return [joined(pieces) for pieces in by_choice.values()]

    def take_plain(self) -> tuple[int, int, str] | None:
        """As `take`, where what has come is one token in the midst of a choice, and only its text
        matters: the choice's index, the token's id and the text. None: nothing is taken."""
        if len(self.came) != 1:
            return None
        choice, what, at_s = self.came[0]
        if what is None or isinstance(what, Exception):
            return None
        text = choice.plain_text(what, at_s)
        if text is None:
            return None
        self.came.clear()
        return choice.index, what.token_id, text

    def _piece(
        self, choice: Choice, what: TokenChunk | Exception | None, at_s: float
    ) -> Piece | None:
        if choice.outcome is not UNFINISHED:
            return None  # it has ended, or was given up: what comes yet changes nothing
        if what is None or isinstance(what, Exception):
            raise choice.cut_short(what)
        piece = choice.piece_of(what, at_s)
        if piece is not None and piece.finish_reason is not None:
            self.unfinished -= 1
        return piece

    def __repr__(self) -> str:
        return f"<Arrivals {len(self.came)} wait, {self.unfinished} choices go on>"


class _Inlet:
    """TokenSink of one choice."""

    __slots__ = ("_arrivals", "_choice")

    def __init__(self, arrivals: Arrivals, choice: Choice) -> None:
        self._arrivals = arrivals
        self._choice = choice

    def take(self, what: TokenChunk | Exception | None) -> None:
        arrivals = self._arrivals
        arrivals.came.append((self._choice, what, arrivals.now_s()))
        if len(arrivals.came) == 1:
            arrivals.notify()

    # As a token: what came before counts first.
    end = take


class TurnEnd:
    """Calls at the end of a turn of the event loop: what comes for one of them in several parts is
    worked on once. Lives on that loop."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call(self, due: Callable[[], None]) -> None:
        """`due`, which must not raise, is called once for this call."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._end)
        self._due.append(due)

    def _end(self) -> None:
        calls, self._due = self._due, []
        for due in calls:
            due()
