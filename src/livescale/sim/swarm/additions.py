"""What was added to drawn worlds later: more kinds of faults, clients, limits that change while a
world runs, and wide bounds. Each is drawn apart from all else, in a world that was drawn without.

Narrow bounds make requests fail. In most worlds they are wide, so that little fails and much is
served; the faults stay as they are.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.load.traces import TraceRow
from livescale.sim.base.config import HostDemand, HostStay, ModelChange, SimConfig
from livescale.sim.swarm.worlds import SwarmWorld, changed, has_room
from livescale.values.bindings import Binding, EarlyBinding, LateBinding
from livescale.values.copy_strategies import AllCopies, SpreadCopies
from livescale.values.scaling_policies import Period
from livescale.values.units import NS_PER_MS

_UNTIL_NS = 3_000 * NS_PER_MS
_NARROW_SHARE = 0.04
"""Of the worlds so many keep each of the narrow bounds."""
_STRAYS = 12
"""Where bounds are wide, one of so many requests may be for a model that is not served."""


def with_bad_files(world: SwarmWorld) -> SwarmWorld:
    """The world with files that cannot be loaded now and then, or as it is. Failed loads are
    given up early and tried again soon in some worlds."""
    rng = random.Random(f"files {world.seed}")
    if not world.config.faults.until_ns or rng.random() < 0.5:
        return world
    return world.changed(
        faults={
            "bad_files": rng.choice([1, 3, 10]),
            "bad_files_ns": rng.choice([50, 500, 5_000]) * NS_PER_MS,
        },
        controller={
            "load_failures_max": rng.choice([1, 2, 3]),
            "load_retry_ns_max": rng.choice([20, 1_000, 30_000]) * NS_PER_MS,
        },
    )


def with_silence(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with faults members stop or are cut off, for less and for more than
    watchers wait for them."""
    rng = random.Random(f"silence {world.seed}")
    if not world.config.faults.until_ns or rng.random() < 0.67:
        return world
    faults = {
        "silences": rng.choice([1, 5, 20]),
        "silence_ns_max": rng.choice([50, 300, 2_000]) * NS_PER_MS,
        "lost_after_ns": rng.choice([50, 200]) * NS_PER_MS,
    }
    return world.changed(faults=faults)


