"""What commands ask a running pool for, over HTTP."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from livescale.common.errors import UserError
from livescale.config.pool import PoolConfig
from livescale.gateway.contract.errors import ErrorBody

_URL = f"http://{PoolConfig().host}:{PoolConfig().port}"
_KEY_VARIABLE = "LIVESCALE_ADMIN_KEY"
_CONNECT_TIMEOUT_S = 10.0
_Answer = TypeVar("_Answer")


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the pool is, and the key that it asks for."""
    parser.add_argument("--url", default=_URL, help=f"URL of the pool (default: {_URL}).")
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        help=f"File of the admin key, in its first line (default: {_KEY_VARIABLE}).",
    )


def metrics_page(arguments: argparse.Namespace) -> str:
    """The pool's figures of now. Raises UserError."""
    response = _sent(arguments, "GET", "/metrics", timeout=_CONNECT_TIMEOUT_S)
    if response.is_error:
        raise UserError(
            f"{arguments.url.rstrip('/')}/metrics answered with status {response.status_code}."
            " Check --url and the admin key"
        )
    return response.text


def call_pool(
    arguments: argparse.Namespace,
    answer_type: type[_Answer],
    method: str,
    path: str,
    body: dict[str, object] | None = None,
) -> _Answer:
    """What the pool answers. Raises UserError, with the pool's own words."""
    # A new model is answered when the pool has its copy, however long that takes.
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    response = _sent(arguments, method, path, json=body, timeout=timeout)
    url = arguments.url.rstrip("/")
    try:
        if response.is_error:
            refused = msgspec.json.decode(response.content, type=ErrorBody)
            raise UserError(f"{refused.error.message} ({url}, status {response.status_code})")
        return msgspec.json.decode(response.content, type=answer_type)
    except msgspec.MsgspecError:
        status = response.status_code
        raise UserError(f"{url} is not a LiveScale pool (status {status}). Check --url") from None


def _sent(arguments: argparse.Namespace, method: str, path: str, **options: Any) -> httpx.Response:
    """What the pool answers to a request (httpx's `options`). Raises UserError without one."""
    url = arguments.url.rstrip("/")
    headers = {"Content-Type": "application/json", **_authorization(arguments)}
    try:
        return httpx.request(method, url + path, headers=headers, trust_env=False, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"{url}: {error}") from error


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
