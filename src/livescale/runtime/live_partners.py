"""What a worker's instance and its partners in live pairs tell each other, with rows and KV.

The LiveBatcher says what is to be told; here it becomes parcels of the data plane, and parcels
become messages. All of it happens on the worker's main thread, between two Runs; only sending is
done by a thread per partner, because opening a connection and waiting for room take time. Whatever
goes wrong with a partner ends the cooperation with it, and nothing else.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from livescale.batching.live_batcher import LiveBatcher
from livescale.batching.live_messages import (
    BatchKey,
    Gone,
    Handover,
    KvLayer,
    LiveMessage,
    Offer,
    Taken,
    refusal,
)
from livescale.batching.live_taker import TakenBatch
from livescale.batching.run import Run, SequenceSpec
from livescale.engine.model_config import parse_config
from livescale.engine.model_files import model_spec
from livescale.engine.run_result import InstanceExecutor
from livescale.runtime.hosted_attempts import HostedAttempts
from livescale.runtime.live_parcels import Assembler, Letter, ParcelError, pack
from livescale.transfer.data_plane import DataPlane
from livescale.transfer.orders import TransferError
from livescale.types import Manifest, Value, WorkerRef

if TYPE_CHECKING:
    from livescale.engine.run_result import HiddenRows

_log = logging.getLogger(__name__)
# What a source asks for at once is some layers' KV of one batch, which is far less.
_WAITING_BYTES_MAX = 1 << 30
_PARCEL_COST_BYTES = 1 << 10
"""What a parcel takes that waits, besides its bytes."""


class HandedBatch(Value, frozen=True):
    """News: a batch was taken over, with `row_bytes` of rows. `gateways` are those of its requests
    ("": nobody waits for that one)."""

    taken: TakenBatch
    next_layer: int
    gateways: tuple[str, ...]
    row_bytes: int


class LivePartners:
    """The partners of a worker's instance, and the rows of its live batches.

    `attempts` are the instance's. `post` lets the main thread do
    something between two Runs; `tell_handed` is told of batches that were taken over, before any
    of their tokens.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        executor: InstanceExecutor,
        attempts: HostedAttempts,
        *,
        patience_s: float,
        post: Callable[[Callable[[], None]], None],
        tell_handed: Callable[[HandedBatch], None],
        waiting_bytes_max: int = _WAITING_BYTES_MAX,
    ) -> None:
        """`patience_s`: how long a partner may leave what it is told unread. `waiting_bytes_max`:
        of all parcels that came and wait for the end of a Run."""
        self._data_plane = data_plane
        self._executor = executor
        self._attempts = attempts
        self._patience_s = patience_s
        self._post = post
        self._tell_handed = tell_handed
        self._live: LiveBatcher | None = None
        self._row_bytes_per_token = 0
        self._vocabulary = 0
        self._rows: dict[BatchKey, HiddenRows] = {}
        #: who handed these batches over
        self._giver_of: dict[BatchKey, WorkerRef] = {}
        self._lines: dict[WorkerRef, _Line] = {}
        self._assemblers: dict[WorkerRef, Assembler] = {}
        #: bytes of rows and KV that came so far for this instance
        self.received_bytes = 0
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting_bytes = 0
        #: a parcel of theirs found no room, which they have not been given up for yet
        self._crowded_out: set[WorkerRef] = set()
        self._waiting_lock = threading.Lock()
        data_plane.on_parcel = self._came
        data_plane.on_disconnected = lambda peer: post(partial(self.lost, peer))

    # -- the instance ---------------------------------------------------------------------------

    def open(self, live: LiveBatcher, manifest: Manifest, source: WorkerRef | None) -> None:
        """From now on these are the partners of this instance. The connection with the `source`
        that it shall help is made meanwhile."""
        self._live = live
        self._row_bytes_per_token = model_spec(manifest).row_bytes_per_token
        where = f"config of {manifest.model}"
        self._vocabulary = parse_config(manifest.config_json, where).vocab_size
        self.received_bytes = 0
        if source is not None:
            self._data_plane.reach(source)

    def close_instance(self) -> None:
        """The instance is gone: its partners are told by its last words, or when they ask."""
        self.talk()
        self._live = None
        self._rows.clear()
        self._giver_of.clear()

    def close(self) -> None:
        """Nothing more is sent."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def talk(self) -> None:
        """Tell the partners what the batcher wants them to know."""
        live = self._live
        if live is None:
            return
        for peer, message in live.take_outbox(time.monotonic_ns()):
            self._send(peer, message)
        if self._rows or self._giver_of:
            for key in [key for key in (*self._rows, *self._giver_of) if not live.holds(key)]:
                self._rows.pop(key, None)
                self._giver_of.pop(key, None)

    def lost(self, peer: WorkerRef) -> None:
        """What was said to this worker, or came from it, may be lost, or it is gone."""
        self._assemblers.pop(peer, None)
        line = self._lines.pop(peer, None)
        if line is not None:
            line.close()
        if self._live is not None:
            self._live.peer_lost(peer)
        self._attempts.partner_lost(peer)

    # -- rows -----------------------------------------------------------------------------------

    def take_rows(self, key: BatchKey | None, run: Run) -> HiddenRows | None:
        """The hidden rows that go into a Run; its own they are from now on."""
        if key is None or run.span.start == 0:
            return None
        return self._rows.pop(key)

    def keep_rows(self, key: BatchKey, hidden: HiddenRows | None) -> None:
        """What came out of a Run, if that ended inside the model."""
        if hidden is not None:
            self._rows[key] = hidden

    # -- sending --------------------------------------------------------------------------------

    def _send(self, peer: WorkerRef, message: LiveMessage) -> None:
        gateways: tuple[str, ...] = ()
        content: list[memoryview] = []
        if isinstance(message, Handover):
            gateways = tuple(self._attempts.gateway_of(r.request) for r in message.requests)
            if message.rows:
                content = [self._executor.export_rows(self._rows[message.batch])]
        elif isinstance(message, KvLayer):
            assert self._live is not None
            if self._live.holds(message.batch):
                places = self._live.kv_places(message.batch)
                content = [self._executor.export_kv(message.layer - 1, t, n) for n, t in places]
            else:  # everything in it was cancelled since
                message = Gone(message.batch)
        line = self._lines.get(peer)
        if line is None:
            line = _Line(peer, self._data_plane, self._patience_s, self._broken)
            self._lines[peer] = line
        try:
            parcels = pack(Letter(message, gateways, sum(c.nbytes for c in content)), content)
            # Rows of the next batch are waited for by the source, KV only by decodes.
            line.put(parcels, can_wait=isinstance(message, KvLayer))
        except ParcelError as error:
            self._give_up(peer, str(error))

    def _broken(self, line: _Line, reason: str) -> None:
        """A line's thread gave up (called from there)."""
        self._post(partial(self._line_broken, line, reason))

    def _line_broken(self, line: _Line, reason: str) -> None:
        if self._lines.get(line.peer) is line:
            self._give_up(line.peer, reason)

    def _give_up(self, peer: WorkerRef, reason: str) -> None:
        _log.warning("no more live work with %s: %s", peer, reason)
        self.lost(peer)

    # -- receiving ------------------------------------------------------------------------------

    def _came(self, peer: WorkerRef, parcel: bytes) -> None:
        """On a thread of the data plane. A parcel that finds no room is lost."""
        size_bytes = len(parcel) + _PARCEL_COST_BYTES
        with self._waiting_lock:
            has_room = self._waiting_bytes + size_bytes <= self._waiting_bytes_max
            if has_room:
                self._waiting_bytes += size_bytes
            elif peer in self._crowded_out:
                return
            else:
                self._crowded_out.add(peer)
        if has_room:
            self._post(partial(self._received, peer, parcel))
        else:
            self._post(partial(self._overflowed, peer))

    def _received(self, peer: WorkerRef, parcel: bytes) -> None:
        with self._waiting_lock:
            self._waiting_bytes -= len(parcel) + _PARCEL_COST_BYTES
        assembler = self._assemblers.get(peer)
        if assembler is None:
            assembler = Assembler(partial(self._expected_bytes, peer))
            self._assemblers[peer] = assembler
        try:
            complete = assembler.take(parcel)
            if complete is not None:
                self._take(peer, *complete)
        except ParcelError as error:
            self._refuse(peer, str(error))

    def _overflowed(self, peer: WorkerRef) -> None:
        with self._waiting_lock:
            self._crowded_out.remove(peer)
        self._refuse(peer, "its parcels found no room among those that wait")

    def _refuse(self, peer: WorkerRef, reason: str) -> None:
        """What it said is no message, or was lost: it is told so where it waits for an answer."""
        _log.warning("no more live work with %s: %s", peer, reason)
        self._assemblers.pop(peer, None)
        if self._live is not None:
            self._live.peer_lost(peer, hears=True)

    def _expected_bytes(self, peer: WorkerRef, letter: Letter) -> int | None:
        """How many bytes come with a Handover or KvLayer; None if nobody wants them.

        Raises ParcelError for a batch that cannot be.
        """
        live, message = self._live, letter.message
        if live is None:
            return None
        if isinstance(message, Handover):
            pulled = live.taker.pulled(peer, message.batch)
            if pulled is None:
                return None
            self._check(live, message, pulled)
            return message.rows * self._row_bytes_per_token
        assert isinstance(message, KvLayer)
        key = message.batch
        if self._giver_of.get(key) != peer or not live.wants_kv(key, message.layer):
            return None
        return sum(self._executor.kv_layer_bytes(tokens) for tokens, _ in live.kv_places(key))

    def _check(self, live: LiveBatcher, message: Handover, pulled: tuple[int, ...]) -> None:
        """The batch is the one that was offered (some may have been cancelled), and can run here.
        Raises ParcelError."""
        layers, offered = live.batcher.span.stop - 2, sorted(pulled)
        done = [live.batcher.span.stop] if message.decoding else [0, *range(2, layers + 1)]
        if message.next_layer not in done:
            raise ParcelError(f"a batch that is at layer {message.next_layer} of {layers}")
        if len({spec.request for spec in message.requests}) < len(message.requests):
            raise ParcelError("a request is in the batch twice")
        for spec in sorted(message.requests, key=_known_tokens):
            known = _known_tokens(spec)
            fitting = [n for n in offered if n == known or (message.decoding and n > known)]
            if not fitting:
                raise ParcelError(f"{spec.request} has {known} tokens: not offered")
            offered.remove(fitting[0])
            if message.decoding and not spec.generated_ids:
                raise ParcelError(f"{spec.request} does not decode")
            ids = (*spec.prompt_ids, *spec.generated_ids)
            if not spec.prompt_ids or not all(0 <= i < self._vocabulary for i in ids):
                raise ParcelError(f"{spec.request} has no prompt, or not one of this model")
            most = len(spec.prompt_ids) + spec.sampling.output_tokens_max - 1
            if not _known_tokens(spec) <= most <= live.batcher.tokens_held_max():
                raise ParcelError(f"{spec.request} needs KV for {most} tokens")
            if spec.attempt in live.batcher.attempts(spec.request):
                raise ParcelError(f"attempt {spec.attempt} at {spec.request} is here already")

    def _take(self, peer: WorkerRef, letter: Letter, content: bytearray) -> None:
        """A message that is complete. Raises ParcelError."""
        live, message = self._live, letter.message
        if live is None:
            answer = refusal(message)
            if answer is not None:
                self._send(peer, answer)
            return
        if isinstance(message, Offer):
            _check_offer(message)
        carries = isinstance(message, Handover | KvLayer)
        wanted_bytes = self._expected_bytes(peer, letter) if carries else None
        if wanted_bytes is not None:
            # Asked for after its first part came: that was not kept.
            if len(content) != wanted_bytes:
                raise ParcelError(f"{type(message).__name__} came before it was asked for")
            self.received_bytes += len(content)
            if isinstance(message, Handover):
                self._take_handover(live, peer, letter, content)
                return
            assert isinstance(message, KvLayer)
            self._import_kv(message, content)
        own = live.requests() if isinstance(message, Taken) else []
        live.take_message(peer, message, time.monotonic_ns())
        if own:
            left = dict.fromkeys(live.requests())
            self._attempts.given(peer, [pair for pair in own if pair not in left])

    def _take_handover(
        self, live: LiveBatcher, peer: WorkerRef, letter: Letter, content: bytearray
    ) -> None:
        message = letter.message
        assert isinstance(message, Handover)
        if message.rows:
            rows = self._executor.import_rows(memoryview(content), message.rows)
            self._rows[message.batch] = rows
        self._giver_of[message.batch] = peer
        live.take_message(peer, message, time.monotonic_ns())
        for taken in live.taker.take_taken():
            news = HandedBatch(taken, message.next_layer, letter.gateways, len(content))
            self._tell_handed(news)

    def _import_kv(self, message: KvLayer, content: bytearray) -> None:
        """Write it into the blocks of the requests that are still here."""
        assert self._live is not None
        first, view = 0, memoryview(content)
        for tokens, block_table in self._live.kv_places(message.batch):
            stop = first + self._executor.kv_layer_bytes(tokens)
            if block_table:
                part = view[first:stop]
                self._executor.import_kv(message.layer - 1, block_table, tokens, part)
            first = stop

    def __repr__(self) -> str:
        return f"<LivePartners {sorted(self._lines)}, rows of {len(self._rows)} batches>"


