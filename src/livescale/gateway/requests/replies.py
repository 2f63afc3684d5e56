"""Answers with generated text as bytes: events of pieces, or one body for all of them.

Pure: what is generated and when it is sent is decided elsewhere.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from livescale.gateway.contract import answers
from livescale.gateway.requests.choices import Piece, ScoredToken

DONE_EVENT = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode  # `msgspec.json.encode` makes an Encoder for each call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all parts of one answer share, and what the client wants in them.

    `front` are the fields of an `AnswerHead`. Each prompt has `choices` answers. `wants_usage` asks
    for a last event with the usage, `wants_usage_always` for it in each event: that of all choices
    so far.
    """

    front: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    choices: int
    wants_usage: bool = False
    wants_usage_always: bool = False
    wants_token_ids: bool = False
    #: cached tokens by prompt, as they become known
    _cached: dict[int, int] = field(default_factory=dict, compare=False)

    def count_cached(self, piece: Piece) -> None:
        """A prompt's cached tokens are those of its first choice: the others find the prompt
        there because of the first."""
        if piece.is_first and piece.choice % self.choices == 0:
            self._cached[piece.choice // self.choices] = piece.cached_tokens

    def usage(self, completion_tokens: int) -> answers.Usage:
        prompt_tokens = sum(map(len, self.prompts))
        return answers.Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            answers.PromptTokensDetails(sum(self._cached.values())),
        )

    def if_ids(self, value: T) -> T | UnsetType:
        """The value if the client wants token ids."""
        return value if self.wants_token_ids else UNSET


class Reply(ABC):
    """How one endpoint writes its answer."""

    __slots__ = ("head",)

    def __init__(self, head: ReplyHead) -> None:
        self.head = head

    @abstractmethod
    def whole(self, choices: Sequence[Piece]) -> bytes:
        """The body of an answer that is not streamed: each choice in one piece."""


class StreamableReply(Reply):
    """An answer that may come as events."""

    __slots__ = ("_front", "_tokens", "_usage")

    def __init__(self, head: ReplyHead, empty: answers.Completion | answers.ChatChunk) -> None:
        """`empty` is an event without choices, which are its last field."""
        super().__init__(head)
        body = msgspec.json.encode(empty)
        assert body.endswith(b'"choices":[]}'), body
        #: the bytes that all events have in common, encoded once
        self._front = b"data: " + body[:-2]
        #: generated for all choices, in events so far
        self._tokens = 0
        # OpenAI: null in all events but the last when usage is asked for, else absent.
        self._usage = b'],"usage":null' if head.wants_usage else b"]"

    def events(self, pieces: Sequence[Piece]) -> bytes:
        """One event for each piece, the next ones of the answer."""
        if len(pieces) == 1:
            return self._event(pieces[0])
        return b"".join([self._event(piece) for piece in pieces])

    def plain_event(self, choice: int, token_id: int, text: str) -> bytes:
        """The event of a piece of one token, which is not the choice's first or last, without log
        probabilities: the very bytes of `events`."""
        self._tokens += 1
        head = self.head
        before, between, behind = _around_text(self.__class__, choice, head.wants_token_ids)
        ids = b"%d" % token_id if head.wants_token_ids else b""
        usage = self._usage_so_far() if head.wants_usage_always else self._usage
        return b"".join((self._front, before, _encode(text), between, ids, behind, usage, b"}\n\n"))

    def ending(self) -> bytes:
        """What stands behind the last piece's event: the usage if that is asked for, and [DONE]."""
        if not self.head.wants_usage:
            return DONE_EVENT
        return b"".join((self._front, self._usage_so_far(), b"}\n\n", DONE_EVENT))

    def _event(self, piece: Piece) -> bytes:
        self.head.count_cached(piece)
        self._tokens += len(piece.token_ids)
        usage = self._usage_so_far() if self.head.wants_usage_always else self._usage
        choice, rest = self._streamed(piece)
        return b"".join((self._front, _encode(choice), usage, rest, b"}\n\n"))

    def _usage_so_far(self) -> bytes:
        return b'],"usage":' + msgspec.json.encode(self.head.usage(self._tokens))

    @abstractmethod
    def _streamed(self, piece: Piece) -> tuple[msgspec.Struct, bytes]:
        """A piece's choice as JSON has it, and what stands behind the choices of the event."""


