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
    words = "make a certificate authority for one pool, and its head's certificate"
    init = actions.add_parser("init", help=words, description=words)
    words = "make the certificate of one more machine"
    member = actions.add_parser("member", help=words, description=words)
    member.add_argument("name", metavar="NAME", help="of the machine, for people")
    role = member.add_mutually_exclusive_group()
    words = "it may be the pool's head (a head elsewhere, or a standby)"
    role.add_argument("--head", action="store_true", help=words)
    words = "it may be a gateway, and nothing else: no host, which is asked for parameters and KV"
    role.add_argument("--gateway", action="store_true", help=words)
    words = "a machine's certificate counts no more"
    revoke = actions.add_parser("revoke", help=words, description=words)
    revoke.add_argument("name", metavar="NAME")
    words = "show what this machine says of itself: interfaces, rates of links, NUMA nodes, GPUs"
    topology = actions.add_parser("topology", help=words, description=words)
    words = "write all of it to this file"
    topology.add_argument("--json", type=Path, metavar="FILE", help=words)
    for action in (init, member, revoke):
        words = "of the authority, which is kept apart from the machines of the pool"
        action.add_argument("--folder", type=Path, required=True, metavar="DIR", help=words)
    for action in (init, member):
        words = "for which the certificates are good (default: %(default)s)"
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
        print(
            f"{arguments.name} is revoked. A running head node that uses this folder rejects it now"
        )
        print(f"Copy this file to the tls_dir of each other head node: {path}")
        return 0
    if not 1 <= arguments.days <= _DAYS_MAX:
        raise ClusterError(f"--days is {arguments.days}. Give a number from 1 to {_DAYS_MAX}")
    if arguments.action == "init":
        made = folder.init(arguments.days)
        print(f"Serve with: --tls-dir {made}")
        print(f"For each machine: livescale cluster member NAME --folder {arguments.folder}")
        return 0
    made = folder.add(
        arguments.name,
        is_head=arguments.head,
        is_gateway=arguments.gateway,
        days=arguments.days,
    )
    print(f"Copy {made} to {arguments.name} unchanged, and join with --tls-dir")
    return 0
