"""The gateway's side of the pool, with a controller and a worker that a test speaks for.

Whatever happens to requests, what waits and what runs is counted right, and the bounds hold.
"""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from poured import Poured, submitted

from effort import examples
from livescale.config.model import ModelConfig, RoleReplicas, RolesConfig
from livescale.config.pool import PoolConfig
from livescale.gateway.contract.backend import (
    Client,
    GenerateRequest,
    GenerationFailed,
    ModelPhase,
    ModelRefused,
    ModelWithdrawn,
    NewModel,
    NoInstance,
    QueueFull,
    Unavailable,
)
from livescale.messages.attempts import (
    AttemptReturned,
    AttemptTaken,
    Cancel,
    Disown,
)
from livescale.messages.commands import Dispatch, FailRequest
from livescale.messages.epochs import FIRST_EPOCH, Acting, ControllerEpoch
from livescale.messages.events import RequestArrived, RequestCancelled, RequestEnded
from livescale.runtime.gateway_process.pool_backend import PoolBackend
from livescale.runtime.wire.boot import GatewayBoot
from livescale.runtime.wire.doors import CONTROLLER_DOOR, Door, token_door
from livescale.runtime.wire.protocol import (
    AddModel,
    Address,
    AnyMessage,
    Catalog,
    CatalogEntry,
    GatewayHello,
    ModelAnswer,
    ModelLoad,
    ModelProblem,
    Peer,
    Peers,
    PoolStatus,
    PublishedModel,
    RemoveModel,
    RequestTimed,
    Submit,
    ToController,
    Token,
    Tokens,
    ToTokenServer,
)
from livescale.runtime.wire.wire_channel import Wire
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.types import (
    FinishReason,
    LayerEntry,
    Manifest,
    ModelSpec,
    Outcome,
    Role,
    SamplingParams,
    WorkerRef,
)
from slowness import patient

pytestmark = pytest.mark.usefixtures("machine")

WAIT_S = 20.0
REQUESTS_MAX, TOKENS_MAX = 4, 40
MODELS = ("a", "b")


def entry(name: str) -> CatalogEntry:
    layers = (LayerEntry(0, 0, 1, (), "", ""),)
    spec = ModelSpec(name, (1,), 1, 4096)
    return CatalogEntry(spec, Manifest(name, "{}", "F32", layers), "/nowhere", (1,), 4096)


async def loop_turns() -> None:
    """What the loop has begun to open or to close is open or closed."""
    for _ in range(5):
        await asyncio.sleep(0)


class Listener:
    """Accepts wires at a door. When it is closed no connection is left."""

    def __init__(
        self,
        door: str,
        incoming: object,
        heed: Callable[[object], None],
        epoch: ControllerEpoch = FIRST_EPOCH,
    ) -> None:
        self._door = Door("", door, self._serve)
        self._epoch = epoch
        self._incoming = incoming
        self._heed = heed
        self._server: asyncio.Server | None = None
        self._wires: list[Wire[object]] = []

    async def start(self) -> Address:
        self._server = await asyncio.start_server(self._door.accept, "127.0.0.1", 0)
        return self.address

    @property
    def address(self) -> Address:
        assert self._server is not None
        return Address(*self._server.sockets[0].getsockname()[:2])

    def send(self, message: AnyMessage) -> None:
        """To who came last."""
        self._wires[-1].send(message)

    def drop(self) -> None:
        """Cut off who came last."""
        self._wires[-1].close()

    async def close(self) -> None:
        assert self._server is not None
        # A server that is closed between accepting and making a transport of it leaks the socket.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await loop_turns()
        self._server.close()
        for wire in self._wires:
            wire.close()
        await loop_turns()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire: Wire[object] = Wire(reader, writer, self._incoming)
        self._wires.append(wire)
        if self._incoming is ToController:
            wire.send(Acting(self._epoch))
        async for message in wire:
            self._heed(message)


