"""Whether the certificate and the key of the HTTP API can be served with. The server reads them."""

from __future__ import annotations

import ssl
from typing import NamedTuple

from livescale.common.settings import ConfigError


class HttpsFiles(NamedTuple):
    """A certificate and its key, PEM (None: plain HTTP)."""

    certfile: str | None = None
    keyfile: str | None = None


def check_https(certfile: str | None, keyfile: str | None) -> None:
    """Nothing happens where neither is given. Raises ConfigError."""
    if certfile is None and keyfile is None:
        return
    if certfile is None or keyfile is None:
        raise ConfigError("ssl_certfile and ssl_keyfile must both be set, or neither")
    for setting, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{setting} {path}: {error.strerror}") from error
    try:
        # Without a password for the key: no terminal may be there to ask for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"ssl_certfile {certfile} and ssl_keyfile {keyfile} are not a PEM "
            f"certificate with its key, without a password ({reason})"
        ) from None
