"""The HTTP API: where it listens, who may use it, and how many wait."""

from __future__ import annotations

from typing import Annotated, ClassVar

from livescale.common.settings import About
from livescale.config.settings.tuning import Tuning

GATEWAYS_MAX = 64


class ApiSettings(Tuning, frozen=True, kw_only=True):
    """The HTTP API: where it listens, who may use it, and how many wait."""

    title: ClassVar[str] = "API"

    host: Annotated[str, About("address that the HTTP API listens on", is_common=True)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, About("port of the HTTP API; 0 takes a free one", upper=65535, is_common=True)
    ] = 8000
    gateways: Annotated[
        int,
        About(
            "processes that serve the HTTP API on this port, on one machine; a core each serves"
            " most streams",
            "",
            1,
            GATEWAYS_MAX,
        ),
    ] = 1
    api_key_file: Annotated[
        str | None,
        About(
            "file of the keys that /v1 asks for; one per line, perhaps with weight=N "
            "behind; none: open to all",
            is_common=True,
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        About("file of the keys that /admin asks for, one per line; none: see operations.md"),
    ] = None
    cors_origins: Annotated[
        str,
        About("origins of web pages that may use /v1, separated by commas, '*': all; empty: none"),
    ] = ""
    ssl_certfile: Annotated[
        str | None,
        About("certificate chain (PEM) of the HTTP API; it is HTTPS then", is_common=True),
    ] = None
    ssl_keyfile: Annotated[str | None, About("key (PEM) of that certificate", is_common=True)] = (
        None
    )
    queue_requests_max: Annotated[
        int, About("waiting requests of a model above which new ones are refused", "requests", 1)
    ] = 1024
    queue_timeout_s: Annotated[
        int | None,
        About("time that a request waits for an instance, then it is refused; none: any", "s", 1),
    ] = 60
    request_timeout_s: Annotated[
        int | None,
        About("time from arrival to last token, then a request is ended; none: no limit", "s", 1),
    ] = None
    metrics_compat: Annotated[
        str, About("names under which /metrics shows its figures again", choices=("none", "vllm"))
    ] = "none"
