"""What `bench multicast` found: rows, ratios, a table for people and one object for machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from livescale.report.run.terminal import table


@dataclass(frozen=True, slots=True)
class MulticastRun:
    """One transfer. Times are ns from the moment before planning; `layer_ns` of the last receiver
    of each layer. `start_ns` is when the first byte was arriving anywhere."""

    plan_ns: int
    start_ns: int
    completed_ns: int
    layer_ns: tuple[int, ...]
    cpu_s: float
    spine_bytes: int


@dataclass(frozen=True, slots=True)
class MulticastRow:
    """One strategy with one number of receivers; the median run speaks for it."""

    strategy: str
    planned: str
    receivers: int
    size_bytes: int
    link_bits_per_s: int
    connect_ns: int
    predicted_ns: int | None
    runs: tuple[MulticastRun, ...]

    @property
    def run(self) -> MulticastRun:
        return sorted(self.runs, key=lambda run: run.completed_ns)[(len(self.runs) - 1) // 2]

    @property
    def seconds(self) -> float:
        return self.run.completed_ns / 1e9

    @property
    def line_rate_share(self) -> float:
        """Payload over what a link's line rate carries in that time (0.956 is the most)."""
        return self.size_bytes * 8 / self.link_bits_per_s / self.seconds

    @property
    def overhead_share(self) -> float:
        """Deciding, planning and ordering until the first byte came, and connecting and
        registering before, over the whole."""
        run = self.run
        return (run.start_ns + self.connect_ns) / (run.completed_ns + self.connect_ns)

    @property
    def predicted_error(self) -> float | None:
        """By how much it took longer than predicted, from the first byte on."""
        if self.predicted_ns is None:
            return None
        run = self.run
        return (run.completed_ns - run.start_ns) / self.predicted_ns - 1

    @property
    def spine_crossings(self) -> float:
        """How often the model's bytes went from a leaf to the spine."""
        return self.run.spine_bytes / self.size_bytes


@dataclass(frozen=True, slots=True)
class MulticastReport:
    """All rows of a run, and what they are compared with. `spread` says what was emulated."""

    rows: tuple[MulticastRow, ...]
    network: dict[str, int]
    stream_seconds: float
    gloo_seconds: dict[int, float] = field(default_factory=dict)
    both_ways: tuple[MulticastRow, ...] = ()

    def t_over_t1(self, row: MulticastRow) -> float | None:
        """Time over that of the fewest receivers by the same strategy."""
        alike = [other for other in self.rows if other.strategy == row.strategy]
        least = min(alike, key=lambda other: other.receivers)
        return None if least is row else row.seconds / least.seconds

    def headline(self) -> MulticastRow:
        """The first strategy with the most receivers."""
        most = max(row.receivers for row in self.rows)
        return next(row for row in self.rows if row.receivers == most)

    def as_json(self) -> dict[str, object]:
        head = self.headline()
        figures: dict[str, object] = {
            **{k: v for k, v in self._row_json(head).items() if k in _HEADLINE},
            **self.network,
            "tcp_stream_seconds": self.stream_seconds,
        }
        if head.receivers in self.gloo_seconds:
            figures["peer_gloo_seconds"] = self.gloo_seconds[head.receivers]
        if self.both_ways:
            figures["both_ways_over_alone"] = self._both_ways_over_alone()
        figures["peer_gloo"] = [
            {"receivers": receivers, "seconds": seconds}
            for receivers, seconds in self.gloo_seconds.items()
        ]
        figures["rows"] = [self._row_json(row) for row in (*self.rows, *self.both_ways)]
        return figures

    def text(self) -> str:
        network = ", ".join(f"{name} {value}" for name, value in self.network.items())
        rows = [self._cells(row) for row in (*self.rows, *self.both_ways)]
        for receivers, seconds in self.gloo_seconds.items():
            cells = ["gloo broadcast", receivers, seconds, None, self.stream_seconds / seconds]
            rows.append([*cells, *[None] * (len(_HEADER) - len(cells))])
        stream = f"one TCP stream: {self.stream_seconds:.3f} s"
        return "\n".join([network, stream, table(_HEADER, rows)])

    def _both_ways_over_alone(self) -> float:
        """The slower of two opposite transfers over the chain alone."""
        there = self.both_ways[0]
        alone = min(
            (row for row in self.rows if row.planned == "chain"),
            key=lambda row: abs(row.receivers - there.receivers),
        )
        return max(row.seconds for row in self.both_ways) / alone.seconds

    def _row_json(self, row: MulticastRow) -> dict[str, object]:
        run = row.run
        figures: dict[str, object] = {
            "strategy": row.strategy,
            "planned": row.planned,
            "receivers": row.receivers,
            "seconds": row.seconds,
            "bytes": row.size_bytes,
            "link_efficiency": self.stream_seconds / row.seconds,
            "t_over_t1": self.t_over_t1(row) if row in self.rows else None,
            "line_rate_share": row.line_rate_share,
            "overhead_share": row.overhead_share,
            "plan_ms": run.plan_ns / 1e6,
            "connect_and_register_ms": row.connect_ns / 1e6,
            "start_ms": run.start_ns / 1e6,
            "predicted_seconds": None if row.predicted_ns is None else row.predicted_ns / 1e9,
            "predicted_error": row.predicted_error,
            "cpu_seconds": run.cpu_s,
            "layer_ms": [ns / 1e6 for ns in run.layer_ns],
            "all_seconds": [other.completed_ns / 1e9 for other in row.runs],
        }
        if self.network["leaves"] > 1:
            figures["spine_crossings"] = row.spine_crossings
        return {name: value for name, value in figures.items() if value is not None}

    def _cells(self, row: MulticastRow) -> list[object]:
        run, error = row.run, row.predicted_error
        layers = [run.layer_ns[k] / 1e6 for k in (0, len(run.layer_ns) // 2, -1)]
        return [
            *(row.strategy, row.receivers, row.seconds),
            self.t_over_t1(row) if row in self.rows else None,
            *(self.stream_seconds / row.seconds, row.line_rate_share, 100 * row.overhead_share),
            None if error is None else 100 * error,
            run.cpu_s,
            row.spine_crossings if self.network["leaves"] > 1 else None,
            "/".join(f"{ms:.0f}" for ms in layers),
        ]


_HEADER = ["strategy", "n", "seconds", "T(n)/T(1)", "stream", "link", "overhead %", "off plan by %"]
_HEADER += ["CPU s", "spine", "layers ms first/half/last"]
_HEADLINE = frozenset(
    {
        *("strategy", "receivers", "seconds", "bytes", "link_efficiency", "t_over_t1"),
        *("overhead_share", "line_rate_share", "predicted_error"),
    }
)
