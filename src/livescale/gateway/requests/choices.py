"""One generation of a request: its tokens as pieces of text, until the text is complete.

Which generations there are is decided in `app.py`, when tokens become pieces in `arrivals.py`,
what a piece looks like in `replies.py`, and when it is sent in `streaming.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from livescale.gateway.contract import backend
from livescale.gateway.contract.answers import TokenLogprob, TopLogprob
from livescale.gateway.contract.errors import ApiError, come_back, unavailable
from livescale.gateway.metrics.metrics import TokenMeter
from livescale.gateway.text.spelling import TokenSpelling
from livescale.gateway.text.text import TextCodec
from livescale.values.types import FinishReason, Value

LOGPROB_LEAST = -9999.0
"""Stands for minus infinity and NaN, which JSON cannot express (the former as vLLM)."""
FLOAT_BYTES = 4
"""Of each number of an embedding."""
UNFINISHED = "cancelled"
"""The outcome of a generation that nothing has ended yet."""


class StopString:
    """One string that ends a text, with the table of Knuth, Morris and Pratt. Never changes.

    The table takes a step per character, so a request makes it once for all of its choices.
    """

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        assert text, "an empty string stops nothing"
        self.text = text
        #: by matched characters: how many of the string's first ones they also end with
        self._borders = [0, 0]
        for character in text[1:]:
            self._borders.append(self._next(self._borders[-1], character))

    def advance(self, matched: int, text: str) -> tuple[int, int | None]:
        """Take text behind `matched` first characters of the string: how many the text now ends
        with, and where in it the string ends first (None: it does not)."""
        first_end = None
        for end, character in enumerate(text, 1):
            matched = self._next(matched, character)
            if matched == len(self.text):
                matched = self._borders[-1]
                if first_end is None:
                    first_end = end
        return matched, first_end

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._borders[matched]
        return matched + 1 if self.text[matched] == character else 0

    def __repr__(self) -> str:
        return f"<StopString {self.text!r}>"


@dataclass(frozen=True, slots=True)
class TextRules:
    """What becomes text, and where the text ends. All choices of a request have the same object.

    `stops` count when they end behind the first `unstopped_tokens` tokens.
    `reported_stop_ids` are the stop tokens that the client named itself: one that ends the text is
    its `stop_reason`. With `is_stop_shown` the text has what stopped it.
    """

    stops: tuple[StopString, ...] = ()
    unstopped_tokens: int = 0
    reported_stop_ids: frozenset[int] = frozenset()
    is_stop_shown: bool = False
    skips_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChoiceOrder:
    """One generation to be made: the choice's index, what the backend gets, and its text's rules.

    `echo` is the text that stands in front of the generated one.
    """

    index: int
    request: backend.GenerateRequest
    rules: TextRules
    codec: TextCodec
    echo: str = ""


class ScoredToken(Value, frozen=True):
    """A generated token with the likely ones; `text_offset` is where its text begins."""

    chosen: TokenLogprob
    text_offset: int


class Piece(Value, frozen=True):
    """Text with the tokens that it comes from; the last one carries `finish_reason`.

    `stop_reason` is the stop string or the named stop token that ended the text. `scored` has one
    entry per token, if the client wants log probabilities. The first one has `cached_tokens`. An
    `embedding` (fp32, little-endian) comes in the place of a text.
    """

    choice: int
    text: str
    token_ids: list[int]
    is_first: bool
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scored: list[ScoredToken] | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces of a choice that follow one another, as one."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    scored = [token for piece in pieces for token in piece.scored or ()]
    return msgspec.structs.replace(
        last,
        text="".join([piece.text for piece in pieces]),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        is_first=first.is_first,
        scored=None if last.scored is None else scored,
        cached_tokens=first.cached_tokens,
    )


class Choice:
    """A generation under way. `outcome` is how it ended, in the words of the metrics."""

    __slots__ = (
        "_cached_tokens",
        "_decoder",
        "_embedding",
        "_is_counted",
        "_is_first",
        "_is_plain",
        "_meter",
        "_order",
        "_scanner",
        "_scored",
        "_stream",
        "_text_chars",
        "_token_ids",
        "index",
        "outcome",
    )

    def __init__(
        self,
        order: ChoiceOrder,
        stream: backend.TokenStream,
        meter: TokenMeter,
    ) -> None:
        rules = order.rules
        self.index = order.index
        self.outcome = UNFINISHED
        self._is_counted = False
        self._order = order
        self._stream = stream
        self._meter = meter
        self._decoder = order.codec.decoder(rules.skips_special_tokens)
        self._scanner = StopScanner(rules.stops, rules.is_stop_shown) if rules.stops else None
        self._is_first = True
        self._cached_tokens = 0
        self._embedding: bytes | None = None
        #: tokens that no piece has carried yet: their text may be the start of a stop string
        self._token_ids: list[int] = []
        self._scored: list[ScoredToken] | None = (
            None if order.request.sampling.logprobs is None else []
        )
        self._text_chars = len(order.echo)
        #: from the second piece on: a token that ends nothing is one piece, of its text alone
        self._is_plain = False

    def plain_text(self, chunk: backend.TokenChunk, at_s: float) -> str | None:
        """The text that is complete with the next token, which came at `at_s`, where that is all
        there is to its piece. None: the token is taken by `piece_of`.

        What nearly all tokens are, in a fraction of the time.
        """
        if not self._is_plain or chunk.finish_reason is not None or self.outcome is not UNFINISHED:
            return None
        meter = self._meter
        assert chunk.index == meter.tokens, f"{chunk} is not {meter.tokens}"
        meter.token(at_s)
        return self._decoder.push(chunk.token_id)

    def piece_of(self, chunk: backend.TokenChunk, at_s: float) -> Piece | None:
        """The piece that is complete with the next token, which came at `at_s`. None if the token's
        text is held: then the token comes with the next piece.

        Raises ApiError (500) if the token's embedding has values that are not finite.
        """
        assert chunk.index == self._meter.tokens, f"{chunk} is not {self._meter.tokens}"
        self._meter.token(at_s)
        piece = self._piece(chunk)
        if piece is not None and piece.finish_reason is not None:
            self.outcome = piece.finish_reason.value
            if chunk.finish_reason is None:
                self._stream.stop()
            self.end()  # before the client gets it: then the counts are right
        return piece

    def cut_short(self, failure: Exception | None) -> Exception:
        """The tokens have ended, but the text has not: the outcome is set, and this is raised."""
        self.outcome = "failed"
        if isinstance(failure, backend.NoInstance):
            if failure.code == "queue_timeout":
                self.outcome = "timeout"
            return come_back(str(failure), failure.retry_after_s, failure.code)
        if isinstance(failure, backend.GenerationFailed):
            return unavailable(str(failure), code="generation_failed")
        name = self._order.request.request
        return failure or AssertionError(f"{name} ended without a finish reason")

    def end(self) -> None:
        """Nothing is generated any more, and the outcome is counted. Idempotent."""
        self._stream.cancel()
        if not self._is_counted:
            self._is_counted = True
            self._meter.end(self.outcome, self._stream.queued_s)

    def give_up(self, outcome: str) -> None:
        """Nothing is generated any more; if it was not finished, this is how it ended."""
        if self.outcome == UNFINISHED:
            self.outcome = outcome
        self.end()

    def __repr__(self) -> str:
        return f"<Choice {self._order.index} of {self._order.request.request}: {self.outcome}>"

    # -- helpers, in the order used ---------------------------------------------------------

    def _piece(self, chunk: backend.TokenChunk) -> Piece | None:
        """The piece that is complete with this token; None if its text is held."""
        self._token_ids.append(chunk.token_id)
        self._cached_tokens += chunk.cached_tokens
        if chunk.embedding is not None:
            # Here, not where the answer is written: then the choice would count as finished.
            _check_finite(chunk.embedding, self.index)
        self._embedding = chunk.embedding
        if self._scored is not None:
            self._scored.append(self._score(chunk))
        finish_reason = chunk.finish_reason
        stop_reason: str | int | None = None
        if finish_reason is None:
            text = self._decoder.push(chunk.token_id)
        else:
            text, stop_reason = self._last_text(chunk)
        self._text_chars += len(text)
        scanner = self._scanner
        if scanner is not None:
            is_armed = self._meter.tokens > self._order.rules.unstopped_tokens
            text = scanner.push(text, is_armed)
            if scanner.found is not None:
                # Like vLLM: a stop string counts more than what the engine ended with.
                finish_reason, stop_reason = FinishReason.STOP, scanner.found
            elif finish_reason is not None:
                text += scanner.flush()
            elif scanner.is_holding and not text:
                return None
        return self._take(text, finish_reason, stop_reason)

    def _score(self, chunk: backend.TokenChunk) -> ScoredToken:
        logprobs = chunk.logprobs
        assert logprobs is not None, f"{chunk} has no logprobs, but they were asked for"
        spelling = self._order.codec.spelling
        top = [TopLogprob(*_spelled(spelling, token_id, value)) for token_id, value in logprobs.top]
        chosen = TokenLogprob(*_spelled(spelling, chunk.token_id, logprobs.chosen), top)
        return ScoredToken(chosen, self._text_chars)

    def _last_text(self, chunk: backend.TokenChunk) -> tuple[str, int | None]:
        """All text that is left, and the stop token if the client is to get its id."""
        token_id, rules = chunk.token_id, self._order.rules
        is_stop = (
            chunk.finish_reason is FinishReason.STOP
            and token_id in self._order.request.sampling.stop_token_ids
        )
        # The token that stops generation is no text, special or not, unless it is asked for.
        is_text = rules.is_stop_shown or not is_stop
        text = self._decoder.push(token_id) if is_text else ""
        is_reported = is_stop and token_id in rules.reported_stop_ids
        return text + self._decoder.flush(), token_id if is_reported else None

    def _take(
        self, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> Piece:
        """The piece of all tokens that none has carried yet."""
        is_first, token_ids, scored = self._is_first, self._token_ids, self._scored
        self._is_first = False
        self._is_plain = self._scanner is None and scored is None
        self._token_ids = []
        if scored is not None:
            self._scored = []
        if is_first:
            text = self._order.echo + text
        return Piece(
            choice=self._order.index,
            text=text,
            token_ids=token_ids,
            is_first=is_first,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            scored=scored,
            cached_tokens=self._cached_tokens if is_first else 0,
            embedding=self._embedding,
        )


def _check_finite(embedding: bytes, choice: int) -> None:
    values = struct.unpack(f"<{len(embedding) // FLOAT_BYTES}f", embedding)
    if not all(map(math.isfinite, values)):
        # In JSON they would be null, in an answer that looks like a good one.
        raise ApiError(
            500,
            "The model computed infinite values, or values that are not a number, "
            f"for input {choice}",
            param="input",
            code="not_finite",
        )


def _spelled(
    spelling: TokenSpelling, token_id: int, logprob: float
) -> tuple[str, float, list[int]]:
    text, spelled = spelling.of(token_id)
    # In this order NaN, which JSON has not either, is the least, too.
    return text, max(LOGPROB_LEAST, logprob), list(spelled)


class StopScanner:
    """Lets text through up to the first stop string, and never a character that it would regret.

    What may be the start of a stop string is held until the next characters decide, nothing else
    is. Of several strings that one piece completes, the one that starts first counts; of those
    that start together, the one listed first. With `is_stop_shown` the text ends behind the stop
    string, else in front of it.
    """

    def __init__(self, stops: tuple[StopString, ...], is_stop_shown: bool) -> None:
        self._stops = stops
        self._first_characters = frozenset(stop.text[0] for stop in stops)
        self._is_stop_shown = is_stop_shown
        self._held = ""
        #: by stop string: how many of its first characters the text ends with
        self._matched = [0] * len(stops)
        #: characters at the end of the text that may be the start of a stop string
        self._matched_most = 0
        self.found: str | None = None

    @property
    def is_holding(self) -> bool:
        """Text is held that may be the start of a stop string."""
        return bool(self._held)

    def push(self, text: str, is_armed: bool = True) -> str:
        """The text that may leave now; sets `found` when it is the last.

        Strings that end in a piece which comes unarmed do not count.
        """
        assert self.found is None, f"text after {self.found!r}"
        if not self._matched_most and self._first_characters.isdisjoint(text):
            return text
        already = len(self._held)
        buffer = self._held + text
        found: list[tuple[int, int, int]] = []  # (start, place in the list, end), in the buffer
        for place, stop in enumerate(self._stops):
            self._matched[place], end = stop.advance(self._matched[place], text)
            if end is not None and is_armed:
                found.append((already + end - len(stop.text), place, already + end))
        if found:
            start, place, end = min(found)
            self.found = self._stops[place].text
            self._held = ""
            return buffer[: end if self._is_stop_shown else start]
        self._matched_most = max(self._matched)
        # A shown stop string takes nothing back, so that nothing has to be held for it.
        cut = len(buffer) - (0 if self._is_stop_shown else self._matched_most)
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """What is still held when no more text comes: it was no stop string after all."""
        held, self._held = self._held, ""
        return held
