"""The words of a reproduction: claims, what was measured for them, pictures, verdicts.

Values and their own arithmetic only: how a claim is measured stands in the modules named after the
papers, which claims there are in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from livescale.traces import TraceRow, find_trace, read_trace

Figures = Mapping[str, float]


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
    """A drawing that belongs to a claim. `is_log_x`: the x axis counts powers of two."""

    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    is_log_x: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures by name (units in the names), and what shows them."""

    figures: dict[str, float]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper, and when our figures agree with it.

    `paper` is what the paper says, `ours` how to say our figures (a format of their names), and
    `tolerance` tells in words what `is_within` tests. `note` says where the paper contradicts
    itself, or what our setup lacks.
    """

    id: str
    setup: str
    paper: str
    tolerance: str
    measure: Callable[[Conditions], Measured]
    ours: str
    is_within: Callable[[Figures], bool]
    note: str = ""


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
        return cls(claim, measured, ours, bool(claim.is_within(measured.figures)))


@dataclass(slots=True)
class Reproduction:
    """All that came of a run: verdicts, and why other claims have none, both in table order."""

    verdicts: list[Verdict] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """`targets` has one object per verdict."""
        return {
            "targets": [
                {
                    "id": verdict.claim.id,
                    "setup": verdict.claim.setup,
                    "paper": verdict.claim.paper,
                    "ours": verdict.ours,
                    "tolerance": verdict.claim.tolerance,
                    "within": verdict.within,
                    "note": verdict.claim.note,
                    "figures": {k: float(v) for k, v in verdict.measured.figures.items()},
                }
                for verdict in self.verdicts
            ],
            "absent": [{"id": name, "reason": reason} for name, reason in self.absent.items()],
        }


def is_near(value: float, expected: float, part: float) -> bool:
    """The value is within `part` (0.05: five percent) of what is expected."""
    return abs(value - expected) <= part * abs(expected)
