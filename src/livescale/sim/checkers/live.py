"""What must hold of live batches, and of an overloaded instance that a loading one helps.

Stated from what workers run and what they send each other. No layer is run before it is there, each
layer of a request is run once and in order by its owner, rows and KV come from layers that
were run, and no token is computed from KV that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from livescale.batching.contract.live_messages import Handover, KvLayer, Promised, Pull
from livescale.batching.lines.stage_batcher import StageBatcher
from livescale.batching.lines.team_batcher import TeamBatcher
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.run import BatchKey, Run, Segment
from livescale.member.effects import Execute, Materialize, TakeOver, WriteKv
from livescale.member.inputs import LayersRan, PeerMessage, RunEnded
from livescale.member.instance import HostedInstance
from livescale.messages.commands import StartHolding
from livescale.sim.base.config import SimConfig
from livescale.sim.checkers.invariants import require
from livescale.values.routes import Duty, Partner
from livescale.values.types import InstanceId, LayerSpan, RequestId, WorkerRef

LiveEffect = Execute | Materialize | TakeOver | WriteKv
_SLACK_NS = 1_000_000
"""What a pull may take besides messages on their way."""


def live_batcher_of(instance: HostedInstance) -> LiveBatcher:
    """What serves on a simulated worker, for those who look inside."""
    assert isinstance(instance.serving, TeamBatcher), f"{instance!r}"
    return instance.serving.inner


@dataclass(slots=True)
class _Part:
    """How far a request in a live batch is on one instance."""

    next_layer: int
    tokens: int
    kv_missing: dict[int, None] = field(default_factory=dict)
    #: came from another instance without rows
    is_from_prompt: bool = False


@dataclass(frozen=True, slots=True)
class _Instance:
    """An instance on a simulated worker. `is_idle` says whether no Run is in flight there;
    `partners` could pull from it when it came."""

    hosted: HostedInstance
    is_idle: Callable[[], bool]
    partners: tuple[Partner, ...]

    @property
    def instance(self) -> InstanceId:
        return self.duty.instance

    @property
    def duty(self) -> Duty:
        return self.hosted.duty

    @property
    def waits_for_layer(self) -> tuple[tuple[int, int], ...]:
        """Requests of its first batch, if it can run no decoder layer yet and has a source that may
        pull: known tokens of each, and those that it can ever need KV for."""
        if isinstance(self.hosted.serving, StageBatcher):
            return ()
        live = live_batcher_of(self.hosted)
        line = live.batches.line
        if live.loaded or live.giver.is_parted or not line:
            return ()
        return tuple((s.known_tokens, s.tokens_max) for s in line[0].sequences)

    def has_room(self, needs: Sequence[tuple[int, int]]) -> bool:
        """The instance is complete, and requests with such needs fit beside its own, none of which
        waits for room."""
        if isinstance(self.hosted.serving, StageBatcher):
            return False
        live = live_batcher_of(self.hosted)
        waits = bool(live.batcher.lines.waiting)
        return live.is_full and not waits and live.batcher.room.fits(needs)


class LiveChecker:
    """Live work of all instances, over all lives of the controller. `free_ns` says since when
    nothing that a worker has sent is under way: now, if something is."""

    def __init__(self, config: SimConfig, free_ns: Callable[[WorkerRef], int]) -> None:
        self._free_ns = free_ns
        specs = [policy.spec for policy in config.policies]
        self._spans = {spec.name: LayerSpan(0, spec.layers) for spec in specs}
        self._ranks = {spec.name: spec.tp_size for spec in specs}
        late_ns = config.faults.late_ns_max if config.faults.late_permille else 0
        #: an offer, a pull and a handover; and the loss of a source that a target does not know of
        self._slack_ns = 4 * (config.message_delay_ns + late_ns) + _SLACK_NS
        #: layers 0…watermark-1 that the ranks of an instance have
        self._watermarks: dict[InstanceId, dict[int, int]] = {}
        self._parts: dict[InstanceId, dict[tuple[RequestId, int], _Part]] = {}
        self._taken: dict[tuple[InstanceId, BatchKey], list[tuple[RequestId, int]]] = {}
        self._members: dict[WorkerRef, _Instance] = {}
        #: workers of loading instances, by the worker of the source that they were given
        self._targets: dict[WorkerRef, list[WorkerRef]] = {}
        self._idle_since_ns: dict[InstanceId, int] = {}
        #: layers behind a missing one, by instance and rank
        self._beyond: dict[tuple[InstanceId, int], dict[int, None]] = {}
        #: layers whose KV is written of batches that are still to come
        self._ahead: dict[tuple[InstanceId, BatchKey], dict[int, None]] = {}
        #: batches that were promised, whose prompts are computed
        self._promised: dict[BatchKey, None] = {}
        #: layers below are done of the Run in flight
        self._layers_stop: dict[InstanceId, int] = {}
        #: targets that were asked for batches without their rows
        self._pulled_bare: dict[InstanceId, None] = {}

    def sees(self, order: StartHolding, effect: LiveEffect) -> None:
        """A worker, which has the order, carries the effect out."""
        assert order.duty is not None
        instance = order.duty.instance
        if isinstance(effect, Materialize):
            self._came(instance, order.rank, effect.layer)
        elif isinstance(effect, Execute):
            self._layers_stop[instance] = effect.run.span.start
            self._runs(instance, order.model, effect.run, is_live=effect.run.batch is not None)
        elif isinstance(effect, TakeOver):
            if isinstance(effect.message, Handover):
                self._handed(instance, effect.message)
        else:
            self._writes(instance, effect.message)

    def ran(self, order: StartHolding | None, news: LayersRan | RunEnded) -> None:
        """The first Run in flight of the worker that has the order is so far, or over."""
        if order is not None and order.duty is not None:
            whole = self._spans[order.model].stop
            stop = news.stop if isinstance(news, LayersRan) else whole
            self._layers_stop[order.duty.instance] = stop

    def sends(self, message: PeerMessage) -> None:
        """A worker is about to send this to another one."""
        if isinstance(message, Handover):
            self._promised.pop(message.batch, None)
            self._hands(message)
        elif isinstance(message, Promised):
            self._promised[message.batch] = None
        elif isinstance(message, KvLayer) and message.batch in self._promised:
            stop = self._layers_stop[message.batch.target]
            require(message.layer < stop, "KV is that of layers that were run", message, stop)
        elif isinstance(message, Pull) and message.without_rows:
            self._pulled_bare[message.batch.target] = None

    # -- layers ---------------------------------------------------------------------------------

    def _came(self, instance: InstanceId, rank: int, layer: int) -> None:
        beyond = self._beyond.setdefault((instance, rank), {})
        beyond[layer] = None
        ranks = self._watermarks.setdefault(instance, {})
        while ranks.setdefault(rank, 0) in beyond:
            del beyond[ranks[rank]]
            ranks[rank] += 1

    def _visits(self, instance: InstanceId, model: str, run: Run) -> None:
        """A Run of a team over the layers that are there."""
        for rank in range(self._ranks[model]):
            beyond = self._beyond.get((instance, rank), {})
            stop = self._watermarks.get(instance, {}).get(rank, 0)
            missing = [n for n in range(run.span.start, run.span.stop) if n >= stop]
            there = all(layer in beyond for layer in missing)
            require(there, "only layers that are there are run", instance, run.span, rank)

    def _runs(self, instance: InstanceId, model: str, run: Run, *, is_live: bool) -> None:
        """The instance starts a Run: some layers of a live batch, or the whole model."""
        if run.is_visit:
            self._visits(instance, model, run)
            return
        ranks = self._watermarks.get(instance, {})
        has_all = len(ranks) == self._ranks[model] and min(ranks.values()) >= run.span.stop
        if is_live:
            require(has_all, "only layers that are there are run", instance, run.span, ranks)
            self._runs_part(instance, run, self._spans[model].stop)
            return
        is_whole = has_all and run.span == self._spans[model]
        require(is_whole, "only complete models serve", instance, run.span, ranks)
        parts = self._parts.get(instance)
        if not parts:
            return
        for segment in run.segments:
            part = parts.pop((segment.request, segment.attempt), None)
            if part is None or segment.first_position < part.tokens:
                continue  # never in a live batch here, or computed anew
            if self._found_in_index(instance, segment):
                continue  # begun anew, without what was to come
            is_computed = part.next_layer == run.span.stop
            require(is_computed, "a request decodes after its last layer", instance, segment, part)
            require(not part.kv_missing, "a request decodes when its KV is there", segment, part)

    def _found_in_index(self, instance: InstanceId, segment: Segment) -> bool:
        """All KV that the segment reads was written here, by Runs of the whole model: blocks get
        their key then. Blocks that KV was to come into have none."""
        [member] = [m for m in self._members.values() if m.instance == instance]
        pool = live_batcher_of(member.hosted).batcher.pool
        read = segment.block_table[: pool.blocks_for(segment.first_position)]
        is_full = segment.first_position == len(read) * pool.block_tokens
        return is_full and all(pool.key_of(block) is not None for block in read)

    def _runs_part(self, instance: InstanceId, run: Run, whole: int) -> None:
        parts = self._parts.setdefault(instance, {})
        for segment in run.segments:
            known = (segment.request, segment.attempt)
            part = parts.get(known)
            # Without its rows a batch begins anew where it is taken, or stays after all.
            may_begin_anew = instance in self._pulled_bare or (
                part is not None and (part.kv_missing or part.is_from_prompt)
            )
            if part is not None and part.next_layer == whole:
                # It got a token, and was preempted before it could decode.
                may_begin_anew = may_begin_anew or segment.token_count == part.tokens + 1
            if part is None or (run.span.start == 0 and may_begin_anew):
                is_from_prompt = part is not None and part.is_from_prompt
                part = parts[known] = _Part(0, segment.token_count, is_from_prompt=is_from_prompt)
            is_next = run.span.start == part.next_layer and segment.first_position == 0
            require(is_next, "layers are run once and in order", instance, run.span, known, part)
            require(segment.token_count == part.tokens, "all of a prompt is run", known, part)
            part.next_layer = run.span.stop

    # -- what passes from one to the other ------------------------------------------------------

    def _hands(self, message: Handover) -> None:
        """The batch leaves its target."""
        parts = self._parts.get(message.batch.target, {})
        if not message.next_layer:
            # What was run of it is given up: if it comes back, it begins anew.
            for spec in message.requests:
                parts.pop((spec.request, spec.attempt), None)
        for spec in message.requests if message.rows else ():
            part = parts.get((spec.request, spec.attempt))
            is_done = part is not None and part.next_layer == message.next_layer
            require(is_done, "rows are those of the layers that were run", message, spec, part)

    def _handed(self, instance: InstanceId, message: Handover) -> None:
        """The instance takes the batch over."""
        parts = self._parts.setdefault(instance, {})
        ahead = self._ahead.pop((instance, message.batch), {})
        taken = self._taken[instance, message.batch] = []
        for spec in message.requests:
            known = (spec.request, spec.attempt)
            parts.pop(known, None)
            if not message.next_layer:
                tokens = len(spec.prompt_ids) + len(spec.generated_ids)
                parts[known] = _Part(0, tokens, is_from_prompt=True)
            else:
                # Of one that decodes, the last token is computed with the KV of all others.
                tokens = len(spec.prompt_ids) + len(spec.generated_ids) - message.decoding
                parts[known] = part = _Part(message.next_layer, tokens)
                wants_kv = spec.sampling.output_tokens_max > len(spec.generated_ids) + 1
                if wants_kv or message.decoding:
                    layers = range(1, message.next_layer - message.decoding)
                    here = message.shared.span if message.shared is not None else None
                    ran = range(here.start, here.stop) if here is not None else ()
                    missing = [n for n in layers if n not in ahead and n not in ran]
                    part.kv_missing = dict.fromkeys(missing)
                taken.append(known)

    def _writes(self, instance: InstanceId, message: KvLayer) -> None:
        """The KV of one layer of a batch that was taken over, or will be, is here."""
        if (instance, message.batch) not in self._taken:
            self._ahead.setdefault((instance, message.batch), {})[message.layer] = None
        for known in self._taken.get((instance, message.batch), ()):
            part = self._parts[instance].get(known)
            if part is not None:
                part.kv_missing.pop(message.layer, None)

    # -- pairs ----------------------------------------------------------------------------------

    def joins(
        self, worker: WorkerRef, instance: HostedInstance, is_idle: Callable[[], bool]
    ) -> None:
        """The worker is rank 0 of this instance from now on."""
        member = self._members[worker] = _Instance(instance, is_idle, instance.duty.gives_to)
        for partner in member.partners:
            self._targets.setdefault(partner.worker, []).append(worker)

    def leaves(self, worker: WorkerRef) -> None:
        """The worker has no instance any more."""
        member = self._members.pop(worker, None)
        if member is None:
            return
        self._idle_since_ns.pop(member.instance, None)
        self._parts.pop(member.instance, None)
        for partner in member.partners:
            self._targets[partner.worker].remove(worker)

    def looks(self, worker: WorkerRef, now_ns: int) -> None:
        """Something has happened on the worker's instance."""
        for target in self._targets.get(worker, ()):
            self._check_pair(target, worker, now_ns)
        member = self._members.get(worker)
        for partner in member.duty.gives_to if member is not None else ():
            self._check_pair(worker, partner.worker, now_ns)

    def _check_pair(self, worker: WorkerRef, source: WorkerRef, now_ns: int) -> None:
        target = self._members[worker]
        since_ns = self._idle_since_ns.pop(target.instance, None)
        is_idle = self._is_idle_source(target, source)
        if since_ns is None and not is_idle:
            return
        # Messages wait behind rows and KV, also behind those that are not wanted any more.
        since_ns = max(since_ns or now_ns, self._free_ns(worker), self._free_ns(source))
        rule = "a source is not idle while its target waits for its first layer"
        if now_ns - since_ns > self._slack_ns:
            require(False, rule, target, self._members.get(source), since_ns, now_ns)
        if is_idle:
            self._idle_since_ns[target.instance] = since_ns

    def _is_idle_source(self, target: _Instance, worker: WorkerRef) -> bool:
        """The target's first batch could run on its source, which does nothing."""
        source, needs = self._members.get(worker), target.waits_for_layer
        if source is None or not needs:
            return False
        # With several targets it may wait for another one's answer.
        partner = Partner(source.instance, worker)
        is_its_own = partner in target.duty.gives_to and len(self._targets[worker]) == 1
        return is_its_own and source.is_idle() and source.has_room(needs)
