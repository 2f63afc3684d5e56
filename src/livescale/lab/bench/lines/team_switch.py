"""What a run record says of requests that decoded in a team when that ended: how long they paused.

λScale §4.4, mode switch. The pause is looked for in the record's times of tokens, as they came to
the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from livescale.messages.commands import ChangeDuty, Dispatch
from livescale.telemetry.record.record import RequestLine, StepLine
from livescale.values.routes import Team
from livescale.values.types import RequestId, WorkerRef

_GAPS_AT_END = 4
"""The Run that a request is in comes to its end, so that the pause may follow one more token; and
behind it other requests may still be computed anew."""


@dataclass(frozen=True, slots=True)
class TeamTime:
    """From the order that made the team to the first that ended it."""

    team: Team
    formed_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Switched:
    """A request that decoded in a team when that ended. Of the gaps between its tokens the longest
    one about the end, and the median of those before."""

    longest_gap_ns: int
    usual_gap_ns: int

    @property
    def pause_ns(self) -> int:
        """What the longest gap has more than the usual one."""
        return max(0, self.longest_gap_ns - self.usual_gap_ns)


class Dispatches:
    """To which worker each request was sent, and when."""

    def __init__(self, steps: Iterable[StepLine]) -> None:
        self._sent: dict[RequestId, list[tuple[int, WorkerRef]]] = {}
        for step in steps:
            for command in step.commands:
                if isinstance(command, Dispatch):
                    sent = self._sent.setdefault(command.request, [])
                    sent.append((step.now_ns, command.worker))

    def worker_at(self, request: RequestId, at_ns: int) -> WorkerRef | None:
        """The worker that it was sent to last, by then. It may have gone on from there to another
        one without an order."""
        sent = self._sent.get(request, [])
        return next((worker for since_ns, worker in reversed(sent) if since_ns <= at_ns), None)


def team_times(steps: Iterable[StepLine]) -> Iterator[TeamTime]:
    """Teams that ended, in the order of their numbers; `ended_ns` 0: it did not."""
    began: dict[int, tuple[Team, int]] = {}
    ended: dict[int, int] = {}
    current: dict[WorkerRef, int] = {}
    for step in steps:
        for command in step.commands:
            if not isinstance(command, ChangeDuty):
                continue
            team, member = command.duty.team, command.holding.member
            if team is not None:
                began.setdefault(team.number, (team, step.now_ns))
                current[member] = team.number
            elif member in current:
                ended.setdefault(current.pop(member), step.now_ns)
    for number, (team, formed_ns) in sorted(began.items()):
        yield TeamTime(team, formed_ns, ended.get(number, 0))


def switched(
    time: TeamTime, requests: Iterable[RequestLine], dispatches: Dispatches
) -> list[Switched]:
    """The requests that decoded in this team when it ended, in the record's order."""
    end_ns, leader = time.ended_ns, time.team.leader.worker
    found = []
    for line in requests:
        tokens = line.token_ns
        is_decoding = len(tokens) > 1 and tokens[0] <= end_ns < tokens[-1]
        if not is_decoding or dispatches.worker_at(line.request, end_ns) != leader:
            continue
        gaps = [(end, end - start) for start, end in pairwise(tokens)]
        later = [gap for at_ns, gap in gaps if at_ns > end_ns]
        before = [gap for at_ns, gap in gaps if at_ns <= end_ns]
        found.append(
            Switched(
                longest_gap_ns=max(later[:_GAPS_AT_END]),
                usual_gap_ns=int(median(before or later)),
            )
        )
    return found
