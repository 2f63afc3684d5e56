"""`livescale serve --ray ADDRESS`: the head of a pool in this process, its hosts on nodes of a Ray
cluster. Imported only where Ray is asked for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from livescale.cli.serve_display import ServeDisplay
from livescale.cli.serve_run import serve
from livescale.common.addresses import address_text, parse_address
from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.config.ray import RayConfig, load_ray_config
from livescale.config.reading import load_config
from livescale.runtime.join.ray_host import HostOrder, own_label
from livescale.runtime.join.ray_hosts import RayHosts, connect, disconnect
from livescale.runtime.layout.pool_layout import LOOPBACK
from livescale.runtime.supervisor.supervisor import Pool
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.token import read_token


def run(address: str, path: Path | None, models: list[str], flags: Mapping[str, object]) -> int:
    """Serve until SIGINT or SIGTERM; then hosts and actors end, too. Raises UserError."""

    def load(own_address: str, rack: str = "") -> PoolConfig:
        # A head without devices, where the hosts can reach it.
        defaults = {"workers": 0, "listen": address_text(own_address, 0), "rack": rack}
        return load_config(path, models, os.environ, flags, defaults)

    # First: what is wrong in the file is found before the cluster is asked.
    config = load(LOOPBACK)
    ray_config = load_ray_config(path, config)
    if config.listen is None:
        raise ConfigError(
            "listen is none. Ray nodes need an address of the head node. Set `listen`, or remove it"
        )
    own_address = connect(address)
    config = load(own_address, own_label(ray_config.rack_label))
    try:
        with ServeDisplay(config.log_level) as display:
            return asyncio.run(_serve(config, ray_config, display))
    finally:
        disconnect()


async def _serve(config: PoolConfig, ray_config: RayConfig, display: ServeDisplay) -> int:
    def hosts_of(pool: Pool) -> RayHosts:
        assert pool.token_file is not None
        head = Address(*parse_address(pool.join_address, "listen"))
        token = read_token(pool.token_file)
        order = HostOrder(
            head,
            token,
            ray_config.workers_per_host,
            rack_label=ray_config.rack_label,
            tls_dir=ray_config.tls_dir,
        )
        return RayHosts(ray_config, config, order, lambda: pool.need, display.tell)

    return await serve(config, display, hosts_of=hosts_of)