def with_takeovers(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with faults, but without silent members, another controller takes
    over while the first one lives on."""
    rng = random.Random(f"takeovers {world.seed}")
    faults = world.config.faults
    if not faults.until_ns or faults.silences or rng.random() < 0.67:
        return world
    longest_ns = rng.choice([20, 300, 2_000]) * NS_PER_MS
    return world.changed(faults={"takeovers": rng.choice([1, 2, 5]), "takeover_ns_max": longest_ns})


def with_refusals_and_jumps(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with faults members refuse what they are to hold for a while; in a
    third clocks jump."""
    rng = random.Random(f"members {world.seed}")
    if not world.config.faults.until_ns:
        return world
    faults = {}
    if rng.random() < 0.33:
        faults["refusals"] = rng.choice([1, 5, 20])
        faults["refusal_ns"] = rng.choice([5, 50, 500]) * NS_PER_MS
    if rng.random() < 0.33:
        faults["clock_jumps"] = rng.choice([1, 5, 20])
        faults["clock_jump_ns_max"] = rng.choice([10, 1_000, 100_000]) * NS_PER_MS
    return world.changed(faults=faults)


def with_binding(world: SwarmWorld) -> SwarmWorld:
    """In a quarter of the worlds requests are bound early, else late, with small bounds in some."""
    rng = random.Random(f"binding {world.seed}")
    if rng.random() < 0.25:
        binding: Binding = EarlyBinding(rng.choice([1, 8]))
    else:
        binding = LateBinding(
            ahead_tokens_max=rng.choice([1, 2, 2, 2]) * world.config.run_tokens_max,
            oldest_prompt_percent=rng.choice([1, 50, 50, 100]),
            passes_max=rng.choice([1, 4, 64]),
            run_tokens_max=world.config.run_tokens_max,
        )
    return world.changed(controller={"binding": binding})


def with_spares_ahead(world: SwarmWorld) -> SwarmWorld:
    """In half of the worlds workers that hold nothing get parameters before they are needed, where
    spares are kept."""
    rng = random.Random(f"ahead {world.seed}")
    return world.changed(controller={"spares_ahead": rng.random() < 0.5})


def with_tight_arenas(world: SwarmWorld) -> SwarmWorld:
    """In most worlds workers have room for the largest model, for one and a half of these, or for
    two and a half: warm spares have to go."""
    config = world.config
    percent = random.Random(f"tight arenas {world.seed}").choice([100, 150, 250, None])
    if percent is None:
        return world
    added = [change.added for change in config.changes if change.added is not None]
    largest = max(policy.spec.size_bytes for policy in (*config.controller.models, *added))
    devices = tuple(
        replace(device, arena_bytes=min(device.arena_bytes, largest * percent // 100))
        for device in config.devices
    )
    return world.changed(devices=devices)


def with_clients(world: SwarmWorld) -> SwarmWorld:
    """In half of the worlds two to five clients share the pool, in some with weights."""
    rng = random.Random(f"clients {world.seed}")
    if rng.random() < 0.5:
        return world
    clients = range(rng.randint(2, 5))
    return world.changed(client_weights=tuple(rng.choice([1, 1, 2, 5]) for _ in clients))


def with_changed_limits(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds a model of the start gets other limits, once or twice.

    A least number rises only where every model still gets an instance beside the least numbers of
    all others. No model gives up its least number: without room beside them requests wait for
    ever, and the world is impossible. (A pool's gateway ends such requests after the queue timeout,
    which most drawn worlds do not have.)
    """
    rng = random.Random(f"limits {world.seed}")
    if rng.random() < 0.67:
        return world
    config = world.config
    for _ in range(rng.randint(1, 2)):
        policy = rng.choice(config.controller.models)
        least = rng.randint(0, max(policy.instances_min, 1))
        limits = replace(
            policy,
            instances_min=least,
            instances_max=rng.randint(max(least, 1), max(config.workers, least)),
            priority=rng.choice([0, 1, 2]),
            idle_ns=rng.choice([10, 500]) * NS_PER_MS,
        )
        at_ns = rng.randrange(_UNTIL_NS)
        drawn = _with_change(config, ModelChange(at_ns, changed=limits))
        if least > policy.instances_min and not has_room(drawn):
            limits = replace(limits, instances_min=policy.instances_min)
            drawn = _with_change(config, ModelChange(at_ns, changed=limits))
        config = drawn
    return SwarmWorld(world.rows, config, world.seed)


def with_schedule(world: SwarmWorld) -> SwarmWorld:
    """In a sixth of the worlds whose models do not change otherwise, one has other limits for a
    part of the day, which begins with the world; not one with roles or stages."""
    rng = random.Random(f"schedule {world.seed}")
    config = world.config
    models = config.controller.models
    whole = [p for p in models if not p.roles and p.spec.stage is None]
    if not whole or config.changes or rng.randrange(6):
        return world
    policy = rng.choice(whole)
    start_ns = rng.choice([0, rng.randrange(_UNTIL_NS)])
    stop_ns = start_ns + rng.choice([50, 500, 5_000]) * NS_PER_MS
    # Room for the least numbers is as without: see `with_changed_limits`.
    least = rng.randint(0, policy.instances_min)
    period = Period(start_ns, stop_ns, least, rng.randint(max(least, 1), policy.instances_max))
    scheduled = replace(policy, schedule=(period,))
    return world.changed(
        controller={"models": tuple(scheduled if p is policy else p for p in models)}
    )


def with_stays(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with several hosts some come later, or leave in order and come back;
    where hosts keep copies, the files of the models may be on one host alone."""
    rng = random.Random(f"stays {world.seed}")
    config = world.config
    names = sorted({config.device(number).host for number in range(config.workers)})
    names = sorted({*names, *(host.name for host in config.hosts)})
    if len(names) < 2 or rng.random() < 0.67:
        return world
    if rng.random() < 0.5:
        config = _with_files_on_one_host(
            config, rng.choice([host.name for host in config.hosts] or [""])
        )
    stays = []
    for host in rng.sample(names, rng.randint(1, len(names) - 1)):
        from_ns = rng.choice([0, 0, 0, 10, 500, 2_000]) * NS_PER_MS
        is_leaving = not from_ns or rng.random() < 0.5
        stays.append(
            HostStay(
                host,
                from_ns,
                rng.randrange(from_ns, from_ns + _UNTIL_NS) if is_leaving else None,
                rng.choice([50, 1_000, 10_000]) * NS_PER_MS,
                rng.choice([1, 100, 1_000]) * NS_PER_MS,
            )
        )
    late = [ref for stay in stays if stay.from_ns for ref in config.on_host(stay.host)]
    expected = {
        "workers_expected": config.workers - sum(not ref.is_agent for ref in late),
        "agents_expected": len(config.hosts) - sum(ref.is_agent for ref in late),
    }
    config = changed(config, controller=expected, stays=tuple(stays))
    return SwarmWorld(world.rows, config, world.seed)


def with_demand(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds whose hosts all stay, some join when they are asked for, and are
    given back."""
    rng = random.Random(f"demand {world.seed}")
    config = world.config
    devices = [config.device(number) for number in range(config.workers)]
    names = sorted({device.host for device in devices})
    if len(names) < 2 or config.stays or rng.random() < 0.67:
        return world
    joining = rng.sample(names, rng.randint(1, len(names) - 1))
    devices.sort(key=lambda device: joining.index(device.host) if device.host in joining else -1)
    hosts = sorted(config.hosts, key=lambda h: joining.index(h.name) if h.name in joining else -1)
    demand = HostDemand(
        tuple(joining),
        hosts_min=rng.choice([0, 0, 1]),
        idle_ns=rng.choice([100, 1_000, 10_000]) * NS_PER_MS,
        look_ns=rng.choice([50, 500]) * NS_PER_MS,
        placing_ns=rng.choice([1, 300, 3_000]) * NS_PER_MS,
        patience_ns=rng.choice([50, 1_000, 10_000]) * NS_PER_MS,
    )
    expected = {
        "workers_expected": sum(device.host not in joining for device in devices),
        "agents_expected": sum(host.name not in joining for host in hosts),
    }
    config = changed(
        config,
        controller=expected,
        devices=tuple(devices),
        hosts=tuple(hosts),
        demand=demand,
    )
    return SwarmWorld(world.rows, config, world.seed)


def with_gateways(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds two or three gateways share the requests; in most of these, where
    there are faults, some are lost, and their requests with them."""
    rng = random.Random(f"gateways {world.seed}")
    if rng.random() < 0.67:
        return world
    losses = rng.choice([0, 1, 1, 3]) if world.config.faults.until_ns else 0
    return world.changed(gateways=rng.choice([2, 3]), faults={"gateway_losses": losses})


def with_timeouts(world: SwarmWorld) -> SwarmWorld:
    """In a twelfth of the worlds requests may wait for a while only."""
    rng = random.Random(f"timeouts {world.seed}")
    if rng.randrange(12):
        return world
    return world.changed(queue_timeout_ns=rng.choice([50, 500, 5_000]) * NS_PER_MS)


def with_wide_bounds(world: SwarmWorld) -> SwarmWorld:
    """The world with most of its bounds widened."""
    rng = random.Random(f"bounds {world.seed}")
    rows, controller, most = world.rows, world.config.controller, world.config.queue_requests_max
    attempts, failures = controller.request_attempts_max, controller.load_failures_max
    if rng.random() >= _NARROW_SHARE:
        rows = _with_few_strays(rows, world.config)
    if rng.random() >= _NARROW_SHARE:
        attempts += rng.choice([2, 5, 20])
    if rng.random() >= _NARROW_SHARE:
        failures += rng.choice([10, 30])
    if rng.random() >= _NARROW_SHARE:
        most = max(most, _places(rows))
    wide = {"request_attempts_max": attempts, "load_failures_max": failures}
    config = changed(world.config, controller=wide, queue_requests_max=most)
    return SwarmWorld(rows, config, world.seed)


def with_poison(world: SwarmWorld) -> SwarmWorld:
    """In a third of the worlds with faults some requests cannot be computed, and by some workers
    end; in half of these few attempts are lost before a request fails."""
    rng = random.Random(f"poison {world.seed}")
    if not world.config.faults.until_ns or rng.random() < 0.67:
        return world
    faults = {
        "raising_permille": rng.choice([0, 20, 80]),
        "killing_permille": rng.choice([0, 5, 20]),
    }
    attempts = world.config.controller.request_attempts_max
    controller = {"request_attempts_max": rng.choice([attempts, rng.randint(1, 4)])}
    # A stretch of steps would have to end where it cannot be computed.
    return world.changed(faults=faults, controller=controller, coalesces=False)


# -- helpers, in the order used -------------------------------------------------------------------


def _with_files_on_one_host(config: SimConfig, name: str) -> SimConfig:
    """Only what runs on this host reads the models' files, and its memory has room for all of
    them. Where hosts do not keep copies, or the host's devices are too few, all read files."""
    is_keeping = isinstance(config.controller.placement, SpreadCopies | AllCopies)
    # A model that is withdrawn is not kept any more, and may have to be read by a device.
    is_withdrawing = any(change.removed for change in config.changes)
    largest = max(policy.spec.size_bytes for policy in config.policies)
    ranks = max(policy.spec.tp_size for policy in config.policies)
    readers = [config.device(number) for number in range(config.workers)]
    able = [one for one in readers if one.host == name and one.arena_bytes >= largest]
    if not name or not is_keeping or is_withdrawing or len(able) < ranks:
        return config
    size_bytes = sum(policy.spec.size_bytes * policy.spec.tp_size for policy in config.policies)
    devices = [config.device(number) for number in range(config.workers)]
    hosts = [
        replace(host, memory_bytes=max(host.memory_bytes, size_bytes))
        if host.name == name
        else host
        for host in config.hosts
    ]
    return changed(
        config,
        devices=tuple(replace(one, reads_files=one.host == name) for one in devices),
        hosts=tuple(replace(host, reads_files=host.name == name) for host in hosts),
    )


def _with_change(config: SimConfig, change: ModelChange) -> SimConfig:
    return changed(config, changes=(*config.changes, change))


def _with_few_strays(
    rows: dict[str, list[TraceRow]], config: SimConfig
) -> dict[str, list[TraceRow]]:
    """The last requests before a model is there, and the first ones after it was withdrawn."""
    added = {c.added.spec.name: c.at_ns for c in config.changes if c.added is not None}
    removed = {c.removed: c.at_ns for c in config.changes if c.removed}
    found = {}
    for model, load in rows.items():
        begin_ns, end_ns = added.get(model, 0), removed.get(model)
        early = [row for row in load if row.arrival_ns < begin_ns]
        late = [row for row in load if end_ns is not None and row.arrival_ns >= end_ns]
        served = [row for row in load if row not in early and row not in late]
        few = len(served) // _STRAYS
        found[model] = [*early[len(early) - few // 2 :], *served, *late[: few - few // 2]]
    return found


def _places(rows: dict[str, list[TraceRow]]) -> int:
    """Places in the line for all but every twelfth request, should all of them wait at a time."""
    total = sum(map(len, rows.values()))
    places = max(map(len, rows.values()), default=0)
    while places > 1 and sum(max(0, len(r) - places + 1) for r in rows.values()) * _STRAYS <= total:
        places -= 1
    return places
