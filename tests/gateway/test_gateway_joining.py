"""Tokens that come while the connection is busy leave together: no text is lost, moved or late."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gateway_double import Chunk, sse_data
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.gateway.contract.backend import GenerateRequest, GenerationFailed, TokenSink
from livescale.gateway.contract.errors import ApiError
from livescale.gateway.metrics.metrics import Metrics
from livescale.gateway.requests.arrivals import JOINED_TOKENS_MAX, Arrivals, TurnEnd
from livescale.gateway.requests.choices import Choice, ChoiceOrder, Piece, StopString, TextRules
from livescale.gateway.requests.direct import Writing
from livescale.gateway.requests.event_writing import EventWriting
from livescale.gateway.requests.replies import (
    ChatReply,
    CompletionReply,
    ReplyHead,
    StreamableReply,
)
from livescale.gateway.text.text import TextCodec
from livescale.values.types import FinishReason, SamplingParams, TokenLogprobs

tried = settings(max_examples=examples(200), deadline=None)
EOS = 1


@pytest.fixture(scope="module")
def codec(model_directory: Path) -> TextCodec:
    return TextCodec.load(model_directory)


@dataclass
class Stream:
    """A TokenStream that brings what the test says, with log probabilities if it `is_scored`."""

    is_scored: bool = True
    queued_s: float | None = None
    sink: TokenSink = field(init=False)
    sent: int = 0

    def pour(self, sink: TokenSink) -> None:
        self.sink = sink

    def bring(self, token_id: int, reason: FinishReason | None = None) -> None:
        logprobs = TokenLogprobs(-0.5, ((token_id, -0.5),)) if self.is_scored else None
        self.sink.take(Chunk(self.sent, token_id, reason, logprobs))
        self.sent += 1

    def cancel(self) -> None: ...

    def stop(self) -> None: ...


@dataclass
class Connection:
    """A BodyWriter: what was written, by write."""

    is_paused: bool = False
    written: list[str] = field(default_factory=list)
    writing: Writing | None = None

    @property
    def is_clear(self) -> bool:
        return not self.is_paused

    def open(self, writing: Writing) -> None:
        self.writing = writing

    def take_over(self) -> None: ...

    def write(self, part: bytes) -> None:
        assert not self.is_paused, "the client has not read what was written before"
        self.written.append(part.decode())

    def close(self) -> None:
        self.writing = None

    def resume(self) -> None:
        self.is_paused = False
        assert self.writing is not None
        self.writing.resume()


class Answer:
    """An answer with some choices, written the direct way."""

    def __init__(
        self, codec: TextCodec, choices: int, stops: Sequence[str], is_scored: bool = True
    ) -> None:
        self.now_s = 0.0
        metrics = self.metrics = Metrics(["m"])
        self.is_scored = is_scored
        self.streams = [Stream(is_scored) for _ in range(choices)]
        self.connection = Connection()
        arrivals = Arrivals(lambda: None, lambda: self.now_s)
        rules = TextRules(tuple(map(StopString, stops)))
        for index, stream in enumerate(self.streams):
            sampling = SamplingParams(10_000, logprobs=1 if is_scored else None)
            request = GenerateRequest(f"r.{index}", "m", (5, 6), sampling)
            order = ChoiceOrder(index, request, rules, codec)
            arrivals.add(Choice(order, stream, metrics.meter("m", 2, 0.0)), stream)
        front = {"id": "i", "created": 1, "model": "m"}
        reply = CompletionReply(ReplyHead(front, ((5, 6),), choices, wants_token_ids=True))
        writing = EventWriting(arrivals, reply, self.connection, TurnEnd())
        writing.open(None)
        self.over = asyncio.create_task(writing.run())

    def events(self, more: str = "") -> dict[int, list[tuple[str, list[int], str | None]]]:
        """By choice: the text, tokens and end of each event that was written."""
        by_choice = defaultdict(list)
        text = "".join(self.connection.written) + more
        for event in map(json.loads, sse_data(text) if text else ()):
            [choice] = event["choices"]
            if self.is_scored:
                assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
            reason = choice["finish_reason"]
            by_choice[choice["index"]].append((choice["text"], choice["token_ids"], reason))
        return by_choice


async def turn() -> None:
    """What is due at the end of this turn is done, and what follows from it."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def one_by_one(codec: TextCodec, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, list[int]]:
    """Text and tokens of a choice, by a connection that always takes what comes."""

    async def story() -> tuple[str, list[int]]:
        answer = Answer(codec, 1, stops)
        [stream] = answer.streams
        await turn()
        for token_id in ids:
            stream.bring(token_id)
            await turn()
        if not answer.over.done():
            stream.bring(EOS, FinishReason.STOP)
        events = answer.events(await last_events(answer))[0]
        return "".join(text for text, _, _ in events), [i for _, ids, _ in events for i in ids]

    return asyncio.run(story())


async def last_events(answer: Answer) -> str:
    last = await answer.over
    assert isinstance(last, bytes)
    return last.decode()


steps = st.lists(
    st.tuples(st.just("token"), st.integers(0, 2), st.integers(2, 319))
    | st.tuples(st.just("tokens"), st.integers(0, 2), st.integers(2, 80))
    | st.sampled_from([("turn",), ("turn",), ("pause",), ("resume",)]),
    max_size=60,
)


