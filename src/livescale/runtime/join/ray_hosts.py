"""The hosts of a pool that Ray places: one actor for each, asked for and given back as the pool
needs them. Which ones are wanted is decided in `control/cluster/wanted_hosts.py`.

An actor that no node has room for waits, and is what Ray's autoscaler adds nodes for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

from livescale.common.addresses import parse_address
from livescale.common.errors import UserError
from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.config.ray import RayConfig
from livescale.control.cluster.wanted_hosts import HostClaim, HostLimits, PoolNeed, WantedHosts
from livescale.runtime.join.ray_host import HostActor, HostOrder
from livescale.runtime.wire.news import News

_NAMESPACE = "livescale"
_LOOK_S = 0.5
# Ray itself tries for a minute, and then ends the process.
_REACH_S = 5.0
_FAILED_PAUSE_S = 5.0
_END_S = 15.0
_AUTO = "auto"


class RayError(UserError):
    """The pool cannot use this Ray cluster; the message says why."""

    exit_status = 2


def connect(address: str) -> str:
    """Make this process a driver of the cluster (`auto`: the one of this machine), and say which
    address others reach this node at. Raises RayError."""
    if address != _AUTO:
        _check_reachable(address)
    try:
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RayError(f"--ray {address}: {reason}") from error
    return str(ray.util.get_node_ip_address())


def disconnect() -> None:
    """This process is no driver any more; actors that are not detached end with it."""
    ray.shutdown()


class RayHosts:
    """Lives on the supervisor's event loop, as a context around a pool that takes hosts."""

    def __init__(
        self,
        config: RayConfig,
        pool: PoolConfig,
        order: HostOrder,
        need: Callable[[], PoolNeed],
        tell: Callable[[News], None],
    ) -> None:
        self._config = config
        self._order = order
        self._need = need
        self._tell = tell
        self._resources = _resources(config, pool)
        self._wanted = WantedHosts(
            HostLimits(
                config.hosts_min,
                config.hosts_max,
                config.workers_per_host,
                config.host_idle_s * 1_000_000_000,
            )
        )
        self._claimed: dict[int, _ClaimedHost] = {}
        self._count = 0
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RayHosts:
        self._keeping = asyncio.create_task(self._keep())
        return self

    def let_go(self) -> None:
        """From now on no host is asked for."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def __aexit__(self, *_: object) -> None:
        """The pool has let its hosts go: what has not ended soon is killed."""
        assert self._keeping is not None
        self.let_go()
        claimed = list(self._claimed.values())
        joined = [one.work for one in claimed if one.name is not None]
        if joined:
            await asyncio.wait(joined, timeout=_END_S)
        for one in claimed:
            one.kill()
        await asyncio.gather(*(one.work for one in claimed), return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping

    # -- helpers --------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Look again and again at what is wanted."""
        while True:
            machines = 0
            if self._config.hosts_max is None:
                machines = _fitting(await asyncio.to_thread(ray.nodes), self._resources)
            self._forget_ended()
            claims = [HostClaim(n, claimed.name) for n, claimed in self._claimed.items()]
            orders = self._wanted.step(time.monotonic_ns(), claims, self._need(), machines)
            for _ in range(orders.ask):
                self._ask()
            for number in orders.give_back:
                self._claimed[number].give_back()
            await asyncio.sleep(_LOOK_S)

    def _ask(self) -> None:
        number = self._count
        self._count += 1
        self._claimed[number] = _ClaimedHost(number, self._resources, self._order, self._tell)

    def _forget_ended(self) -> None:
        for number, claimed in list(self._claimed.items()):
            if claimed.work.done():
                del self._claimed[number]

    def __repr__(self) -> str:
        return f"<RayHosts: {len(self._claimed)} asked for>"


class _ClaimedHost:
    """One actor, from when it is asked for. `name` is the host's (None: Ray has not placed it, or
    starts it again); `work` ends with it."""

    def __init__(
        self,
        number: int,
        resources: dict[str, Any],
        order: HostOrder,
        tell: Callable[[News], None],
    ) -> None:
        self.name: str | None = None
        self._number = number
        self._tell = tell
        self._is_given_back = False
        self._actor = _host_actor(resources)
        self._naming = asyncio.create_task(self._keep_name())
        self.work = asyncio.create_task(self._work(order))

    def give_back(self) -> None:
        """It leaves in order, or is not waited for any more."""
        if self._is_given_back:
            return
        self._is_given_back = True
        if self.name is None:
            self.kill()
        else:
            self._tell(News(f"Ray: host {self.name} is given back"))
            self._actor.leave.remote()

    def kill(self) -> None:
        """The actor ends for good; its processes end with it."""
        self._is_given_back = True
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor, no_restart=True)

    async def _work(self, order: HostOrder) -> None:
        try:
            await self._actor.run.remote(order)
        except ray.exceptions.RayError as error:
            if not self._is_given_back:
                lines = str(getattr(error, "cause", None) or error).strip().splitlines()
                reason = lines[-1] if lines else type(error).__name__
                self._tell(News(f"Ray: host {self.name or self._number}: {reason}", True))
                self.kill()
                await asyncio.sleep(_FAILED_PAUSE_S)
        finally:
            self._naming.cancel()
        # What it took of its node is free only when the actor is gone.
        self.kill()

    async def _keep_name(self) -> None:
        """A restarted actor may be on another node."""
        while True:
            try:
                name = await self._actor.name.remote()
            except ray.exceptions.RayError:
                name = None
            if name != self.name:
                was = f"host {self.name} is away" if name is None else f"host {name} is placed"
                self._tell(News(f"Ray: {was}", is_problem=name is None))
                self.name = name
            await asyncio.sleep(_LOOK_S)


def _host_actor(resources: dict[str, Any]) -> Any:
    """An actor that ends with this process, and is started again wherever there is room for it.
    Its long call comes again by itself; the others are for the one that is there."""
    kept = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return ray.remote(**kept)(HostActor).options(**resources).remote()


def _resources(config: RayConfig, pool: PoolConfig) -> dict[str, Any]:
    """What a node must have, as options of an actor."""
    asked: dict[str, Any] = {}
    if config.host_resource is not None:
        asked["resources"] = {config.host_resource: 1}
    if pool.device == "cuda":
        asked["num_gpus"] = config.workers_per_host
    if config.accelerator_type is not None:
        asked["accelerator_type"] = config.accelerator_type
    return asked


def _fitting(nodes: list[dict[str, Any]], asked: dict[str, Any]) -> int:
    """Living nodes that have all of it."""
    wanted = dict(asked.get("resources", {}))
    if "num_gpus" in asked:
        wanted["GPU"] = asked["num_gpus"]
    if "accelerator_type" in asked:
        wanted[f"accelerator_type:{asked['accelerator_type']}"] = 0.001
    return sum(
        node["Alive"] and all(node["Resources"].get(k, 0) >= v for k, v in wanted.items())
        for node in nodes
    )


def _check_reachable(address: str) -> None:
    """Raises RayError."""
    if "://" in address:
        raise RayError(
            f"--ray {address} is the address of a Ray client. Run `livescale serve` on "
            "a node of the cluster, and give its GCS address, such as 10.0.0.1:6379, "
            "or auto"
        )
    try:
        host, port = parse_address(address, "--ray", is_own=False)
        socket.create_connection((host, port), _REACH_S).close()
    except ConfigError as error:
        raise RayError(str(error)) from error
    except OSError as error:
        raise RayError(f"--ray {address}: {error.strerror or error}") from error
