"""What a run record of `bench teams` says: of the load, of the teams, and of each one's tokens.

Real and simulated pools write the same record, and both are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.lines.team_switch import (
    Dispatches,
    Switched,
    TeamTime,
    switched,
    team_times,
)
from livescale.messages.commands import StartHolding
from livescale.messages.events import (
    BatchTaken,
    Event,
    HoldingCompleted,
    HoldingFailed,
    ModelChanged,
    WorkerLost,
)
from livescale.telemetry.record.record import AnyLine, RequestLine, StepLine
from livescale.values.scaling_policies import ModelPolicy
from livescale.values.types import Outcome, WorkerRef
from livescale.values.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class TeamRun:
    """A team: decoder layers of each member, when it was ordered and ended, and when it gave first
    tokens. In the second half of the time from the first of these to its end it gave `decoded`
    further tokens, and each source `source_decoded` on average. `switched` decoded at its end."""

    members: int
    span_layers: tuple[int, ...]
    formed_ns: int
    ended_ns: int
    token_ns: tuple[int, ...]
    decoded: int
    source_decoded: float
    switched: tuple[Switched, ...]

    @property
    def member_ns(self) -> int:
        """From the first token to the team's end, for each member; of a team that gave none, from
        its beginning."""
        return self.members * (
            self.ended_ns - (self.token_ns[0] if self.token_ns else self.formed_ns)
        )

    @property
    def span_limit(self) -> float:
        """Of what its members would compute with even spans, what they can with theirs."""
        return sum(self.span_layers) / (self.members * max(self.span_layers))


@dataclass(frozen=True, slots=True)
class TeamPlay:
    """One play of the scene. Times are the record's; `source_token_ns` are first tokens of each
    source while the others were loaded, in order. `ttft_ns` are those of all requests, and
    `helped_ns` the time of the first token for which a new instance ran some layers."""

    ordered_ns: int
    loaded_ns: int
    teams: tuple[TeamRun, ...]
    source_token_ns: tuple[tuple[int, ...], ...]
    ttft_ns: tuple[int, ...]
    helped_ns: int | None

    @property
    def load_s(self) -> float:
        """From the order until the last instance has everything."""
        return (self.loaded_ns - self.ordered_ns) / NS_PER_S

    @property
    def formed_ratio(self) -> float | None:
        """From the load's order to that of the first team, over the load's time."""
        return self._part_of_load(team.formed_ns for team in self.teams)

    @property
    def first_token_ratio(self) -> float | None:
        """From the load's order to the first token of a team, over the load's time."""
        return self._part_of_load(team.token_ns[0] for team in self.teams if team.token_ns)

    @property
    def throughput_ratio(self) -> float | None:
        """Prompts per time of teams, over what as many whole instances compute. Of each team the
        time from its first token to its end counts, by its members; all of it where none came."""
        if not self.teams:
            return None
        done = sum(max(len(team.token_ns) - 1, 0) for team in self.teams)
        return done / (self._source_rate * sum(team.member_ns for team in self.teams))

    @property
    def throughput_limit(self) -> float | None:
        """As `throughput_ratio` would be if spans alone bound the teams."""
        if not self.teams:
            return None
        limits = sum(team.span_limit * team.member_ns for team in self.teams)
        return limits / sum(team.member_ns for team in self.teams)

    @property
    def helped_ratio(self) -> float | None:
        """From the load's order to the first token for which a new instance ran some layers, over
        the load's time."""
        return self._part_of_load([] if self.helped_ns is None else [self.helped_ns])

    @property
    def decode_ratio(self) -> float | None:
        """Tokens behind the first ones that teams gave, over what as many sources gave in the same
        time."""
        alone = sum(team.members * team.source_decoded for team in self.teams)
        return sum(team.decoded for team in self.teams) / alone if alone else None

    @property
    def pauses_ms(self) -> list[float]:
        """Of each request that decoded in a team when that ended."""
        return [one.pause_ns / 1e6 for team in self.teams for one in team.switched]

    def as_json(self) -> dict[str, object]:
        teams = [
            {
                "members": team.members,
                "span_layers": list(team.span_layers),
                "formed_s": (team.formed_ns - self.ordered_ns) / NS_PER_S,
                "ended_s": (team.ended_ns - self.ordered_ns) / NS_PER_S,
                "first_tokens": len(team.token_ns),
                "decoding_at_end": len(team.switched),
            }
            for team in self.teams
        ]
        return {
            "load_s": self.load_s,
            "team_throughput_ratio": self.throughput_ratio,
            "team_throughput_limit": self.throughput_limit,
            "team_formed_ratio_to_load": self.formed_ratio,
            "first_token_ratio_to_load": self.first_token_ratio,
            "source_prompts_per_s": self._source_rate * NS_PER_S,
            "teams": teams,
        }

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _source_rate(self) -> float:
        """Prompts per ns of one source."""
        spans = [(len(times) - 1, times[-1] - times[0]) for times in self.source_token_ns]
        return sum(count for count, _ in spans) / sum(span_ns for _, span_ns in spans)

    def _part_of_load(self, times_ns: Iterable[int]) -> float | None:
        first_ns = min(times_ns, default=None)
        if first_ns is None:
            return None
        return (first_ns - self.ordered_ns) / (self.loaded_ns - self.ordered_ns)


