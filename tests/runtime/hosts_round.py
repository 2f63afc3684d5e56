"""One round of chaos between machines: streams of several gateways run over hosts that joined, and
something happens to a host that has some of them, to its links, to a gateway, or to the head.

A fault is a method `_strike_NAME` that says what it did, with its name in FAULTS; where streams end
with a gateway its URL comes into `lost`. Standby controllers have no rounds here.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from bed_gateways import BedGateway
from certificates import Cluster
from completions import Answer, prompt
from joiners import Joiner
from pool_thread import LocalPool, wait_until
from running_streams import are_given_up

from livescale.config.pool import PoolConfig
from livescale.lab.testbed.bed import Testbed
from livescale.runtime.layout.pool_layout import PoolLayout, local_layout
from livescale.telemetry.record_watch import RecordWatch
from slowness import patient, patient_ms

FAULTS = (
    *("killed", "silent", "controller", "no-way-out", "head", "slow", "controller-and-silent"),
    *("twin", "no-way-in", "leaves", "controller-and-leaves", "everything", "gateway"),
    "controller-and-gateway",
)
HOSTS = ("h1", "h2", "h3")
GATEWAYS = ("h4", "h5")
"""Hosts of the testbed without workers. Clients ask their gateways and the head's in turns."""
LINK_BITS_PER_S = 100_000_000
SLOW_BITS_PER_S = 1_000_000
STREAMS = 18
TOKENS = 120
ANSWER_S = 30.0
"""A stream that sends nothing for so long is lost."""
END_S = 30.0


def lost_after_ms() -> int:
    """A function: how slow the machine is was not measured when this module was imported."""
    return patient_ms(1500)


