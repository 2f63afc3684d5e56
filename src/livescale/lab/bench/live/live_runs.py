"""One burst of prefill batches on a pair of workers, in one live order.

t = 0 is when the target has the embedding and the first decoder layer, as in BlitzScale's Figure 15
(layer k is there at `Time_l (k - 1)`); or, with `from_start`, when the load is ordered. All batches
are queued then. A live target with a source gets them all, and the source takes its share from
there. Without live scaling an instance is given the next batch when it is free. With overlap alone
nothing is shared: a router deals the batches out, as that of a pool does (`live_split.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from livescale.lab.bench.live.live_fleet import (
    SOURCE,
    SOURCE_INSTANCE,
    TARGET,
    AskedRequest,
    PairFleet,
    Reported,
)
from livescale.lab.bench.live.live_split import OverlapSplit
from livescale.lab.bench.live.live_worker import WorkItem
from livescale.messages.events import BatchTaken, HoldingCompleted, LayerArrived, LiveStarted
from livescale.values.routes import Partner
from livescale.values.types import WorkerRef
from livescale.values.units import NS_PER_S

ALONE = "alone"
"""The source has all batches to itself, and no target loads."""

AT_FIRST_LAYER, AT_START = "from the first layer", "from the start"
STOP, OVERLAP = "stop-the-world", "overlap"

_DECODE_PROMPT_TOKENS, _DECODE_TOKENS = 8, 1900


@dataclass(frozen=True, slots=True)
class Burst:
    """What is played: while `decodes` requests decode on the source, if any."""

    order: str
    batches: int
    output_tokens: int = 1
    from_start: bool = False
    decodes: int = 0

    @property
    def queued(self) -> str:
        """When the batches are queued."""
        return AT_START if self.from_start else AT_FIRST_LAYER


@dataclass(frozen=True, slots=True)
class PairPlay:
    """What came of a burst. Times are monotonic; `zero_ns` is t = 0.

    `arrived_ns` are when each layer of the model was reported to the driver (empty without a load),
    `decodes` the requests that decoded on the source all the while.
    """

    burst: Burst
    began_ns: int
    zero_ns: int
    arrived_ns: tuple[int, ...]
    loaded_ns: int | None
    requests: tuple[AskedRequest, ...]
    decodes: tuple[AskedRequest, ...]
    source_work: tuple[WorkItem, ...]
    target_work: tuple[WorkItem, ...]
    taken: tuple[Reported, ...]

    @property
    def ttft_ns(self) -> list[int]:
        """Of every batch, from t = 0, in the order of the queue."""
        return [asked.token_ns[0] - self.zero_ns for asked in self.requests]

    @property
    def kept_by_source(self) -> int:
        """Batches that went to the source and ended there."""
        return sum(asked.owner == SOURCE for asked in self.requests)

    @property
    def load_ns(self) -> int | None:
        """From the order to the last layer."""
        return None if self.loaded_ns is None else self.loaded_ns - self.began_ns

    @property
    def gaps_ns(self) -> list[int]:
        """Times between tokens of the decodes, of those that came before the last batch's first."""
        end_ns = self.zero_ns + max(self.ttft_ns)
        return [
            after - before
            for asked in self.decodes
            for before, after in zip(asked.token_ns, asked.token_ns[1:], strict=False)
            if self.zero_ns <= after <= end_ns
        ]

    @property
    def first_help_ns(self) -> int | None:
        """When the target had run the first layer of a batch. Monotonic."""
        return min((item.stop_ns for item in self.target_work if item.requests), default=None)


