"""Which life of the controller may act: what a controller says of itself, and is told."""

from __future__ import annotations

from livescale.values.types import Value


class ControllerEpoch(Value, frozen=True):
    """One life of a controller. Of those of one `line`, whose lives are counted in one place (a
    lease, or the supervisor of a pool without one), only that with the highest number may act."""

    line: str = ""
    number: int = 0


FIRST_EPOCH = ControllerEpoch()
"""Of a controller that counts nothing, or for the first time."""


class Acting(Value, frozen=True, tag=True):
    """Controller to every process that connects, before anything else: it is this life."""

    epoch: ControllerEpoch


class Fenced(Value, frozen=True, tag=True):
    """To a controller: a later life than it is was met, this one. It must not act any more."""

    epoch: ControllerEpoch