@dataclass(slots=True)
class HostsPool:
    """A head in the testbed's h0, a host with one worker in each of HOSTS, and a gateway in each of
    GATEWAYS. All have certificates."""

    bed: Testbed
    model: Path
    scratch: Path
    cluster: Cluster
    heads: int = 0
    joiners: dict[str, Joiner] = field(default_factory=dict)
    #: by prompt, the tokens of a timed worker, which depend on it alone
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    gateways: list[BedGateway] = field(default_factory=list)
    #: where streams ended with their gateway in this round
    lost: set[str] = field(default_factory=set)
    #: the first wave of this round, by where it was asked
    first: list[tuple[str, Answer]] = field(default_factory=list)
    _head: LocalPool | None = None
    _watch: RecordWatch | None = None

    @property
    def head(self) -> LocalPool:
        assert self._head is not None
        return self._head

    @property
    def watch(self) -> RecordWatch:
        assert self._watch is not None
        self._watch.read()
        return self._watch

    def start(self) -> None:
        self._start_head()
        for host in HOSTS:
            self._join(host)
        self.head.wait_ready()
        for host in GATEWAYS:
            tls_dir = self.cluster.gateway_dir(host)
            self.gateways.append(BedGateway(self.bed, host, self.scratch, tls_dir))
            self.gateways[-1].join(self.head)
        self.rest("have done nothing")

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.__exit__()
        for joiner in self.joiners.values():
            joiner.close()
        if self._head is not None:
            self._head.__exit__()

    # -- a round --------------------------------------------------------------------------------

    def round(self, fault: str, seed: int) -> str:
        """Two waves of streams, one of them begun before the strike; all tokens are right and the
        pool is whole again. Says what was hit."""
        rng = random.Random(seed)
        self.lost = set()
        second, hit = asyncio.run(self._waves(fault, rng))
        for url, answer in [*self.first, *second]:
            if url not in self.lost:
                assert answer.error is None, f"{answer.error} after we {hit}"
                assert len(answer.token_ids) == TOKENS, hit
            self._is_right(answer, hit)
        self.rest(hit)
        return hit

    async def _waves(self, fault: str, rng: random.Random) -> tuple[list[tuple[str, Answer]], str]:
        """The second wave, and what was hit. The wave follows the strike at once, at the gateways
        that are there; behind a lost head it waits for the next."""
        timeout = httpx.Timeout(patient(ANSWER_S))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            self.first = self._dealt(rng)
            begun = asyncio.Semaphore(0)

            async def read(url: str, answer: Answer) -> None:
                try:
                    async for count in answer.stream(url, client, TOKENS):
                        if count == 1:
                            begun.release()
                except httpx.TransportError as error:
                    answer.error = f"{url} is gone: {error!r}"

            tasks = [asyncio.create_task(read(url, answer)) for url, answer in self.first]
            for _ in self.first:
                async with asyncio.timeout(patient(ANSWER_S)):
                    await begun.acquire()
            victim = await self._drawn(rng)
            streams = self.watch.requests_on(victim)
            strike: Callable[..., Awaitable[tuple[str, Any]]] = getattr(
                self, f"_strike_{fault.replace('-', '_')}"
            )
            hit, undo = await strike(victim, rng)
            second = self._dealt(rng)
            more = [asyncio.create_task(answer.read(url, client, TOKENS)) for url, answer in second]
            undoing = asyncio.create_task(undo) if undo is not None else None
            await asyncio.gather(*tasks)
            await asyncio.gather(*more)
            if undoing is not None:
                await undoing
        return second, f"{hit}, which had {len(streams)} streams"

    def _dealt(self, rng: random.Random) -> list[tuple[str, Answer]]:
        """A wave of streams, and where each is asked: at the gateways in turns that are there."""
        here = [gateway for gateway in self.gateways if gateway.url not in self.lost]
        urls = [self.head.url, *(gateway.url for gateway in here)]
        return [
            (urls[n % len(urls)], Answer(prompt(rng.randrange(40), 20))) for n in range(STREAMS)
        ]

    async def _drawn(self, rng: random.Random) -> str:
        """A host whose instance serves streams, as the record says, which may be late: else the
        round would prove nothing of those."""
        async with asyncio.timeout(patient(END_S)):
            while True:
                watch = self.watch
                busy = [h for h in HOSTS if watch.serving_on(h) and watch.requests_on(h)]
                if busy:
                    return rng.choice(busy)
                await asyncio.sleep(0.02)

    def _is_right(self, answer: Answer, hit: str) -> None:
        known = self.known.setdefault(tuple(answer.prompt_ids), answer.token_ids)
        if len(known) < len(answer.token_ids):
            known = self.known[tuple(answer.prompt_ids)] = answer.token_ids
        assert answer.token_ids == known[: len(answer.token_ids)], f"wrong tokens after we {hit}"

    # -- faults: what was done, and what undoes it ------------------------------------------------

    async def _strike_killed(self, victim: str, _: random.Random) -> tuple[str, Any]:
        await asyncio.to_thread(self.joiners[victim].kill)
        self._join(victim)
        return f"killed the supervisor of {victim}", None

    async def _strike_silent(self, victim: str, rng: random.Random) -> tuple[str, Any]:
        seconds = rng.uniform(0.2, 2.5 * lost_after_ms() / 1000)
        await asyncio.to_thread(self.bed.isolate, victim)
        told = f"cut {victim} off for {seconds:.1f} s"
        return told, self._later(seconds, self.bed.rejoin, victim)

    async def _strike_no_way_out(self, victim: str, rng: random.Random) -> tuple[str, Any]:
        return await self._one_way(victim, rng, is_out=True)

    async def _strike_no_way_in(self, victim: str, rng: random.Random) -> tuple[str, Any]:
        return await self._one_way(victim, rng, is_out=False)

    async def _one_way(self, victim: str, rng: random.Random, *, is_out: bool) -> tuple[str, Any]:
        seconds = rng.uniform(0.2, 2.5 * lost_after_ms() / 1000)
        await asyncio.to_thread(self.bed.cut_one_way, victim, is_out=is_out)
        way = "out of" if is_out else "into"
        undo = self._later(seconds, self.bed.set_rate, victim, 0, LINK_BITS_PER_S)
        return f"cut the way {way} {victim} for {seconds:.1f} s", undo

    async def _strike_slow(self, victim: str, rng: random.Random) -> tuple[str, Any]:
        seconds = rng.uniform(1.0, 4.0)
        await asyncio.to_thread(self.bed.set_rate, victim, 0, SLOW_BITS_PER_S)
        undo = self._later(seconds, self.bed.set_rate, victim, 0, LINK_BITS_PER_S)
        return f"slowed the link of {victim} for {seconds:.1f} s", undo

    async def _strike_controller(self, victim: str, _: random.Random) -> tuple[str, Any]:
        self.head.kill("controller")
        return f"killed the controller beside {victim}", None

    async def _strike_controller_and_silent(
        self, victim: str, rng: random.Random
    ) -> tuple[str, Any]:
        return self._also_the_controller(await self._strike_silent(victim, rng))

    def _also_the_controller(self, strike: tuple[str, Any]) -> tuple[str, Any]:
        told, undo = strike
        self.head.kill("controller")
        return f"killed the controller and {told}", undo

    async def _strike_leaves(self, victim: str, _: random.Random) -> tuple[str, Any]:
        leaving = self.joiners[victim]
        leaving.interrupt()

        async def come_back() -> None:
            assert await asyncio.to_thread(leaving.ended) == 0
            self._join(victim)

        return f"told {victim} to leave", come_back()

    async def _strike_controller_and_leaves(
        self, victim: str, rng: random.Random
    ) -> tuple[str, Any]:
        return self._also_the_controller(await self._strike_leaves(victim, rng))

    async def _strike_twin(self, victim: str, _: random.Random) -> tuple[str, Any]:
        """A second machine of one name is refused, and the first goes on."""
        twin = self._joiner(victim, self.scratch / "twin", "--patience-s", "0.2")
        try:
            assert await asyncio.to_thread(twin.ended) == 2
            assert twin.said("choose another --name")
        finally:
            twin.close()
        assert self.joiners[victim].process.poll() is None
        return f"let a second host come by the name of {victim}", None

    async def _strike_gateway(self, victim: str, rng: random.Random) -> tuple[str, Any]:
        """Its own streams end, at once, and workers do not go on with them."""
        told, come_back = await self._lose_a_gateway(victim, rng)
        (url,) = self.lost
        own = [answer for lost, answer in self.first if lost == url]

        async def free() -> None:
            await come_back
            ended = [answer for answer in own if answer.error is not None]
            await asyncio.to_thread(
                wait_until,
                lambda: are_given_up(self.head.record, ended),
                "workers have given its streams up",
            )

        return told, free()

    async def _lose_a_gateway(self, victim: str, rng: random.Random) -> tuple[str, Any]:
        """With all its processes, and without a word."""
        gateway = rng.choice(self.gateways)
        own = [answer for url, answer in self.first if url == gateway.url]
        assert any(len(answer.token_ids) < TOKENS for answer in own), "it has none left"
        self.lost.add(gateway.url)
        await asyncio.to_thread(gateway.joined.kill)
        assert gateway.joined.ended() == -signal.SIGKILL

        async def come_back() -> None:
            async with asyncio.timeout(patient(END_S)):
                while not any(answer.error is not None for answer in own):
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(gateway.join, self.head)

        return f"killed the gateway on {gateway.host} beside {victim}", come_back()

    async def _strike_controller_and_gateway(
        self, victim: str, rng: random.Random
    ) -> tuple[str, Any]:
        """The next controller does not know those streams."""
        return self._also_the_controller(await self._lose_a_gateway(victim, rng))

    async def _strike_head(self, victim: str, _: random.Random) -> tuple[str, Any]:
        """Hosts and gateways stay, and come back with what they have: streams of the head's own
        gateway end, and no others."""
        self.lost.add(self.head.url)
        await asyncio.to_thread(self._restart_head)
        machines = [*self.joiners.values(), *(gateway.joined for gateway in self.gateways)]
        assert all(machine.process.poll() is None for machine in machines)
        return f"started the head of {victim} anew", None

    async def _strike_everything(self, victim: str, _: random.Random) -> tuple[str, Any]:
        def again() -> None:
            self.lost |= {self.head.url, *(gateway.url for gateway in self.gateways)}
            for machine in (*self.gateways, *self.joiners.values()):
                machine.close()
            self._restart_head(self._join_all)
            for gateway in self.gateways:
                gateway.join(self.head)

        await asyncio.to_thread(again)
        return f"started {victim} and all else anew", None

    # -- helpers --------------------------------------------------------------------------------

    async def _later(self, seconds: float, undo: Callable[..., None], *words: Any) -> None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(undo, *words)

    def _start_head(self) -> None:
        prefix = tuple(self.bed.inside("h0"))

        def inside(config: PoolConfig) -> PoolLayout:
            layout = local_layout(config)
            hosts = tuple(msgspec.structs.replace(seat, prefix=prefix) for seat in layout.hosts)
            return msgspec.structs.replace(layout, hosts=hosts, control_prefix=prefix)

        own = self.scratch / f"head-{self.heads}"
        own.mkdir()
        self.heads += 1
        pool = LocalPool(
            self.model,
            own,
            f"    min_replicas: {len(HOSTS)}\n    prefill_tokens_per_s: 5000\n",
            make_layout=inside,
            device="timed",
            timed_run_us=20_000,
            workers=0,
            listen=f"{self.bed.host('h0').devices[0].address}:7000",
            token_file=str(self.scratch / "pool.token"),
            tls_dir=str(self.cluster.head_dir),
            lost_after_ms=lost_after_ms(),
            request_attempts_max=8,
        )
        self._head = pool.__enter__()
        self._watch = RecordWatch(pool.record)

    def _restart_head(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """The head dies without any message, and another one begins at its place."""
        self.head.call(self.head.pool.kill(), END_S)
        self.head.__exit__()
        self._start_head()
        meanwhile()
        self.head.wait_ready()

    def _join_all(self) -> None:
        for host in HOSTS:
            self._join(host)

    def _join(self, host: str) -> None:
        self.joiners[host] = self._joiner(host, self.scratch)

    def _joiner(self, host: str, scratch: Path, *more: str) -> Joiner:
        scratch.mkdir(exist_ok=True)
        own = self.cluster.member_dir(host)
        flags = ("--interface", "d0", "--tls-dir", str(own), *more)
        return Joiner(self.head, host, scratch, *flags, prefix=self.bed.inside(host))

    def rest(self, hit: str) -> None:
        """Every host is back and serves, and no request runs."""
        wanted = {
            "workers": len(HOSTS),
            "agents": len(HOSTS) + 1,
            "num_requests_running": 0,
            "instances": len(HOSTS),
        }
        for name, amount in wanted.items():
            wait_until(
                lambda name=name, amount=amount: self.head.gauge(name) == amount,
                f"{name} is {amount} after we {hit}",
            )
        wait_until(
            lambda: all(self.watch.serving_on(host) for host in HOSTS),
            f"every host serves after we {hit}",
        )
        wait_until(
            lambda: all(gateway.is_ready() for gateway in self.gateways),
            f"every gateway serves after we {hit}",
        )
        wait_until(lambda: self.head.kv_in_use() == 0, f"workers are free after we {hit}")
