"""Service level objectives: what was measured of a request, and when that is good enough.

Ground floor: values and rules only. Measuring lives in `client/`, rendering in `report/`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import msgspec

from livescale.common.errors import UserError
from livescale.values.types import Value

_NS_PER_UNIT = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000}
_MULTIPLE = re.compile(r"(\d+)x-mean")
TIME = r"(\d{1,9}(?:\.\d{1,9})?)(s|ms|us)"
"""How times are written: the groups are what `exact_ns` takes."""
_BOUND = re.compile(rf"(ttft|tbt)={TIME}")


class SloError(UserError, ValueError):
    """An SLO cannot be read or has nothing to refer to."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When one request was due, was sent, gave its tokens and ended (one monotonic clock).

    `token_ns` has one time per token. `ok` is True only if all its tokens came. `sent_ns` is when
    the client got round to sending it; lateness is `sent_ns - scheduled_ns`. `model` is empty where
    all requests are judged alike.
    """

    request: str
    scheduled_ns: int
    sent_ns: int
    token_ns: tuple[int, ...]
    finished_ns: int
    ok: bool
    model: str = ""

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token since the request was due, not since it was sent.

        An open loop counts so: a client that falls behind must not hide waiting time.
        """
        return self.token_ns[0] - self.scheduled_ns if self.token_ns else None

    @property
    def tbt_ns(self) -> tuple[int, ...]:
        """Times between consecutive tokens; empty below two tokens."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_ns))

    @property
    def tbt_mean_ns(self) -> int | None:
        """Mean time between tokens (rounded down); None below two tokens."""
        if len(self.token_ns) < 2:
            return None
        return (self.token_ns[-1] - self.token_ns[0]) // (len(self.token_ns) - 1)


class SloAbsolute(Value, frozen=True):
    """Bounds in nanoseconds. `tbt_ns` is None where the time between tokens is not bounded.

    `of_models` has the models, by name, that are judged by bounds of their own.
    """

    ttft_ns: int
    tbt_ns: int | None = None
    of_models: dict[str, SloAbsolute] = msgspec.field(default_factory=dict)

    def resolve(self, timings: Sequence[RequestTiming]) -> SloAbsolute:
        """Itself: absolute bounds do not depend on what was measured."""
        return self

    def is_met(self, timing: RequestTiming) -> bool:
        """The request ended well, its TTFT and its mean TBT are within the bounds.

        TBT is judged by the request's mean, as reading speed is what a user notices: the largest
        gap would fail a request of many tokens for one hiccup, and would grow stricter with the
        length of the answer. One token has no TBT and meets any bound on it.
        """
        bounds = self.of_models.get(timing.model, self)
        return (
            timing.ok
            and bounds.is_ttft_met(timing.ttft_ns)
            and bounds.is_tbt_met(timing.tbt_mean_ns)
        )

    def is_ttft_met(self, ttft_ns: int | None) -> bool:
        """The first token came (None: it did not), and in time."""
        return ttft_ns is not None and ttft_ns <= self.ttft_ns

    def is_tbt_met(self, tbt_mean_ns: int | None) -> bool:
        """The mean time between tokens is within the bound; without two tokens it is."""
        return self.tbt_ns is None or tbt_mean_ns is None or tbt_mean_ns <= self.tbt_ns

    def __str__(self) -> str:
        ttft = f"ttft={_decimal_ms(self.ttft_ns)}ms"
        return ttft if self.tbt_ns is None else f"{ttft},tbt={_decimal_ms(self.tbt_ns)}ms"


class SloMultipleOfMean(Value, frozen=True):
    """BlitzScale's rule (§6): an SLO is `multiple` times the mean (5 there).

    Which run the mean is taken of is the caller's choice; compared systems need the same one.
    """

    multiple: int = 5

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"an SLO of {self.multiple} times the mean cannot be met")

    def resolve(self, timings: Sequence[RequestTiming]) -> SloAbsolute:
        """The bounds that these timings give: means over requests that ended well.

        The TBT bound is taken of all gaps between tokens. Raises SloError if none ended well.
        """
        ttfts = [t.ttft_ns for t in timings if t.ok and t.ttft_ns is not None]
        if not ttfts:
            raise SloError(f"SLO {self}: no request ended well, there is no mean")
        gaps = [gap for t in timings if t.ok for gap in t.tbt_ns]
        return SloAbsolute(
            self.multiple * sum(ttfts) // len(ttfts),
            self.multiple * sum(gaps) // len(gaps) if gaps else None,
        )

    def __str__(self) -> str:
        return f"{self.multiple}x-mean"


class SloOfModels(Value, frozen=True):
    """A rule for each of some models, by name, and a general one for all others."""

    general: SloAbsolute | SloMultipleOfMean
    of_models: dict[str, SloAbsolute | SloMultipleOfMean]

    def resolve(self, timings: Sequence[RequestTiming]) -> SloAbsolute:
        """A multiple of the mean refers to the requests that it judges; a model without such a
        mean is judged by the general bounds. Those refer to all requests if none that they judge
        ended well. Raises SloError if no request at all did and a mean is asked for.
        """
        asked: dict[str, list[RequestTiming]] = {name: [] for name in self.of_models}
        others: list[RequestTiming] = []
        for timing in timings:
            asked.get(timing.model, others).append(timing)
        own: dict[str, SloAbsolute] = {}
        for name, rule in self.of_models.items():
            with contextlib.suppress(SloError):
                own[name] = rule.resolve(asked[name])
        judged = others if any(timing.ok for timing in others) else timings
        return msgspec.structs.replace(self.general.resolve(judged), of_models=own)


SloRule = SloAbsolute | SloMultipleOfMean | SloOfModels


def parse_slo(text: str) -> SloAbsolute | SloMultipleOfMean:
    """The rule in "5x-mean", "ttft=450ms,tbt=150ms" or "ttft=0.5s" (s, ms, us).

    Raises SloError.
    """
    multiple = _MULTIPLE.fullmatch(text)
    if multiple and int(multiple[1]) >= 1:
        return SloMultipleOfMean(int(multiple[1]))
    bounds: dict[str, int] = {}
    for part in text.split(","):
        bound = _BOUND.fullmatch(part.strip())
        if bound is None or bound[1] in bounds:
            break
        bounds[bound[1]] = exact_ns(bound[2], bound[3])
    else:
        if "ttft" in bounds:
            return SloAbsolute(bounds["ttft"], bounds.get("tbt"))
    raise SloError(f"'{text}' is not a valid SLO. Write '5x-mean' or 'ttft=450ms,tbt=150ms'")


def exact_ns(amount: str, unit: str) -> int:
    """A time as it is written, in nanoseconds; what is finer is left out."""
    return int(Fraction(amount) * _NS_PER_UNIT[unit])


def percentile(values: Sequence[int], q: int) -> int:
    """The q-th percentile by nearest rank: always one of the values. ValueError if there is none.

    It is the smallest value that at least q percent of the values do not exceed.
    """
    if not values or not 0 <= q <= 100:
        raise ValueError(f"there is no {q}th percentile of {len(values)} values")
    rank = max(1, -(-q * len(values) // 100))
    return sorted(values)[rank - 1]


def _decimal_ms(amount_ns: int) -> str:
    ms, rest_ns = divmod(amount_ns, 1_000_000)
    return f"{ms}.{rest_ns:06d}".rstrip("0").rstrip(".")