class CompletionReply(StreamableReply):
    """Answers of /v1/completions."""

    __slots__ = ()

    def __init__(self, head: ReplyHead) -> None:
        super().__init__(head, answers.Completion(**head.front, choices=[]))

    def whole(self, choices: Sequence[Piece]) -> bytes:
        body = answers.Completion(
            **self.head.front,
            choices=[self._choice(piece, True) for piece in choices],
            usage=self.head.usage(_tokens(choices)),
        )
        return msgspec.json.encode(body)

    def _streamed(self, piece: Piece) -> tuple[msgspec.Struct, bytes]:
        return self._choice(piece, piece.is_first), b""

    def _choice(self, piece: Piece, has_prompt_ids: bool) -> answers.CompletionChoice:
        head = self.head
        choice = answers.CompletionChoice(
            piece.text,
            piece.choice,
            None if piece.scored is None else _completion_logprobs(piece.scored),
            piece.finish_reason,
            piece.stop_reason,
        )
        if head.wants_token_ids:
            choice.token_ids = piece.token_ids
            if has_prompt_ids:
                choice.prompt_token_ids = head.prompts[piece.choice // head.choices]
        return choice


class ChatReply(StreamableReply):
    """Answers of /v1/chat/completions."""

    __slots__ = ()

    def __init__(self, head: ReplyHead) -> None:
        super().__init__(head, answers.ChatChunk(**head.front, choices=[]))

    def whole(self, choices: Sequence[Piece]) -> bytes:
        body = answers.ChatCompletion(
            **self.head.front,
            choices=[
                answers.ChatChoice(
                    answers.AssistantMessage(piece.text),
                    piece.choice,
                    None if piece.scored is None else _chat_logprobs(piece.scored),
                    piece.finish_reason,
                    piece.stop_reason,
                    self.head.if_ids(piece.token_ids),
                )
                for piece in choices
            ],
            usage=self.head.usage(_tokens(choices)),
            prompt_token_ids=self.head.if_ids(self.head.prompts[0]),
        )
        return msgspec.json.encode(body)

    def _streamed(self, piece: Piece) -> tuple[msgspec.Struct, bytes]:
        head = self.head
        choice = answers.ChatChunkChoice(
            answers.Delta("assistant" if piece.is_first else UNSET, piece.text),
            piece.choice,
            None if piece.scored is None else _chat_logprobs(piece.scored),
            piece.finish_reason,
            piece.stop_reason,
            head.if_ids(piece.token_ids),
        )
        prompt_ids = b""
        if head.wants_token_ids and piece.is_first:
            prompt_ids = b',"prompt_token_ids":' + msgspec.json.encode(head.prompts[0])
        return choice, prompt_ids


# -- helpers, in the order used -------------------------------------------------------------------


@functools.cache
def _around_text(
    kind: Callable[[ReplyHead], StreamableReply], choice: int, has_ids: bool
) -> tuple[bytes, bytes, bytes]:
    """What stands in front of the text of a plain event's choice, between it and the token's id,
    and behind. Shared by all answers: it stays in the processor's cache."""
    head = ReplyHead({"id": "", "created": 0, "model": ""}, (), 1, wants_token_ids=has_ids)
    entry, rest = kind(head)._streamed(Piece(choice, text="", token_ids=[], is_first=False))
    assert not rest, "only first pieces have fields behind the choices"
    before, _, behind = _encode(entry).partition(b'""')
    if not has_ids:
        return before, behind, b""
    between, _, behind = behind.partition(b"[]")
    return before, between + b"[", b"]" + behind


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in pieces)


def _completion_logprobs(scored: Sequence[ScoredToken]) -> answers.CompletionLogprobs:
    return answers.CompletionLogprobs(
        text_offset=[token.text_offset for token in scored],
        token_logprobs=[token.chosen.logprob for token in scored],
        tokens=[token.chosen.token for token in scored],
        top_logprobs=[_by_text(token.chosen) for token in scored],
    )


def _by_text(chosen: answers.TokenLogprob) -> dict[str, float]:
    # Different tokens may have the same text; the likelier one, which comes first, counts.
    by_text: dict[str, float] = {}
    for candidate in (*chosen.top_logprobs, chosen):
        by_text.setdefault(candidate.token, candidate.logprob)
    return by_text


def _chat_logprobs(scored: Sequence[ScoredToken]) -> answers.ChatLogprobs:
    return answers.ChatLogprobs([token.chosen for token in scored])
