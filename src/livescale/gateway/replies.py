"""The two endpoints' answers as bytes: one event per token, or one body for all of them.

Pure: what is generated and when it is sent is decided in `streaming.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from livescale.gateway.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    Usage,
)
from livescale.types import FinishReason

DONE_EVENT = b"data: [DONE]\n\n"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Generated text with the tokens it comes from; the last one carries `finish_reason`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all parts of one answer share, and what the client wants in them.

    `wants_usage` asks for a last event with the usage, `wants_usage_always` for it in each event.
    """

    id: str
    created: int
    model: str
    prompt_ids: tuple[int, ...]
    wants_usage: bool = False
    wants_usage_always: bool = False
    wants_token_ids: bool = False

    def usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = len(self.prompt_ids)
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)

    def event_usage(self, completion_tokens: int) -> Usage | UnsetType | None:
        """OpenAI: null in all events but the last when usage is asked for, else absent."""
        if self.wants_usage_always:
            return self.usage(completion_tokens)
        return None if self.wants_usage else UNSET

    def if_ids(self, value: T) -> T | UnsetType:
        """The value if the client wants token ids."""
        return value if self.wants_token_ids else UNSET


class Reply(Protocol):
    """How one endpoint writes its answer."""

    head: ReplyHead

    def event(self, piece: Piece, completion_tokens: int, is_first: bool) -> bytes:
        """The event of one piece; `completion_tokens` counts up to and with it."""

    def usage_event(self, completion_tokens: int) -> bytes:
        """The event behind the last piece when usage is asked for."""

    def whole(self, piece: Piece) -> bytes:
        """The body of an answer that is not streamed."""


class CompletionReply:
    """Answers of /v1/completions."""

    def __init__(self, head: ReplyHead) -> None:
        self.head = head

    def event(self, piece: Piece, completion_tokens: int, is_first: bool) -> bytes:
        choice = self._choice(piece, has_prompt_ids=is_first)
        return sse(self._body([choice], self.head.event_usage(completion_tokens)))

    def usage_event(self, completion_tokens: int) -> bytes:
        return sse(self._body([], self.head.usage(completion_tokens)))

    def whole(self, piece: Piece) -> bytes:
        choice = self._choice(piece, has_prompt_ids=True)
        return msgspec.json.encode(self._body([choice], self.head.usage(len(piece.token_ids))))

    def _choice(self, piece: Piece, has_prompt_ids: bool) -> CompletionChoice:
        return CompletionChoice(
            text=piece.text,
            finish_reason=piece.finish_reason,
            token_ids=self.head.if_ids(piece.token_ids),
            prompt_token_ids=self.head.if_ids(self.head.prompt_ids) if has_prompt_ids else UNSET,
        )

    def _body(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        head = self.head
        return Completion(head.id, head.created, head.model, choices, usage=usage)


class ChatReply:
    """Answers of /v1/chat/completions."""

    def __init__(self, head: ReplyHead) -> None:
        self.head = head

    def event(self, piece: Piece, completion_tokens: int, is_first: bool) -> bytes:
        head = self.head
        choice = ChatChunkChoice(
            Delta("assistant" if is_first else UNSET, piece.text),
            finish_reason=piece.finish_reason,
            token_ids=head.if_ids(piece.token_ids),
        )
        chunk = ChatChunk(
            *(head.id, head.created, head.model, [choice]),
            usage=head.event_usage(completion_tokens),
            prompt_token_ids=head.if_ids(head.prompt_ids) if is_first else UNSET,
        )
        return sse(chunk)

    def usage_event(self, completion_tokens: int) -> bytes:
        head = self.head
        return sse(
            ChatChunk(head.id, head.created, head.model, [], usage=head.usage(completion_tokens))
        )

    def whole(self, piece: Piece) -> bytes:
        head = self.head
        choice = ChatChoice(
            AssistantMessage(piece.text),
            finish_reason=piece.finish_reason,
            token_ids=head.if_ids(piece.token_ids),
        )
        body = ChatCompletion(
            *(head.id, head.created, head.model, [choice]),
            usage=head.usage(len(piece.token_ids)),
            prompt_token_ids=head.if_ids(head.prompt_ids),
        )
        return msgspec.json.encode(body)


def sse(body: msgspec.Struct) -> bytes:
    """The body as a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
