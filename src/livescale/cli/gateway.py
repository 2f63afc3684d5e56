"""`livescale gateway --join ADDRESS:PORT`: one more HTTP endpoint of a pool that runs elsewhere,
open until the pool ends or Ctrl-C: then running requests finish.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import msgspec

from livescale.cli.join import HEAD, add_joining, own_path, when_interrupted
from livescale.cli.serve_display import ServeDisplay
from livescale.common.addresses import parse_address
from livescale.common.errors import UserError
from livescale.common.help_format import add_setting
from livescale.common.settings import read_values
from livescale.config.pool import SETTINGS, PoolConfig
from livescale.runtime.join.head_talk import HeadAccess, JoinError
from livescale.runtime.join.joined_gateway import JoinedGateway
from livescale.runtime.wire.doors import open_credentials
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.token import check_fingerprint, read_token

_PATHS = ("tls_dir", "ssl_certfile", "ssl_keyfile", "api_key_file", "admin_key_file")
#: settings of the pool that a gateway may have of its own
_OWN = (*_PATHS, "host", "port", "gateways", "cors_origins", "log_level")
_DEFAULTS_ARE = (
    "The defaults are --host 127.0.0.1, --port 8000 and --gateways 1. Files and folders have the"
    " default none. Other settings have the pool's values."
)
_SETTINGS = tuple(setting for setting in SETTINGS if setting.name in _OWN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--join", required=True, metavar="ADDRESS:PORT", help=HEAD)
    add_joining(parser)
    group = parser.add_argument_group("settings of this gateway", _DEFAULTS_ARE)
    for setting in _SETTINGS:
        add_setting(group, setting)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the pool ends or SIGINT or SIGTERM; the first lets running requests finish, the
    second ends everything at once. Raises UserError."""
    try:
        head = parse_address(arguments.join, "the head's address", is_own=False)
        token = read_token(arguments.token_file)
        given = {name: value for name, value in vars(arguments).items() if name in _OWN}
        own: dict[str, Any] = read_values(given, _SETTINGS, "flags: ", is_text=True)
        # Paths of the head mean nothing here.
        own |= {name: own_path(own.get(name)) for name in _PATHS}
        settings = msgspec.structs.replace(PoolConfig(models=()), **own)
        own |= {name: getattr(settings, name) for name in ("host", "port", "gateways")}
        tls = open_credentials(settings.tls_dir)
        fingerprint = None if tls is None else tls.fingerprint
        check_fingerprint(arguments.token_file, token, fingerprint)
    except UserError as error:
        raise JoinError(str(error)) from error
    with ServeDisplay(settings.log_level) as display:
        access = HeadAccess(Address(*head), token.secret, tls, display.tell, arguments.patience_s)
        return asyncio.run(_serve(access, arguments.name, settings, own))


async def _serve(access: HeadAccess, name: str, settings: PoolConfig, own: dict[str, Any]) -> int:
    try:
        gateway = JoinedGateway(access, name, settings, own, os.environ)
    except UserError as error:
        raise JoinError(str(error)) from error
    when_interrupted(gateway.leave, gateway.kill, "draining")
    print(f"joining {access.head} as {name}: {gateway.base_url}/v1", flush=True)
    await gateway.run()
    print("stopped")
    return 0
