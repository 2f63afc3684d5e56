"""Web pages that may use the gateway from a browser: those of the configured origins (CORS).

Other pages' requests get no answer that a browser would let them read, and without an API key
none of the bodies that a page may send unasked is taken (`bodies.py`). Models are administered by
no page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from livescale.common.settings import ConfigError
from livescale.gateway.http.envelope import REQUEST_ID_HEADER

PREFLIGHT_KEPT_S = 600
_ORIGIN = re.compile(r"\*|https?://[^/\s,]+")


def page_origins(setting: str) -> tuple[str, ...]:
    """The origins that the setting names. Raises ConfigError for what no browser would send."""
    origins = tuple(origin.strip() for origin in setting.split(",") if origin.strip())
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"cors_origins: '{origin}' is an invalid origin. Write it as https://example.org"
            )
    return origins


class PageGate(CORSMiddleware):
    """Stands before the KeyGate, because a browser asks first without key."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        """`origins` as browsers send them, such as https://chat.example.org; "*" for all pages."""
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER, "retry-after", "retry-after-ms"),
            max_age=PREFLIGHT_KEPT_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_closed = f"{scope.get('path', '')}/".startswith("/admin/")
        app = self.app if is_closed else super().__call__
        await app(scope, receive, send)
