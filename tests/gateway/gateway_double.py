"""A Backend whose answers a test writes down, a tiny model directory, and a server around both.

The double stands at the gateway's own seam (`livescale.gateway.contract.backend`); everything in
front of it is real: HTTP over loopback, tokenization, templates.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import ASGIApp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from livescale.gateway.contract.backend import (
    AdministeredUsage,
    Client,
    GenerateRequest,
    ModelCard,
    ModelPhase,
    ModelRefused,
    ModelStatus,
    ModelWithdrawn,
    NewModel,
    Reading,
    SettingValue,
    TokenSink,
)
from livescale.gateway.contract.keys import KeyDigests, KeyRing
from livescale.gateway.contract.limits import Limits
from livescale.gateway.endpoints.app import AppOptions, create_app
from livescale.gateway.http.https import HttpsFiles
from livescale.gateway.http.server import serve
from livescale.values.types import FinishReason, TokenLogprobs, Value

WAIT_S = 20.0
LIMITS = Limits(body_bytes_max=100_000)
MODEL_TOKENS_MAX = 200
EMBEDDING_SIZE = 24
JSON = {"content-type": "application/json"}
NEVER_CHOSEN = 7
"""A token with a probability of 0, by the scripted logprobs."""
NOT_A_NUMBER = 8
"""A token whose scripted logprob is NaN."""
TEXT = "the quick brown fox 🦊 jumps over the lazy dog – naïve café 日本語 👩‍👩‍👧"
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a user asks and an assistant answers",
    "many models share one pool of workers",
]
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ raise_exception('tools cannot speak here') }}{% endif %}
<|{{ message.role }}|>{{ message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def build_model_directory(directory: Path) -> Path:
    """A byte-level tokenizer (any text survives it), its configuration and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(8)  # left over from training: the gateway must not cut prompts
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<s>", "special": True}
    config = {"bos_token": bos, "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@dataclass
class Script:
    """What the backend does with a request: refuse it, or emit tokens and then end some way.

    After the tokens: None ends as an engine does (EOS), an Exception is raised, an Event is
    waited for before EOS comes.
    """

    token_ids: list[int]
    then: Exception | asyncio.Event | None = None
    refusal: Exception | None = None
    #: of the prompt, as the first token tells
    cached_tokens: int = 0
    #: of the event loop, between two tokens: by default enough for one event per token
    turns_between: int = 12
    #: raised before the prompt is tokenized
    admission: Exception | None = None
    #: of every input (None: what tells which one it is)
    embedding: bytes | None = None


class Chunk(Value, frozen=True):
    """A TokenChunk."""

    index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None


def scripted_logprobs(token_id: int, likely: int | None) -> TokenLogprobs | None:
    """Some logprobs that tell which token they are for; two of them are no numbers."""
    if likely is None:
        return None
    top = tuple(((token_id + place) % 320, -place / 8 - token_id / 1e3) for place in range(likely))
    odd = {NEVER_CHOSEN: -math.inf, NOT_A_NUMBER: math.nan}
    return TokenLogprobs(odd.get(token_id, -token_id / 1e3), top)


def scripted_embedding(prompt_ids: Sequence[int]) -> bytes:
    """Values that tell which prompt they are for; some of them need all bits of an fp32."""
    values = (sum(prompt_ids) / (place + 3) for place in range(EMBEDDING_SIZE))
    return struct.pack(f"<{EMBEDDING_SIZE}f", *values)


@dataclass
class ScriptedStream:
    request: GenerateRequest
    script: Script
    eos: int
    #: set from the server's thread, waited for in the test's
    waiting: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_finished: bool = False
    is_stopped: bool = False
    queued_s: float | None = 0.25
    _pouring: asyncio.Task[None] | None = None

    def pour(self, sink: TokenSink) -> None:
        self._pouring = asyncio.create_task(self._pour(sink))

    async def _pour(self, sink: TokenSink) -> None:
        try:
            async for chunk in self._chunks():
                sink.take(chunk)
        except Exception as failure:
            sink.end(failure)
        else:
            sink.end(None)

    async def _chunks(self) -> AsyncIterator[Chunk]:
        sampling = self.request.sampling
        token_ids = [*self.script.token_ids]
        for index, token_id in enumerate(token_ids):
            reason = None
            if token_id in sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif index + 1 == sampling.output_tokens_max:
                reason = FinishReason.LENGTH
            self.is_finished = reason is not None
            yield self._chunk(index, token_id, reason)
            if reason is not None:
                return
            # Lets other requests run between two tokens, as in life, and this one's event leave.
            for _ in range(self.script.turns_between):
                await asyncio.sleep(0)
        if isinstance(self.script.then, Exception):
            raise self.script.then
        self.waiting.set()
        if isinstance(self.script.then, asyncio.Event):
            await self.script.then.wait()
        self.is_finished = True
        yield self._chunk(len(token_ids), self.eos, FinishReason.STOP)

    def _chunk(self, index: int, token_id: int, reason: FinishReason | None) -> Chunk:
        likely = self.request.sampling.logprobs
        cached_tokens = 0 if index else self.script.cached_tokens
        embeds = self.request.sampling.embeds
        return Chunk(
            index,
            token_id,
            reason,
            scripted_logprobs(token_id, likely),
            cached_tokens,
            (self.script.embedding or scripted_embedding(self.request.prompt_ids))
            if embeds
            else None,
        )

    def cancel(self) -> None:
        self._end()
        if not self.is_finished:
            self.cancelled.set()

    def stop(self) -> None:
        self._end()
        if not self.is_finished:  # its last token may have come just now
            self.is_finished = self.is_stopped = True

    def _end(self) -> None:
        if self._pouring is not None:
            self._pouring.cancel()


class ScriptedBackend:
    """Follows `script` for each request and keeps the streams it handed out.

    While there are `next_scripts`, each request takes the first of them instead.
    """

    def __init__(self, cards: tuple[ModelCard, ...], token_ids: list[int]) -> None:
        self._initial = cards
        self._watchers: list[Callable[[], None]] = []
        self._token_ids = token_ids
        self._lock = threading.Condition()
        self.streams: list[ScriptedStream] = []
        self.reset()

    def reset(self) -> None:
        self.script = Script(self._token_ids)
        self.next_scripts: list[Script] = []
        self.is_up = True
        self.streams.clear()
        #: change them with `offer`, in the server's loop
        self._cards = self._initial
        #: models that are not on offer: being prepared, or leaving
        self._others: dict[str, ModelPhase] = {}
        #: what becomes of the next models that are published or withdrawn
        self.change_problem: Exception | None = None
        self.added: list[NewModel] = []
        self.changed: list[tuple[str, dict[str, SettingValue]]] = []
        #: where the next published model's files are, if not where the client said
        self.added_directory: Path | None = None
        #: (model, requests, about so many prompt tokens) of each admission that was asked for
        self.admitted: list[tuple[str, int, int]] = []
        #: and whose it was
        self.admitted_clients: list[Client] = []

    def models(self) -> tuple[ModelCard, ...]:
        return self._cards

    def watch_models(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def offer(self, *cards: ModelCard, **others: ModelPhase) -> None:
        """These are the models from now on, and beside them others, by name, in some phase."""
        self._cards, self._others = cards, others
        for changed in self._watchers:
            changed()

    def model_states(self) -> tuple[ModelStatus, ...]:
        offered = [
            ModelStatus(
                card.name,
                str(card.directory),
                ModelPhase.SERVING,
                instances={"serving": 1},
                host_copies=1,
                usage=AdministeredUsage(0, 0, 0, 1.0),
            )
            for card in self._cards
        ]
        nothing = AdministeredUsage(0, 0, 0, 0.0)
        others = [
            ModelStatus(name, "/x", phase, {}, 0, nothing) for name, phase in self._others.items()
        ]
        return (*offered, *others)

    async def add_model(self, model: NewModel) -> str:
        if self.change_problem is not None:
            raise self.change_problem
        self.added.append(model)
        name = model.name or Path(model.directory).name
        directory = self.added_directory or Path(model.directory)
        card = dataclasses.replace(self._initial[0], name=name, directory=directory)
        self.offer(*self._cards, card)
        return name

    async def change_model(self, name: str, settings: Mapping[str, SettingValue]) -> None:
        if self.change_problem is not None:
            raise self.change_problem
        self.changed.append((name, dict(settings)))

    async def remove_model(self, name: str) -> None:
        if self.change_problem is not None:
            raise self.change_problem
        if name not in [card.name for card in self._cards]:
            raise ModelRefused("unknown", name)
        self.offer(*(card for card in self._cards if card.name != name))

    def is_ready(self) -> bool:
        return self.is_up

    def submit(self, requests: Sequence[GenerateRequest]) -> list[ScriptedStream]:
        self._check_offered(requests[0].model)
        streams = [self._open(request) for request in requests]
        with self._lock:
            self.streams += streams
            self._lock.notify_all()
        return streams

    def _open(self, request: GenerateRequest) -> ScriptedStream:
        script = self.next_scripts.pop(0) if self.next_scripts else self.script
        if script.refusal is not None:
            raise script.refusal
        return ScriptedStream(request, script, self._initial[0].eos_token_ids[0])

    def _check_offered(self, model: str) -> None:
        if model not in [card.name for card in self._cards]:
            raise ModelWithdrawn(model)

    @contextlib.contextmanager
    def admit(
        self, model: str, requests: int, prompt_tokens: int, client: Client
    ) -> Iterator[None]:
        self._check_offered(model)
        self.admitted.append((model, requests, prompt_tokens))
        self.admitted_clients.append(client)
        if self.script.admission is not None:
            raise self.script.admission
        yield

    def readings(self) -> list[Reading]:
        tiny, other = (("model", "tiny"),), (("model", "b"),)
        return [
            Reading("workers", 3),
            Reading("instances", 2, tiny),
            Reading("kv_cache_usage_perc", 0.5, tiny),
            Reading("num_preemptions_total", 7, tiny),
            Reading("instances", 1, other),
        ]

    def wait_for_stream(self, count: int = 1) -> ScriptedStream:
        """The `count`-th stream, once it has been asked for."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.streams) >= count, WAIT_S)
            return self.streams[count - 1]


class LocalServer:
    """`serve` in a thread of its own, on an ephemeral loopback port."""

    def __init__(
        self,
        app: ASGIApp,
        drain_s: float,
        limits: Limits,
        send_buffer_bytes: int | None = None,
        **files: str,
    ) -> None:
        """`files` of HTTPS, as `serve` takes them."""
        self._app = app
        self._files = HttpsFiles(**files)
        self._drain_s = drain_s
        self._limits = limits
        self._sock = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes is not None:  # connections inherit it
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self.thread = threading.Thread(target=lambda: uvloop.run(self._main()), daemon=True)
        self.thread.start()
        assert self._ready.wait(WAIT_S)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await serve(self._app, self._sock, self._stop, self._drain_s, self._limits, self._files)

    def call(self, function: object, *args: object) -> None:
        """Run a function in the server's loop."""
        self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def running(
    backend: ScriptedBackend,
    drain_s: float = 0.2,
    limits: Limits = LIMITS,
    key_digests: Sequence[str] = (),
    admin_key_digests: Sequence[str] = (),
    keys: KeyRing | None = None,
    siblings: Any = None,
    **options: Any,
) -> Iterator[LocalServer]:
    if key_digests or admin_key_digests:
        keys = KeyRing(KeyDigests(tuple(key_digests), tuple(admin_key_digests)))
    app = create_app(
        backend, AppOptions("gw", **options), limits=limits, keys=keys, siblings=siblings
    )
    server = LocalServer(app, drain_s, limits)
    try:
        yield server
    finally:
        if server.thread.is_alive():
            server.stop()
            server.join()


def sse_data(text: str) -> list[str]:
    """The data of each event; every event is exactly one data line and an empty one."""
    assert text.endswith("\n\n"), text
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events), text
    return [event.removeprefix("data: ") for event in events]
