"""`bench attacks`: a light client alone and beside each attack, on a real pool.

The pool is real (controller, gateway, worker processes, sockets), only its executors are timed.
The same light client is measured alone and beside an attack in turns, so that what else the machine
does meets both. The attacker has the least claim to the processor. What attacks workers has a pool
of its own, which computes (`poison.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from livescale.config.pool import PoolConfig
from livescale.config.slo import percentile
from livescale.engine.files.make import PRESETS, make_model
from livescale.lab.bench.attacks.attack_bodies import BENCH_ATTACKS
from livescale.lab.bench.attacks.poison import POISON, PoisonOptions, run_poison
from livescale.lab.bench.attacks.poison_report import PoisonFigures
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.line_process import LineProcess, bench_process
from livescale.lab.bench.base.machine import own_cpu_s
from livescale.lab.bench.base.made_models import pool_config, target_of
from livescale.report.run.terminal import table
from livescale.runtime.supervisor.supervisor import Pool

RATIO_MAX = 2.0
"""A light client's p99 TTFT beside an attack is at most so many times that of without."""
GATEWAY_BYTES_MAX = 200_000_000
"""The gateway's memory grows by this at most."""


@dataclass(slots=True)
class AttackFigures:
    """What was seen of one attack, all its windows together.

    `alone_ns` and `beside_ns` are the light client's TTFTs; `gateway_bytes` is the growth of the
    memory of the gateway and its children at most; `statuses` counts the attacker's answers
    ("closed": none), `failed` the light client's requests that were not answered whole.
    """

    name: str
    request_bytes: int
    gateway_bytes: int = 0
    alone_ns: list[int] = field(default_factory=list)
    beside_ns: list[int] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    offered: int = 0
    attacked_s: float = 0.0
    failed: int = 0
    light_5xx: int = 0
    gateway_cpu_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def p99_ratio(self) -> float:
        return _ttft_ms(self.beside_ns) / max(_ttft_ms(self.alone_ns), 1e-6)

    @property
    def http_5xx(self) -> int:
        """Of the attacker and of the light client."""
        attacker = sum(count for status, count in self.statuses.items() if status.startswith("5"))
        return attacker + self.light_5xx

    @property
    def is_within(self) -> bool:
        """All bounds are kept."""
        return (
            self.p99_ratio <= RATIO_MAX
            and self.gateway_bytes <= GATEWAY_BYTES_MAX
            and not self.http_5xx
            and not self.failed
        )

    def as_json(self) -> dict[str, object]:
        attacked_s = max(self.attacked_s, 1e-9)
        return {
            "name": self.name,
            "p99_alone_ms": _ttft_ms(self.alone_ns),
            "p99_beside_ms": _ttft_ms(self.beside_ns),
            "p99_ratio": self.p99_ratio,
            "p50_alone_ms": _ttft_ms(self.alone_ns, 50),
            "p50_beside_ms": _ttft_ms(self.beside_ns, 50),
            "gateway_bytes": self.gateway_bytes,
            "gateway_cpu_share": self.gateway_cpu_s / attacked_s,
            "http_5xx": self.http_5xx,
            "light_failed": self.failed,
            "request_bytes": self.request_bytes,
            "offered_per_s": self.offered / attacked_s,
            "answered_per_s": sum(self.statuses.values()) / attacked_s,
            "statuses": self.statuses,
            "is_within": self.is_within,
            **({"errors": self.errors} if self.errors else {}),
        }