def read_play(lines: Sequence[AnyLine], *, needs_queue: bool = True) -> TeamPlay:
    """What happened. Raises BenchError where the scene was not played to its end, or with
    `needs_queue` where no prompt waited at some time of the load."""
    steps = [line for line in lines if isinstance(line, StepLine)]
    requests = [line for line in lines if isinstance(line, RequestLine)]
    ordered_ns, targets = _order(steps)
    loaded_ns = _loaded_ns(steps, targets)
    _check(steps, requests, ordered_ns)
    if needs_queue and _runs_dry(requests, ordered_ns, loaded_ns):
        raise BenchError("no prompt was queued any more at some time of the load")
    dispatches = Dispatches(steps)
    tokens = _Tokens(requests, dispatches)
    sources = [worker for worker in sorted(tokens.first) if worker not in targets]
    by_source = [_between(tokens.first[worker], ordered_ns, loaded_ns) for worker in sources]
    if not by_source or any(len(times) < 2 for times in by_source):
        raise BenchError("a source computed less than two prompts during the load")
    teams = [_team(time, requests, dispatches, tokens, sources) for time in team_times(steps)]
    return TeamPlay(
        ordered_ns=ordered_ns,
        loaded_ns=loaded_ns,
        teams=tuple(teams),
        source_token_ns=tuple(by_source),
        ttft_ns=tuple(line.token_ns[0] - line.due_ns for line in requests),
        helped_ns=_helped_ns(steps, requests, targets),
    )


def asked_for(lines: Iterable[AnyLine]) -> ModelPolicy:
    """The limits that asked for more instances. Raises BenchError."""
    for line in lines:
        for event in line.events if isinstance(line, StepLine) else ():
            if isinstance(event, ModelChanged):
                return event.policy
    raise BenchError("more instances were not asked for")


# -- helpers, in the order used -------------------------------------------------------------------


def _order(steps: Sequence[StepLine]) -> tuple[int, dict[WorkerRef, None]]:
    """When loads were ordered behind the change of limits, and of whom."""
    targets: dict[WorkerRef, None] = {}
    ordered_ns: int | None = None
    is_changed = False
    for step in steps:
        is_changed |= any(isinstance(event, ModelChanged) for event in step.events)
        for command in step.commands if is_changed else ():
            if isinstance(command, StartHolding):
                ordered_ns = step.now_ns if ordered_ns is None else ordered_ns
                targets[command.holding.member] = None
    if ordered_ns is None:
        raise BenchError("no load was ordered")
    return ordered_ns, targets


def _loaded_ns(steps: Sequence[StepLine], targets: dict[WorkerRef, None]) -> int:
    """When the last of these had everything."""
    done = {
        event.holding.member: step.now_ns
        for step, event in _events(steps)
        if isinstance(event, HoldingCompleted) and event.holding.member in targets
    }
    if len(done) < len(targets):
        raise BenchError(f"{len(done)} of {len(targets)} loads came to their end")
    return max(done.values())


