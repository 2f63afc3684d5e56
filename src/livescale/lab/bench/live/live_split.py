"""Who gets the next batch under overlap alone: what a pool's router decides, in a pair.

Nothing is shared there. The source holds two Runs, the target what it will have computed before the
source would have, and the others wait for whichever of the two comes free first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from livescale.config.pool import PoolConfig
from livescale.control.requests.live_costs import LayersArriving, tokens_while_loading
from livescale.control.requests.router import Router
from livescale.lab.bench.live.live_fleet import (
    SOURCE,
    SOURCE_INSTANCE,
    TARGET,
    AskedRequest,
    PairFleet,
)
from livescale.messages.events import FirstByteArrived, HoldingCompleted, LayerArrived
from livescale.values.bindings import LateBinding
from livescale.values.routes import Hop, Partner, Route
from livescale.values.types import InstanceId, LayerSpan, Part

_SETTINGS = PoolConfig()


@dataclass(slots=True)
class OverlapSplit:
    """Deals prompts of one length out, with the settings that a pool has by default.

    The target is `instance`, and an instance does `tokens_per_s`.
    """

    fleet: PairFleet
    instance: InstanceId
    prompts: Sequence[tuple[int, ...]]
    tokens_per_s: int
    output_tokens: int
    router: Router = field(init=False)
    part: Part = field(init=False)
    sent: list[AskedRequest] = field(default_factory=list)
    #: per request that was sent, under which name the router knows it
    _names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        setting = self.fleet.setting
        self.part = Part(setting.manifest.model, LayerSpan(0, len(setting.manifest.layers)))
        self.router = Router(
            dispatched_ahead_max=_SETTINGS.dispatched_ahead_max,
            live_ahead_max=_SETTINGS.live_ahead_max,
            places=setting.sequences_max,
            binding=LateBinding(_SETTINGS.runs_ahead_max * setting.batch_tokens),
        )
        for number, prompt in enumerate(self.prompts):
            self.router.arrive(str(number), self.part, len(prompt))

    @property
    def is_done(self) -> bool:
        """Every prompt was sent."""
        return len(self.sent) == len(self.prompts)

    def deal(self) -> bool:
        """Send what can be sent now; whether that was anything."""
        self._learn()
        assigned = self.router.assign(time.monotonic_ns(), self.part, self._routes())
        for assignment in assigned:
            name, prompt = assignment.request.id, self.prompts[int(assignment.request.id)]
            self._names.append(name)
            self.sent.append(self.fleet.submit(assignment.worker, prompt, self.output_tokens))
        return bool(assigned)

    # -- helpers, in the order used -------------------------------------------------------------

    def _learn(self) -> None:
        """What requests have come to."""
        for name, asked in zip(self._names, self.sent, strict=True):
            record = self.router.requests.get(name)
            if record is None:
                continue
            if asked.is_over:
                self.router.end(record)
            elif asked.token_ids:
                self.router.start(name, record.attempt)

    def _routes(self) -> list[Route]:
        return [
            Route((Hop((Partner(SOURCE_INSTANCE, SOURCE),), self.part.span),)),
            self._route_to_target(),
        ]

    def _route_to_target(self) -> Route:
        partners = (Partner(self.instance, TARGET),)
        if self.fleet.of_target(HoldingCompleted):
            return Route((Hop(partners, self.part.span),))
        setting = self.fleet.setting
        first = self.fleet.of_target(FirstByteArrived)
        arrived = self.fleet.of_target(LayerArrived)
        load = LayersArriving(
            watermark=self.fleet.watermark,
            kept_layers=0,
            first_byte_ns=first[0].at_ns if first else None,
            layer_ns=arrived[-1].at_ns if arrived else None,
            predicted_ns=setting.load_ns,
        )
        sizes = [entry.size_bytes for entry in setting.manifest.layers]
        lag = tokens_while_loading(time.monotonic_ns(), sizes, load, self.tokens_per_s)
        return Route((Hop(partners, None),), lag_tokens=lag, ahead_tokens=lag)