@dataclass(frozen=True, slots=True)
class AttacksReport:
    """All attacks. `shape` says what was run; `poison` is None where it was not chosen."""

    shape: dict[str, object]
    attacks: tuple[AttackFigures, ...]
    poison: PoisonFigures | None = None

    @property
    def is_good(self) -> bool:
        is_poison_within = self.poison is None or self.poison.is_within
        return is_poison_within and all(attack.is_within for attack in self.attacks)

    def as_json(self) -> dict[str, object]:
        figures = {**self.shape, "attacks": [attack.as_json() for attack in self.attacks]}
        return figures if self.poison is None else {**figures, "poison": self.poison.as_json()}

    def text(self) -> str:
        parts = [self._table()] if self.attacks else []
        parts += [self.poison.text()] if self.poison is not None else []
        return "\n\n".join(parts)

    def _table(self) -> str:
        rows = []
        for attack in self.attacks:
            figures = attack.as_json()
            answers = (f"{count} x {status}" for status, count in sorted(attack.statuses.items()))
            end = "" if attack.is_within else "  <- out of bounds"
            rows.append(
                [
                    *(attack.name, _ttft_ms(attack.alone_ns), _ttft_ms(attack.beside_ns)),
                    *(attack.p99_ratio, f"{attack.gateway_bytes / 1e6:+.0f}"),
                    *(f"{figures['gateway_cpu_share']:.0%}", attack.http_5xx),
                    *(figures["offered_per_s"], figures["answered_per_s"]),
                    ", ".join(answers) + end,
                ]
            )
        header = ["attack", "alone ms", "beside ms", "ratio", "memory MB", "cpu", "5xx"]
        told = table([*header, "offered/s", "answered/s", "answers"], rows)
        errors = [f"{attack.name}: {error}" for attack in self.attacks for error in attack.errors]
        return "\n".join([told, *errors])


def _ttft_ms(ttft_ns: list[int], percent: int = 99) -> float:
    return percentile(ttft_ns, percent) / 1e6 if ttft_ns else 0.0


_MODEL = "timed"
_MODEL_TOKENS_MAX = 4096
_WORKERS = 2
_WAIT_S = 120.0
_SAMPLE_S = 0.02
# What is left of an attack is over before the light client is measured alone.
_SETTLE_S = 0.5
_WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class AttacksBenchOptions:
    """What is run. `attacks` are names, or parts of them (none: all). What comes last is of the
    poison prompts and broken models."""

    attacks: tuple[str, ...] = ()
    rounds: int = 4
    seconds: float = 4.0
    attack_rate: float = 20.0
    connections: int = 64
    light_rate: float = 10.0
    prompt_tokens: int = 256
    output_tokens: int = 8
    seed: int = 0
    streams: int = 16
    poison_prompts: int = 200
    broken_models: int = 10


def run_attacks(options: AttacksBenchOptions, say: Callable[[str], None]) -> AttacksReport:
    """Start a pool, measure, stop it, and the same for what attacks workers. Raises BenchError."""
    numbers, has_poison = _chosen(options.attacks)
    figures: list[AttackFigures] = []
    poison = None
    if numbers:
        with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
            preset = dataclasses.replace(PRESETS["tiny"], model_tokens_max=_MODEL_TOKENS_MAX)
            make_model(Path(scratch) / _MODEL, preset)
            config = _config(Path(scratch))
            say(f"pool: {_WORKERS} timed workers; starting …")
            figures = asyncio.run(_play(config, options, numbers, say))
    if has_poison:
        sizes = (options.streams, options.poison_prompts, options.broken_models, options.seed)
        with tempfile.TemporaryDirectory(prefix="livescale-bench-") as scratch:
            poison = run_poison(PoisonOptions(*sizes), Path(scratch), say)
    shape = {key: value for key, value in dataclasses.asdict(options).items() if key != "attacks"}
    return AttacksReport(shape, tuple(figures), poison)


# -- helpers, in the order used -------------------------------------------------------------------


def _chosen(names: tuple[str, ...]) -> tuple[list[int], bool]:
    """Numbers of attacks, and whether workers are attacked. Raises BenchError for a name that fits
    none."""
    known = (*(attack.name for attack in BENCH_ATTACKS), POISON)
    for name in names:
        if not any(name in attack for attack in known):
            raise BenchError(f"no attack {name!r}, there are: {', '.join(known)}")
    *are_chosen, has_poison = (
        not names or any(name in attack for name in names) for attack in known
    )
    return [number for number, is_chosen in enumerate(are_chosen) if is_chosen], has_poison