class Standby(Listener):
    """A controller that says which life it is when the test lets it act."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[object] = asyncio.Queue()
        self.acts = asyncio.Event()
        super().__init__(
            CONTROLLER_DOOR, ToController, self.told.put_nowait, ControllerEpoch(number=1)
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.acts.wait()
        await super()._serve(reader, writer)


class SecondWorker:
    """A worker that says what the test says."""

    def __init__(self, ref: WorkerRef) -> None:
        self.ref = ref
        self.is_known = asyncio.Event()
        self.heard: asyncio.Queue[object] = asyncio.Queue()
        self._listener = Listener(token_door(ref), ToTokenServer, self._heed)

    async def start(self) -> Peer:
        return Peer(self.ref, await self._listener.start())

    def _heed(self, message: object) -> None:
        if isinstance(message, GatewayHello):
            self.is_known.set()
        else:
            self.heard.put_nowait(message)

    def say(self, message: Tokens | AttemptTaken | AttemptReturned) -> None:
        self._listener.send(message)

    async def told(self) -> object:
        return await asyncio.wait_for(self.heard.get(), patient(WAIT_S))

    async def close(self) -> None:
        await self._listener.close()


class ScriptedPool:
    """Controller and worker of one gateway: they say what the test says."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[object] = asyncio.Queue()
        self.submitted: asyncio.Queue[Submit] = asyncio.Queue()
        self.incarnation = 0
        #: what else the first worker was told
        self.worker_told: asyncio.Queue[object] = asyncio.Queue()
        self._others: list[SecondWorker] = []
        self._controller = Listener(CONTROLLER_DOOR, ToController, self.told.put_nowait)
        self._worker: Listener | None = None

    async def start(self) -> Address:
        return await self._controller.start()

    @property
    def worker(self) -> WorkerRef:
        return WorkerRef(0, self.incarnation)

    def say(self, message: Dispatch | Peers | PoolStatus | Catalog | ModelAnswer) -> None:
        self._controller.send(message)

    def emit(self, *tokens: Token) -> None:
        assert self._worker is not None
        self._worker.send(Tokens(tokens))

    async def add_worker(self, number: int) -> SecondWorker:
        """One more, beside the first."""
        assert self._worker is not None
        worker = SecondWorker(WorkerRef(number))
        self._others.append(worker)
        peers = [Peer(self.worker, self._worker.address), await worker.start()]
        self.say(Peers(tuple(peers)))
        await asyncio.wait_for(worker.is_known.wait(), patient(WAIT_S))
        return worker

    async def heard(self, kind: type) -> object:
        """The next message of a kind that the gateway told the controller."""
        while True:
            message = await asyncio.wait_for(self.told.get(), patient(WAIT_S))
            if isinstance(message, kind):
                return message

    async def start_worker(self) -> None:
        self._worker = Listener(token_door(self.worker), ToTokenServer, self._heed_worker)
        self.say(Peers((Peer(self.worker, await self._worker.start()),)))

    async def lose_worker(self) -> None:
        """Its connection breaks, and nobody answers where it was."""
        if self._worker is not None:
            await self._worker.close()
            self._worker = None

    def lose_controller(self) -> None:
        """The gateway comes back to the next one."""
        self._controller.drop()

    def worker_says(self, message: AttemptTaken | AttemptReturned) -> None:
        assert self._worker is not None
        self._worker.send(message)

    async def worker_hears(self) -> object:
        return await asyncio.wait_for(self.worker_told.get(), patient(WAIT_S))

    async def close(self) -> None:
        await self.lose_worker()
        for other in self._others:
            await other.close()
        await self._controller.close()

    def _heed_worker(self, message: object) -> None:
        if isinstance(message, Submit):
            self.submitted.put_nowait(message)
        elif not isinstance(message, GatewayHello):
            self.worker_told.put_nowait(message)


@asynccontextmanager
async def pool_and_gateway(
    queue_timeout_s: float | None = None, others: tuple[Address, ...] = ()
) -> AsyncIterator[tuple[ScriptedPool, PoolBackend]]:
    pool = ScriptedPool()
    backend = PoolBackend(boot(await pool.start(), queue_timeout_s, others))
    running = asyncio.create_task(backend.run())
    await pool.heard(GatewayHello)
    try:
        yield pool, backend
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pool.close()


def boot(
    controller: Address, queue_timeout_s: float | None = None, others: tuple[Address, ...] = ()
) -> GatewayBoot:
    return GatewayBoot(
        secret="",
        gateway="g0",
        listen_fd=-1,
        controller=controller,
        other_controllers=others,
        catalog=Catalog(tuple(published(name) for name in MODELS)),
        pool=PoolConfig(
            queue_requests_max=REQUESTS_MAX,
            queue_prompt_tokens_max=TOKENS_MAX,
            queue_timeout_s=queue_timeout_s,
            slo="ttft=1s",
            lost_after_ms=60_000,
        ),
        key_digests=(),
    )


def published(
    name: str, instances_min: int = 0, priority: int = 0, is_leaving: bool = False
) -> PublishedModel:
    listed = entry(name)
    policy = ModelPolicy(listed.spec, instances_min, 3, priority=priority)
    settings = ModelConfig(path=listed.directory, name=name)
    return PublishedModel(listed, policy, settings, is_leaving)


async def publish(pool: ScriptedPool, backend: PoolBackend, *models: str, **leaving: bool) -> None:
    """These are the pool's models from now on; returns when the gateway knows."""
    known = asyncio.Event()
    backend.watch_models(known.set)
    listed = [published(name) for name in models]
    listed += [published(name, is_leaving=is_leaving) for name, is_leaving in leaving.items()]
    pool.say(Catalog(tuple(listed)))
    await asyncio.wait_for(known.wait(), patient(WAIT_S))


