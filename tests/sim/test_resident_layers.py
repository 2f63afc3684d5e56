"""Workers that keep first layers of models that they gave up: a second burst finds them there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
from test_live_scaling import config_of
from worlds import MS, Row

from livescale.messages.events import FirstByteArrived, LayerArrived
from livescale.sim.base.config import SimConfig
from livescale.sim.base.run_notes import SimResult
from livescale.sim.world.simulate import simulate
from livescale.telemetry.record.record import AnyLine, StepLine, TrafficLine, read_record
from livescale.values.types import HoldingId, Outcome

_S = 1000 * MS
_SECOND_NS = 90 * _S


def config(live_order: str, resident_bytes: int) -> SimConfig:
    """As in the tests of live scaling, with room for a model and what is kept behind it."""
    plain = config_of(live_order)
    size_bytes = plain.controller.models[0].spec.size_bytes
    devices = tuple(
        msgspec.structs.replace(device, arena_bytes=size_bytes + resident_bytes)
        for device in plain.devices
    )
    # Warm spares would keep everything.
    cold = msgspec.structs.replace(plain.controller, warm_spares="off")
    return msgspec.structs.replace(
        plain, controller=cold, devices=devices, resident_bytes=resident_bytes
    )


def two_bursts(live_order: str, resident_bytes: int) -> tuple[SimResult, list[AnyLine]]:
    """The second burst comes when the first one's instance is long gone."""
    rows = [Row(at + n * MS, 2000, 4) for at in (30 * _S, _SECOND_NS) for n in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        with path.open("wb") as file:
            result = simulate(rows, config(live_order, resident_bytes), 1, file)
        return result, list(read_record(path))


def last_ttft_ns(result: SimResult, from_ns: int, to_ns: int = 1 << 62) -> int:
    requests = [r for r in result.requests if from_ns <= r.queued_ns < to_ns]
    assert all(r.outcome is Outcome.FINISHED for r in requests)
    return max(r.token_ns[0] - r.queued_ns for r in requests)


@pytest.mark.parametrize("live_order", ["zigzag", "overlap"])
def test_a_second_burst_finds_the_first_layers(live_order: str) -> None:
    without, _ = two_bursts(live_order, 0)
    result, lines = two_bursts(live_order, 9_000_000_000)
    first_ns = [last_ttft_ns(r, 0, _SECOND_NS) for r in (without, result)]
    assert first_ns[0] == first_ns[1], "there was nothing to keep"
    assert last_ttft_ns(result, _SECOND_NS) < last_ttft_ns(without, _SECOND_NS)
    started: dict[HoldingId, int] = {}
    at_once: dict[HoldingId, int] = {}
    for line in lines:
        if isinstance(line, StepLine):
            for event in line.events:
                if isinstance(event, FirstByteArrived):
                    started[event.holding] = line.now_ns
                elif isinstance(event, LayerArrived) and line.now_ns == started[event.holding]:
                    at_once[event.holding] = at_once.get(event.holding, 0) + 1
    first, second = sorted(started)[1:]
    assert first not in at_once
    assert at_once[second] == 17, "the embedding and half of 32 layers, in 9 GB"


def test_what_is_kept_is_not_sent_again() -> None:
    sent = []
    for resident_bytes in (0, 9_000_000_000):
        _, lines = two_bursts("zigzag", resident_bytes)
        traffic = [line for line in lines if isinstance(line, TrafficLine)]
        sent.append(max(line.carried_bytes.get("nic", 0) for line in traffic))
    spec = config("zigzag", 0).controller.models[0].spec
    assert sent[0] - sent[1] == sum(spec.layer_bytes[:17])