def _config(scratch: Path) -> PoolConfig:
    """The timed worker's times are those of the settings' defaults."""
    model = {"path": str(scratch / _MODEL), "min_replicas": _WORKERS, "max_replicas": _WORKERS}
    settings = {"port": 0, "device": "timed", "workers": _WORKERS, "arena_bytes": 8 << 20}
    return pool_config(scratch, [model], settings)


async def _play(
    config: PoolConfig,
    options: AttacksBenchOptions,
    numbers: list[int],
    say: Callable[[str], None],
) -> list[AttackFigures]:
    async with Pool(config) as pool:
        await pool.ready()
        return await pool.or_failure(asyncio.to_thread(_measure, pool, options, numbers, say))


def _measure(
    pool: Pool, options: AttacksBenchOptions, numbers: list[int], say: Callable[[str], None]
) -> list[AttackFigures]:
    target = target_of(pool)
    light_job = {
        **target,
        "rate": options.light_rate,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "seed": options.seed,
    }
    attack_job = {**target, "rate": options.attack_rate, "connections": options.connections}
    with (
        bench_process("the light client", "peers.light_client") as light,
        bench_process("the attacker", "peers.attacker") as attacker,
    ):
        light.ask(light_job, _WAIT_S)
        attacker.ask(attack_job, _WAIT_S)
        light.ask({"seconds": _WARM_UP_S}, _WAIT_S)
        gateway = psutil.Process(pool.pids()["gateway"])
        bench = _Windows(light, attacker, gateway, options)
        figures = []
        for number in numbers:
            figures.append(bench.attack(number))
            say(f"{figures[-1].name}: {figures[-1].p99_ratio:.2f} x")
    return figures


@dataclass(slots=True)
class _Windows:
    """Measures attacks, one after the other: windows alone and beside, in turns."""

    light: LineProcess
    attacker: LineProcess
    gateway: psutil.Process
    options: AttacksBenchOptions

    def attack(self, number: int) -> AttackFigures:
        request_bytes = self.attacker.ask({"attack": number}, _WAIT_S)["request_bytes"]
        figures = AttackFigures(BENCH_ATTACKS[number].name, request_bytes)
        for _ in range(self.options.rounds):
            figures.alone_ns += self._light_window(figures)
            with _growth(self.gateway, figures):
                self._beside(number, figures)
            time.sleep(_SETTLE_S)
        return figures

    def _beside(self, number: int, figures: AttackFigures) -> None:
        begin_cpu_s = own_cpu_s(self.gateway)
        window = {"attack": number, "seconds": self.options.seconds}
        self.attacker.send(window)
        figures.beside_ns += self._light_window(figures)
        attack = self.attacker.receive(self.options.seconds + _WAIT_S)
        figures.gateway_cpu_s += own_cpu_s(self.gateway) - begin_cpu_s
        figures.offered += attack["offered"]
        figures.attacked_s += attack["elapsed_s"]
        for status, count in attack["statuses"].items():
            figures.statuses[status] = figures.statuses.get(status, 0) + count

    def _light_window(self, figures: AttackFigures) -> list[int]:
        """Its TTFTs; what failed is in the figures."""
        window = {"seconds": self.options.seconds}
        seen = self.light.ask(window, self.options.seconds + _WAIT_S)
        figures.failed += seen["failed"]
        figures.light_5xx += seen["http_5xx"]
        figures.errors += seen["errors"]
        ttft_ns: list[int] = seen["ttft_ns"]
        return ttft_ns


@contextlib.contextmanager
def _growth(gateway: psutil.Process, figures: AttackFigures) -> Iterator[None]:
    """The most that the gateway and its children had more of memory than at the beginning."""
    begin_bytes = _rss_bytes(gateway)
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(_SAMPLE_S):
            grown_bytes = _rss_bytes(gateway) - begin_bytes
            figures.gateway_bytes = max(figures.gateway_bytes, grown_bytes)

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield
    finally:
        is_over.set()
        sampling.join()


def _rss_bytes(gateway: psutil.Process) -> int:
    total_bytes = 0
    for process in (gateway, *gateway.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that has just ended
            total_bytes += process.memory_info().rss
    return total_bytes