@dataclass
class Oracle:
    """What a list would say: every request that is not over, in the order it came."""

    streams: dict[str, Poured] = field(default_factory=dict)
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    offered: tuple[str, ...] = MODELS

    def waiting(self, model: str) -> list[GenerateRequest]:
        return [
            request
            for name, request in self.asked.items()
            if request.model == model and name not in self.running
        ]

    def end(self, name: str) -> None:
        del self.asked[name], self.streams[name]
        if name in self.running:
            self.running.remove(name)


ops = st.lists(
    st.tuples(st.just("submit"), st.sampled_from(MODELS), st.integers(1, 3), st.integers(1, 25))
    | st.tuples(st.sampled_from(["dispatch", "finish", "cancel"]), st.integers(0, 9))
    | st.tuples(st.just("hold"), st.sampled_from(MODELS), st.integers(1, 3), st.integers(1, 25))
    | st.tuples(st.just("offer"), st.lists(st.sampled_from(MODELS), unique=True))
    | st.tuples(st.just("lose"), st.just(0)),
    min_size=5,
    max_size=40,
)


@given(ops)
@settings(max_examples=examples(200))
def test_what_waits_and_what_runs_is_counted(story: list[tuple]) -> None:
    asyncio.run(asyncio.wait_for(tell(story), patient(WAIT_S)))


async def tell(story: list[tuple]) -> None:
    async with pool_and_gateway() as (pool, backend):
        await pool.start_worker()
        oracle = Oracle()
        for number, (what, *details) in enumerate(story):
            if what == "submit":
                submit(backend, oracle, number, *details)
            elif what == "hold":
                hold(backend, oracle, *details)
            elif what == "lose":
                await lose(pool, oracle)
            elif what == "offer":
                oracle.offered = tuple(details[0])
                others = {model: True for model in MODELS if model not in oracle.offered}
                await publish(pool, backend, *oracle.offered, **others)
            else:
                await move(pool, oracle, what, *details)
            compare(backend, oracle)
        for stream in list(oracle.streams.values()):
            stream.cancel()
        compare(backend, Oracle())
        # What is withdrawn and empty leaves nothing behind.
        await publish(pool, backend, "c")
        labels = [label for reading in backend.readings() for label in reading.labels]
        shown = {text for key, text in labels if key == "model"}
        assert shown == {"c"}


def fits(oracle: Oracle, model: str, count: int, tokens: int) -> bool:
    waiting = oracle.waiting(model)
    held = sum(len(request.prompt_ids) for request in waiting)
    return not waiting or (len(waiting) + count <= REQUESTS_MAX and held + tokens <= TOKENS_MAX)


def submit(
    backend: PoolBackend, oracle: Oracle, number: int, model: str, count: int, tokens: int
) -> None:
    requests = [
        GenerateRequest(f"{number}.{n}", model, (5,) * tokens, SamplingParams(10))
        for n in range(count)
    ]
    if model not in oracle.offered:
        with pytest.raises(ModelWithdrawn):
            backend.submit(requests)
        return
    if not fits(oracle, model, count, count * tokens):
        with pytest.raises(QueueFull):
            backend.submit(requests)
        return
    for request, stream in zip(requests, submitted(backend, requests), strict=True):
        oracle.asked[request.request] = request
        oracle.streams[request.request] = stream
        oracle.attempts[request.request] = 0


def hold(backend: PoolBackend, oracle: Oracle, model: str, count: int, tokens: int) -> None:
    """Places that are held while somebody tokenizes count like the others, and come back."""
    admission = backend.admit(model, count, tokens, Client())
    if model not in oracle.offered:
        with pytest.raises(ModelWithdrawn):
            admission.__enter__()
        return
    if not fits(oracle, model, count, tokens):
        with pytest.raises(QueueFull):
            admission.__enter__()
        return
    with admission:
        assert reading(backend, "num_requests_waiting", model) == (
            len(oracle.waiting(model)) + count
        )


async def move(pool: ScriptedPool, oracle: Oracle, what: str, place: int) -> None:
    names = [
        name
        for name in oracle.asked
        if what == "cancel" or (name in oracle.running) == (what == "finish")
    ]
    if not names:
        return
    name = names[place % len(names)]
    if what == "cancel":
        oracle.streams[name].cancel()
        oracle.end(name)
    elif what == "dispatch":
        oracle.attempts[name] += 1
        pool.say(Dispatch(name, oracle.attempts[name], 1, pool.worker))
        await pool.submitted.get()
        oracle.running.append(name)
        queued_s = oracle.streams[name].queued_s
        assert queued_s is not None
        assert queued_s >= 0
    else:
        pool.emit(Token(name, oracle.attempts[name], 0, 7, FinishReason.STOP))
        [chunk] = [chunk async for chunk in oracle.streams[name]]
        assert chunk.finish_reason is FinishReason.STOP
        oracle.end(name)