class _Line:
    """What is told to one partner, one message behind the other, by a thread of its own."""

    def __init__(
        self,
        peer: WorkerRef,
        data_plane: DataPlane,
        patience_s: float,
        broken: Callable[[_Line, str], None],
    ) -> None:
        self.peer = peer
        self._data_plane = data_plane
        self._patience_s = patience_s
        self._broken = broken
        self._parcels: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._run, name=f"live work with {peer}", daemon=True).start()

    def put(self, parcels: list[bytes], *, can_wait: bool) -> None:
        for parcel in parcels:
            self._parcels.put((parcel, can_wait))

    def close(self) -> None:
        """What was not sent is not sent."""
        self._is_closed = True
        self._parcels.put(None)

    def _run(self) -> None:
        while (entry := self._parcels.get()) is not None and not self._is_closed:
            parcel, can_wait = entry
            try:
                self._data_plane.post(self.peer, parcel, self._patience_s, can_wait=can_wait)
            except TransferError as error:
                self._broken(self, str(error))
                return


def _check_offer(message: Offer) -> None:
    """Raises ParcelError for sizes that no requests have."""
    known, most = message.tokens, message.tokens_max
    if len(known) != len(most) or not all(0 < k <= m for k, m in zip(known, most, strict=True)):
        raise ParcelError(f"an offer of {known} tokens, at most {most}")


def _known_tokens(spec: SequenceSpec) -> int:
    return len(spec.prompt_ids) + len(spec.generated_ids)
