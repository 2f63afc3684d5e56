"""The gateways of one machine, a head's or another one's: a process each, all behind one port.

A gateway that is replaced gets the socket of the one before. While it is away, new connections go
to the others; those that were waiting in its socket wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import msgspec

from livescale.config.pool import PoolConfig
from livescale.runtime.children.pool_process import Child
from livescale.runtime.supervisor.shared_port import SharedPort
from livescale.runtime.wire.boot import GatewayBoot, GatewayPlace, Status
from livescale.runtime.wire.news import News, PoolProgress


class OwnGateways:
    """Raises ConfigError where the address cannot be had."""

    def __init__(self, config: PoolConfig, tell: Callable[[News | PoolProgress], None]) -> None:
        self.count = config.gateways
        self.port = SharedPort(config.host, config.port, self.count)
        self.children: list[Child] = []
        #: that accept connections
        self._accepting: dict[str, int] = {}
        cores = len(os.sched_getaffinity(0))
        if self.count > cores:
            words = f"gateways is {self.count}, and this machine has {cores} cores"
            tell(
                News(
                    f"{words}. More than one gateway per core does not raise throughput",
                    is_problem=True,
                )
            )

    def make(self, boot: Callable[[int, int], GatewayBoot], prefix: tuple[str, ...] = ()) -> None:
        """The children, anew. `boot` makes the boot message of a gateway's life from its number and
        the life's."""
        self.children = []
        for number in range(self.count):
            name = "gateway" if self.count == 1 else f"gateway {number}"
            fds = (self.port.fileno(number),)
            child = Child(name, "gateway", partial(boot, number), fds, prefix)
            child.ended = partial(self._is_away, name)
            self.children.append(child)

    def heed(self, child: Child, status: Status) -> None:
        """A child of the pool has reported."""
        if child in self.children and status.is_accepting is not None:
            if status.is_accepting:
                self._accepting[child.name] = self.children.index(child)
                self.port.deal_to(sorted(self._accepting.values()))
            else:
                self._is_away(child.name)

    @property
    def are_ready(self) -> bool:
        return all(child.is_ready.is_set() for child in self.children)

    async def ready(self) -> None:
        """Return when every one has told that the pool serves."""
        for child in self.children:
            await child.is_ready.wait()

    def place(self, number: int, directory: str) -> GatewayPlace | None:
        """Of this gateway among the others, if there are others. Their files are in `directory`."""
        return None if self.count == 1 else GatewayPlace(directory, number, self.count)

    def _is_away(self, name: str) -> None:
        if self._accepting.pop(name, None) is not None:
            self.port.deal_to(sorted(self._accepting.values()))

    def __repr__(self) -> str:
        return f"<OwnGateways: {len(self._accepting)} of {self.count} accept connections>"


def with_share_of_line(config: PoolConfig, number: int) -> PoolConfig:
    """The configuration of one of the gateways: bounds on what waits, which hold for all of them
    together, are divided among them."""
    requests, tokens = config.queue_requests_max, config.queue_prompt_tokens_max
    return msgspec.structs.replace(
        config,
        queue_requests_max=_share(requests, number, config.gateways),
        queue_prompt_tokens_max=(
            None if tokens is None else _share(tokens, number, config.gateways)
        ),
    )


def _share(total: int, number: int, count: int) -> int:
    """Of the `number`-th of `count`; all shares add up to the total."""
    return total // count + (number < total % count)
