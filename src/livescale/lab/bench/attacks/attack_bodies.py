"""What an attacker may send a gateway: one entry per attack, for tests and for the benchmark.

Each attack is bytes on a connection. Sizes follow the gateway's own bound of a body, so that all of
an attack would pass a gateway that bounds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

BODY_BYTES = 8 * 1024 * 1024
"""What the gateway takes of a body at most."""
NESTED_LISTS = (BODY_BYTES - 200) // 3
KEYS = 500_000
MESSAGES = 240_000
TOKEN_IDS = 4_000_000
HEADERS = 10_000
TRAILER_BYTES = 35 * 1024 * 1024
_LINE_BYTES = 1000
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_HEAD = b"GET /health HTTP/1.1\r\n"


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `request` makes the bytes of one request for a model.

    `statuses` are the answers of a gateway that withstands it; one that closes the connection
    before all is sent withstands it, too.
    """

    name: str
    request: Callable[[str], bytes]
    statuses: tuple[int, ...]


def http_request(path: str, body: bytes, extra_head: bytes = b"") -> bytes:
    """A POST of JSON, whole."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
    ).encode() + (extra_head + b"\r\n" + body)


def long_text(model: str) -> bytes:
    """A body whose prompt is longer than the bound of a body leaves room for anything else."""
    head, tail = b'{"model":"%s","prompt":"' % model.encode(), b'"}'
    return head + b"word " * ((BODY_BYTES - len(head) - len(tail)) // 5) + tail


def _text_to(path: str) -> Callable[[str], bytes]:
    return lambda model: http_request(path, long_text(model))


def _many(path: str, members: bytes, item: bytes, count: int) -> Callable[[str], bytes]:
    """A body with these members besides the model's name; their %s is the item, so often (a %d in
    the item is its number)."""

    def request(model: str) -> bytes:
        items = (item % n for n in range(count)) if b"%d" in item else repeat(item, count)
        body = b'{"model":"%s",%s}' % (model.encode(), members % b",".join(items))
        return http_request(path, body)

    return request


def _trailers(_model: str) -> bytes:
    """A short body in chunks, and after it trailers without end."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    line = b"x: " + b"y" * _LINE_BYTES + b"\r\n"
    return head + line * (TRAILER_BYTES // len(line)) + b"\r\n"


def _many_headers(_model: str) -> bytes:
    """Headers that are small together, and very many."""
    lines = b"".join(b"a%d: b\r\n" % number for number in range(HEADERS))
    return http_request(_COMPLETIONS, b"{}", lines)


_LISTS = _many(_COMPLETIONS, b'"prompt":[%s]', b"[]", NESTED_LISTS)
_KEYS = _many(_COMPLETIONS, b'"prompt":"x",%s', b'"k%d":1', KEYS)
_BIASES = _many(_COMPLETIONS, b'"prompt":"x","logit_bias":{%s}', b'"%d":1', KEYS)
_UNKNOWN_LISTS = _many(_COMPLETIONS, b'"prompt":"x","x":[%s]', b"[]", NESTED_LISTS)
_MESSAGES = _many(_CHAT, b'"messages":[%s]', b'{"role":"user","content":"x"}', MESSAGES)
_PARTS = _many(
    _CHAT, b'"messages":[{"role":"user","content":[%s]}]', b'{"type":"text","text":"x"}', MESSAGES
)

ATTACKS = (
    Attack("completion of 8 MiB of text", _text_to(_COMPLETIONS), (400,)),
    Attack("8 MiB of text to tokenize", _text_to("/tokenize"), (400,)),
    # In a field that no endpoint knows, and where lists are allowed: prompts of token ids.
    Attack("millions of lists", _UNKNOWN_LISTS, (413,)),
    Attack("millions of prompts", _LISTS, (413,)),
    # Members that no endpoint knows, and where members are allowed.
    Attack("500,000 members", _KEYS, (413,)),
    Attack("500,000 biases", _BIASES, (413,)),
    Attack("240,000 messages", _MESSAGES, (413,)),
    Attack("240,000 parts", _PARTS, (413,)),
    Attack(
        "millions of token ids", _many(_COMPLETIONS, b'"prompt":[%s]', b"5", TOKEN_IDS), (400, 413)
    ),
    Attack("10,000 headers", _many_headers, (431,)),
    # One header that does not end soon.
    Attack(
        "a header of 8 MiB", lambda _: _HEAD + b"host: localhost\r\nx: " + b"y" * BODY_BYTES, (431,)
    ),
    Attack("trailers of 35 MiB", _trailers, (431,)),
    Attack("no Host", lambda _: _HEAD + b"\r\n", (400,)),
    Attack("two Hosts", lambda _: _HEAD + b"host: localhost\r\nhost: example.org\r\n\r\n", (400,)),
)
"""All of them, by what they send."""

BENCH_ATTACKS = (
    *ATTACKS,
    Attack("heads that do not end", lambda _: _HEAD + b"host: localhost\r\nx: ", (408,)),
    # The first few KiB, and then nothing.
    Attack("bodies that do not end", lambda model: _LISTS(model)[: BODY_BYTES // 1000], (408,)),
)
"""With those that are answered when the time for a request is over."""