async def lose(pool: ScriptedPool, oracle: Oracle) -> None:
    while not pool.told.empty():
        pool.told.get_nowait()
    await pool.lose_worker()
    for _ in oracle.running:
        ended = await pool.heard(RequestEnded)
        assert isinstance(ended, RequestEnded)
        assert ended.outcome is Outcome.WORKER_LOST
        assert isinstance(await pool.heard(RequestArrived), RequestArrived)
    oracle.running.clear()
    pool.incarnation += 1
    await pool.start_worker()


def compare(backend: PoolBackend, oracle: Oracle) -> None:
    for model in MODELS:
        waiting = oracle.waiting(model)
        tokens = sum(len(request.prompt_ids) for request in waiting)
        running = sum(oracle.asked[name].model == model for name in oracle.running)
        assert reading(backend, "num_requests_waiting", model) == len(waiting)
        assert reading(backend, "waiting_prompt_tokens", model) == tokens
        assert reading(backend, "num_requests_running", model) == running


def reading(backend: PoolBackend, name: str, model: str) -> float:
    """0 for a model that is not there."""
    values = [
        reading.value
        for reading in backend.readings()
        if reading.name == name and ("model", model) in reading.labels
    ]
    assert len(values) <= 1
    return sum(values)


def test_nothing_is_accepted_before_a_controller_was_there() -> None:
    backend = PoolBackend(boot(Address("127.0.0.1", 0)))
    with pytest.raises(Unavailable):
        backend.submit([GenerateRequest("r", "a", (5,), SamplingParams(1))])
    with pytest.raises(Unavailable), backend.admit("a", 1, 1, Client()):
        pass


def test_more_generations_than_may_wait_are_taken_when_nobody_waits() -> None:
    """Refused then, they would be refused forever."""

    async def story() -> None:
        async with pool_and_gateway() as (_, backend):
            many = [
                GenerateRequest(f"r{n}", "a", (5,) * TOKENS_MAX, SamplingParams(1))
                for n in range(REQUESTS_MAX + 1)
            ]
            streams = submitted(backend, many)
            with pytest.raises(QueueFull):
                backend.submit([GenerateRequest("late", "a", (5,), SamplingParams(1))])
            assert [stream.queued_s for stream in streams] == [None] * len(many)
            # Another model has a line of its own.
            assert submitted(backend, [GenerateRequest("other", "b", (5,), SamplingParams(1))])

    asyncio.run(story())


