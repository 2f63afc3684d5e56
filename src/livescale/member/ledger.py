"""The owner of each request's current attempt, its next token, and the messages when these change.

Every gateway, real or simulated, keeps one Ledger, which is the arbiter: a request has at most one
owner, and each token index is accepted once, in order, from the owner of the current attempt. An
attempt may move from worker to worker; the new owner may repeat tokens that the last one had sent.
A worker that runs an attempt without owning it gets one message to forget it.

Every method takes one piece of news and returns effects, which the gateway carries out in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from livescale.member.fence import Fence
from livescale.messages.attempts import (
    AttemptFailed,
    AttemptReturned,
    AttemptTaken,
    Cancel,
    Disown,
)
from livescale.messages.commands import Dispatch
from livescale.messages.epochs import FIRST_EPOCH, ControllerEpoch
from livescale.messages.events import RequestCancelled, RequestEnded
from livescale.values.types import Outcome, RequestId, Value, WorkerRef

AttemptReport = AttemptTaken | AttemptReturned | AttemptFailed

FORGETS_MAX = 4096
"""Messages to forget an attempt that the Ledger remembers, the latest ones."""


class Send(Value, frozen=True):
    """Send the prompt and the tokens so far to the worker of this dispatch."""

    order: Dispatch


class Forget(Value, frozen=True):
    """Send the worker the message to forget the attempt: a Cancel, because the request is over, or
    a Disown, because it goes on elsewhere."""

    worker: WorkerRef
    message: Cancel | Disown


class Moved(Value, frozen=True):
    """Another worker owns the request from now on (None: the request waits)."""

    request: RequestId
    before: WorkerRef | None
    after: WorkerRef | None


class Announce(Value, frozen=True):
    """Report the request to the controller. `owner` None: the request waits."""

    request: RequestId
    attempt: int
    owner: WorkerRef | None
    moves: int


class Finish(Value, frozen=True):
    """The request is over, and has left the Ledger, after so many `attempts` and `tokens`.

    `owner` is that of the last attempt (None: the request waited), `reason` why a request failed.
    """

    request: RequestId
    outcome: Outcome
    attempts: int
    owner: WorkerRef | None
    tokens: int
    reason: str


#: the two events are reported to the controller
LedgerEffect = Send | Forget | Moved | Announce | Finish | RequestEnded | RequestCancelled


@dataclass(slots=True)
class Entry:
    """One request until it is over. Only the Ledger changes it."""

    request: RequestId
    #: number of the current attempt (0: there was none)
    attempt: int = 0
    #: how often the current attempt was taken over
    moves: int = 0
    #: the worker that runs the current attempt (None: the request waits)
    owner: WorkerRef | None = None
    #: accepted so far
    tokens: int = 0
    #: so many of them may come again: those accepted before the attempt was last taken over
    repeated_max: int = 0
    #: reported to a second controller, which may have missed the worker's report of the end
    is_announced_again: bool = False

    def is_run_by(self, worker: WorkerRef, attempt: int) -> bool:
        """The worker owns the request, and the attempt is the current one."""
        return attempt == self.attempt and worker == self.owner


class Ledger:
    """All requests of a gateway that are not over, in order of arrival.

    News of a request that is not in the Ledger is late, and changes no request.
    """

    def __init__(self) -> None:
        self._entries: dict[RequestId, Entry] = {}
        #: orders of controllers that it does not admit change nothing
        self.fence = Fence()
        #: controllers that were met
        self._controllers = 0
        #: messages to forget an attempt, the latest last
        self._forgets: dict[tuple[WorkerRef, RequestId, int], None] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, request: RequestId) -> Entry | None:
        return self._entries.get(request)

    # -- clients --------------------------------------------------------------------------------

    def open(self, request: RequestId) -> Sequence[LedgerEffect]:
        """A new request waits. Raises ValueError for an id that is in the Ledger."""
        if request in self._entries:
            raise ValueError(f"request {request} is in the ledger already")
        entry = self._entries[request] = Entry(request)
        return [_announced(entry)]

    def cancel(
        self, request: RequestId, outcome: Outcome = Outcome.CANCELLED, reason: str = ""
    ) -> Sequence[LedgerEffect]:
        """No more tokens are wanted, or the request has waited too long: `outcome` is its end."""
        entry = self._entries.get(request)
        if entry is None:
            return ()
        return [
            *self._forget_owner(entry, is_over=True),
            RequestCancelled(request),
            *self._end(entry, outcome, reason),
        ]

    # -- the controller -------------------------------------------------------------------------

    def controller_joined(self, epoch: ControllerEpoch = FIRST_EPOCH) -> Sequence[LedgerEffect]:
        """Report every request to a controller that knows none of them; nothing to one that is
        over."""
        if self.fence.meet(epoch) is not None:
            return ()
        self._controllers += 1
        for entry in self:
            entry.is_announced_again = True
        return [_announced(entry) for entry in self]

    def dispatched(
        self,
        order: Dispatch,
        epoch: ControllerEpoch = FIRST_EPOCH,
        *,
        is_reachable: bool,
    ) -> Sequence[LedgerEffect]:
        """The controller gives a worker the next attempt. Not `is_reachable`: the gateway has no
        connection to the worker."""
        if not self.fence.admits(epoch):
            return ()
        entry = self._entries.get(order.request)
        if entry is None:
            return [RequestEnded(order.request, order.attempt, Outcome.CANCELLED)]
        # A worker may have taken over an attempt that the controller had given up.
        owner, attempt = entry.owner, entry.attempt
        entry.attempt, entry.moves, entry.repeated_max = order.attempt, 0, 0
        effects: list[LedgerEffect] = []
        if owner is not None and owner != order.worker:
            effects = self._forget(owner, order.request, attempt, entry)
        if is_reachable:
            return [*effects, *_moved(entry, order.worker), Send(order)]
        lost = RequestEnded(order.request, order.attempt, Outcome.WORKER_LOST)
        return [*effects, *_moved(entry, None), lost]

    def failed(
        self, request: RequestId, reason: str, epoch: ControllerEpoch | None = None
    ) -> Sequence[LedgerEffect]:
        """The controller ends the request with an error, or (without `epoch`) the gateway does."""
        entry = self._entries.get(request)
        if entry is None or (epoch is not None and not self.fence.admits(epoch)):
            return ()
        return [
            *self._forget_owner(entry, is_over=True),
            *self._end(entry, Outcome.FAILED, reason),
        ]

    # -- the workers ----------------------------------------------------------------------------

    def reported(self, worker: WorkerRef, report: AttemptReport) -> Sequence[LedgerEffect]:
        """The worker has taken the attempt over, or gives it back, or reports that no worker can
        run it. Its own report to the controller may be lost."""
        entry = self._entries.get(report.request)
        if isinstance(report, AttemptTaken):
            return self._taken(worker, report, entry)
        if entry is None or not entry.is_run_by(worker, report.attempt):
            return ()
        if isinstance(report, AttemptReturned):
            return _waits_again(entry, Outcome.RETURNED)
        return self._end(entry, Outcome.FAILED, report.reason)

    def came(
        self,
        worker: WorkerRef,
        request: RequestId,
        attempt: int,
        *,
        index: int,
        count: int,
        is_last: bool,
    ) -> tuple[int, Sequence[LedgerEffect]]:
        """A worker has sent tokens `[index, index + count)`; `is_last`: the request has no more.
        Returns how many of them, counted from the end, are accepted.

        After a gap, or an end before tokens that are accepted already, the owner does not continue
        the accepted ones: the request waits again.
        """
        entry = self._entries.get(request)
        # As `is_run_by`, without a call: this is asked for every token.
        if entry is None or entry.attempt != attempt or entry.owner != worker:
            return 0, self._forget(worker, request, attempt, entry)
        stop = index + count
        if index > entry.tokens or (is_last and stop <= entry.tokens):
            forget = self._forget_owner(entry, is_over=False)
            return 0, [*forget, *_waits_again(entry, Outcome.RETURNED)]
        accepted = max(0, stop - entry.tokens)
        entry.tokens += accepted
        return accepted, self._end(entry, Outcome.FINISHED, "") if is_last else ()

    def worker_gone(self, worker: WorkerRef) -> Sequence[LedgerEffect]:
        """The connection to the worker is lost, maybe with the last tokens of a request that the
        controller has forgotten as ended: so all of the worker's requests are announced again."""
        owned = [entry for entry in self if entry.owner == worker]
        effects = [e for entry in owned for e in _waits_again(entry, Outcome.WORKER_LOST)]
        # A request that is over may have never reached it, and neither may the message to forget
        # it: then no word of the worker ends the attempt.
        told = [key for key in self._forgets if key[0] == worker]
        for key in told:
            del self._forgets[key]
            _, request, attempt = key
            if request not in self._entries:
                effects.append(RequestEnded(request, attempt, Outcome.CANCELLED))
        return effects

    def __repr__(self) -> str:
        return f"<Ledger of {len(self._entries)} requests>"

    # -- helpers --------------------------------------------------------------------------------

    def _taken(
        self, worker: WorkerRef, report: AttemptTaken, entry: Entry | None
    ) -> Sequence[LedgerEffect]:
        """Reports of two workers come on different connections: the one with more moves is the
        later."""
        request, attempt = report.request, report.attempt
        # An earlier message to forget was about an earlier stay of the attempt.
        self._forgets.pop((worker, request, attempt), None)
        if entry is None or entry.attempt != attempt:
            return self._forget(worker, request, attempt, entry)
        if report.moves < entry.moves:
            return ()
        entry.moves, entry.repeated_max = report.moves, entry.tokens
        return _moved(entry, worker)

    def _end(self, entry: Entry, outcome: Outcome, reason: str) -> list[LedgerEffect]:
        del self._entries[entry.request]
        effects: list[LedgerEffect] = []
        # The worker's report may have gone to the controller before this one: so may that of a
        # worker that took the attempt over since, and has not met this one yet.
        is_elsewhere = entry.is_announced_again or (entry.moves > 0 and self._controllers > 1)
        if is_elsewhere and entry.owner is not None:
            effects.append(RequestEnded(entry.request, entry.attempt, outcome, entry.tokens))
        finish = Finish(
            request=entry.request,
            outcome=outcome,
            attempts=entry.attempt,
            owner=entry.owner,
            tokens=entry.tokens,
            reason=reason,
        )
        return [*effects, finish]

    def _forget_owner(self, entry: Entry, *, is_over: bool) -> list[LedgerEffect]:
        if entry.owner is None:
            return []
        return self._forget(entry.owner, entry.request, entry.attempt, None if is_over else entry)

    def _forget(
        self, worker: WorkerRef, request: RequestId, attempt: int, entry: Entry | None
    ) -> list[LedgerEffect]:
        """`entry` is that of the request, None when it is over. Once is enough: tokens may be on
        their way while the message is on its own."""
        key = worker, request, attempt
        if key in self._forgets:
            return []
        if len(self._forgets) >= FORGETS_MAX:
            del self._forgets[next(iter(self._forgets))]
        self._forgets[key] = None
        if entry is None:
            return [Forget(worker, Cancel(request, attempt))]
        moves = entry.moves if entry.attempt == attempt else None
        return [Forget(worker, Disown(request, attempt, moves))]


def _announced(entry: Entry) -> Announce:
    return Announce(entry.request, entry.attempt, entry.owner, entry.moves)


def _moved(entry: Entry, owner: WorkerRef | None) -> list[LedgerEffect]:
    before, entry.owner = entry.owner, owner
    return [Moved(entry.request, before, owner)] if before != owner else []


def _waits_again(entry: Entry, outcome: Outcome) -> list[LedgerEffect]:
    moved = _moved(entry, None)
    ended = RequestEnded(entry.request, entry.attempt, outcome)
    return [*moved, ended, _announced(entry)]
