"""N7: BlitzScale's chain with ZigZag against λScale's execution pipelines.

No paper compares the two. The id's N says so: it is counted neither as printed nor as corrected.
"""

from __future__ import annotations

import msgspec

from livescale.lab.reproduce.base.claim import Conditions, Curve, Measured, Picture, claim, near
from livescale.lab.reproduce.base.half_loads import (
    half_load,
    kv_behind,
    ttft_mean_s,
    ttft_p99_s,
)
from livescale.lab.reproduce.base.models import cluster_of
from livescale.lab.reproduce.base.saturated import Ramp, Scene, play
from livescale.lab.reproduce.lambdascale.lambdascale_scaling import BURSTS
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS
from livescale.values.copy_strategies import NoCopies
from livescale.values.units import NS_PER_S

_COUNTS = (1, 2, 4)
"""Copies at first, λScale's k."""
_SYSTEMS = {
    "stop": "livescale-stop-cold",
    "chain": "livescale-cold",
    "teams": "lambda-pairs",
    "both": "lambda-zigzag",
    "auto": "lambda-auto",
}
"""All under the same bounds, without warm spares. With `auto` the controller takes chain or teams
for each load."""
_PART = 0.25
"""Of capacity: at half of it most devices are in use all the time."""
_SLOW_GBIT = 100
"""A load that takes 23 prompts: filling a team's pipeline is a small part of that."""
_HOPS_NS = (0, 200_000, 2_000_000)
"""What a message takes; each member of a team is a message further."""
_HOSTS = 8
"""The paper's example."""


@claim(
    id="N7",
    judges="pool",
    setup="13B on testbed 1, k = 1, 2, 4 copies at first: 400 prompts at once, and the first minute"
    " of BurstGPT at a quarter of capacity",
    paper="in no paper. Expected: until all are full teams add first tokens for members ·"
    " (end - ready)",
    tolerance="± 10 %, over 100 Gbit/s (a long load)",
    ours="teams {team_part_slow_2:.2f} (k = 2) and {team_part_slow_4:.2f} (k = 4) of that"
    " (400 Gbit/s: {team_part_2:.2f}, {team_part_4:.2f}); in instance-loads {added_slow_4:.2f}"
    " (k = 4), on 8 hosts {hop_added_teams_1_200us:.2f}, {hop_added_teams_2_200us:.2f} and"
    " {hop_added_teams_4_200us:.2f} (k = 1, 2, 4). k = 4, mean and p99 TTFT in the burst:"
    " chain {burst_mean_chain_4:.2f} and {burst_p99_chain_4:.2f} s, teams {burst_mean_teams_4:.2f}"
    " and {burst_p99_teams_4:.2f}, both {burst_mean_both_4:.2f} and {burst_p99_both_4:.2f}, stop"
    " {burst_mean_stop_4:.2f} and {burst_p99_stop_4:.2f}, chain or teams by prediction"
    " {burst_mean_auto_4:.2f} and {burst_p99_auto_4:.2f}; over the minute chain"
    " {minute_mean_chain_4:.2f} and {minute_p99_chain_4:.2f} s, teams {minute_mean_teams_4:.2f} and"
    " {minute_p99_teams_4:.2f}, both {minute_mean_both_4:.2f} and {minute_p99_both_4:.2f}, stop"
    " {minute_mean_stop_4:.2f} and {minute_p99_stop_4:.2f}, by prediction {minute_mean_auto_4:.2f}"
    " and {minute_p99_auto_4:.2f}",
    is_within=near(0.1, team_part_slow_2=1, team_part_slow_4=1),
    note="who wins is shown and not judged. k = 1 forms a team late or not at all: one source"
    " sends each block once",
)
def chain_or_teams(conditions: Conditions) -> Measured:
    """BlitzScale §5.2 against λScale §4.2 to §4.4: the same policy, links and load.

    Per system and k mean and p99 TTFT and device time, of the burst and the minute; and of the
    burst, in instance-loads, the first tokens that new instances add until all of them are full.
    Of a burst on eight hosts over slow links the same with messages that take longer, or no time.
    """
    figures: dict[str, float] = {"failed": 0}
    added: dict[str, list[tuple[float, float]]] = {name: [] for name in _SYSTEMS}
    for count in _COUNTS:
        slow = play(Scene(count, nic_gbit_per_s=_SLOW_GBIT), _SYSTEMS["teams"], conditions.seed)
        figures[f"team_part_slow_{count}"] = slow.team_part
        figures[f"added_slow_{count}"] = slow.added
        figures["failed"] += slow.run.failed
        for name, system in _SYSTEMS.items():
            ramp = play(Scene(count), system, conditions.seed)
            minute = _minute(count, system, conditions)
            figures |= _of_burst(f"{name}_{count}", ramp) | _of_minute(f"{name}_{count}", minute)
            figures["failed"] += ramp.run.failed + minute.failed
            added[name].append((count, ramp.added))
            if name == "teams":
                figures[f"team_part_{count}"] = ramp.team_part
    figures["failed"] += _add_hops(figures, conditions.seed)
    picture = Picture(
        "First tokens that new instances add until all are full",
        "copies at first (k)",
        "instance-loads",
        tuple(Curve(name, tuple(points)) for name, points in added.items()),
    )
    return Measured(figures, picture)


# -- helpers --------------------------------------------------------------------------------------


def _of_burst(name: str, ramp: Ramp) -> dict[str, float]:
    return {
        f"burst_mean_{name}": ramp.mean_s,
        f"burst_p99_{name}": ramp.percentile_s(99),
        f"burst_device_s_{name}": ramp.device_s,
        f"burst_full_s_{name}": ramp.full_ns / NS_PER_S,
        f"added_{name}": ramp.added,
    }


def _add_hops(figures: dict[str, float], seed: int) -> int:
    """The burst on fewer hosts over slow links, by what a message takes. Requests that failed."""
    failed = 0
    for count in _COUNTS:
        for hop_ns in _HOPS_NS:
            scene = Scene(count, hosts=_HOSTS, nic_gbit_per_s=_SLOW_GBIT, message_delay_ns=hop_ns)
            for name in ("chain", "teams", "auto"):
                ramp = play(scene, _SYSTEMS[name], seed)
                key = f"{name}_{count}_{hop_ns // 1000}us"
                figures[f"hop_mean_{key}"] = ramp.mean_s
                figures[f"hop_p99_{key}"] = ramp.percentile_s(99)
                figures[f"hop_added_{key}"] = ramp.added
                failed += ramp.run.failed
    return failed


def _of_minute(name: str, run: PoolRun) -> dict[str, float]:
    return {
        f"minute_mean_{name}": ttft_mean_s(run),
        f"minute_p99_{name}": ttft_p99_s(run),
        f"minute_device_s_{name}": run.device_ns() / NS_PER_S,
    }


def _minute(count: int, system: str, conditions: Conditions) -> PoolRun:
    """The trace, with so many copies at least."""
    rows, _ = half_load(BURSTS, conditions, _PART)
    model = PooledModel(BURSTS.preset, BURSTS.preset, instances_min=count)
    placed = msgspec.structs.replace(SYSTEMS[system], placement=NoCopies())
    config = kv_behind(build_config(cluster_of(BURSTS.cluster), [model], placed))
    return run_pool(config, {model.name: rows}, lead_ns(config), conditions.seed)
