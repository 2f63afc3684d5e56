"""What key stages in host memory, and where stages are placed, are worth.

The simulator checks at every step of all of these that memory is not overdrawn, that copies of key
stages leave 15 % of it free, and that no last copy is given up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from stage_worlds import MEMORY_NS, SERVICE_NS, STORAGE_NS, Row, Start, burst, hosted_world, starts
from worlds import MS, make_model

from livescale.control.policy import placement as placement_module
from livescale.control.policy.placement import Discard, Keep
from livescale.sim.checkers.invariants import InvariantBroken
from livescale.values.copy_strategies import CacheCopies, KeyStageCopies, NoCopies, Placement
from livescale.values.scaling_policies import ModelPolicy, StagesByQueue

FROM_NS = 60_000 * MS
"""All stages have their first instances long before."""
TWICE = ((0.3, 2), (0.75, 8), (0.0, 45), (0.75, 8))
SECOND_NS = FROM_NS + 55_000 * MS
KEY = KeyStageCopies()
MINUTES = CacheCopies(ttl_ns=300_000 * MS)


@functools.cache
def one_slow_stage(placement: Placement, others: int = 0) -> list[Start]:
    """Three hosts of two devices: one is free when the slow stage has to grow, in two bursts.
    Between them other models are used once, on that host's devices."""
    policy = StagesByQueue(slo_ns=4 * 5 * SERVICE_NS)
    config = hosted_world(policy, placement, "as-models", 3, 2, {"m/1": 1.5}, stages=4)
    size_bytes = config.controller.models[1].spec.size_bytes
    more = [make_model(f"n{number}", 2, size_bytes // 6) for number in range(others)]
    models = [ModelPolicy(spec, 0, 1, idle_ns=500 * MS) for spec in more]
    controller = replace(config.controller, models=(*config.controller.models, *models))
    loads = {"m": later(burst(TWICE))}
    for number in range(others):
        loads[f"n{number}"] = [Row(FROM_NS + (20_000 + 9_000 * number) * MS, 64, 1)]
    return starts(replace(config, controller=controller), loads, FROM_NS)


def test_a_key_stage_comes_back_from_host_memory() -> None:
    """The first burst has to read storage, whatever is kept. QUART's Q9: 0.8 s for an eighth of
    BERT-21B, and seven times as long from disk."""
    for placement in (NoCopies(), CacheCopies(), KEY):
        first = [one for one in one_slow_stage(placement) if one.at_ns < SECOND_NS]
        assert {one.stage for one in first} == {"m/1"}
        assert mean_ns(first) == pytest.approx(STORAGE_NS, rel=0.01)
    again = {placement: second(one_slow_stage(placement)) for placement in (NoCopies(), KEY)}
    assert mean_ns(again[KEY]) == pytest.approx(MEMORY_NS, rel=0.01)
    assert mean_ns(again[NoCopies()]) == pytest.approx(STORAGE_NS, rel=0.01)


def test_a_cache_forgets_it_after_its_time_to_live() -> None:
    assert mean_ns(second(one_slow_stage(CacheCopies()))) > 6 * mean_ns(second(one_slow_stage(KEY)))


@pytest.mark.long
def test_a_cache_that_keeps_longer_is_as_good_until_others_need_the_memory() -> None:
    """What other models load drives the stage out of a cache; they are no key stages."""
    assert mean_ns(second(one_slow_stage(MINUTES))) == mean_ns(second(one_slow_stage(KEY)))
    cached, kept = second(one_slow_stage(MINUTES, 2)), second(one_slow_stage(KEY, 2))
    assert mean_ns(cached) > 6 * mean_ns(kept)


def test_copies_beyond_the_limit_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that fills a host's memory breaks a rule of the simulator's."""
    made = placement_module._most_recent

    def broken(_percent: int, *others: Any) -> list[Keep | Discard]:
        return made(100, *others)

    monkeypatch.setattr(placement_module, "_most_recent", broken)
    policy = StagesByQueue(slo_ns=4 * 5 * SERVICE_NS)
    few = KeyStageCopies(memory_percent=30)
    config = hosted_world(policy, few, "as-models", 3, 2, {"m/1": 1.5}, stages=4)
    with pytest.raises(InvariantBroken, match="leave memory of their host free"):
        starts(config, {"m": later(burst(TWICE))}, FROM_NS)


@functools.cache
def two_slow_stages(stage_placement: str) -> list[Start]:
    """Four hosts of four devices, of which half are free when two stages have to grow by several
    instances each, in two bursts."""
    policy = StagesByQueue(slo_ns=2_000 * MS)
    slow = {"m/2": 2.5, "m/5": 2.0}
    config = hosted_world(policy, KEY, stage_placement, 4, 4, slow, stages=8)
    phases = ((0.3, 2), (0.9, 10), (0.0, 43), (0.9, 10))
    return starts(config, {"m": later(burst(phases))}, FROM_NS)


@pytest.mark.long
def test_where_devices_are_few_stages_come_back_sooner_than_spread_ones() -> None:
    """Packed stages leave whole hosts for key stages, which find their copies there again. Spread
    ones come to whatever host has a device, with a copy or not."""
    own, spread = second(two_slow_stages("quart")), second(two_slow_stages("spread"))
    assert {one.reason for one in own} <= {"key_most_free", "key_kl"}
    assert mean_ns(own) == pytest.approx(MEMORY_NS, rel=0.01)
    assert mean_ns(spread) > 1.5 * mean_ns(own)


@pytest.mark.long
def test_the_first_burst_pays_for_packing() -> None:
    """Packed stages grow on few hosts, whose storage all of the new instances share."""
    own, spread = (
        [one for one in two_slow_stages(how) if one.at_ns < SECOND_NS]
        for how in ("quart", "spread")
    )
    assert mean_ns(own) > mean_ns(spread)


# -- helpers --------------------------------------------------------------------------------------


def later(rows: Sequence[Row]) -> list[Row]:
    shift_ns = FROM_NS - 3_000 * MS
    return [replace(row, arrival_ns=row.arrival_ns + shift_ns) for row in rows]


def second(found: Sequence[Start]) -> list[Start]:
    return [one for one in found if one.at_ns >= SECOND_NS and one.stage.startswith("m/")]


def mean_ns(found: Sequence[Start]) -> float:
    assert found
    return sum(one.load_ns for one in found) / len(found)