def test_a_request_that_no_instance_takes_ends() -> None:
    """Dispatched ones go on; one whose worker is lost waits anew, and no longer than others."""

    # Long enough for a dispatch that is on its way.
    limit_s = round(patient(1.5), 1)

    async def story() -> None:
        async with pool_and_gateway(queue_timeout_s=limit_s) as (pool, backend):
            await pool.start_worker()
            [taken] = submitted(backend, [GenerateRequest("taken", "a", (5,), SamplingParams(9))])
            pool.say(Dispatch("taken", 1, 1, pool.worker))
            await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
            [waits] = submitted(backend, [GenerateRequest("waits", "a", (5, 6), SamplingParams(9))])
            with pytest.raises(NoInstance, match=rf"'a'.* {re.escape(f'{limit_s:g}')} s") as waited:
                await anext(aiter(waits))
            assert waited.value.retry_after_s > 0
            assert waited.value.code == "queue_timeout"
            assert (await pool.heard(RequestCancelled)).request == "waits"
            timed = await pool.heard(RequestTimed)
            assert timed.line.outcome is Outcome.FAILED
            assert f"{limit_s:g} s" in timed.line.error
            assert timed.line.first_dispatched_ns is None
            assert reading(backend, "num_requests_waiting", "a") == 0
            assert reading(backend, "num_requests_running", "a") == 1
            # Its dispatch may have been on the way.
            pool.say(Dispatch("waits", 1, 1, pool.worker))
            assert (await pool.heard(RequestEnded)).outcome is Outcome.CANCELLED

            pool.emit(Token("taken", 1, 0, 7, None))
            chunks = aiter(taken)
            assert (await anext(chunks)).token_id == 7
            await pool.lose_worker()
            with pytest.raises(NoInstance) as waited:
                await anext(chunks)
            assert waited.value.code == "queue_timeout"
            timed = await pool.heard(RequestTimed)
            assert len(timed.line.token_ns) == 1
            assert reading(backend, "num_requests_waiting", "a") == 0

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_worker_whose_connection_is_being_made_is_sent_all_of_it_in_order() -> None:
    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            await pool.start_worker()
            [stream] = submitted(backend, [GenerateRequest("r", "a", (5,), SamplingParams(9))])
            pool.say(Dispatch("r", 1, 1, pool.worker))
            while stream.queued_s is None:
                await asyncio.sleep(0)
            stream.cancel()
            assert (await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))).request == "r"
            assert await pool.worker_hears() == Cancel("r", 1)

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_line_of_the_record_has_all_times_in_order() -> None:
    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            await pool.start_worker()
            asked = GenerateRequest("r", "a", (5,), SamplingParams(9), None, arrived_ns=1)
            [stream] = submitted(backend, [asked])
            for attempt in (1, 2):
                pool.say(Dispatch("r", attempt, 1, pool.worker))
                await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
                if attempt == 1:
                    await pool.lose_worker()
                    await pool.heard(RequestEnded)
                    pool.incarnation += 1
                    await pool.start_worker()
            pool.emit(Token("r", 2, 0, 7, None), Token("r", 2, 1, 7, FinishReason.STOP))
            assert len([chunk async for chunk in stream]) == 2
            line = (await pool.heard(RequestTimed)).line
            times = [line.arrived_ns, line.queued_ns, line.first_dispatched_ns]
            times += [line.dispatched_ns, *line.token_ns, line.finished_ns]
            assert times == sorted(times)
            assert line.first_dispatched_ns < line.dispatched_ns
            assert line.attempts == 2

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_request_that_is_over_leaves_nothing_for_the_garbage_collector() -> None:
    """Stream, sink and transcript know one another. Collections would stop all other streams."""

    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            await pool.start_worker()
            [stream] = submitted(backend, [GenerateRequest("r", "a", (5,), SamplingParams(9))])
            pool.say(Dispatch("r", 1, 1, pool.worker))
            await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
            pool.emit(Token("r", 1, 0, 7, FinishReason.STOP))
            assert len([chunk async for chunk in stream]) == 1
            kept = weakref.ref(stream)
            gc.disable()
            try:
                del stream
                await loop_turns()
                assert kept() is None
            finally:
                gc.enable()

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_request_of_a_withdrawn_model_goes_on_where_its_worker_died() -> None:
    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            await pool.start_worker()
            [stream] = submitted(backend, [GenerateRequest("r", "a", (5,), SamplingParams(9))])
            pool.say(Dispatch("r", 1, 1, pool.worker))
            await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
            pool.emit(Token("r", 1, 0, 7, None))
            chunks = aiter(stream)
            assert (await anext(chunks)).token_id == 7
            await publish(pool, backend, "b", a=True)
            with pytest.raises(ModelWithdrawn):
                backend.submit([GenerateRequest("late", "a", (5,), SamplingParams(9))])
            assert [state.state for state in backend.model_states()] == [
                ModelPhase.LEAVING,
                ModelPhase.AT_ZERO,
            ]
            await pool.lose_worker()
            await pool.heard(RequestEnded)
            pool.incarnation += 1
            await pool.start_worker()
            pool.say(Dispatch("r", 2, 1, pool.worker))
            submit = await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
            assert submit.generated_ids == (7,)
            pool.emit(
                Token("r", 1, 1, 66, None),  # of the attempt that was lost
                Token("r", 2, 0, 66, None),  # known already
                Token("r", 2, 1, 8, FinishReason.STOP),
            )
            assert [chunk.token_id async for chunk in chunks] == [8]

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_what_waits_for_a_model_that_is_gone_ends_as_the_controller_says() -> None:
    """Which answers the announcement of a request for a model that it does not know."""

    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            [stream] = submitted(backend, [GenerateRequest("r", "a", (5,), SamplingParams(9))])
            await publish(pool, backend, "b", a=True)
            await publish(pool, backend, "b")
            assert reading(backend, "num_requests_waiting", "a") == 1
            pool.say(FailRequest("r", "a is not served"))
            with pytest.raises(GenerationFailed, match="a is not served"):
                await anext(aiter(stream))
            assert "a" not in [dict(one.labels).get("model") for one in backend.readings()]

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


# -- attempts that move ---------------------------------------------------------------------------


@asynccontextmanager
async def one_request_on_the_first_of_two() -> AsyncIterator[
    tuple[ScriptedPool, PoolBackend, SecondWorker, Poured]
]:
    async with pool_and_gateway() as (pool, backend):
        await pool.start_worker()
        other = await pool.add_worker(1)
        [stream] = submitted(backend, [GenerateRequest("r", "a", (5,), SamplingParams(9))])
        pool.say(Dispatch("r", 1, 1, pool.worker))
        await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
        yield pool, backend, other, stream


