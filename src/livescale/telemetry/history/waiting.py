"""Why the slowest requests waited: what their pool did meanwhile.

Works on histories alone. Nothing is decided here.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from livescale.telemetry.history.device_time import DeviceStretch, DeviceUse, device_stretches
from livescale.telemetry.history.reading import History
from livescale.telemetry.record.record import RequestLine
from livescale.values.types import InstanceState

SLOWEST_PERCENT = 5


@dataclass(frozen=True, slots=True)
class SlowRequests:
    """The slowest requests to get a first token, and where their times went; ns summed up over
    them: the four parts sum to `ttft_ns`.

    They computed for `compute_ns`. Before, they waited: `loading_ns` while an instance of their
    model was loading; else `full_ns` while no device was left for another one; else
    `held_back_ns`, while the policy, or a limit, let devices be.
    """

    requests: int = 0
    ttft_ns: int = 0
    loading_ns: int = 0
    full_ns: int = 0
    held_back_ns: int = 0
    compute_ns: int = 0


def slow_requests(history: History, percent: int = SLOWEST_PERCENT) -> SlowRequests:
    """The slowest `percent` of the requests that got a first token, one at least if there is any.

    A record does not say when a request's computing began. It is taken to compute for as long as
    it would need if its instance had nothing else to do, as the record shows that: at most the
    time from dispatch to the first token of any request of its model with as long a prompt, or of
    one with a shorter prompt times the ratio of their lengths. What is left of its time, at the
    instance or before, it waited.
    """
    begun = [line for line in history.requests if line.token_ns]
    count = -(-len(begun) * percent // 100)
    slowest = sorted(begun, key=lambda line: (_ttft_ns(line), line.request))[len(begun) - count :]
    if not slowest:
        return SlowRequests()
    from_ns = min(line.token_ns[0] - _ttft_ns(line) for line in slowest)
    to_ns = max(line.token_ns[0] for line in slowest)
    devices = device_stretches(history, from_ns, to_ns)
    models = dict.fromkeys(line.model for line in slowest)
    phases = {model: _Phases(history, devices, model, from_ns, to_ns) for model in models}
    alone = {model: _Alone(line for line in begun if line.model == model) for model in models}
    sums = dict.fromkeys(_Phase, 0)
    ttft_ns = compute_ns = 0
    for line in slowest:
        first_ns, its_ttft_ns = line.token_ns[0], _ttft_ns(line)
        own_ns = min(alone[line.model].compute_ns(line.prompt_tokens), its_ttft_ns)
        ttft_ns += its_ttft_ns
        compute_ns += own_ns
        waited = phases[line.model].between(first_ns - its_ttft_ns, first_ns - own_ns)
        for phase, spent_ns in waited:
            sums[phase] += spent_ns
    return SlowRequests(
        requests=len(slowest),
        ttft_ns=ttft_ns,
        loading_ns=sums[_Phase.LOADING],
        full_ns=sums[_Phase.FULL],
        held_back_ns=sums[_Phase.HELD_BACK],
        compute_ns=compute_ns,
    )


# -- helpers, in the order used -------------------------------------------------------------------


def _ttft_ns(line: RequestLine) -> int:
    return max(line.token_ns[0] - line.due_ns, 0)


class _Phase(enum.Enum):
    """What a pool did for a model at a time."""

    LOADING = enum.auto()
    FULL = enum.auto()
    HELD_BACK = enum.auto()


class _Phases:
    """The phases of one model from `from_ns` to `to_ns`, without gaps."""

    def __init__(
        self,
        history: History,
        devices: dict[int, tuple[DeviceStretch, ...]],
        model: str,
        from_ns: int,
        to_ns: int,
    ) -> None:
        policy = history.policies.get(model)
        needed = 1 if policy is None else policy.spec.tp_size
        changes: list[tuple[int, int, int]] = []  # (at, instances that load more, devices free)
        for instance in history.instances:
            for state, start_ns, stop_ns in instance.stretches(to_ns):
                is_loading = state in (InstanceState.LOADING, InstanceState.LIVE)
                if instance.model == model and is_loading:
                    changes += [(start_ns, 1, 0), (stop_ns, -1, 0)]
        for stretches in devices.values():
            for start_ns, stop_ns, use, of_model in stretches:
                is_own_drain = use is DeviceUse.DRAINING and of_model == model
                if use in (DeviceUse.IDLE, DeviceUse.SPARE) or is_own_drain:
                    changes += [(start_ns, 0, 1), (stop_ns, 0, -1)]
        # The earliest first; what is before `from_ns` holds from there on.
        steps = {from_ns: _phase(0, 0, needed)}
        loading = free = 0
        for at_ns, more, freed in sorted(changes):
            loading, free = loading + more, free + freed
            if at_ns < to_ns:
                steps[max(at_ns, from_ns)] = _phase(loading, free, needed)
        self._times = [*steps, to_ns]
        self._phases = list(steps.values())
        spans = [stop_ns - start_ns for start_ns, stop_ns in pairwise(self._times)]
        #: of each phase, how long it had lasted by each of `_times`
        self._spent = {
            phase: list(
                accumulate(
                    (s if p is phase else 0 for s, p in zip(spans, self._phases, strict=True)),
                    initial=0,
                )
            )
            for phase in _Phase
        }

    def between(self, start_ns: int, stop_ns: int) -> Iterator[tuple[_Phase, int]]:
        """How long each phase lasted within that time."""
        for phase in _Phase:
            yield phase, self._by(phase, stop_ns) - self._by(phase, start_ns)

    def _by(self, phase: _Phase, at_ns: int) -> int:
        """How long it had lasted by then."""
        place = min(bisect_right(self._times, at_ns), len(self._phases)) - 1
        spent_ns = self._spent[phase][place]
        return spent_ns + (at_ns - self._times[place] if self._phases[place] is phase else 0)


def _phase(loading: int, free: int, needed: int) -> _Phase:
    if loading:
        return _Phase.LOADING
    return _Phase.FULL if free < needed else _Phase.HELD_BACK


class _Alone:
    """How long prompts of one model compute, at most, if their instance has nothing else to do."""

    def __init__(self, lines: Iterable[RequestLine]) -> None:
        found = sorted(_served(lines))
        self._prompts = [prompt for prompt, _ in found]
        #: the least time of this prompt and all longer ones
        self._of_longer = list(accumulate(reversed([ns for _, ns in found]), min))[::-1]
        #: the least (time, prompt) per token of this prompt and all shorter ones
        self._of_shorter = list(accumulate(((ns, prompt) for prompt, ns in found), _lower_rate))

    def compute_ns(self, prompt_tokens: int) -> int:
        """For a prompt of that length; rounded up."""
        times = []
        place = bisect_left(self._prompts, prompt_tokens)
        if place < len(self._prompts):
            times.append(self._of_longer[place])
        if place:
            spent_ns, tokens = self._of_shorter[place - 1]
            times.append(-(-spent_ns * prompt_tokens // tokens))
        return min(times, default=0)


def _served(lines: Iterable[RequestLine]) -> Iterator[tuple[int, int]]:
    """(prompt tokens, ns from dispatch to first token) of requests of which that is known."""
    for line in lines:
        sent_ns = line.dispatched_ns
        if line.prompt_tokens > 0 and sent_ns is not None and sent_ns <= line.token_ns[0]:
            yield line.prompt_tokens, line.token_ns[0] - sent_ns


def _lower_rate(one: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    (one_ns, one_tokens), (other_ns, other_tokens) = one, other
    if other_ns * one_tokens < one_ns * other_tokens:
        return other_ns, other_tokens
    return one_ns, one_tokens
