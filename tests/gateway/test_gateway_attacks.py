"""Hostile requests, each as it would be sent: answered early, without work, and beside others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import psutil
import pytest
from gateway_double import (
    JSON,
    MODEL_TOKENS_MAX,
    WAIT_S,
    LocalServer,
    ScriptedBackend,
    build_model_directory,
    running,
)

from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.keys import digest_of
from livescale.gateway.contract.limits import HEADERS_MAX, Limits
from livescale.gateway.text.text import TextCodec, TextWork
from livescale.lab.bench.attacks.attack_bodies import (
    ATTACKS,
    Attack,
    http_request,
    long_text,
)

pytestmark = pytest.mark.usefixtures("machine")

GROWTH_BYTES_MAX = 200 << 20


@pytest.fixture(scope="module")
def server(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    """A gateway with the bounds of a pool."""
    with running(shared_backend, limits=Limits()) as server:
        yield server


def sent(port: int, request: bytes) -> bytes:
    """What comes back, also from a server that stops reading."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:

        def send() -> None:
            with contextlib.suppress(OSError):
                sock.sendall(request)

        sending = threading.Thread(target=send)
        sending.start()
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in received:
                part = sock.recv(65536)
                if not part:
                    break
                received += part
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sending.join()
    return bytes(received)


def status_of(answer: bytes) -> int | None:
    """None: the connection was closed without an answer, or that was lost by the reset."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_is_refused_without_memory_and_work(attack: Attack, server: LocalServer) -> None:
    """Four at once. The gateway is this very process: what the test itself holds counts, too."""
    request = attack.request("tiny")
    process, most_bytes = psutil.Process(), 0
    before_bytes = process.memory_info().rss
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(sent, server.port, request) for _ in range(4)]
        while wait(answers, timeout=0.005).not_done:
            most_bytes = max(most_bytes, process.memory_info().rss)
    statuses = {status_of(answer.result()) for answer in answers}
    assert statuses <= {*attack.statuses, None}, attack.name
    assert most_bytes - before_bytes < GROWTH_BYTES_MAX
    assert httpx.get(f"{server.url}/live", timeout=WAIT_S).status_code == 200


def test_requests_that_are_none_do_not_fill_the_log(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        assert status_of(sent(server.port, b"no request\r\n\r\n")) == 400
    assert len(caplog.records) <= 1


def test_others_are_served_beside_bodies_that_are_hard_to_decode(server: LocalServer) -> None:
    """How often they get a turn: `test_gateway_time.py`; how fast: `livescale bench attacks`."""
    hostile = [attack.request("tiny") for attack in ATTACKS if attack.statuses == (413,)][:3]
    is_over = threading.Event()
    with ThreadPoolExecutor(2) as threads, httpx.Client(base_url=server.url) as client:
        attacking = threads.submit(lambda: [sent(server.port, body) for body in hostile])
        attacking.add_done_callback(lambda _: is_over.set())
        while not is_over.is_set():
            body = {"model": "tiny", "prompt": "x"}
            answer = client.post("/v1/completions", json=body, timeout=WAIT_S)
            assert answer.status_code == 200


# -- large bodies ---------------------------------------------------------------------------------


def begun(port: int, request: bytes, size_bytes: int) -> tuple[int | None, bool]:
    """The answer to the first bytes of a request, and whether the connection is ended then."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        sock.sendall(request[:size_bytes])
        answer = sock.recv(65536)
        try:
            while sock.recv(65536):
                pass
        except TimeoutError:
            return status_of(answer), False
        except ConnectionResetError:
            pass
        return status_of(answer), True


def test_a_text_that_no_model_could_hold_is_refused_while_it_arrives(server: LocalServer) -> None:
    """And what has been refused need not come whole: the connection is ended."""
    request = http_request("/v1/completions", long_text("tiny"))
    assert begun(server.port, request, 1 << 20) == (400, True)


# -- heads ----------------------------------------------------------------------------------------


def head(lines: int) -> bytes:
    """With a Host besides."""
    return b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * lines + b"connection: close\r\n\r\n"


def test_as_many_headers_as_may_be(server: LocalServer) -> None:
    assert status_of(sent(server.port, head(HEADERS_MAX - 2))) == 200
    assert status_of(sent(server.port, head(HEADERS_MAX - 1))) == 431


def test_trailers_are_read_and_dropped(server: LocalServer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-check: 5\r\n\r\n" % (len(body), body)
    )
    assert status_of(sent(server.port, request)) == 200


def test_http_1_0_needs_no_host(server: LocalServer) -> None:
    assert status_of(sent(server.port, b"GET /live HTTP/1.0\r\n\r\n")) == 200


# -- texts that are worked on ---------------------------------------------------------------------


def test_long_texts_wait_for_one_another_and_short_ones_do_not(tmp_path: Path) -> None:
    """However many there are, so much is tokenized at once and no more."""
    codec = TextCodec.load(build_model_directory(tmp_path), TextWork())
    long = "the quick brown fox " * 20_000

    async def main() -> list[str]:
        ended = []

        async def encode(name: str, text: str) -> None:
            await codec.encode(text)
            ended.append(name)

        await asyncio.gather(
            *(encode("long", long) for _ in range(6)), encode("short", long[:10_000])
        )
        return ended

    assert asyncio.run(main()).index("short") < 6


# -- chat templates -------------------------------------------------------------------------------

LOOPING = """{%- macro loop(n) %}{% for i in range(99999) %}{% for j in range(99999) %}
{%- for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endmacro -%}
{% if CONDITION %}{{ loop(1) }}{% endif %}{{ messages[0].content }}"""


