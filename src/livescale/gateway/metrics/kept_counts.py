"""What a gateway has counted, as values that other processes read and add to what they counted.

Where they are kept is not decided here, and neither is which gateways belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.gateway.contract.backend import Reading
from livescale.values.types import Value


class KeptBuckets(Value, frozen=True):
    """How many values lie in each interval, and their sum in seconds."""

    counts: tuple[int, ...]
    sum: float


class KeptModel(Value, frozen=True):
    """All that was counted of one model. `slo` has for each part of the SLO the requests that met
    it, and those that missed it."""

    model: str
    outcomes: dict[str, int]
    prompt_tokens: int
    generation_tokens: int
    goodput_tokens: int
    first_token: KeptBuckets
    inter_token: KeptBuckets
    request: KeptBuckets
    queue: KeptBuckets
    slo: dict[str, tuple[int, int]]


class KeptCounts(Value, frozen=True):
    """Of one gateway at one time, with the amounts of its own requests (`Reading.is_own`)."""

    models: tuple[KeptModel, ...] = ()
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True, slots=True)
class SiblingCounts:
    """What another gateway counted. If it does not answer, these are the last counts that are known
    of it."""

    name: str
    counts: KeptCounts
    answers: bool


class Siblings(Protocol):
    """The other gateways behind the same port: a client, or a scraper, gets to any of them."""

    @property
    def name(self) -> str:
        """Of this gateway among them."""

    def earlier(self) -> KeptCounts:
        """What the process counted whose place this one has taken: counts go on from there."""

    def answer_with(self, own: Callable[[], KeptCounts]) -> None:
        """From now on others that ask are answered with these."""

    async def others(self, own: KeptCounts) -> Sequence[SiblingCounts]:
        """The counts of the others. What is shown of `own` is not lost with this process."""
