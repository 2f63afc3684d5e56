"""The words of a reproduction: claims, what was measured for them, pictures, verdicts.

Values and their own arithmetic only. Claims stand in the modules named after the papers: each
measuring function there becomes the Claim that it is measured for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from livescale.load.traces import TraceRow, find_trace, read_trace

Figures = Mapping[str, float]
Judges = Literal["pool", "planner", "arithmetic"]
"""What a claim puts to the test: a simulated pool that serves a load; a plan of the production
planner or controller, and what becomes of it on links; or formulas, small queues and exact plays
with stated inputs, which say nothing of a pool."""
JUDGES: tuple[Judges, ...] = ("pool", "planner", "arithmetic")


class AbsentError(Exception):
    """A claim cannot be measured here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a measurement may use besides the code: a seed, and the data directory if there is
    one."""

    seed: int = 0
    data_dir: Path | None = None

    def trace(self, name: str) -> list[TraceRow]:
        """The rows of a public trace. Raises AbsentError without a data directory, TraceError for
        one without the trace."""
        if self.data_dir is None:
            raise AbsentError(f"trace {name}: LIVESCALE_DATA is not set")
        return read_trace(find_trace(name, self.data_dir))


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) of one line of a picture; `is_step`: y holds until the next x."""

    label: str
    points: tuple[tuple[float, float], ...]
    is_step: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing that belongs to a claim, or a panel of a figure. `is_log_x`: the x axis counts
    powers of two. With `names` of the x 0, 1, … it has bars."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    is_log_x: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures by name (units in the names), and what shows them."""

    figures: dict[str, float]
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper, and when our figures agree with it.

    `measure` takes the figures; its docstring names the place in the paper. `paper` is what the
    paper says, `ours` how to say our figures (a format of their names), and `tolerance` tells in
    words what `is_within` tests. `corrected` says what was changed where that is not the statement
    as printed: because it cannot hold, or because only a weaker or a completed one can be tested.
    `note` says where the paper contradicts itself, or what our setup lacks.
    """

    measure: Callable[[Conditions], Measured]
    id: str
    judges: Judges
    setup: str
    paper: str
    tolerance: str
    ours: str
    is_within: Callable[[Figures], bool]
    corrected: str = ""
    note: str = ""

    @property
    def statement(self) -> Literal["printed", "corrected", "own"]:
        """Of ids with N, which stand in no paper, it is our own."""
        if self.id.startswith("N"):
            return "own"
        return "corrected" if self.corrected else "printed"

    def agrees(self, figures: Figures) -> bool:
        """Within tolerance; and a claim about pools is one about requests that were all answered
        (its figure `failed` counts those that were not, over all runs)."""
        is_answered = self.judges != "pool" or figures["failed"] == 0
        return is_answered and bool(self.is_within(figures))


def claim(**fields: Any) -> Callable[[Callable[[Conditions], Measured]], Claim]:
    """Makes a measuring function a Claim; `fields` are the other fields of the Claim."""
    return lambda measure: Claim(measure, **fields)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim with our figures beside it."""

    claim: Claim
    measured: Measured
    ours: str
    within: bool

    @classmethod
    def of(cls, claim: Claim, measured: Measured) -> Verdict:
        ours = claim.ours.format_map(measured.figures)
        if failed := measured.figures.get("failed"):
            ours += f"; {failed:.0f} requests failed"
        return cls(claim, measured, ours, claim.agrees(measured.figures))


@dataclass(frozen=True, slots=True)
class Count:
    """Of so many claims so many are within tolerance."""

    within: int
    claims: int

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Count:
        return cls(sum(verdict.within for verdict in verdicts), len(verdicts))

    def __str__(self) -> str:
        return f"{self.within} of {self.claims}"

    def as_json(self) -> dict[str, int]:
        return {"within": self.within, "claims": self.claims}


_TOLD = ("id", "judges", "statement", "corrected", "setup", "paper", "tolerance", "note")


@dataclass(slots=True)
class Reproduction:
    """All that came of a run: verdicts, and why other claims have none, both in table order."""

    verdicts: list[Verdict] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def count(self, statement: str, judges: str | None = None) -> Count:
        """Of the claims whose statement is that one ("printed", "corrected"); only of those that
        judge one thing, or of all."""
        return Count.of(
            [
                verdict
                for verdict in self.verdicts
                if verdict.claim.statement == statement and judges in (None, verdict.claim.judges)
            ]
        )

    def as_json(self) -> dict[str, object]:
        """`targets` has one object per verdict; `within` counts them by what they judge ("all":
        together) and by statement."""
        groups: tuple[Judges | None, ...] = (*JUDGES, None)
        return {
            "within": {
                judges or "all": {
                    kind: self.count(kind, judges).as_json() for kind in ("printed", "corrected")
                }
                for judges in groups
            },
            "targets": [
                {
                    **{name: getattr(verdict.claim, name) for name in _TOLD},
                    "ours": verdict.ours,
                    "within": verdict.within,
                    "figures": {k: float(v) for k, v in verdict.measured.figures.items()},
                }
                for verdict in self.verdicts
            ],
            "absent": [{"id": name, "reason": reason} for name, reason in self.absent.items()],
        }


def is_near(value: float, expected: float, part: float) -> bool:
    """The value is within `part` (0.05: five percent) of what is expected."""
    return abs(value - expected) <= part * abs(expected)


def near(part: float, **expected: float) -> Callable[[Figures], bool]:
    """The figures of these names are within `part` of what is expected of them."""
    return lambda figures: all(is_near(figures[k], v, part) for k, v in expected.items())