def model_with_template(directory: Path, template: str) -> Path:
    build_model_directory(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (LOOPING.replace("CONDITION", "true"), "did not end"),
        ("{{ nothing.here }}", "undefined"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ 'x' * 10 ** 12 }}", "fails"),
    ],
)
def test_a_template_that_cannot_serve_is_named_when_it_is_published(
    tmp_path: Path, template: str, says: str
) -> None:
    directory = model_with_template(tmp_path / "broken", template)
    with pytest.raises(ValueError, match=says) as raised:
        TextCodec.load(directory, TextWork())
    assert str(directory) in str(raised.value)


def test_a_template_that_loops_holds_up_nobody(tmp_path: Path, model_directory: Path) -> None:
    """Over one message only: it passes when it is tried."""
    template = LOOPING.replace("CONDITION", "messages[0].content == 'loop'")
    slow = model_with_template(tmp_path / "slow", template)
    cards = (
        ModelCard("slow", MODEL_TOKENS_MAX, 1, (1,), slow),
        ModelCard("tiny", MODEL_TOKENS_MAX, 1, (1,), model_directory),
    )

    def chat(url: str, model: str, text: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    backend = ScriptedBackend(cards, [5])
    with running(backend) as server, ThreadPoolExecutor(1) as threads:
        looping = threads.submit(chat, server.url, "slow", "loop")
        for _ in range(5):
            assert chat(server.url, "tiny", "hi").status_code == 200
        assert not looping.done()
        answer = looping.result()
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "chat_template_error"
        assert chat(server.url, "slow", "hi").status_code == 200


# -- web pages ------------------------------------------------------------------------------------

ASKED = b'{"model": "tiny", "prompt": "x"}'
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_what_any_page_may_send_is_refused_without_keys(
    path: str, kind: str | None, server: LocalServer, backend: ScriptedBackend
) -> None:
    before = len(backend.streams)
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(f"{server.url}{path}", content=ASKED, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 415
    assert len(backend.streams) == before


def test_with_a_key_the_type_does_not_matter(backend: ScriptedBackend) -> None:
    with running(backend, key_digests=[digest_of("key")]) as server:
        for path in PATHS:
            url = f"{server.url}{path}"
            assert httpx.post(url, content=ASKED, headers=JSON).status_code == 401
        headers = {"authorization": "Bearer key", "content-type": "text/plain"}
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, content=ASKED, headers=headers).status_code == 200


def test_pages_of_configured_origins_may_ask(backend: ScriptedBackend) -> None:
    origin, other = "https://chat.example.org", "https://example.com"
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    with (
        running(backend, page_origins=[origin], is_local=True) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):
        path = "/v1/completions"
        allowed = client.options(path, headers={"origin": origin, **preflight})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == origin
        refused = client.options(path, headers={"origin": other, **preflight})
        assert "access-control-allow-origin" not in refused.headers
        answer = client.post(path, content=ASKED, headers={"origin": origin, **JSON})
        assert answer.headers["access-control-allow-origin"] == origin
        admin = client.options("/admin/models", headers={"origin": origin, **preflight})
        assert "access-control-allow-origin" not in admin.headers
    with running(backend) as server:
        answer = httpx.options(f"{server.url}{path}", headers={"origin": origin, **preflight})
        assert "access-control-allow-origin" not in answer.headers


# -- what answers repeat --------------------------------------------------------------------------

ECHOED = "z" * 5000
BODIES = [
    {"model": ECHOED, "prompt": "x"},
    {"model": "tiny", "prompt": "x", "suffix": ECHOED},
    {"model": "tiny", "prompt": "x", "tools": [{ECHOED: ECHOED}]},
    {"model": "tiny", "prompt": "x", "response_format": {"type": ECHOED}},
    {"model": "tiny", "prompt": "x", "stop": ECHOED},
    {"model": "tiny", "prompt": "x", "logit_bias": {ECHOED: 1}},
    {"model": "tiny", "prompt": "x", ECHOED: "\ud800"},
    {"model": "tiny", "prompt": "x", "seed": ECHOED},
    {"model": "tiny", "messages": [{"role": ECHOED, "content": "x"}]},
    {"model": "tiny", "messages": [{"role": "tool", "content": ECHOED}]},
    {"model": "tiny", "messages": [{"role": "user", "content": [{"type": ECHOED}]}]},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", PATHS)
def test_no_error_repeats_more_than_a_little(
    path: str, body: dict[str, object], http: httpx.Client
) -> None:
    answer = http.post(path, content=json.dumps(body).encode())
    assert ECHOED[:201] not in answer.text


def test_nor_do_paths_and_models_that_are_published(http: httpx.Client) -> None:
    for method, path in (("GET", "/"), ("GET", "/v1/models/"), ("PUT", "/v1/models/")):
        assert ECHOED[:201] not in http.request(method, path + ECHOED).text


# -- half a character -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (r'{"model":"tiny","prompt":"\ud800"}', "prompt"),
        (r'{"model":"tiny","prompt":["a","b\udc00c"]}', "prompt[1]"),
        (r'{"model":"tiny","prompt":"x","stop":["\ud83e"]}', "stop[0]"),
        (r'{"model":"tiny","messages":[{"role":"user","content":"\ud800x"}]}', None),
    ],
)
def test_half_a_character_is_named(body: str, param: str | None, http: httpx.Client) -> None:
    path = "/v1/chat/completions" if param is None else "/v1/completions"
    answer = http.post(path, content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == (param or "messages[0].content")
    assert "surrogate" in error["message"]
