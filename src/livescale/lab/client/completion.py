"""One streamed completion as its client sees it: what arrived, when, and how it ended.

From pieces of a byte stream to server-sent events, and from status, events and data of
`POST /v1/completions` to tokens; does no I/O and reads no clock.
"""

from __future__ import annotations

import msgspec

EVENT_BYTES_MAX = 4 << 20
"""Longest event that is kept in memory while it is incomplete."""


class SseError(ValueError):
    """The stream cannot be server-sent events of a bounded size."""


class SseParser:
    """Collects the `data` of events; comments and other fields are dropped.

    Lines may end in LF or CRLF and be cut anywhere between two calls of `push`. (A lone CR, which
    the standard allows too, is sent by no server and would cost a look at every byte.)
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def push(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece completes. Raises SseError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._data_bytes = [], 0
        if self._data_bytes + len(self._rest) > EVENT_BYTES_MAX:
            raise SseError(f"an event is longer than {EVENT_BYTES_MAX} bytes")
        return events

    def __repr__(self) -> str:
        return f"<SseParser {self._data_bytes + len(self._rest)} bytes of an incomplete event>"


_DONE = b"[DONE]"
_QUOTED_CHARS_MAX = 300


class StreamError(ValueError):
    """The server ended the completion with an error, or sent what cannot be understood."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


_event_decoder = msgspec.json.Decoder(_Event)


def completion_body(model: str, prompt_ids: list[int], tokens: int) -> dict[str, object]:
    """Asks for so many greedy tokens as a CompletionStream wants them: streamed, with their ids and
    the usage."""
    return {
        "model": model,
        "prompt": prompt_ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


class CompletionStream:
    """Takes the pieces of one response body; keeps token ids and the time of each."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.token_ns: list[int] = []
        self._parser = SseParser()
        self._usage_tokens: int | None = None
        self._is_done = False

    def push(self, piece: bytes, now_ns: int) -> None:
        """Take the bytes that arrived at `now_ns`. Raises StreamError."""
        try:
            for data in self._parser.push(piece):
                self._take(data, now_ns)
        except (ValueError, msgspec.MsgspecError) as error:
            if isinstance(error, StreamError):
                raise
            raise StreamError(f"the stream cannot be understood: {error}") from None

    def end(self, tokens_expected: int) -> None:
        """The body has ended. Raises StreamError unless all the tokens came and all agrees."""
        tokens = len(self.token_ids)
        if not self._is_done:
            raise StreamError(f"the stream ended after {tokens} tokens without [DONE]")
        if self._usage_tokens not in (None, tokens):
            raise StreamError(f"{tokens} tokens came, the usage says {self._usage_tokens}")
        if tokens != tokens_expected:
            raise StreamError(f"{tokens} tokens came, {tokens_expected} were asked for")

    def _take(self, data: bytes, now_ns: int) -> None:
        if data == _DONE:
            self._is_done = True
            return
        event = _event_decoder.decode(data)
        if event.error is not None:
            raise StreamError(error_message(data))
        if event.usage is not None:
            self._usage_tokens = event.usage.completion_tokens
        for choice in event.choices:
            if choice.token_ids is None:
                raise StreamError("an event has no token_ids: the server does not return them")
            self.token_ids += choice.token_ids
            self.token_ns += [now_ns] * len(choice.token_ids)

    def __repr__(self) -> str:
        end = "done" if self._is_done else "streaming"
        return f"<CompletionStream {len(self.token_ids)} tokens, {end}>"


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of whatever was sent instead."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except (ValueError, msgspec.MsgspecError):
        return body[:_QUOTED_CHARS_MAX].decode(errors="replace") or "no message"
