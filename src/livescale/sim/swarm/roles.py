"""Models whose prompts are computed at one instance and whose requests decode at another, drawn
from a seed, in a world without.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from livescale.sim.base.config import ModelChange
from livescale.sim.swarm.worlds import SwarmWorld, changed
from livescale.values.scaling_policies import ModelPolicy, RoleLimits
from livescale.values.types import Role


def with_roles(world: SwarmWorld) -> SwarmWorld:
    """In a quarter of the worlds most models have roles, in some with less than one instance for
    each: then one does both."""
    rng = random.Random(f"roles {world.seed}")
    if rng.randrange(4):
        return world
    config = world.config
    chosen = {policy.spec.name: rng.random() < 0.7 for policy in config.controller.models}

    def given(policy: ModelPolicy) -> ModelPolicy:
        return _with_roles(policy, rng) if chosen.get(policy.spec.name) else policy

    models = tuple(map(given, config.controller.models))
    changes = tuple(
        change
        if change.changed is None
        else ModelChange(change.at_ns, changed=given(change.changed))
        for change in config.changes
    )
    config = changed(replace(config, changes=changes), controller={"models": models})
    return SwarmWorld(world.rows, config, world.seed)


def _with_roles(policy: ModelPolicy, rng: random.Random) -> ModelPolicy:
    """The least number of instances is dealt between both roles, the largest is each one's."""
    least, most = policy.instances_min, policy.instances_max
    decoding = rng.randint(0, least)
    roles = (
        RoleLimits(Role.PREFILL, least - decoding, max(most, least - decoding)),
        RoleLimits(Role.DECODE, decoding, max(most, decoding)),
    )
    return replace(policy, instances_max=sum(r.instances_max for r in roles), roles=roles)
