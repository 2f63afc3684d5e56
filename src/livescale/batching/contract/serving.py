"""What a member needs of whatever computes for an instance: one interface for every engine.

Ours is the LiveBatcher: continuous batching, KV room and the passing of live batches. That of an
engine that schedules by itself is the EngineServing: its Runs stand for steps of the engine, it
takes `whole_model_only`, and passes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from livescale.batching.contract.live_messages import LiveMessage
from livescale.batching.runs.engine_step import EngineStep
from livescale.batching.runs.faulty_runs import FaultyRequest
from livescale.batching.runs.run import BatchKey, EmittedTokens, Run, SequenceSpec
from livescale.messages.events import InstanceReported, TeamBroke
from livescale.values.routes import Partner, Pipeline, Taker, Team
from livescale.values.types import RequestId, WorkerRef

KvPlaces = tuple[tuple[int, tuple[int, ...]], ...]
"""Per request: positions, and the blocks in which they lie (none: it has ended)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a member asks about an instance.

    `whole_model_only`: no request is taken before every layer is there. `prefill_tokens_per_s` is
    what its Runs took so far (None: not known). Where `runs_await_layers` a Run is of the whole
    model, and waits inside for layers that are not there yet.
    """

    whole_model_only: bool
    kv_blocks: int
    prefill_tokens_per_s: int | None
    runs_await_layers: bool = False


@dataclass(frozen=True, slots=True)
class KvCame:
    """All KV that other instances had of these requests (with their attempts) is here: of `layers`
    decoder layers, each with `tokens` positions. It was asked for at `asked_ns`, with the requests
    or later; the first layer was here at `first_ns`, the last at `last_ns`."""

    requests: tuple[tuple[RequestId, int], ...]
    layers: int
    tokens: int
    asked_ns: int
    first_ns: int
    last_ns: int


class Serving(Protocol):
    """Decides the Runs of one instance. Pure: time comes as an argument."""

    @property
    def capabilities(self) -> Capabilities: ...

    def layers_arrived(self, watermark: int) -> None:
        """Layers 0…watermark-1 are complete and may be run."""

    def add(self, spec: SequenceSpec) -> None:
        """Accept a request; ValueError when it can never run here. A newer attempt of a request
        takes the place of an older one."""

    def cancel(self, request: RequestId, attempt: int) -> bool:
        """Forget the request. False when it is not here, or another instance's by now."""

    def requests(self) -> list[tuple[RequestId, int]]:
        """(request, attempt) of everything that is this instance's."""

    def give_back(self) -> list[tuple[RequestId, int]]:
        """Forget everything, between two Runs. Returns what must run elsewhere."""

    def next(self, steps_max: int = 1) -> Run | None:
        """The next Run, of up to `steps_max` steps; None when nothing could run now. While one is
        in flight: one that can be carried out behind it."""

    def shorten(self, run: Run, steps: int) -> Run:
        """The Run in flight ends after so many of its steps; the one that is returned is `done`."""
        assert steps == run.steps, f"{self!r}: its Runs have one step"
        return run

    def done(
        self, run: Run, token_ids: Sequence[Sequence[int]], elapsed_ns: int
    ) -> list[EmittedTokens]:
        """The first Run in flight is over: per sampling segment a token per step. Its last step
        took `elapsed_ns`."""

    def stepped(self, run: Run, step: EngineStep, elapsed_ns: int) -> list[EmittedTokens]:
        """As `done`, of a Run that stands for a step of an engine."""
        raise AssertionError(f"{self!r}: its Runs are none of another engine")

    def fail(self, run: Run, faulty: Sequence[FaultyRequest]) -> None:
        """The first Run in flight, which is `done` next, gave nothing of these requests: they are
        forgotten, here and at their leader. Tokens and rows of theirs have no meaning."""
        raise AssertionError(f"{self!r}: a Run of it fails as a whole")

    def take_refused(self) -> Sequence[tuple[RequestId, int, str]]:
        """What was forgotten since the last call because it can never run here, and why."""
        return ()

    def take_emitted(self) -> list[EmittedTokens]:
        """Tokens that came with messages, since the last call: of Runs that ended elsewhere."""
        return []

    @property
    def tells_layers(self) -> bool:
        """Of the Run that was chosen last something is to be sent while it goes on: it is to be
        told how far that is."""
        return False

    def layers_ran(self, stop: int) -> None:
        """The first Run in flight has done the layers below `stop`."""
        raise AssertionError(f"{self!r}: no Run tells its layers")

    def report(self) -> InstanceReported:
        """The load now. What was admitted and started since the last report is in this one."""

    # -- teams ----------------------------------------------------------------------------------

    def layer_came(self, layer: int) -> None:
        """This layer is complete and may be run; others before it may be missing."""
        return None

    def join(self, team: Team | None) -> None:
        """Be a member of this team from now on, and no longer of another one. None: serve alone
        when all layers are here. Between two Runs."""
        return None

    def follow(self, pipelines: Sequence[Pipeline]) -> None:
        """The instance of a stage is in these from now on, and in no others: what others have is
        finished. Between two Runs."""
        return None

    @property
    def team_broke(self) -> TeamBroke | None:
        """The team that this instance leads is over: what it led was returned. So until the
        instance joins another team, or none."""
        return None

    # -- partners -------------------------------------------------------------------------------

    def work_alone(self) -> None:
        """While layers are missing: no other instance pulls from here any more. What none has
        pulled is returned. Between two Runs."""
        return None

    def drain_to(self, takers: Sequence[Taker]) -> None:
        """Become empty: what is here moves to these, or is returned. None: keep it. Between two
        Runs."""

    def decode_at(self, partners: Sequence[Partner], *, keeps: bool = False) -> None:
        """Requests decode at one of these from their first token on: the first that takes them.
        None of these: they decode here. With `keeps` those that decode here now end here. At any
        time: what is in a Run in flight is none of those that are given."""
        return None

    def take_returned(self) -> Sequence[tuple[RequestId, int]]:
        """What was forgotten since the last call, and is to run elsewhere."""

    @property
    def is_alone(self) -> bool:
        """There is nothing to tell another instance, and nothing that one should tell."""

    def expected_tokens(self, peer: WorkerRef, message: LiveMessage) -> int | None:
        """Positions whose rows, or whose KV of one layer, come with the message; None if they are
        not wanted. Raises UnexpectedMessage for a message that cannot be."""
        return None

    def may_come(self, peer: WorkerRef, message: LiveMessage) -> bool:
        """The message can be taken now: no Run is in flight, or nothing that runs is taken away."""
        return True

    def take_message(
        self, peer: WorkerRef, message: LiveMessage, now_ns: int, came_ns: int | None = None
    ) -> int | None:
        """A message of another instance; what came along is written. The last byte was here at
        `came_ns` (None: now). Raises UnexpectedMessage.

        Returns how long the pull of a batch took, in ns, that is this instance's from now on.
        Requests that were decoding have tokens which may still be on their way to the gateway from
        where they were: the gateway gets all of them again, before any further ones.
        """

    def take_kv_came(self) -> Sequence[KvCame]:
        """Whose KV has come from other instances since the last call."""
        return ()

    def peer_lost(self, peer: WorkerRef, *, is_reachable: bool = False) -> None:
        """Nothing more comes from this worker or goes there. One that `is_reachable` is told what
        does not come."""

    def take_outbox(self, now_ns: int) -> list[tuple[WorkerRef, LiveMessage]]:
        """What is to be sent to whom, since the last call. To be called whenever something
        happened: after messages, after `done`, and after `next`."""

    def deadline_ns(self) -> int | None:
        """When a partner's answer is late: then `take_outbox` is to be called."""
        return None

    def holds(self, key: BatchKey) -> bool:
        """Rows or KV of this batch may still be wanted here."""
        return False

    def kv_places(self, key: BatchKey) -> KvPlaces:
        """Of a batch that changes hands, in the order of a `KvLayer`'s bytes."""
        raise AssertionError(f"{self!r}: {key} was never here")