def test_tokens_are_accepted_from_whoever_owns_the_attempt() -> None:
    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, backend, other, stream):
            # Not taken over yet.
            other.say(Tokens((Token("r", 1, 0, 66, None),)))
            assert await other.told() == Disown("r", 1, 0)
            other.say(AttemptTaken("r", 1))
            other.say(Tokens((Token("r", 1, 0, 7, None),)))
            chunks = aiter(stream)
            assert (await anext(chunks)).token_id == 7
            # The last owner does not know it yet.
            pool.emit(Token("r", 1, 1, 66, None))
            assert await pool.worker_hears() == Disown("r", 1, 1)
            assert reading(backend, "num_requests_running", "a") == 1
            other.say(Tokens((Token("r", 1, 1, 8, FinishReason.STOP),)))
            assert [chunk.token_id async for chunk in chunks] == [8]
            line = (await pool.heard(RequestTimed)).line
            assert (line.worker, line.attempts) == (other.ref, 1)
            # Nobody reads it any more.
            other.say(AttemptTaken("r", 1))
            assert await other.told() == Cancel("r", 1)

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_of_two_takers_the_later_owns_the_attempt_whichever_word_comes_first() -> None:
    """To another worker and back: the other one's word was late."""

    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, _, other, stream):
            pool.worker_says(AttemptTaken("r", 1, 2))
            pool.emit(Token("r", 1, 0, 7, None))
            chunks = aiter(stream)
            assert (await anext(chunks)).token_id == 7
            other.say(AttemptTaken("r", 1, 1))
            other.say(Tokens((Token("r", 1, 1, 66, None),)))
            assert await other.told() == Disown("r", 1, 2)
            pool.emit(Token("r", 1, 1, 8, FinishReason.STOP))
            assert [chunk.token_id async for chunk in chunks] == [8]

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_new_owner_may_repeat_what_the_last_one_had_sent() -> None:
    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, _, other, stream):
            pool.emit(Token("r", 1, 0, 7, None), Token("r", 1, 1, 8, None))
            chunks = aiter(stream)
            assert [(await anext(chunks)).token_id for _ in range(2)] == [7, 8]
            # The first one took it back, but it was only late.
            other.say(AttemptTaken("r", 1))
            for index, token_id in enumerate((7, 8, 9)):
                other.say(Tokens((Token("r", 1, index, token_id, None),)))
            assert (await anext(chunks)).token_id == 9
            other.say(Tokens((Token("r", 1, 3, 10, FinishReason.STOP),)))
            assert [chunk.token_id async for chunk in chunks] == [10]
            assert other.heard.empty()

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


@pytest.mark.parametrize(
    "token", [Token("r", 1, 2, 9, None), Token("r", 1, 0, 9, FinishReason.STOP)]
)
def test_an_owner_who_goes_on_elsewhere_loses_the_attempt(token: Token) -> None:
    """Its last owner's tokens came too late to be accepted, or it ended before them."""

    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, backend, other, stream):
            await pool.heard(RequestArrived)
            pool.emit(Token("r", 1, 0, 7, None))
            chunks = aiter(stream)
            assert (await anext(chunks)).token_id == 7
            other.say(AttemptTaken("r", 1))
            other.say(Tokens((token,)))
            assert await other.told() == Disown("r", 1, 1)
            ended = await pool.heard(RequestEnded)
            assert (ended.attempt, ended.outcome, ended.worker) == (1, Outcome.RETURNED, None)
            assert (await pool.heard(RequestArrived)).worker is None
            assert reading(backend, "num_requests_waiting", "a") == 1
            pool.say(Dispatch("r", 2, 1, other.ref))
            assert (await other.told()).generated_ids == (7,)
            other.say(Tokens((Token("r", 2, 1, 8, FinishReason.STOP),)))
            assert [chunk.token_id async for chunk in chunks] == [8]

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_whoever_computes_what_nobody_wants_is_told_to_stop_once() -> None:
    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, backend, other, stream):
            pool.emit(Token("r", 1, 0, 7, FinishReason.STOP))
            assert [chunk.token_id async for chunk in aiter(stream)] == [7]
            for index in range(3):
                other.say(Tokens((Token("r", 1, index, 66, None),)))
            assert await other.told() == Cancel("r", 1)
            # Of another request it is told again, and of one that was cancelled no second time.
            [stream] = submitted(backend, [GenerateRequest("s", "a", (5,), SamplingParams(9))])
            pool.say(Dispatch("s", 1, 1, pool.worker))
            await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
            for index in range(3):
                other.say(Tokens((Token("s", 1, index, 66, None),)))
            assert await other.told() == Disown("s", 1, 0)
            stream.cancel()
            for index in range(3):
                pool.emit(Token("s", 1, index, 66, None))
            assert await pool.worker_hears() == Cancel("s", 1)
            # Each of them has said all of it when this is answered.
            for worker_says in (other.say, pool.worker_says):
                worker_says(AttemptTaken("r", 1))
            assert await other.told() == Cancel("r", 1)
            assert await pool.worker_hears() == Cancel("r", 1)

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_an_attempt_may_be_taken_over_from_one_who_died() -> None:
    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, backend, other, stream):
            await pool.lose_worker()
            assert (await pool.heard(RequestEnded)).outcome is Outcome.WORKER_LOST
            assert reading(backend, "num_requests_waiting", "a") == 1
            other.say(AttemptTaken("r", 1))
            other.say(Tokens((Token("r", 1, 0, 7, None),)))
            assert (await anext(aiter(stream))).token_id == 7
            assert reading(backend, "num_requests_waiting", "a") == 0
            assert reading(backend, "num_requests_running", "a") == 1
            stream.cancel()
            assert await other.told() == Cancel("r", 1)

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_newer_attempt_disowns_the_older_one() -> None:
    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, _, other, stream):
            other.say(AttemptTaken("r", 1))
            other.say(Tokens((Token("r", 1, 0, 7, None),)))
            chunks = aiter(stream)
            assert (await anext(chunks)).token_id == 7
            pool.say(Dispatch("r", 2, 1, pool.worker))
            submit = await asyncio.wait_for(pool.submitted.get(), patient(WAIT_S))
            assert (submit.attempt, submit.generated_ids) == (2, (7,))
            assert await other.told() == Disown("r", 1)
            other.say(AttemptTaken("r", 1))  # too late
            assert await other.told() == Disown("r", 1)
            pool.emit(Token("r", 2, 1, 8, FinishReason.STOP))
            assert [chunk.token_id async for chunk in chunks] == [8]

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_an_attempt_that_is_given_back_waits_again() -> None:
    async def story() -> None:
        async with one_request_on_the_first_of_two() as (pool, backend, other, _):
            await pool.heard(RequestArrived)
            other.say(AttemptReturned("r", 1))  # it is not that one's to give
            pool.worker_says(AttemptReturned("r", 2))  # nor that attempt
            pool.worker_says(AttemptReturned("r", 1))
            again = await pool.heard(RequestArrived)
            assert (again.attempt, again.worker) == (1, None)
            assert reading(backend, "num_requests_waiting", "a") == 1
            # A controller that was not there when the worker gave it back hears of it here.
            pool.lose_controller()
            await pool.heard(RequestArrived)
            pool.say(Dispatch("r", 2, 1, other.ref))
            assert isinstance(await other.told(), Submit)
            other.say(AttemptReturned("r", 2))
            ended = await pool.heard(RequestEnded)
            assert (ended.attempt, ended.outcome) == (2, Outcome.RETURNED)
            assert (await pool.heard(RequestArrived)).worker is None

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


