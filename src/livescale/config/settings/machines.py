"""Several machines: how they find the pool, trust one another, and where they stand."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.devices import DeviceSettings


class MachineSettings(DeviceSettings, frozen=True, kw_only=True):
    """Several machines: how they find the pool, trust one another, and where they stand."""

    title: ClassVar[str] = "several machines"

    listen: Annotated[
        str | None,
        About("ADDRESS:PORT that other machines join at; none: none may join", is_common=True),
    ] = None
    token_file: Annotated[
        str | None,
        About(
            "file with the pool's secret; of mode 0600, made where it is missing; none: a "
            "new secret for each start",
            is_common=True,
        ),
    ] = None
    tls_dir: Annotated[
        str | None,
        About(
            "folder with this machine's certificate and key; `livescale cluster` makes it: "
            "TLS between all processes of the pool; none: plain text",
            is_common=True,
        ),
    ] = None
    data_plane_tls: Annotated[
        str,
        About(
            "with tls_dir, parameters between machines: auto: encrypted; off: plain, and compared"
            " with their SHA-256; on: encrypted between processes of one machine, too",
            choices=("off", "auto", "on"),
        ),
    ] = "auto"
    heads: Annotated[
        str | None,
        About("ADDRESS:PORT of every head that may act, with commas; none: there is one"),
    ] = None
    lease: Annotated[
        str | None,
        About(
            "which head acts: a file that all of them reach, or kubernetes:[NAMESPACE/]NAME; none:"
            " this one does"
        ),
    ] = None
    lease_ms: Annotated[
        int, About("after so long without its holder another head acts", "ms", 300, 600_000)
    ] = 3000
    lost_after_ms: Annotated[
        int,
        About(
            "silence after which a worker, an agent, the controller or a gateway is given up",
            "ms",
            200,
            3_600_000,
        ),
    ] = 5000
    topology: Annotated[
        str | None, About("file of hosts, devices and links; none: one host without limits")
    ] = None
    rack: Annotated[
        str,
        About(
            "leaf switch that this machine hangs on, and hosts that join and name none; empty:"
            " leaf0"
        ),
    ] = ""
    racks: Annotated[
        str | None,
        About("file that says in which racks hosts are that join and name none; none: see `rack`"),
    ] = None
    carrier: Annotated[
        str,
        About(
            "auto: shared memory within a host, TCP between hosts; tcp: no shared memory; nixl:"
            " NIXL instead of TCP, for RDMA networks (extra rdma)",
            choices=("auto", "tcp", "nixl"),
        ),
    ] = "auto"
