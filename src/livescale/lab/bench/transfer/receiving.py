"""`bench receiving`: what computing and receiving parameters cost each other on one device.

A target decodes with one model while another one comes over the TCP data plane at a given rate,
by threads of the same process or by a process of its own. Computing alone, receiving alone and both
together take turns within each round, so that what else the machine does meets all of them; ratios
are those of one round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.machine import CpuShares
from livescale.lab.bench.base.made_models import BenchShape, made_model
from livescale.lab.bench.transfer.receiving_report import (
    PROCESS,
    THREADS,
    WAYS,
    ReceivingReport,
    ReceivingRow,
    Round,
    Window,
)
from livescale.transfer.formats.orders import ContentChecks

_WAIT_S = 600.0
_LOOPBACK = "127.0.0.1"
_TARGET, _RECEIVER, _FIRST_SENDER = 1, 2, 10
_STEPS_MIN, _STEPS_MAX = 8, 512
_WARM_STEPS = 16
_PROMPT_TOKENS = 32
_BLOCK_TOKENS = 16
_PAGE_BYTES = 4096
_SHAPE = BenchShape(1024, 16)


@dataclass(frozen=True, slots=True)
class ReceivingOptions:
    """A made model of this shape decodes `sequences` at a time with one thread, for about
    `window_s` a window; a model of `size_bytes` comes at each of `rates` (bytes per second)."""

    rates: tuple[int, ...] = (125_000_000, 625_000_000, 1_250_000_000)
    shape: BenchShape = _SHAPE
    dtype: str = "bfloat16"
    vocabulary: int = 8192
    sequences: int = 8
    size_bytes: int = 256 << 20
    layers: int = 16
    chunk_bytes: int = 1 << 20
    content_checks: ContentChecks = ContentChecks.NETWORK
    window_s: float = 1.0
    rounds: int = 5


def run_receiving(options: ReceivingOptions, say: Callable[[str], None]) -> ReceivingReport:
    """Measure all rates and both ways, round after round. Raises BenchError."""
    loads_before = os.getloadavg()
    with ExitStack() as stack:
        made = made_model(options.shape, options.vocabulary, options.dtype)
        directory = stack.enter_context(made)
        scene = _Scene(options, directory, stack)
        steps = scene.warm_up()
        say(f"{options.shape}: {steps} steps a window, {options.rounds} rounds …")
        shares = CpuShares([os.getpid()])
        rounds: dict[tuple[int, str], list[Round]] = {
            (rate, way): [] for rate in options.rates for way in WAYS
        }
        for number in range(options.rounds):
            for rate in options.rates:
                # None of them is always the first.
                for way in WAYS if number % 2 else WAYS[::-1]:
                    rounds[rate, way].append(scene.round(rate, way, steps))
            say(f"  round {number + 1} is done")
        others = shares.others()
    return ReceivingReport(
        {
            "shape": str(options.shape),
            "dtype": options.dtype,
            "sequences": options.sequences,
            "steps": steps,
            "rounds": options.rounds,
            "chunk_bytes": options.chunk_bytes,
            "content_checks": options.content_checks.value,
        },
        tuple(ReceivingRow(rate, way, tuple(of)) for (rate, way), of in rounds.items()),
        others,
        (loads_before, os.getloadavg()),
    )


# -- helpers --------------------------------------------------------------------------------------


class _Scene:
    """The processes: a target that computes and may receive, a receiver into the same arena, and a
    sender for each rate. They end with the stack."""

    def __init__(self, options: ReceivingOptions, directory: Path, stack: ExitStack) -> None:
        self._options = options
        self._senders = {
            rate: _sender(options, _FIRST_SENDER + number, rate, stack)
            for number, rate in enumerate(options.rates)
        }
        common: dict[str, object] = {
            "chunk_bytes": options.chunk_bytes,
            "content_checks": options.content_checks.value,
        }
        target = stack.enter_context(
            bench_process("the target", "transfer.receiving_worker", threads=1)
        )
        computes: dict[str, object] = {
            "worker": _TARGET,
            "directory": str(directory),
            "threads": 1,
            "sequences": options.sequences,
            "prompt_tokens": _PROMPT_TOKENS,
            "block_tokens": _BLOCK_TOKENS,
            "steps_max": _STEPS_MAX,
            "received_bytes": _received_bytes(options),
        }
        shared = target.ask({**common, **computes}, _WAIT_S)["settings"]
        receiver = stack.enter_context(
            bench_process("the receiver", "transfer.receiving_worker", threads=1)
        )
        receiver.ask({**common, **shared, "worker": _RECEIVER}, _WAIT_S)
        self._target = target
        self._receivers = {THREADS: target, PROCESS: receiver}

    def warm_up(self) -> int:
        """Kernels are compiled, and connections are there. How many steps fill a window."""
        self._decoded(_WARM_STEPS)
        warm = self._decoded(_WARM_STEPS)
        for way in WAYS:
            for rate in self._options.rates:
                self._begin(rate, way)
                self._end(way)
        step_cpu_s = warm["cpu_ns"] / _WARM_STEPS / 1e9
        steps = round(self._options.window_s / float(step_cpu_s))
        return min(max(steps, _STEPS_MIN), _STEPS_MAX)

    def round(self, rate: int, way: str, steps: int) -> Round:
        """Computing alone, both together, receiving alone."""
        alone = self._decoded(steps)
        self._begin(rate, way)
        before = self._usage(rate, way)
        decoded = self._decoded(steps)
        between = self._usage(rate, way)
        time.sleep(decoded["elapsed_ns"] / 1e9)
        after = self._usage(rate, way)
        self._end(way)
        return Round(
            computing=_window(steps, alone),
            receiving=_window(0, {}, between, after),
            together=_window(steps, decoded, before, between),
        )

    def _decoded(self, steps: int) -> dict[str, Any]:
        return self._target.ask({"do": "decode", "steps": steps}, _WAIT_S)

    def _begin(self, rate: int, way: str) -> None:
        sender = self._senders[rate]
        order = {"do": "begin", "sender": sender.place, "manifest": sender.manifest}
        _check(way, self._receivers[way].ask(order, _WAIT_S))

    def _end(self, way: str) -> None:
        _check(way, self._receivers[way].ask({"do": "end"}, _WAIT_S))

    def _usage(self, rate: int, way: str) -> dict[str, int]:
        usage = self._receivers[way].ask({"do": "usage"}, _WAIT_S)
        sent_s = self._senders[rate].process.ask({"do": "usage"}, _WAIT_S)["cpu_s"]
        return {**usage, "send_cpu_ns": round(sent_s * 1e9)}


@dataclass(frozen=True, slots=True)
class _Sender:
    """A process that gives a model at one rate: its number, address and port."""

    process: LineProcess
    place: tuple[int, str, int]
    manifest: Mapping[str, object]


def _sender(options: ReceivingOptions, number: int, rate: int, stack: ExitStack) -> _Sender:
    process = stack.enter_context(
        bench_process(f"the sender at {rate}", "transfer.multicast_worker")
    )
    job: dict[str, object] = {
        "worker": number,
        "address": _LOOPBACK,
        "arena_bytes": _received_bytes(options),
        "uplink_bytes_per_s": rate,
    }
    port = process.ask(job, _WAIT_S)["settings"]["port"]
    order = {
        "do": "make",
        "model": "comes",
        "layers": options.layers,
        "size_bytes": options.size_bytes,
        "offset_bytes": 0,
        "seed": 0,
    }
    manifest = process.ask(order, _WAIT_S)["manifest"]
    return _Sender(process, (number, _LOOPBACK, port), manifest)


def _received_bytes(options: ReceivingOptions) -> int:
    """Layers are whole pages."""
    return options.size_bytes + options.layers * _PAGE_BYTES


def _window(
    steps: int,
    decoded: Mapping[str, Any],
    before: Mapping[str, int] | None = None,
    after: Mapping[str, int] | None = None,
) -> Window:
    """Of what was decoded between two looks at the receiver, if there were any."""
    step_ns = sorted(decoded.get("step_ns", (0,)))
    before, after = before or {}, after or {}

    def more(name: str) -> int:
        return after.get(name, 0) - before.get(name, 0)

    return Window(
        steps=steps,
        steps_ns=decoded.get("elapsed_ns", 0),
        compute_cpu_ns=decoded.get("cpu_ns", 0),
        core_wait_ns=decoded.get("core_wait_ns", 0),
        step_p99_ns=step_ns[len(step_ns) * 99 // 100],
        received_bytes=more("received_bytes"),
        received_ns=more("at_ns"),
        receive_cpu_ns=more("cpu_ns"),
        send_cpu_ns=more("send_cpu_ns"),
    )


def _check(way: str, answer: Mapping[str, Any]) -> None:
    if answer["failure"]:
        raise BenchError(f"receiving by {way} failed: {answer['failure']}")