# -- models ---------------------------------------------------------------------------------------


def test_administrators_questions_are_answered() -> None:
    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            model = NewModel("/models/c", "c", {"min_replicas": 0, "max_replicas": None})
            for problem in (None, *ModelProblem):
                adding = asyncio.create_task(backend.add_model(model))
                removing = asyncio.create_task(backend.remove_model("a"))
                add, remove = await pool.heard(AddModel), await pool.heard(RemoveModel)
                assert (add.path, add.name, add.settings) == ("/models/c", "c", model.settings)
                assert remove.name == "a"
                # In any order; an answer to nothing is no harm.
                pool.say(ModelAnswer("other", "x"))
                pool.say(ModelAnswer(remove.call, "a", problem, "because"))
                pool.say(ModelAnswer(add.call, "c", problem, "because"))
                pool.say(ModelAnswer(add.call, "c"))
                if problem is None:
                    assert await adding == "c"
                    await removing
                    continue
                for asked in (adding, removing):
                    with pytest.raises(ModelRefused, match="because") as refused:
                        await asked
                    assert refused.value.problem == problem.value

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_lost_controller_answers_nothing_and_the_next_one_can_be_asked() -> None:
    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            removing = asyncio.create_task(backend.remove_model("a"))
            await pool.heard(RemoveModel)
            pool.lose_controller()
            with pytest.raises(Unavailable, match="restarted"):
                await removing
            await pool.heard(GatewayHello)
            again = asyncio.create_task(backend.remove_model("a"))
            pool.say(ModelAnswer((await pool.heard(RemoveModel)).call, "a"))
            await again

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_a_controller_that_was_replaced_answers_nothing_though_its_connection_stood() -> None:
    """A standby takes over from one that is stopped: no wire has to break for that."""

    async def story() -> None:
        standby = Standby()
        async with pool_and_gateway(others=(await standby.start(),)) as (pool, backend):
            removing = asyncio.create_task(backend.remove_model("a"))
            await pool.heard(RemoveModel)
            standby.acts.set()
            with pytest.raises(Unavailable, match="restarted"):
                await removing
            assert isinstance(await standby.told.get(), GatewayHello)
            again = asyncio.create_task(backend.remove_model("a"))
            standby.send(ModelAnswer((await standby.told.get()).call, "a"))
            await again
        await standby.close()

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


