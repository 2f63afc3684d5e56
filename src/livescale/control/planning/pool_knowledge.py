"""What the controller knows: one value for everything that decides by it."""

from __future__ import annotations

from dataclasses import dataclass

from livescale.control.planning.loads import Loads
from livescale.control.requests.router import Router
from livescale.control.state.config import ControllerConfig
from livescale.control.state.fleet import Fleet
from livescale.control.state.model_state import ModelState
from livescale.control.state.pool import ParameterPool
from livescale.values.copy_strategies import keeps_last


@dataclass(frozen=True, slots=True, eq=False)
class PoolKnowledge:
    """Of one pool: its models by name, instances and members, copies, requests, and loads."""

    config: ControllerConfig
    models: dict[str, ModelState]
    fleet: Fleet
    pool: ParameterPool
    router: Router
    loads: Loads

    @classmethod
    def at_start(cls, config: ControllerConfig) -> PoolKnowledge:
        """Of the configuration alone: nobody has reported yet."""
        pool = ParameterPool(keeps_last(config.placement))
        models = {
            policy.spec.name: ModelState(policy, config, 0, number)
            for number, policy in enumerate(config.models)
        }
        router = Router(
            config.dispatched_ahead_max,
            config.live_ahead_max,
            config.sequences_max,
            config.binding,
        )
        return cls(config, models, Fleet(pool), pool, router, Loads(pool))


class OfPool:
    """Base of what decides by what is known of one pool."""

    def __init__(self, known: PoolKnowledge) -> None:
        self._config = known.config
        self._states = known.models
        self._fleet = known.fleet
        self._pool = known.pool
        self._router = known.router
        self._loads = known.loads
