"""The HTTP API: addresses, keys, certificates and the queue of requests."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.tuning import Tuning

GATEWAYS_MAX = 64


class ApiSettings(Tuning, frozen=True, kw_only=True):
    """The HTTP API: addresses, keys, certificates and the queue of requests."""

    title: ClassVar[str] = "API"

    host: Annotated[str, About("Address of the HTTP API.", is_common=True)] = "127.0.0.1"
    port: Annotated[
        int,
        About(
            "Port of the HTTP API. With 0, the gateway binds a free port.",
            upper=65535,
            is_common=True,
        ),
    ] = 8000
    gateways: Annotated[
        int,
        About(
            "Gateway processes on this node that share the port. A gateway uses one CPU core.",
            "",
            1,
            GATEWAYS_MAX,
        ),
    ] = 1
    api_key_file: Annotated[
        str | None,
        About(
            "File of API keys for /v1. Each line has one key, optionally followed by weight=N."
            " With none, /v1 is open to every client.",
            is_common=True,
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        About(
            "File of admin keys for /admin. Each line has one key. Without a key, /admin is"
            " open only on a loopback address."
        ),
    ] = None
    cors_origins: Annotated[
        str,
        About(
            "Origins of web pages that may use /v1, separated by commas. With '*', every origin may"
            " use /v1. If empty, none may."
        ),
    ] = ""
    ssl_certfile: Annotated[
        str | None,
        About(
            "Certificate chain (PEM) of the HTTP API. With a certificate, the API uses HTTPS.",
            is_common=True,
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None, About("Private key (PEM) of the HTTPS certificate.", is_common=True)
    ] = None
    queue_requests_max: Annotated[
        int,
        About(
            "Longest queue of a model. The gateway rejects further requests of the model.",
            "requests",
            1,
        ),
    ] = 1024
    queue_timeout_s: Annotated[
        int | None,
        About(
            "Longest time in the queue. The gateway rejects a request that waits longer for an"
            " instance. With none, requests wait without a limit.",
            "s",
            1,
        ),
    ] = 60
    request_timeout_s: Annotated[
        int | None,
        About(
            "Longest time from the arrival of a request to its last token. The gateway ends a"
            " request that takes longer. With none, requests run without a limit.",
            "s",
            1,
        ),
    ] = None
    metrics_compat: Annotated[
        str,
        About(
            "Additional metric names on /metrics. With vllm, /metrics repeats its values under the"
            " names of vLLM.",
            choices=("none", "vllm"),
        ),
    ] = "none"