def _events(steps: Iterable[StepLine]) -> Iterator[tuple[StepLine, Event]]:
    for step in steps:
        for event in step.events:
            yield step, event


def _check(steps: Sequence[StepLine], requests: Sequence[RequestLine], ordered_ns: int) -> None:
    """Nothing else happened. Raises BenchError."""
    for step, event in _events(steps):
        if step.now_ns >= ordered_ns and isinstance(event, HoldingFailed | WorkerLost):
            raise BenchError(f"{event}")
    failed = [line for line in requests if line.outcome is not Outcome.FINISHED]
    if failed:
        raise BenchError(f"{len(failed)} requests failed, the first one: {failed[0].error}")


def _runs_dry(requests: Sequence[RequestLine], start_ns: int, stop_ns: int) -> bool:
    """No prompt waits for an instance at some time between these."""
    came = [(line.queued_ns, 1) for line in requests]
    left = [(line.first_dispatched_ns, -1) for line in requests if line.first_dispatched_ns]
    changes = sorted(came + left)
    waiting = sum(change for at_ns, change in changes if at_ns <= start_ns)
    for at_ns, change in changes:
        if start_ns < at_ns <= stop_ns:
            if waiting <= 0:
                return True
            waiting += change
    return waiting <= 0


class _Tokens:
    """When each worker gave first tokens, and others, but for those that it took over from a member
    of its team or a loading instance."""

    def __init__(self, requests: Iterable[RequestLine], dispatches: Dispatches) -> None:
        self.first: dict[WorkerRef, list[int]] = {}
        self.later: dict[WorkerRef, list[int]] = {}
        for line in requests:
            if line.worker is not None and len(line.token_ns) == 1:
                self.first.setdefault(line.worker, []).append(line.token_ns[0])
                continue
            for number, at_ns in enumerate(line.token_ns):
                worker = dispatches.worker_at(line.request, at_ns)
                if worker is not None:
                    found = self.later if number else self.first
                    found.setdefault(worker, []).append(at_ns)


def _team(
    time: TeamTime,
    requests: Sequence[RequestLine],
    dispatches: Dispatches,
    tokens: _Tokens,
    sources: Sequence[WorkerRef],
) -> TeamRun:
    team, start_ns, end_ns = time.team, time.formed_ns, time.ended_ns
    if not end_ns:
        raise BenchError(f"team {team.number} did not end")
    leader = team.leader.worker
    first = _between(tokens.first.get(leader, []), start_ns, end_ns)
    half_ns = ((first[0] if first else start_ns) + end_ns) // 2
    later = {w: len(_between(times, half_ns, end_ns)) for w, times in tokens.later.items()}
    layers = team.members[-1].span.stop
    spans = tuple(member.span.decoder_layers(layers) for member in team.members)
    return TeamRun(
        members=len(spans),
        span_layers=spans,
        formed_ns=start_ns,
        ended_ns=end_ns,
        token_ns=first,
        decoded=later.get(leader, 0),
        source_decoded=sum(later.get(worker, 0) for worker in sources) / len(sources),
        switched=tuple(switched(time, requests, dispatches)),
    )


def _helped_ns(
    steps: Iterable[StepLine], requests: Iterable[RequestLine], targets: dict[WorkerRef, None]
) -> int | None:
    """The first token of a request that ended at a target, or of a batch that a source took over
    from one with some layers done."""
    helped = {
        request
        for _, event in _events(steps)
        if isinstance(event, BatchTaken) and event.next_layer > 0
        for request, _, _ in event.requests
    }
    times = [r.token_ns[0] for r in requests if r.worker in targets or r.request in helped]
    return min(times, default=None)


def _between(times_ns: Iterable[int], start_ns: int, stop_ns: int) -> tuple[int, ...]:
    return tuple(sorted(at_ns for at_ns in times_ns if start_ns <= at_ns <= stop_ns))
