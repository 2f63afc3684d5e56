"""Several nodes: addresses, secrets, leader election, racks and links."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.devices import DeviceSettings


class MachineSettings(DeviceSettings, frozen=True, kw_only=True):
    """Several nodes: addresses, secrets, leader election, racks and links."""

    title: ClassVar[str] = "several nodes"

    listen: Annotated[
        str | None,
        About(
            "Control address of the head node, ADDRESS:PORT. Other nodes join the pool at this"
            " address. With none, the pool accepts no other node.",
            is_common=True,
        ),
    ] = None
    token_file: Annotated[
        str | None,
        About(
            "File of the pool's secret. If the file is missing, the head node creates it with mode"
            " 0600. With none, the head node makes a new secret at each start.",
            is_common=True,
        ),
    ] = None
    tls_dir: Annotated[
        str | None,
        About(
            "Folder of this node's certificate and key. `livescale cluster` makes it. With a"
            " folder, all processes of the pool use TLS. With none, the processes use plain text.",
            is_common=True,
        ),
    ] = None
    data_plane_tls: Annotated[
        str,
        About(
            "Encryption of parameter transfers in a pool with `tls_dir`. auto encrypts transfers"
            " between nodes. off sends plain bytes and verifies their SHA-256. on also encrypts"
            " transfers within a node.",
            choices=("off", "auto", "on"),
        ),
    ] = "auto"
    heads: Annotated[
        str | None,
        About(
            "Control addresses of all head nodes, ADDRESS:PORT, separated by commas. With none, the"
            " pool has one head node."
        ),
    ] = None
    lease: Annotated[
        str | None,
        About(
            "Lease that elects the leader among the head nodes. The value is a file that all head"
            " nodes reach, or kubernetes:[NAMESPACE/]NAME. With none, this head node leads."
        ),
    ] = None
    lease_ms: Annotated[
        int,
        About(
            "Lease duration. A standby takes over this long after the last renewal.",
            "ms",
            300,
            600_000,
        ),
    ] = 3000
    lost_after_ms: Annotated[
        int,
        About(
            "Failure timeout. The pool marks a worker, a host agent, the controller or a gateway"
            " lost after this time without a message.",
            "ms",
            200,
            3_600_000,
        ),
    ] = 5000
    topology: Annotated[
        str | None,
        About(
            "File of the cluster's hosts, devices and links. With none, the pool has one host with"
            " unlimited links."
        ),
    ] = None
    rack: Annotated[
        str,
        About(
            "Rack (leaf switch) of this node. Nodes that join without a rack get the same rack. If"
            " empty, the rack is leaf0."
        ),
    ] = ""
    racks: Annotated[
        str | None,
        About(
            "File of the racks of nodes that join without a rack. With none, these nodes get the"
            " rack of the head node (`rack`)."
        ),
    ] = None
    carrier: Annotated[
        str,
        About(
            "Transport of parameters and KV. auto uses shared memory within a node and TCP between"
            " nodes. tcp uses TCP everywhere. nixl replaces TCP by NIXL for RDMA networks (install"
            " 'livescale[rdma]').",
            choices=("auto", "tcp", "nixl"),
        ),
    ] = "auto"
