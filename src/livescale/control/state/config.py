"""What the control plane is told once, at its start. Values only; a run record begins with them."""

from __future__ import annotations

from msgspec.structs import replace

from livescale.clusters.topology import Leaf
from livescale.values.bindings import Binding, LateBinding
from livescale.values.copy_strategies import Placement, SpreadCopies
from livescale.values.scaling_policies import Bounds, ModelPolicy, ScalingPolicy
from livescale.values.types import SEQUENCES_MAX, Value


class PairRule(Value, frozen=True):
    """When a loading instance gets a partner: where a pair pays.

    One instance computes at least `load_tokens_min` prompt tokens while the load takes its time
    (four Runs). The KV that a pair moves, as fast as one instance computes prompts, takes at most
    `link_permille_max` of the link between the two (None: whatever it takes). All requests of a
    pair decode at the source: its free KV blocks, of `block_tokens` tokens each, hold its
    part of the prompts that wait (None: that does not matter). What is not known speaks against
    no pair.
    """

    load_tokens_min: int = 8192
    link_permille_max: int | None = 2000
    block_tokens: int | None = 16


ANY_PAIR = PairRule(load_tokens_min=0, link_permille_max=None, block_tokens=None)
"""A partner for every loading instance, as long as there are overloaded ones."""


class ControllerConfig(Value, frozen=True):
    """Everything that shapes the controller's decisions besides its events.

    `epoch` counts the controller's lives, so that ids of an earlier life are never reused.
    `workers_expected` and `agents_expected` end the settling time early: placement waits until
    that many have joined or `settle_ns` have passed since the first event. An instance computes
    `sequences_max` requests at once, and holds at most `dispatched_ahead_max` that it has not
    started; `binding` says how much work it holds besides. A failed load
    is ordered again after `load_retry_ns`, which doubles with every further one up to
    `load_retry_ns_max`; after `load_failures_max` in a row the model counts as one that cannot
    be loaded, and its requests fail while no instance of it is there. A request whose gateway
    lost its worker is not sent to that worker again for `avoid_ns`; what a leader gives back so
    near to a member's loss was lost with it. `multicast` names the planner's strategy,
    `placement` who keeps host copies. `live_order` is how loading instances work before
    everything is there (`batching/contract/live_order.py`; "stop-the-world": not at all);
    loads that are predicted to take no longer than `live_over_ns` are waited for instead, and a
    live instance holds at most `live_ahead_max` requests that neither it nor its source has
    admitted, and two Runs beyond what it computes until the load is over. `pairs` says where it
    gets a partner (None, of baselines: wherever one is overloaded, without the bound by the load's
    time). `teams` says how loading instances serve together before any of them has everything
    (`control/together/teams.py`; None: not at all). With `mutations` an instance may change its
    role; without, for comparison, each role loads its own. Requests of a draining instance end
    there (`drain` "finish"), or go to others of their part ("move"). `wall_ns` is the wall clock
    (UTC, since 1970) when the controller's own clock stands at 0: schedules are read with it. With
    `avoids_serving` the planner is told which link directions rows and KV cross, and keeps away
    from them where others are as good; without it, for comparison, plans are made as if there were
    none (BlitzScale §5.1's interference), and tell what they meet. With `assumes_group_rate` what a
    probe measures inside a host replaces `group_bytes_per_s`, and the hosts' `device_bytes_per_s`.
    Parameters get at most `parameter_share_percent` of an uplink. `warm_spares` says which
    parameters stay longest on released devices (`control/planning/spares.py`): "needed", "recent",
    "slow-links", or "off" for none; with `spares_ahead` devices get some before they are needed
    (`control/planning/spares_ahead.py`).
    Where they stay, a model's last instance goes after `spare_idle_ns` without a request, at most.
    `stage_placement` says which hosts new instances of stages come to: "as-models" (what the plan
    chooses), "quart" or "spread" (`control/stages/stage_placement.py`).
    """

    models: tuple[ModelPolicy, ...]
    workers_expected: int
    agents_expected: int = 0
    epoch: int = 0
    settle_ns: int = 1_000_000_000
    dispatched_ahead_max: int = 64
    binding: Binding = LateBinding()
    sequences_max: int = SEQUENCES_MAX
    request_attempts_max: int = 3
    load_retry_ns: int = 1_000_000_000
    load_retry_ns_max: int = 30_000_000_000
    load_failures_max: int = 3
    avoid_ns: int = 1_000_000_000
    scaling: ScalingPolicy = Bounds()
    multicast: str = "auto"
    avoids_serving: bool = True
    placement: Placement = SpreadCopies()
    live_order: str = "stop-the-world"
    live_over_ns: int = 100_000_000
    live_ahead_max: int = 8
    pairs: PairRule | None = PairRule()
    teams: str | None = None
    mutations: bool = True
    drain: str = "finish"
    chunk_bytes: int = 1 << 20
    leaves: tuple[Leaf, ...] = ()
    group_bytes_per_s: int | None = None
    remote_storage_bytes_per_s: int | None = None
    assumes_group_rate: bool = False
    parameter_share_percent: int = 100
    warm_spares: str = "needed"
    spares_ahead: bool = False
    spare_idle_ns: int = 1_000_000_000
    stage_placement: str = "as-models"
    wall_ns: int = 0


# Members that were with another controller look for the next one at least so often.
_COME_BACK_NS = 2_000_000_000
_COUNT_UNKNOWN = 1 << 31


def taking_over(config: ControllerConfig, epoch: int) -> ControllerConfig:
    """What a controller begins with that takes over from another one: members come back one by
    one, and their count is not known. So it waits for them before it places anything."""
    return replace(
        config,
        epoch=epoch,
        workers_expected=_COUNT_UNKNOWN,
        settle_ns=max(config.settle_ns, _COME_BACK_NS),
    )