@pytest.mark.parametrize(
    ("instances", "instances_min", "is_unready", "phase"),
    [
        ({"serving": 1, "loading": 2}, 1, False, ModelPhase.SERVING),
        ({"loading": 1}, 1, True, ModelPhase.STARTING),
        ({"starting": 1}, 0, False, ModelPhase.STARTING),
        ({}, 1, True, ModelPhase.STARTING),
        ({}, 0, True, ModelPhase.COPYING),
        ({}, 0, False, ModelPhase.AT_ZERO),
    ],
)
def test_where_a_model_stands(
    instances: dict[str, int], instances_min: int, is_unready: bool, phase: ModelPhase
) -> None:
    """A pool is ready although models are at zero."""

    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            assert not backend.is_ready()
            status = PoolStatus(
                *({"a": instances}, 3, {"a": ModelLoad(0, 0, device_ns=5)}),
                agents=1,
                copies={"a": 2},
                unready=("a",) if is_unready else (),
            )
            pool.say(status)
            known = asyncio.Event()
            backend.watch_models(known.set)
            listed = published("a", instances_min, priority=7)
            pool.say(Catalog((listed,), preparing=(("z", "/models/z"),)))
            await asyncio.wait_for(known.wait(), patient(WAIT_S))
            assert backend.is_ready() != is_unready
            state, preparing = backend.model_states()
            assert (state.state, state.instances, state.host_copies) == (phase, instances, 2)
            assert (state.min_replicas, state.max_replicas, state.priority) == (
                *(instances_min, 3),
                7,
            )
            assert state.usage.device_seconds == 5e-9
            assert (preparing.name, preparing.state) == ("z", ModelPhase.PREPARING)
            assert reading(backend, "host_copies", "a") == 2
            assert reading(backend, "device_seconds_total", "a") == 5e-9
            assert [card.name for card in backend.models()] == ["a"]

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_instances_are_shown_by_role() -> None:
    """All states of the roles that a model has, 0 included."""
    one_each = {"prefill": {"serving": 1}, "decode": {"loading": 1}}
    roles = RolesConfig(prefill=RoleReplicas(), decode=RoleReplicas())
    limits = (RoleLimits(Role.PREFILL, 1, 2), RoleLimits(Role.DECODE, 1, 2))
    split = published("a", 2)
    split = msgspec.structs.replace(
        split,
        policy=msgspec.structs.replace(split.policy, roles=limits),
        settings=msgspec.structs.replace(split.settings, roles=roles),
    )

    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            known = asyncio.Event()
            backend.watch_models(known.set)
            by_role = {"a": one_each, "b": {"unified": {"serving": 1}}}
            states = {"a": {"serving": 1, "loading": 1}, "b": {"serving": 1}}
            pool.say(PoolStatus(states, 3, {}, by_role=by_role))
            pool.say(Catalog((split, published("b", 1))))
            await asyncio.wait_for(known.wait(), patient(WAIT_S))
            shown = [r for r in backend.readings() if r.name == "instances"]
            counts = {tuple(label for _, label in r.labels): r.value for r in shown}
            assert {key: count for key, count in counts.items() if count} == {
                ("a", "prefill", "serving"): 1,
                ("a", "decode", "loading"): 1,
                ("b", "unified", "serving"): 1,
            }
            assert len(counts) == len(shown) == 3 * 5
            first, second = backend.model_states()
            assert (first.instances_by_role, first.roles) == (one_each, roles)
            assert (second.instances_by_role, second.roles) == ({}, None)

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))


def test_the_instances_loads_are_shown() -> None:
    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            loads = {"a": ModelLoad(3, 12, 5, 100, 60), "b": ModelLoad(0, 0)}
            pool.say(PoolStatus({"a": {"serving": 2}, "b": {"serving": 1}}, 3, loads))
            await asyncio.wait_for(backend.is_settled.wait(), patient(WAIT_S))
            assert reading(backend, "kv_cache_usage_perc", "a") == 0.25
            assert reading(backend, "kv_cache_usage_perc", "b") == 0.0
            assert reading(backend, "kv_blocks", "a") == 12
            assert reading(backend, "num_preemptions_total", "a") == 5
            assert reading(backend, "prefix_cache_queries_total", "a") == 100
            assert reading(backend, "prefix_cache_hits_total", "a") == 60

    asyncio.run(story())


def test_the_controller_is_told_whose_a_request_is_also_the_next_one() -> None:
    heavy, light = Client("10.0.0.1", 3), Client("key-0123456789ab")

    async def story() -> None:
        async with pool_and_gateway() as (pool, backend):
            asked = [
                [
                    GenerateRequest(
                        f"{client.name}.{n}", "a", (5,), SamplingParams(10), client=client
                    )
                    for n in range(count)
                ]
                for client, count in ((heavy, REQUESTS_MAX), (light, 1))
            ]
            streams = submitted(backend, asked[0])
            # The line is full, of the heavy one's.
            with pytest.raises(QueueFull):
                backend.submit(asked[0])
            streams += submitted(backend, asked[1])
            expected = sorted(
                (r.request, r.client.name, r.client.weight) for r in asked[0] + asked[1]
            )
            for life in range(2):
                if life:
                    pool.lose_controller()
                events = [await pool.heard(RequestArrived) for _ in streams]
                told = [(e.request, e.client, e.weight) for e in events]  # type: ignore[attr-defined]
                assert sorted(told) == expected

    asyncio.run(asyncio.wait_for(story(), patient(WAIT_S)))
