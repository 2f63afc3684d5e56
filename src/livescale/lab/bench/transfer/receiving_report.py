"""What `bench receiving` found: rates alone and together, ratios within a round, and the rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from livescale.report.run.terminal import table

THREADS, PROCESS = "threads", "process"
WAYS = (THREADS, PROCESS)
"""Where parameters are received: by threads of the process that computes, as workers have it, or by
a process of its own that writes into the same arena."""

COST_PERCENT_MAX = 5.0
"""What receiving and computing may cost each other for the threads to stay where they are."""

_GBIT = 1e9 / 8
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Window:
    """What one stretch of time brought. What did not happen in it is 0.

    `compute_cpu_ns` is the CPU time of the thread that computes, `core_wait_ns` how long that was
    ready and had no core; `receive_cpu_ns` is the CPU time of all that receives, `send_cpu_ns` that
    of the sender.
    """

    steps: int = 0
    steps_ns: int = 0
    compute_cpu_ns: int = 0
    core_wait_ns: int = 0
    step_p99_ns: int = 0
    received_bytes: int = 0
    received_ns: int = 0
    receive_cpu_ns: int = 0
    send_cpu_ns: int = 0

    @property
    def steps_per_s(self) -> float:
        return self.steps * 1e9 / self.steps_ns

    @property
    def step_cpu_ms(self) -> float:
        return self.compute_cpu_ns / self.steps / 1e6

    @property
    def step_with_core_ms(self) -> float:
        """What a step takes less the time without a core: computing, and waiting for the
        interpreter."""
        return (self.steps_ns - self.core_wait_ns) / self.steps / 1e6

    @property
    def bytes_per_s(self) -> float:
        return self.received_bytes * 1e9 / self.received_ns

    @property
    def receive_cpu_s_per_gib(self) -> float:
        return self.receive_cpu_ns / 1e9 * _GIB / self.received_bytes


@dataclass(frozen=True, slots=True)
class Round:
    """One window of each kind, one after the other."""

    computing: Window
    receiving: Window
    together: Window


_FIGURES: dict[str, Callable[[Round], float]] = {
    "steps_per_s_alone": lambda r: r.computing.steps_per_s,
    "steps_per_s_together": lambda r: r.together.steps_per_s,
    "compute_ratio": lambda r: r.together.steps_per_s / r.computing.steps_per_s,
    # As the one before, had the computing thread had a core whenever it was ready.
    "with_core_ratio": lambda r: r.computing.step_with_core_ms / r.together.step_with_core_ms,
    "step_cpu_ratio": lambda r: r.together.step_cpu_ms / r.computing.step_cpu_ms,
    "step_p99_ratio": lambda r: r.together.step_p99_ns / r.computing.step_p99_ns,
    "gbit_per_s_alone": lambda r: r.receiving.bytes_per_s / _GBIT,
    "gbit_per_s_together": lambda r: r.together.bytes_per_s / _GBIT,
    "receive_ratio": lambda r: r.together.bytes_per_s / r.receiving.bytes_per_s,
    "receive_cpu_s_per_gib_alone": lambda r: r.receiving.receive_cpu_s_per_gib,
    "receive_cpu_s_per_gib_together": lambda r: r.together.receive_cpu_s_per_gib,
}
"""Of one round, in the order of the table."""
_FURTHER_FIGURES: dict[str, Callable[[Round], float]] = {
    "step_with_core_ms_alone": lambda r: r.computing.step_with_core_ms,
    "step_with_core_ms_together": lambda r: r.together.step_with_core_ms,
    "step_cpu_ms_alone": lambda r: r.computing.step_cpu_ms,
    "step_cpu_ms_together": lambda r: r.together.step_cpu_ms,
    "send_cpu_s_per_gib_together": lambda r: (
        r.together.send_cpu_ns / 1e9 * _GIB / r.together.received_bytes
    ),
}


@dataclass(frozen=True, slots=True)
class ReceivingRow:
    """All rounds of one rate and one way."""

    rate_bytes_per_s: int
    way: str
    rounds: tuple[Round, ...]

    def each(self, name: str) -> list[float]:
        """A figure of each round."""
        return list(map(_FIGURES[name], self.rounds))

    def middle(self, name: str) -> float:
        """The median of the rounds."""
        return median(self.each(name))

    @property
    def cost_percent(self) -> float:
        """Of what suffers more."""
        return 100 * max(0.0, 1 - min(self.middle("compute_ratio"), self.middle("receive_ratio")))

    def cells(self) -> list[object]:
        return [self.rate_bytes_per_s / _GBIT, self.way, *map(self.middle, _FIGURES)]

    def as_json(self) -> dict[str, object]:
        figures = _FIGURES | _FURTHER_FIGURES
        return {
            "rate_gbit_per_s": self.rate_bytes_per_s / _GBIT,
            "way": self.way,
            **{name: median(map(figure, self.rounds)) for name, figure in figures.items()},
            "compute_ratios": self.each("compute_ratio"),
            "receive_ratios": self.each("receive_ratio"),
            "cost_percent": self.cost_percent,
        }


@dataclass(frozen=True, slots=True)
class ReceivingReport:
    """Rows by rate, each way; and what else the machine did."""

    settings: Mapping[str, object]
    rows: tuple[ReceivingRow, ...]
    others_share: float
    load_averages: tuple[tuple[float, float, float], tuple[float, float, float]]

    @property
    def is_within(self) -> bool:
        """Threads cost no more than the rule allows, at all rates."""
        return all(row.cost_percent <= COST_PERCENT_MAX for row in self._of(THREADS))

    @property
    def gains(self) -> dict[float, tuple[float, float]]:
        """By rate (Gbit/s), what a process of its own has over threads: computing, receiving."""
        pairs = zip(self._of(THREADS), self._of(PROCESS), strict=True)
        return {
            threads.rate_bytes_per_s / _GBIT: (
                process.middle("compute_ratio") / threads.middle("compute_ratio"),
                process.middle("receive_ratio") / threads.middle("receive_ratio"),
            )
            for threads, process in pairs
        }

    def as_json(self) -> dict[str, object]:
        return {
            **self.settings,
            "rows": [row.as_json() for row in self.rows],
            "threads_within_limit": self.is_within,
            "cost_percent_max": COST_PERCENT_MAX,
            "process_over_threads": [
                {"rate_gbit_per_s": rate, "compute": compute, "receive": receive}
                for rate, (compute, receive) in self.gains.items()
            ],
            "others_share": self.others_share,
            "load_averages": self.load_averages,
        }

    def text(self) -> str:
        header = ["Gbit/s", "by", "steps/s", "together", "ratio", "with core", "CPU", "p99"]
        header += ["Gbit/s alone", "together", "ratio", "CPU s/GiB", "together"]
        most = max(row.cost_percent for row in self._of(THREADS))
        least = min(row.middle("with_core_ratio") for row in self._of(THREADS))
        with_core = 100 * max(0.0, 1 - least)
        rule = "within" if self.is_within else "above"
        gains = "; ".join(
            f"{rate:g} Gbit/s: computing x {compute:.3f}, receiving x {receive:.3f}"
            for rate, (compute, receive) in self.gains.items()
        )
        before, after = (", ".join(f"{a:.2f}" for a in loads) for loads in self.load_averages)
        return "\n".join(
            (
                table(header, [row.cells() for row in self.rows]),
                f"threads cost {most:.1f} % at most: {rule} the {COST_PERCENT_MAX:g} % of the rule;"
                f" computing loses {with_core:.1f} % where it has a core whenever it is ready",
                f"a process over threads: {gains}",
                f"other programs took {self.others_share:.0%} of the CPU time;"
                f" load averages {before} before, {after} after",
            )
        )

    def _of(self, way: str) -> list[ReceivingRow]:
        return [row for row in self.rows if row.way == way]
