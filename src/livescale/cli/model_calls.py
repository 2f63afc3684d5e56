"""`livescale models add|remove|list`: what an administrator asks of a running pool, over HTTP.

Thin: a request is written, an answer is printed. What may be asked is the gateway's business.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from livescale.cli.errors import UserError
from livescale.config import MODEL_SETTINGS, PoolConfig
from livescale.gateway.admin import AdministeredModel
from livescale.report.terminal import table
from livescale.settings import ConfigError, read_values, shown_default

_URL = f"http://{PoolConfig().host}:{PoolConfig().port}"
_KEY_VARIABLE = "LIVESCALE_ADMIN_KEY"
_CONNECT_TIMEOUT_S = 10.0
_Answer = TypeVar("_Answer")
#: of `models:` in the configuration; `add` takes each as a flag
_SETTINGS = tuple(setting for setting in MODEL_SETTINGS if setting.name != "path")


class _Listed(msgspec.Struct):
    data: list[AdministeredModel]


class _Removed(msgspec.Struct):
    name: str


class _Detail(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    error: _Detail


def add_arguments(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = actions.add_parser("add", help="publish a model in a running pool")
    add.add_argument("directory", type=Path, metavar="DIR")
    for setting in _SETTINGS:
        unit = f" [{setting.about.unit}]" if setting.about.unit else ""
        words = f"{setting.about.help}{unit} (default: {shown_default(setting)})"
        add.add_argument(
            setting.flag,
            dest=setting.name,
            metavar=setting.type.upper(),
            default=argparse.SUPPRESS,
            help=words.replace("%", "%%"),
        )
    remove = actions.add_parser("remove", help="withdraw a model from a running pool")
    remove.add_argument("name", metavar="NAME")
    listing = actions.add_parser("list", help="show the models of a running pool")
    for action in (add, remove, listing):
        action.add_argument("--url", default=_URL, help=f"where the pool is (default: {_URL})")
        action.add_argument(
            "--admin-key-file", type=Path, help=f"its first line is sent; or set {_KEY_VARIABLE}"
        )


def run(arguments: argparse.Namespace) -> int:
    """Ask the pool and print what came of it. Raises UserError with the pool's own words."""
    print(_ACTIONS[arguments.action](arguments))
    return 0


# -- helpers, in the order used -------------------------------------------------------------------


def _add(arguments: argparse.Namespace) -> str:
    given = {s.name: vars(arguments)[s.name] for s in _SETTINGS if s.name in vars(arguments)}
    try:
        settings = read_values(given, _SETTINGS, "flags: ", is_text=True)
    except ConfigError as error:
        raise UserError(str(error)) from error
    body = {"path": str(arguments.directory.resolve()), **settings}
    model = _call(arguments, AdministeredModel, "POST", "/admin/models", body)
    return f"{model.name}: {_words(model.state)}, copies in host memory: {model.host_copies}"


def _remove(arguments: argparse.Namespace) -> str:
    path = f"/admin/models/{quote(arguments.name, safe='')}"
    removed = _call(arguments, _Removed, "DELETE", path)
    return f"{removed.name}: takes no more requests, leaves when the running ones have ended"


def _list(arguments: argparse.Namespace) -> str:
    models = _call(arguments, _Listed, "GET", "/admin/models").data
    header = ["model", "state", "instances", "host copies", "requests", "tokens", "device s"]
    return table([*header, "path"], [_row(model) for model in models])


def _row(model: AdministeredModel) -> list[object]:
    states = [f"{count} {state}" for state, count in sorted(model.instances.items())]
    usage = model.usage
    return [
        *(model.name, _words(model.state), ", ".join(states) or "none", model.host_copies),
        *(usage.requests, usage.generation_tokens, round(usage.device_seconds), model.path),
    ]


_ACTIONS = {"add": _add, "remove": _remove, "list": _list}


def _words(state: str) -> str:
    return state.replace("_", " ")


def _call(
    arguments: argparse.Namespace,
    answer_type: type[_Answer],
    method: str,
    path: str,
    body: dict[str, object] | None = None,
) -> _Answer:
    url = arguments.url.rstrip("/")
    try:
        response = httpx.request(
            *(method, url + path),
            json=body,
            headers={"Content-Type": "application/json", **_authorization(arguments)},
            # A new model is answered when the pool has its copy, however long that takes.
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"{url}: {error}") from error
    try:
        if response.is_error:
            refused = msgspec.json.decode(response.content, type=_Refused)
            raise UserError(f"{refused.error.message} ({url}, status {response.status_code})")
        return msgspec.json.decode(response.content, type=answer_type)
    except msgspec.MsgspecError:
        status = response.status_code
        raise UserError(f"{url}: is not a pool of LiveScale (status {status})") from None


def _authorization(arguments: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get(_KEY_VARIABLE)
    if arguments.admin_key_file is not None:
        try:
            lines = arguments.admin_key_file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{arguments.admin_key_file}: {error}") from error
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        key = keys[0] if keys else None
    return {} if key is None else {"Authorization": f"Bearer {key}"}
