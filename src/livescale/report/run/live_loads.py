"""Loads of instances from close by: what was there when, what the instance did meanwhile, and which
batches another one took over from it (live scaling, BlitzScale §5.2). Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from livescale.report.run.terminal import filling, seconds, table
from livescale.telemetry.history.holding_history import InstanceHistory
from livescale.telemetry.history.reading import History
from livescale.telemetry.record.record import RequestLine
from livescale.values.types import RequestId
from livescale.values.units import NS_PER_S

_COLUMNS = 60


@dataclass(frozen=True, slots=True)
class TakenOver:
    """One batch that the source took over, and when it had all of its first tokens (None: some
    never came from there). Layers of the model below `next_layer` had been run."""

    at_ns: int
    next_layer: int
    requests: int
    answered_ns: int | None


@dataclass(frozen=True, slots=True)
class LoadStory:
    """One instance from the order to load it until it served, was lost or the record ended.

    `order` is the live order; empty for a load that all requests wait for. `source` is the worker
    that is helped, or -1. `steps` are (time, first layers that are there, layers of batches run so
    far) in ascending time. `first_ns` are the times of first tokens that came from this worker.
    `help_ns` is the first time that something came of its work: a batch taken over, or a token.
    """

    worker: int
    layers: int
    order: str
    source: int
    ordered_ns: int
    live_ns: int | None
    loaded_ns: int | None
    end_ns: int
    steps: tuple[tuple[int, int, int], ...]
    taken: tuple[TakenOver, ...]
    first_ns: tuple[int, ...]
    help_ns: int | None

    @property
    def first_layer_ns(self) -> int | None:
        return next((at for at, watermark, _ in self.steps if watermark), None)

    @property
    def help_s(self) -> float | None:
        """How long after the order it first helped."""
        return None if self.help_ns is None else (self.help_ns - self.ordered_ns) / NS_PER_S

    @property
    def live_layers(self) -> int:
        """Layers of batches that it had run by its last report."""
        return max((ran for _, _, ran in self.steps), default=0)

    @property
    def requests_given(self) -> int:
        return sum(batch.requests for batch in self.taken)


def load_stories(history: History, *, only_live: bool = False) -> Iterator[LoadStory]:
    """The loads of all instances whose order is on record, in the order of their beginning, or only
    of those that worked, or were meant to, before everything was there."""
    of_request = {line.request: line for line in history.requests}
    for instance in history.instances:
        if instance.is_ordered and (instance.live_ns is not None or not only_live):
            yield _story(instance, history, of_request)


def live_text(stories: Sequence[LoadStory], started_ns: int) -> str:
    """Live loads for a terminal: one row each, and the first from close by; empty without any."""
    if not stories:
        return ""
    rows = []
    for story in stories:
        ns = (story.live_ns, story.first_layer_ns, story.help_ns, story.loaded_ns)
        after = [None if at is None else (at - story.ordered_ns) / NS_PER_S for at in ns]
        rows.append(
            [
                seconds((story.ordered_ns - started_ns) / NS_PER_S),
                f"w{story.worker}",
                f"w{story.source}" if story.source >= 0 else "none",
                story.order,
                *map(seconds, after),
                len(story.taken),
                story.requests_given,
                story.live_layers,
            ]
        )
    header = ["at", "live", "helps", "order", "takes requests", "1st layer", "1st help"]
    counts = ["loaded", "batches given", "requests", "layers run"]
    return "\n\n".join([table([*header, *counts], rows), _diagram(stories[0])])


# -- helpers, in the order used -------------------------------------------------------------------


def _story(
    instance: InstanceHistory, history: History, of_request: dict[RequestId, RequestLine]
) -> LoadStory:
    held = min(instance.holdings, key=lambda held: (held.rank, held.begun_ns))
    layers = len(held.layer_bytes)
    duty = instance.duty
    ends_ns = [at for at in (instance.served_ns, instance.ended_ns) if at is not None]
    taken = tuple(
        TakenOver(
            at_ns,
            event.next_layer,
            len(event.requests),
            _answered_ns(
                [of_request.get(name) for name, *_ in event.requests], event.worker.worker
            ),
        )
        for at_ns, event in instance.taken
    )
    first_ns = sorted(
        line.token_ns[0]
        for line in history.requests
        if line.token_ns and line.worker == held.member and line.token_ns[0] >= held.begun_ns
    )
    helped = [batch.at_ns for batch in taken[:1]] + first_ns[:1]
    return LoadStory(
        worker=held.member.worker,
        layers=layers,
        order=duty.live_order or "",
        source=duty.gives_to[0].worker.worker if duty.gives_to else -1,
        ordered_ns=held.begun_ns,
        live_ns=instance.live_ns,
        loaded_ns=instance.served_ns,
        end_ns=min(ends_ns, default=history.end_ns),
        steps=_steps(instance, layers),
        taken=taken,
        first_ns=tuple(first_ns),
        help_ns=min(helped, default=None),
    )


def _steps(instance: InstanceHistory, layers: int) -> tuple[tuple[int, int, int], ...]:
    """Its arrivals, and the end of the load."""
    steps = [(layer.at_ns, layer.watermark, layer.live_layers) for layer in instance.arrivals]
    if instance.served_ns is not None:
        steps.append((instance.served_ns, layers, steps[-1][2] if steps else 0))
    return tuple(steps)


def _answered_ns(lines: Sequence[RequestLine | None], worker: int) -> int | None:
    """When the last of these requests had its first token, if all had it from this worker."""
    found = [
        line.token_ns[0]
        for line in lines
        if line is not None and line.token_ns and line.worker and line.worker.worker == worker
    ]
    return max(found) if len(found) == len(lines) else None


def _diagram(story: LoadStory) -> str:
    """Rows over the time of the load: layers there, layers of batches run, batches given away."""
    span_ns = max(story.end_ns - story.ordered_ns, 1)

    def row(name: str, cells: str, total: str) -> str:
        return f"{name:>14} |{cells}|  {total}"

    filled, worked, given = [], [], []
    for column in range(_COLUMNS):
        start_ns, stop_ns = (
            story.ordered_ns + span_ns * edge // _COLUMNS for edge in (column, column + 1)
        )
        there = [step for step in story.steps if step[0] <= stop_ns]
        filled.append(filling(max((w for _, w, _ in there), default=0), story.layers))
        worked.append(filling(max((ran for _, _, ran in there), default=0), story.live_layers))
        count = sum(start_ns < batch.at_ns <= stop_ns for batch in story.taken)
        given.append(" " if not count else str(count) if count < 10 else "+")
    came = max((watermark for _, watermark, _ in story.steps), default=0)
    end = f"{span_ns / NS_PER_S:.3g} s"
    return "\n".join(
        [
            f"w{story.worker} from the order to load it until it was there:",
            row("layers there", "".join(filled), f"{came} of {story.layers}"),
            row("layers run", "".join(worked), f"{story.live_layers}, of all batches"),
            row("batches given", "".join(given), str(len(story.taken))),
            f"{'':>14} 0{end:>{_COLUMNS}}",
        ]
    )
