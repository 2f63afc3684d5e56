"""Generated loads: arrivals of a renewal process, drawn lengths, and the names commands know.

Ground floor: everything drawn comes from a seed that the caller gives.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import msgspec

from livescale.common.settings import unknown
from livescale.load.formats import ParsedTrace, TraceError, TraceRow, parse_trace_file
from livescale.load.traces import burst_trace, drawn_length, find_trace
from livescale.values.types import Value
from livescale.values.units import NS_PER_S

_CV_MIN, _CV_MAX = 0.01, 32.0
_SECONDS_MAX = 31_536_000
REQUESTS_MAX = 50_000_000
"""Requests of one generated trace; a slip of the pen must not fill the memory."""


_Kind = TypeVar("_Kind", bound=Value)


class GammaShape(Value, frozen=True, kw_only=True):
    """What a generated load looks like, apart from its rate and its seed.

    Intervals between arrivals are gamma distributed with the coefficient of variation `cv`: 1 is a
    Poisson process, above it requests come in bursts, below it like clockwork. Lengths in tokens
    are `input` and `output`; with a sigma they are log-normal with that median. `lengths` names a
    trace whose lengths are taken instead, in its order, starting over at its end.
    """

    cv: float = 1.0
    input: int = 512
    output: int = 128
    input_sigma: float = 0.0
    output_sigma: float = 0.0
    lengths: str = ""

    def __post_init__(self) -> None:
        if not _CV_MIN <= self.cv <= _CV_MAX:
            raise ValueError(f"cv {self.cv:g} is not in {_CV_MIN:g} to {_CV_MAX:g}")
        if min(self.input, self.output) < 1:
            raise ValueError(f"lengths of {self.input} and {self.output} tokens: 1 is the least")
        if not all(0 <= sigma <= 4 for sigma in (self.input_sigma, self.output_sigma)):
            raise ValueError("input_sigma and output_sigma lie in 0 to 4")


class _GammaName(GammaShape, frozen=True, kw_only=True):
    """What may stand behind `gamma:`: the shape, and more."""

    rate: float
    seconds: float = 600.0
    seed: int | None = None


class _BurstName(Value, frozen=True, kw_only=True):
    """What may stand behind `burst:`."""

    seconds: float = 60.0
    peak: float = 67.0
    seed: int | None = None


def gamma_arrivals(requests_per_s: float, cv: float, duration_ns: int, seed: int) -> Iterator[int]:
    """Times in [0, duration_ns) of a stationary renewal process with gamma intervals.

    Stationary: time 0 lies anywhere in an interval, not at the start of one (Cox, Renewal Theory,
    1962, §2.2 and §5.4). So the expected number of arrivals is exactly rate times duration, which
    matters for bursty models with few requests: counted from an arrival there would be up to
    (cv² - 1) / 2 more. One trace's own rate varies by about cv / sqrt(requests).
    """
    if not (requests_per_s > 0 and math.isfinite(requests_per_s)):
        raise ValueError(f"{requests_per_s} requests per second is no rate")
    if requests_per_s * duration_ns > REQUESTS_MAX * NS_PER_S:
        raise ValueError(f"more than {REQUESTS_MAX} requests would be generated")
    shape = 1 / cv**2
    scale_ns = NS_PER_S / requests_per_s / shape
    rng = random.Random(seed)
    # The interval that covers time 0 is drawn in proportion to its length (a gamma of a shape
    # larger by one), and what is left of it is uniform.
    at_ns = rng.random() * rng.gammavariate(shape + 1, scale_ns)
    while at_ns < duration_ns:
        yield int(at_ns)
        at_ns += rng.gammavariate(shape, scale_ns)


def gamma_trace(
    shape: GammaShape,
    requests_per_s: float,
    duration_ns: int,
    seed: int,
    payloads: Sequence[TraceRow] = (),
) -> list[TraceRow]:
    """A generated trace. Lengths are those of the `payloads`, in their order, if there are any.

    Arrivals and lengths are drawn apart: another length changes no arrival.
    """
    arrivals = gamma_arrivals(requests_per_s, shape.cv, duration_ns, seed)
    if payloads:
        return [
            payload.at(at_ns) for payload, at_ns in zip(cycle(payloads), arrivals, strict=False)
        ]
    rng = random.Random(f"lengths {seed}")
    return [
        TraceRow(
            at_ns,
            drawn_length(rng, shape.input, shape.input_sigma),
            drawn_length(rng, shape.output, shape.output_sigma),
        )
        for at_ns in arrivals
    ]


def named_trace(name: str, data_dir: Path | None, seed: int) -> ParsedTrace:
    """The requests that a name stands for where a command asks for a trace.

    A file that exists wins; then `gamma:rate=6,cv=4,…` and `burst` (or `burst:peak=30,…`) are
    generated, with the seed of the name or else `seed`; anything else is a name under the data
    directory. Raises TraceError.
    """
    if not is_generated(name):
        return parse_trace_file(find_trace(name, data_dir))
    kind, _, given = name.partition(":")
    try:
        return ParsedTrace(_GENERATORS[kind](_pairs(given), data_dir, seed), kind)
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"trace '{name}': {error}") from None


def is_generated(name: str) -> bool:
    """The name stands for what is generated, and is not that of a file."""
    return name.partition(":")[0] in _GENERATORS and not Path(name).is_file()


def payloads_of(shape: GammaShape, data_dir: Path | None) -> list[TraceRow]:
    """The rows whose lengths a shape takes; none where it has lengths of its own."""
    if not shape.lengths:
        return []
    rows = parse_trace_file(find_trace(shape.lengths, data_dir)).rows
    if not rows:
        raise TraceError(f"trace '{shape.lengths}' has no request whose lengths could be taken")
    return rows


# -- helpers, in the order used -------------------------------------------------------------------


def _pairs(text: str) -> dict[str, str]:
    """The settings in "rate=6,cv=4"."""
    pairs: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key in pairs:
            raise ValueError(f"'{part}' is not one more KEY=VALUE")
        pairs[key] = value
    return pairs


def _gamma(pairs: dict[str, str], data_dir: Path | None, seed: int) -> list[TraceRow]:
    name = _convert(pairs, _GammaName)
    payloads = payloads_of(name, data_dir)
    own_seed = seed if name.seed is None else name.seed
    return gamma_trace(name, name.rate, _duration_ns(name.seconds), own_seed, payloads)


def _burst(pairs: dict[str, str], data_dir: Path | None, seed: int) -> list[TraceRow]:
    name = _convert(pairs, _BurstName)
    if not 0 < name.peak <= 1_000_000:
        raise ValueError(f"peak {name.peak:g} is not in 0 to 1000000 requests per second")
    own_seed = seed if name.seed is None else name.seed
    return burst_trace(own_seed, _duration_ns(name.seconds), peak_per_s=name.peak)


_GENERATORS = {"gamma": _gamma, "burst": _burst}


def _convert(pairs: Mapping[str, str], kind: type[_Kind]) -> _Kind:
    for key in pairs:
        if key not in kind.__struct_fields__:
            raise ValueError(unknown("unknown key", key, kind.__struct_fields__))
    return msgspec.convert(pairs, kind, strict=False)


def _duration_ns(seconds: float) -> int:
    if not 0 < seconds <= _SECONDS_MAX:
        raise ValueError(f"seconds {seconds:g} is not in 0 to {_SECONDS_MAX}")
    return round(seconds * NS_PER_S)
