"""The faults of a soak: each is struck at a real pool, lasts for a while and is undone.

A fault is healed when users notice nothing of it any more, whether all processes are back or not.
What is struck when is drawn from a seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from livescale.lab.bench.attacks.attack_bodies import ATTACKS
from livescale.lab.bench.base.made_models import gauge_sum
from livescale.lab.bench.soak.load import SoakLoad
from livescale.lab.client.completion import completion_body
from livescale.lab.testbed.bed import Testbed
from livescale.runtime.supervisor.supervisor import Pool
from livescale.values.units import NS_PER_S

_JSON = {"Content-Type": "application/json"}
_POLL_S = 0.05
# What a process had sent before it was struck may still arrive this long afterwards.
_IN_FLIGHT_NS = 250_000_000
_GIVE_UP_S = 60.0
_WHOLE_S = 120.0
_LEAVING_CLIENTS = 20
_FULL_DISK_S = 3.0
_BAD_MODEL = "damaged"
_ANSWER_S = 60.0
_ATTACKS = 4

HEAL_S = 5.0
"""A fault is to be healed within `lost_after_ms` and this."""


@dataclass(slots=True)
class StruckFault:
    """What came of one fault. `healed_s` runs from the strike (None: it never was), and so does
    `whole_s`, when all processes were back. `problem` is what was wrong besides."""

    kind: str
    bound_s: float
    what: str = ""
    healed_s: float | None = None
    whole_s: float | None = None
    problem: str = ""

    @property
    def is_healed(self) -> bool:
        return self.healed_s is not None and not self.problem

    @property
    def is_late(self) -> bool:
        return self.healed_s is not None and self.healed_s > self.bound_s


Undo = Coroutine[Any, Any, None] | None
"""What ends a fault that has been struck; None where it ends by itself."""


@dataclass(slots=True)
class FaultScene:
    """What faults are struck at. `model` is a directory to copy, `scratch` where to; `bed` is the
    network, where it can be cut, `record_disk` a file system that holds the record alone."""

    pool: Pool
    load: SoakLoad
    client: httpx.AsyncClient
    model: Path
    scratch: Path
    rng: random.Random
    bed: Testbed | None = None
    record_disk: Path | None = None
    serial: int = field(default=0)

    @property
    def lost_after_s(self) -> float:
        return self.pool.config.lost_after_ms / 1000

    @property
    def models(self) -> tuple[str, ...]:
        return self.load.shape.models

    def kinds(self) -> tuple[str, ...]:
        """The faults that can be struck here."""
        missing = {"cut": self.bed is None, "full-disk": self.record_disk is None}
        return tuple(kind for kind in FAULT_KINDS if not missing.get(kind, False))


async def strike(scene: FaultScene, kind: str) -> StruckFault:
    """Strike a fault and return when it is healed and undone and the pool is whole again."""
    at_ns = time.monotonic_ns()
    fault = StruckFault(kind, scene.lost_after_s + HEAL_S)
    undo = await FAULT_KINDS[kind](scene, fault)
    undoing = asyncio.create_task(undo) if undo is not None else None
    fault.healed_s = await _seconds_until(lambda: _is_healed(scene, at_ns), at_ns, _GIVE_UP_S)
    if undoing is not None:
        await undoing
    fault.whole_s = await _seconds_until(lambda: _is_whole(scene), at_ns, _WHOLE_S)
    return fault


# -- what is struck -------------------------------------------------------------------------------


async def _kill(scene: FaultScene, fault: StruckFault) -> Undo:
    """A process dies without a last message."""
    name, process = _victim(scene)
    process.send_signal(signal.SIGKILL)
    fault.what = f"killed {name}"
    return None


async def _stop(scene: FaultScene, fault: StruckFault) -> Undo:
    """A process stops, shorter or longer than the time after which it counts as lost."""
    name, process = _victim(scene)
    seconds = scene.rng.uniform(0.1, 2 * scene.lost_after_s)
    process.send_signal(signal.SIGSTOP)

    async def go_on() -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            # psutil compares start times: a successor with the same pid is left alone.
            process.send_signal(signal.SIGCONT)

    fault.what = f"stopped {name} for {seconds:.1f} s"
    return go_on()


async def _cut(scene: FaultScene, fault: StruckFault) -> Undo:
    """The links of a host carry nothing: those of its data, or with them the one of control."""
    assert scene.bed is not None
    bed, host = scene.bed, scene.rng.choice(scene.bed.hosts)
    is_silent = scene.rng.random() < 0.5
    seconds = scene.rng.uniform(0.2, 2 * scene.lost_after_s)
    links = (bed.isolate, bed.rejoin) if is_silent else (bed.cut, bed.restore)
    await asyncio.to_thread(links[0], host.name)

    async def restore() -> None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(links[1], host.name)

    what = "all links" if is_silent else "the data link"
    fault.what = f"cut {what} of {host.name} for {seconds:.1f} s"
    return restore()


async def _fill_disk(scene: FaultScene, fault: StruckFault) -> Undo:
    """The disk that the record is on has no byte left."""
    assert scene.record_disk is not None
    filler = scene.record_disk / "filler"
    await asyncio.to_thread(_fill, filler)

    async def free() -> None:
        await asyncio.sleep(_FULL_DISK_S)
        filler.unlink()

    fault.what = f"filled the record's disk for {_FULL_DISK_S:g} s"
    return free()


async def _damage_files(scene: FaultScene, fault: StruckFault) -> Undo:
    """A model is published, its host copies go, and its files are damaged: its requests end soon
    with a 503 that names the reason, and with its files it can be served again."""
    scene.serial += 1
    directory = scene.scratch / f"{_BAD_MODEL}-{scene.serial}"
    await asyncio.to_thread(shutil.copytree, scene.model, directory)
    name = directory.name
    asked = {"path": str(directory), "name": name, "min_replicas": 0}
    fault.what = f"damaged the files of {name}"
    answer = await scene.client.post("/admin/models", json=asked, timeout=_ANSWER_S)
    if answer.status_code != httpx.codes.CREATED:
        fault.problem = f"not published: {answer.text[:200]}"
        return None
    weights = next(iter(sorted(directory.glob("*.safetensors"))))
    size_bytes = weights.stat().st_size
    os.truncate(weights, size_bytes // 2)
    for child, pid in scene.pool.pids().items():
        if child.startswith("agent"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def judge() -> None:
        began = time.monotonic()
        body = {"model": name, "prompt": [11, 12, 13], "max_tokens": 2}
        try:
            answer = await scene.client.post("/v1/completions", json=body, timeout=_ANSWER_S)
            # 200: the copy was in memory, where damage to a file does not reach.
            if answer.status_code not in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE):
                fault.problem = f"a model with bad files: {answer.status_code} {answer.text[:200]}"
        except httpx.TransportError as error:
            fault.problem = f"a request of a model with bad files: {type(error).__name__}"
        took_s = time.monotonic() - began
        if not fault.problem and took_s > scene.lost_after_s + HEAL_S:
            fault.problem = f"a request of a model with bad files waited for {took_s:.1f} s"
        await scene.client.request("DELETE", f"/admin/models/{name}", headers=_JSON)
        await asyncio.to_thread(shutil.rmtree, directory)

    return judge()


async def _leave(scene: FaultScene, fault: StruckFault) -> Undo:
    """Many clients go away at once, in the midst of their streams."""
    load = scene.load
    body = completion_body(scene.models[0], load.prompt_ids(0), load.shape.output_tokens)

    async def leave_early() -> None:
        with contextlib.suppress(httpx.TransportError):
            async with scene.client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    return

    await asyncio.gather(*(leave_early() for _ in range(_LEAVING_CLIENTS)))
    fault.what = f"{_LEAVING_CLIENTS} clients left in the midst of their streams"
    return None


async def _send_hostile_bodies(scene: FaultScene, fault: StruckFault) -> Undo:
    """Requests that are made to do harm: each is refused as it should be, or cut off."""
    attacks = scene.rng.sample(ATTACKS, _ATTACKS)
    for attack in attacks:
        request = await asyncio.to_thread(attack.request, scene.models[0])
        status = await _status_of(scene.pool.base_url, request)
        if status is not None and status not in attack.statuses:
            fault.problem = f"{attack.name}: answered with {status}"
    fault.what = f"sent {', '.join(attack.name for attack in attacks)}"
    return None


async def _status_of(base_url: str, request: bytes) -> int | None:
    """The status of the answer; None where the connection ended without one."""
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        async with asyncio.timeout(_ANSWER_S):
            # The answer may come, and the connection end, before all is sent.
            sending = asyncio.create_task(_send(writer, request))
            line = await reader.readline()
            sending.cancel()
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()
    words = line.split(b" ")
    return int(words[1]) if len(words) > 1 else None


async def _send(writer: asyncio.StreamWriter, request: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(request)
        await writer.drain()


FAULT_KINDS: dict[str, Callable[[FaultScene, StruckFault], Awaitable[Undo]]] = {
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "full-disk": _fill_disk,
    "bad-files": _damage_files,
    "leave": _leave,
    "hostile": _send_hostile_bodies,
}


# -- helpers, in the order used -------------------------------------------------------------------


def _victim(scene: FaultScene) -> tuple[str, psutil.Process]:
    """A process of the pool, each kind as likely as the others."""
    pids = scene.pool.pids()
    kinds = sorted({name.split(" ")[0] for name in pids})
    kind = scene.rng.choice(kinds)
    name = scene.rng.choice(sorted(name for name in pids if name.split(" ")[0] == kind))
    if kind == "gateway":
        scene.load.gateway_faults_ns.append(time.monotonic_ns())
    return name, psutil.Process(pids[name])


def _fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


async def _seconds_until(
    is_true: Callable[[], Awaitable[bool]], at_ns: int, patience_s: float
) -> float | None:
    """Seconds from this time until it was true; None: not within this time."""
    while True:
        is_over = await is_true()
        elapsed_s = (time.monotonic_ns() - at_ns) / NS_PER_S
        if is_over:
            return elapsed_s
        if elapsed_s > patience_s:
            return None
        await asyncio.sleep(_POLL_S)


async def _is_healed(scene: FaultScene, at_ns: int) -> bool:
    """The pool reports that it is well, a new request is answered, and all that were under way have
    moved since the strike."""
    if time.monotonic_ns() < at_ns + _IN_FLIGHT_NS:
        return False
    if any(r.moved_ns < at_ns + _IN_FLIGHT_NS for r in scene.load.open_since(at_ns)):
        return False
    return await _is_healthy(scene) and await scene.load.probe(scene.models[0])


async def _is_healthy(scene: FaultScene) -> bool:
    try:
        answer = await scene.client.get("/health", timeout=_ANSWER_S)
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK


async def _is_whole(scene: FaultScene) -> bool:
    """All workers and agents are members again."""
    site = scene.pool.layout
    wanted = {"livescale_workers": len(site.seats), "livescale_agents": len(site.agents)}
    try:
        text = (await scene.client.get("/metrics", timeout=_ANSWER_S)).text
    except httpx.TransportError:
        return False
    are_there = all(gauge_sum(text, name) == amount for name, amount in wanted.items())
    return are_there and await _is_healthy(scene)
