"""What each model of a run was asked, and what it took. Works on the lines of a record alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from livescale.messages.commands import StartLoad
from livescale.messages.events import LoadFailed, Released, WorkerJoined, WorkerLost
from livescale.telemetry.record import AnyLine, RequestLine, StepLine
from livescale.types import WorkerRef


@dataclass(slots=True)
class ModelUsage:
    """Sums over a run. `device_ns` is how long instances held devices, loading included.

    `slo_met` is None where no request was judged.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    slo_met: int | None = None
    device_ns: int = 0


def usage_by_model(
    lines: Iterable[AnyLine], from_ns: int = 0, to_ns: int | None = None
) -> dict[str, ModelUsage]:
    """The sums of every model that was asked for or loaded, by name.

    A device is held from the order to load until it is released, fails to load or is lost, or
    until the record's last step; of that, what lies between `from_ns` and `to_ns` counts.
    """
    usage: dict[str, ModelUsage] = {}
    held: dict[WorkerRef, _Held] = {}
    now_ns = 0
    for line in lines:
        if isinstance(line, RequestLine):
            _count(usage.setdefault(line.model, ModelUsage()), line)
        elif isinstance(line, StepLine):
            now_ns = max(line.now_ns, from_ns)
            now_ns = now_ns if to_ns is None else min(now_ns, to_ns)
            for event in line.events:
                if isinstance(event, WorkerJoined) and event.report is not None:
                    # A new controller hears of it again; in a cut record it may begin here.
                    report = event.report
                    key = (report.instance, report.rank)
                    held.setdefault(event.worker, _Held(report.model, key, now_ns))
                for worker in _freed(held, event):
                    _end(usage, held.pop(worker), now_ns)
            for command in line.commands:
                if isinstance(command, StartLoad):
                    key = (command.instance, command.rank)
                    held[command.worker] = _Held(command.model, key, now_ns)
    for holding in held.values():
        _end(usage, holding, now_ns)
    return dict(sorted(usage.items()))


# -- helpers, in the order used -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """A device that an instance's rank holds."""

    model: str
    key: tuple[int, int]
    since_ns: int


def _count(usage: ModelUsage, line: RequestLine) -> None:
    usage.requests += 1
    usage.prompt_tokens += line.prompt_tokens
    usage.generated_tokens += len(line.token_ns)
    if line.slo_met is not None:
        usage.slo_met = (usage.slo_met or 0) + line.slo_met


def _freed(held: dict[WorkerRef, _Held], event: object) -> list[WorkerRef]:
    if isinstance(event, WorkerLost):
        return [event.worker] if event.worker in held else []
    if isinstance(event, (Released, LoadFailed)):
        key = (event.instance, event.rank)
        return [worker for worker, holding in held.items() if holding.key == key]
    return []


def _end(usage: dict[str, ModelUsage], holding: _Held, now_ns: int) -> None:
    usage.setdefault(holding.model, ModelUsage()).device_ns += now_ns - holding.since_ns
