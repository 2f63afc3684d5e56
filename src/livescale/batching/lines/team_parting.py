"""The end of a team: requests that decode go to its members, and KV comes from all of them.

λScale §4.4 has two ways to switch from a pipeline to instances that serve alone: compute KV anew,
or move it. This one moves it. A request has the same block table at every member, in the leader's
numbers. So the member that gets it has KV of its own layers already, in blocks of its own, and
fetches that of the other layers from those that ran them, each of which keeps the leader's blocks
until the leader has learned that all is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

from livescale.batching.contract.live_messages import Handover, KvAt, PartOf, UnexpectedMessage
from livescale.batching.contract.visit_messages import Kept, Shared, Stop
from livescale.batching.lines.visit_lead import Left, VisitLead
from livescale.batching.lines.visitors import Tell, Visitors
from livescale.batching.live.live_batch import ANEW, CHEAPER
from livescale.batching.live.live_batcher import LiveBatcher
from livescale.batching.runs.batcher import Batcher
from livescale.batching.runs.run import BatchKey
from livescale.values.routes import Team
from livescale.values.types import LayerSpan

_S_PS = 1_000_000_000_000


class Parting:
    """Of the team that `lead` led from this instance."""

    def __init__(
        self,
        inner: LiveBatcher,
        visitors: Visitors,
        lead: VisitLead,
        tell: Tell,
    ) -> None:
        self.lead = lead
        self._inner = inner
        self._visitors = visitors
        self._tell = tell
        self._keys: list[BatchKey] = []

    @property
    def is_over(self) -> bool:
        """No KV is to be fetched any more."""
        batches = self._inner.batches
        self._keys = [key for key in self._keys if key in batches.given or key in batches.taken]
        return not self._keys

    def share(self, left: Sequence[Left], now_ns: int) -> None:
        """The first request goes to the first member, the second to the second, and so on."""
        if not left:
            return
        lead, way = self.lead.lead, self.lead.way
        blocks = tuple(dict.fromkeys(block for one in left for block in one.table))
        for stop in way:
            self._tell(stop.partner, Kept(lead, blocks))
        for number, one in enumerate(left):
            self._give(one, way[number % len(way)], now_ns)

    def _give(self, left: Left, stop: Stop, now_ns: int) -> None:
        inner, lead, spec = self._inner, self.lead.lead, left.spec
        key = inner.batches.next_key()
        own = next(s for s in self.lead.way if s.partner.instance == inner.instance)
        table = self._visitors.adopt(Shared(lead, left.table, own.span))
        assert table is not None, f"{spec.request} has blocks of the quota"
        tokens = spec.known_tokens - 1
        part = PartOf(BatchKey(lead.leader, lead.number), spec.request, lead, left.table, tokens)
        layers = inner.batcher.span.stop - 2
        others = [s for s in self.lead.way if s not in (own, stop)]
        kv_at = tuple(KvAt(s.partner.worker, _decoders(s.span, layers), part) for s in others)
        self._keys.append(key)
        if stop == own:
            missing = [n for at in kv_at for n in range(at.span.start, at.span.stop)]
            inner.taker.hold_shared(key, spec, table, sorted(missing), kv_at)
            return
        shared = Shared(lead, left.table, _decoders(stop.span, layers))
        batch = inner.batches.hold(key, spec, table, kv_at, shared)
        inner.giver.give(stop.partner.worker, batch, now_ns)


def moving_pays(
    how: str, team: Team, prefill_tokens_per_s: int | None, *, in_full_runs: bool
) -> bool:
    """KV of requests that decode moves when a team ends. Per token of KV a member fetches what the
    others have run, over one link; or it computes all layers. Both take place at all members at
    once. What is not known speaks against nothing: KV moves.

    `how` is one of TEAM_ENDS. The rate is what Runs of the team had. Prompts that came one at a
    time had Runs of their own; many requests at once are computed anew in Runs that are full
    (`in_full_runs`), and faster.
    """
    rate, members = prefill_tokens_per_s or 0, len(team.members)
    if in_full_runs:
        rate = max(rate, team.prefill_tokens_per_s)
    if how != CHEAPER or not rate:
        return how != ANEW
    return team.kv_token_ps * (members - 1) // members < _S_PS // rate


def check_shared(batcher: Batcher, message: Handover) -> None:
    """The request can be this instance's. Raises UnexpectedMessage."""
    shared, layers = message.shared, batcher.span.stop - 2
    assert shared is not None
    if len(message.requests) != 1 or not message.decoding:
        raise UnexpectedMessage("one request that decodes is shared at a time")
    [spec] = message.requests
    known = spec.known_tokens
    try:
        batcher.check(spec)
    except ValueError as error:
        raise UnexpectedMessage(str(error)) from None
    if not spec.generated_ids:
        raise UnexpectedMessage(f"{spec.request} does not decode")
    least, most = batcher.pool.blocks_for(known - 1), batcher.pool.blocks_for(known)
    is_table = len(set(shared.blocks)) == len(shared.blocks)
    if not is_table or not least <= len(shared.blocks) <= most:
        raise UnexpectedMessage(f"{spec.request}: {known} tokens in {len(shared.blocks)} blocks")
    spans = [at.span for at in message.kv_at]
    if not all(1 <= span.start < span.stop <= layers + 1 for span in (*spans, shared.span)):
        raise UnexpectedMessage(f"KV of {spans} of {layers} layers")


def _decoders(span: LayerSpan, layers: int) -> LayerSpan:
    """Of the span the layers that have KV."""
    return LayerSpan(max(span.start, 1), min(span.stop, layers + 1))
