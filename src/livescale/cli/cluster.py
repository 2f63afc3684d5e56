"""`livescale cluster …`: certificates for the machines of a pool, and what this machine says of
itself. Nothing here talks to a pool.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from livescale.cli.loads import write_json
from livescale.cli.machine_text import machine_lines
from livescale.runtime.join.cluster_folder import DAYS, ClusterError, ClusterFolder
from livescale.runtime.supervisor.machine import read_machine

_DAYS_MAX = 36_500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    words = "Make a pool's certificate authority and the head node's certificate."
    init = actions.add_parser("init", help=words, description=words)
    words = "Make the certificate of another node."
    member = actions.add_parser("member", help=words, description=words)
    member.add_argument("name", metavar="NAME", help="Name of the node in the certificate.")
    role = member.add_mutually_exclusive_group()
    words = "Allow the node to be a head node (leader or standby)."
    role.add_argument("--head", action="store_true", help=words)
    words = "Allow the node to be a gateway only, without access to parameters and KV."
    role.add_argument("--gateway", action="store_true", help=words)
    words = "Revoke the certificate of a node."
    revoke = actions.add_parser("revoke", help=words, description=words)
    revoke.add_argument("name", metavar="NAME", help="Name of the node.")
    words = "Show the interfaces, link rates, NUMA nodes and GPUs of this node."
    topology = actions.add_parser("topology", help=words, description=words)
    words = "Write the details to this file."
    topology.add_argument("--json", type=Path, metavar="FILE", help=words)
    for action in (init, member, revoke):
        words = "Folder of the certificate authority. Keep it off the nodes of the pool."
        action.add_argument("--folder", type=Path, required=True, metavar="DIR", help=words)
    for action in (init, member):
        words = "Validity of the certificate in days."
        action.add_argument("--days", type=int, default=DAYS, help=words)


def run(arguments: argparse.Namespace) -> int:
    """Raises ClusterError."""
    if arguments.action == "topology":
        machine = read_machine()
        print("\n".join(machine_lines(machine)))
        if arguments.json is not None:
            write_json(arguments.json, msgspec.to_builtins(machine))
        return 0
    folder = ClusterFolder(arguments.folder)
    if arguments.action == "revoke":
        path = folder.revoke(arguments.name)
        print(f"{arguments.name} is revoked: a head that runs with a folder in here knows it now")
        print(f"a head elsewhere needs this file in its tls_dir: {path}")
        return 0
    if not 1 <= arguments.days <= _DAYS_MAX:
        raise ClusterError(f"--days is {arguments.days}, not 1 to {_DAYS_MAX}")
    if arguments.action == "init":
        made = folder.init(arguments.days)
        print(f"serve with: --tls-dir {made}")
        print(f"for each machine: livescale cluster member NAME --folder {arguments.folder}")
        return 0
    made = folder.add(
        arguments.name, is_head=arguments.head, is_gateway=arguments.gateway, days=arguments.days
    )
    print(f"copy {made} to {arguments.name}, as it is there: join with --tls-dir")
    return 0
