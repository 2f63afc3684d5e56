"""A world of one team in virtual time: instances that get layers in any order, and serve together
meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from live_parts import Node, Target
from live_worlds import SOURCE, LiveWorld

from livescale.batching.live.live_batch import LiveLimits
from livescale.batching.runs.batcher import BatcherConfig
from livescale.batching.runs.run import Run
from livescale.values.routes import Partner, Team, TeamMember
from livescale.values.types import LayerSpan, RequestId, WorkerRef

CONFIG = BatcherConfig(64, 4, 64, 16, growth_tokens=4)
LAYERS = 6
RELOAD_NS = 4_000
ENDS = [("move", 0), ("anew", 0), ("cheaper", 0), ("cheaper", 10**12)]
"""How a team ends, and what a token's KV takes from one member to another: of those that are to
take the cheaper way the first moves KV, and the second computes it anew."""


class TeamWorld(LiveWorld):
    """An instance that has everything, and members that get layers in any order. From `start_ns`
    on they are a team, from `stop_ns` on each has all layers: RELOAD_NS later if the instance that
    they come from is lost before. Some are told of the team so much later (`late_ns` by member), or
    never (None). How the team ends is one of ENDS.

    No two instances run an attempt in turn, unless they have lost each other."""

    def __init__(
        self,
        cuts: Sequence[int],
        *,
        config: BatcherConfig = CONFIG,
        smallest: BatcherConfig | None = None,
        delays: Sequence[int] = (5,),
        start_ns: int = 0,
        stop_ns: int = 50_000,
        end: tuple[str, int] = ENDS[0],
        late_ns: Sequence[int | None] = (),
    ) -> None:
        configs = [config] * (len(cuts) + 1)
        if smallest is not None:
            configs[-1] = smallest
        targets = [Target((), c, "stop-the-world", has_source=False) for c in configs]
        team_end, kv_token_ps = end
        limits = LiveLimits(answer_ns=100_000, team_end=team_end)
        super().__init__(LAYERS, CONFIG, targets, limits, delays=delays, gateway_ns=3)
        self.members = [ref for ref in self.nodes if ref != SOURCE]
        spans = [LayerSpan(a, b) for a, b in pairwise((0, *cuts, LAYERS + 2))]
        partners = [Partner(ref.worker + 1, ref) for ref in self.members]
        members = [TeamMember(p, span) for p, span in zip(partners, spans, strict=True)]
        self.team = Team(1, tuple(members), kv_token_ps)
        #: who has run an attempt, in turn
        self._owners: dict[tuple[RequestId, int], list[WorkerRef]] = {}
        late = dict(zip(self.members, late_ns, strict=False))
        #: when each has been told at the latest: orders to one member keep their order
        self.told_ns = {ref: start_ns + (late.get(ref, 0) or 0) for ref in self.members}
        for ref, span in zip(self.members, spans, strict=True):
            self.at(start_ns, partial(self.gets, ref, span))
            if late.get(ref, 0) is not None:
                join = partial(self.between, ref, partial(self.join, ref, self.team))
                self.at(self.told_ns[ref], join)
            self.at(max(stop_ns, self.told_ns[ref] + 1), partial(self.last_layer, ref))

    @property
    def leader(self) -> WorkerRef:
        return self.team.leader.worker

    def gets(self, ref: WorkerRef, span: LayerSpan) -> None:
        serving = self.nodes[ref].serving
        if serving is not None:
            # The last first: nothing asks for a prefix.
            for layer in reversed(range(span.start, span.stop)):
                serving.layer_came(layer)

    def between(self, ref: WorkerRef, action: partial[None]) -> None:
        self._between_runs(self.nodes[ref], action)

    def join(self, ref: WorkerRef, team: Team | None) -> None:
        serving = self.nodes[ref].serving
        if serving is not None:
            serving.join(team)

    def join_if_loading(self, ref: WorkerRef, team: Team | None) -> None:
        serving = self.nodes[ref].serving
        if serving is not None and not serving.inner.is_full and serving.side.team is not None:
            self.join(ref, team)

    def last_layer(self, ref: WorkerRef) -> None:
        """It comes, now or from another instance later."""
        wait_ns = 0 if self.nodes[SOURCE].is_alive else RELOAD_NS
        whole = partial(self.between, ref, partial(self.whole, ref))
        self.at(self.now_ns + wait_ns, whole)

    def whole(self, ref: WorkerRef) -> None:
        serving = self.nodes[ref].serving
        if serving is not None:
            serving.layers_arrived(LAYERS + 2)
            serving.join(None)

    def _check_may_run(self, node: Node, run: Run) -> None:
        super()._check_may_run(node, run)
        is_led_elsewhere = run.is_visit and run.span.start > 0
        for segment in () if is_led_elsewhere else run.segments:
            owners = self._owners.setdefault((segment.request, segment.attempt), [])
            if not owners or owners[-1] != node.ref:
                known = node.ref not in owners
                assert known or self._are_apart(node.ref, owners[-1]), f"{segment} at {owners}"
                owners.append(node.ref)

    def _are_apart(self, one: WorkerRef, other: WorkerRef) -> bool:
        is_lost = not (self.nodes[one].is_alive and self.nodes[other].is_alive)
        return is_lost or frozenset((one, other)) in self._cut