async def play_burst(fleet: PairFleet, burst: Burst) -> PairPlay:
    """Play it; the target is empty again afterwards. Raises BenchError."""
    setting = fleet.setting
    batch_ns = 0
    if burst.order == OVERLAP:
        batch_ns = setting.decoder_layers * await time_prompt(fleet, setting.batch_tokens)
    fleet.forget()
    decodes = await _start_decodes(fleet, burst.decodes)
    prompts = [fleet.new_prompt(setting.batch_tokens) for _ in range(burst.batches)]
    began_ns = zero_ns = time.monotonic_ns()
    target = SOURCE_INSTANCE
    if burst.order != ALONE:
        gives_to = () if burst.order in (STOP, OVERLAP) else (Partner(SOURCE_INSTANCE, SOURCE),)
        target = fleet.load_target(None if burst.order == STOP else burst.order, gives_to)
        if burst.from_start and burst.order != STOP:
            # Requests and orders come on different wires.
            await fleet.until(lambda: bool(fleet.of_target(LiveStarted)))
        elif not burst.from_start:
            await fleet.until(lambda: fleet.watermark >= 2)
            zero_ns = fleet.of_target(LayerArrived)[-1].at_ns
    if burst.order == OVERLAP:
        tokens_per_s = setting.batch_tokens * NS_PER_S // batch_ns
        split = OverlapSplit(fleet, target, prompts, tokens_per_s, burst.output_tokens)
        requests = await _serve_split(fleet, split)
    else:
        requests = await _serve(fleet, burst, prompts)
    await fleet.until(lambda: all(asked.is_over for asked in requests))
    for asked in decodes:
        fleet.cancel(asked)
    loaded_ns = None
    if burst.order != ALONE:
        await fleet.until(lambda: bool(fleet.of_target(HoldingCompleted)))
        loaded_ns = fleet.of_target(HoldingCompleted)[0].at_ns
        await fleet.release_target()
    return PairPlay(
        burst=burst,
        began_ns=began_ns,
        zero_ns=zero_ns,
        arrived_ns=_arrivals(fleet),
        loaded_ns=loaded_ns,
        requests=tuple(requests),
        decodes=tuple(decodes),
        source_work=tuple(fleet.work(SOURCE, began_ns)),
        target_work=tuple(fleet.work(TARGET, began_ns)),
        taken=tuple(h for h in fleet.reports if isinstance(h.event, BatchTaken)),
    )


async def time_prompt(fleet: PairFleet, tokens: int) -> int:
    """What one decoder layer of a prompt takes on the source that has nothing else to do, in ns."""
    fleet.forget()
    began_ns = time.monotonic_ns()
    asked = fleet.submit(SOURCE, fleet.new_prompt(tokens), 1)
    await fleet.until(lambda: asked.is_over)
    (item,) = fleet.work(SOURCE, began_ns)
    return (item.stop_ns - item.start_ns) // item.layer_count


# -- helpers, in the order used -------------------------------------------------------------------


async def _start_decodes(fleet: PairFleet, count: int) -> list[AskedRequest]:
    decodes = [
        fleet.submit(SOURCE, fleet.new_prompt(_DECODE_PROMPT_TOKENS), _DECODE_TOKENS)
        for _ in range(count)
    ]
    await fleet.until(lambda: all(len(asked.token_ids) > 1 for asked in decodes))
    return decodes


def _arrivals(fleet: PairFleet) -> tuple[int, ...]:
    """When each layer was there, and all before it."""
    arrived: list[int] = []
    for report in fleet.of_target(LayerArrived):
        assert isinstance(report.event, LayerArrived)
        arrived += [report.at_ns] * (report.event.watermark - len(arrived))
    return tuple(arrived)


async def _serve_split(fleet: PairFleet, split: OverlapSplit) -> list[AskedRequest]:
    """Send all prompts where a router sends them; those sent, in the order of the queue."""
    split.deal()
    while not split.is_done:
        await fleet.until(split.deal)
    return split.sent


async def _serve(
    fleet: PairFleet, burst: Burst, prompts: Sequence[tuple[int, ...]]
) -> list[AskedRequest]:
    """Send all prompts where they belong; those sent, in the order of the queue."""
    waiting = deque(prompts)
    sent: list[AskedRequest] = []

    def send(worker: WorkerRef) -> None:
        sent.append(fleet.submit(worker, waiting.popleft(), burst.output_tokens))

    def free() -> WorkerRef | None:
        """Who gets the next one."""
        is_loaded = burst.order != ALONE and bool(fleet.of_target(HoldingCompleted))
        busy = {asked.owner for asked in sent if not asked.token_ids}
        workers = [SOURCE, TARGET] if is_loaded else [SOURCE]
        return next((worker for worker in workers if worker not in busy), None)

    if burst.order not in (ALONE, STOP):
        while waiting:
            send(TARGET)
    while waiting:
        await fleet.until(lambda: free() is not None)
        worker = free()
        assert worker is not None
        send(worker)
    return sent
