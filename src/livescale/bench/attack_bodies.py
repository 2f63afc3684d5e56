"""What an attacker may send a gateway: one entry per attack, for tests and for the benchmark.

Each attack is bytes on a connection. Sizes follow the gateway's own bound of a body, so that all of
an attack would pass a gateway that bounds nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass

BODY_BYTES = 8 * 1024 * 1024
"""What the gateway takes of a body at most."""
NESTED_LISTS = (BODY_BYTES - 200) // 3
KEYS = 500_000
MESSAGES = 240_000
TOKEN_IDS = 4_000_000
HEADERS = 10_000
TRAILER_BYTES = 35 * 1024 * 1024
_LINE_BYTES = 1000


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


def nested_lists(model: str) -> bytes:
    """Millions of empty lists in a field that no endpoint knows."""
    lists = b",".join([b"[]"] * NESTED_LISTS)
    return b'{"model":"%s","prompt":"x","x":[%s]}' % (model.encode(), lists)


def list_prompts(model: str) -> bytes:
    """The same where lists are allowed: prompts of token ids."""
    lists = b",".join([b"[]"] * NESTED_LISTS)
    return b'{"model":"%s","prompt":[%s]}' % (model.encode(), lists)


def many_keys(model: str) -> bytes:
    """Half a million members."""
    keys = b",".join(b'"k%d":1' % number for number in range(KEYS))
    return b'{"model":"%s","prompt":"x",%s}' % (model.encode(), keys)


def many_biases(model: str) -> bytes:
    """The same where members are allowed."""
    keys = b",".join(b'"%d":1' % number for number in range(KEYS))
    return b'{"model":"%s","prompt":"x","logit_bias":{%s}}' % (model.encode(), keys)


def many_messages(model: str) -> bytes:
    """A chat of a quarter of a million messages."""
    messages = b",".join([b'{"role":"user","content":"x"}'] * MESSAGES)
    return b'{"model":"%s","messages":[%s]}' % (model.encode(), messages)


def many_ids(model: str) -> bytes:
    """A prompt of millions of token ids."""
    ids = b",".join([b"5"] * TOKEN_IDS)
    return b'{"model":"%s","prompt":[%s]}' % (model.encode(), ids)


def many_parts(model: str) -> bytes:
    """A message of very many parts."""
    parts = b",".join([b'{"type":"text","text":"x"}'] * MESSAGES)
    message = b'{"role":"user","content":[%s]}' % parts
    return b'{"model":"%s","messages":[%s]}' % (model.encode(), message)


def many_headers(model: str) -> bytes:
    """Headers that are small together, and very many."""
    lines = b"".join(b"a%d: b\r\n" % number for number in range(HEADERS))
    return http_request("/v1/completions", b"{}", lines)


def long_header(model: str) -> bytes:
    """One header that does not end soon."""
    return b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * BODY_BYTES


def trailers(model: str) -> bytes:
    """A short body in chunks, and after it trailers without end."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    line = b"x: " + b"y" * _LINE_BYTES + b"\r\n"
    return head + line * (TRAILER_BYTES // len(line)) + b"\r\n"


def no_host(model: str) -> bytes:
    return b"GET /health HTTP/1.1\r\n\r\n"


def two_hosts(model: str) -> bytes:
    return b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: example.org\r\n\r\n"


def unfinished_head(model: str) -> bytes:
    return b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "


def unfinished_body(model: str) -> bytes:
    """The first few KiB, and then nothing."""
    whole = http_request("/v1/completions", list_prompts(model))
    return whole[: BODY_BYTES // 1000]


def _posted(path: str, body: Callable[[str], bytes]) -> Callable[[str], bytes]:
    return lambda model: http_request(path, body(model))


ATTACKS = (
    Attack("completion of 8 MiB of text", _posted("/v1/completions", long_text), (400,)),
    Attack("8 MiB of text to tokenize", _posted("/tokenize", long_text), (400,)),
    Attack("millions of lists", _posted("/v1/completions", nested_lists), (413,)),
    Attack("millions of prompts", _posted("/v1/completions", list_prompts), (413,)),
    Attack("500,000 members", _posted("/v1/completions", many_keys), (413,)),
    Attack("500,000 biases", _posted("/v1/completions", many_biases), (413,)),
    Attack("240,000 messages", _posted("/v1/chat/completions", many_messages), (413,)),
    Attack("240,000 parts", _posted("/v1/chat/completions", many_parts), (413,)),
    Attack("millions of token ids", _posted("/v1/completions", many_ids), (400, 413)),
    Attack("10,000 headers", many_headers, (431,)),
    Attack("a header of 8 MiB", long_header, (431,)),
    Attack("trailers of 35 MiB", trailers, (431,)),
    Attack("no Host", no_host, (400,)),
    Attack("two Hosts", two_hosts, (400,)),
)
"""All of them, by what they send."""

BENCH_ATTACKS = (
    *ATTACKS,
    Attack("heads that do not end", unfinished_head, (408,)),
    Attack("bodies that do not end", unfinished_body, (408,)),
)
"""With those that are answered when the time for a request is over."""