@given(
    choices=st.integers(1, 3),
    steps=steps,
    stops=st.lists(st.text("the qui", min_size=1)),
    is_scored=st.booleans(),
)
@tried
def test_no_text_is_lost_moved_or_late(
    choices: int,
    steps: list[tuple[str | int, ...]],
    stops: list[str],
    is_scored: bool,
    codec: TextCodec,
) -> None:
    """Whenever tokens come and the connection stops and goes on. What may leave has left by the end
    of the turn, in events of a bounded size."""
    brought: list[list[int]] = [[] for _ in range(choices)]

    async def story() -> Answer:
        answer = Answer(codec, choices, stops, is_scored)
        connection = answer.connection
        await turn()
        for kind, *values in steps:
            if answer.over.done():
                break
            if kind in ("token", "tokens"):
                place, value = values[0] % choices, values[1]
                for token_id in [value] if kind == "token" else range(5, 5 + value):
                    brought[place].append(token_id)
                    answer.streams[place].bring(token_id)
            elif kind == "pause":
                connection.is_paused = True
            elif kind == "resume" and connection.is_paused:
                connection.resume()
            await turn() if kind == "turn" else None
        connection.resume() if connection.writing else None
        await turn()
        for stream in answer.streams:
            stream.bring(EOS, FinishReason.STOP)
        answer.connection.written.append(await last_events(answer))
        return answer

    events = asyncio.run(story()).events()
    for place in range(choices):
        text, ids = one_by_one(codec, brought[place], stops)
        assert "".join(text for text, _, _ in events[place]) == text
        assert [i for _, ids, _ in events[place] for i in ids] == ids
        # (Tokens whose text was held for a stop string come on top.)
        assert stops or all(len(ids) <= JOINED_TOKENS_MAX for _, ids, _ in events[place])
        assert [end for _, _, end in events[place]] == [None] * (len(events[place]) - 1) + ["stop"]


@given(
    kind=st.sampled_from([CompletionReply, ChatReply]),
    text=st.text(),
    token_id=st.integers(0, 1 << 20),
    choice=st.integers(0, 7),
    wants=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    model=st.sampled_from(["m", 'a"",[]b']),
)
@tried
def test_a_plain_event_has_the_bytes_of_any_other(
    kind: type[StreamableReply],
    text: str,
    token_id: int,
    choice: int,
    wants: tuple[bool, bool, bool],
    model: str,
) -> None:
    def reply() -> StreamableReply:
        front = {"id": "i", "created": 1, "model": model}
        return kind(ReplyHead(front, ((5, 6),), 8, *wants))

    plain, any_other = reply(), reply()
    for _ in range(2):
        piece = Piece(choice=choice, text=text, token_ids=[token_id], is_first=False)
        assert plain.plain_event(choice, token_id, text) == any_other.events([piece])
    assert plain.ending() == any_other.ending()


def test_tokens_of_one_turn_and_those_behind_a_busy_connection_share_an_event(
    codec: TextCodec,
) -> None:
    async def story() -> None:
        answer = Answer(codec, 2, ())
        await turn()
        for token_id in (10, 11):
            for stream in answer.streams:
                stream.bring(token_id)
        await turn()
        assert [len(ids) for _, ids, _ in answer.events()[1]] == [2]
        answer.connection.is_paused = True
        for token_id in range(20, 60):
            answer.streams[0].bring(token_id)
            await turn()
        assert len(answer.connection.written) == 1
        answer.connection.resume()
        await turn()
        assert [len(ids) for _, ids, _ in answer.events()[0]] == [2, JOINED_TOKENS_MAX, 8]
        answer.over.cancel()

    asyncio.run(story())


def test_what_came_before_a_failure_leaves_first_and_what_comes_behind_it_never(
    codec: TextCodec,
) -> None:
    async def story() -> None:
        answer = Answer(codec, 2, ())
        first, second = answer.streams
        first.bring(10)
        second.bring(11)
        first.sink.end(GenerationFailed("the worker was lost"))
        second.bring(12)
        failure = await answer.over
        assert isinstance(failure, ApiError)
        assert "the worker was lost" in str(failure)
        ids = {place: [ids for _, ids, _ in of] for place, of in answer.events().items()}
        assert ids == {0: [[10]], 1: [[11]]}

    asyncio.run(story())


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_client_that_reads_slowly_does_not_make_tokens_late(
    codec: TextCodec, is_scored: bool
) -> None:
    """With log probabilities and without: tokens are worked on in two ways."""

    async def story() -> None:
        answer = Answer(codec, 1, (), is_scored)
        for number in range(4):
            if number == 2:
                answer.connection.is_paused = True
            answer.now_s += 0.25
            answer.streams[0].bring(10 + number, FinishReason.LENGTH if number == 3 else None)
            await turn()
        answer.now_s += 60.0
        answer.connection.resume()
        assert await answer.over
        counted = answer.metrics.models["m"].kept()
        assert counted.first_token.sum == 0.25
        assert counted.inter_token.sum == 0.75
        assert counted.request.sum == 1.0

    asyncio.run(story())


def test_a_client_that_is_gone_and_a_time_that_is_over_end_it(codec: TextCodec) -> None:
    async def story() -> None:
        answer = Answer(codec, 1, ())
        await turn()
        assert answer.connection.writing is not None
        answer.connection.writing.lost()
        assert await answer.over is None
        answer.streams[0].bring(10)
        await turn()
        assert not answer.connection.written
        reply = CompletionReply(ReplyHead({"id": "i", "created": 1, "model": "m"}, ((5,),), 1))
        late = EventWriting(Arrivals(lambda: None), reply, Connection(), TurnEnd())
        late.open(0.0)
        with pytest.raises(TimeoutError):
            await late.run()
        late.close()

    asyncio.run(story())
