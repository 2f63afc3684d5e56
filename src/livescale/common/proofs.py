"""How two processes prove to each other that they know the pool's secret, without sending it.

Three messages: a nonce; a nonce and a proof; a proof. A proof is a hash keyed with the secret
(HMAC, RFC 2104) over both nonces, the side that it is for and the names of what is connected, so
that neither an old proof nor one's own, sent back, is worth anything. Bytes only: how messages
travel, and who draws nonces, is the business of `transfer/formats/greeting.py` and
`runtime/wire/doors.py`.
"""

from __future__ import annotations

import hmac

NONCE_BYTES = 32
PROOF_BYTES = 32

_CALLER, _CALLED = b"caller", b"called"


class ProofError(Exception):
    """The other side does not know the secret."""


class NotAdmittedError(ConnectionError):
    """The other end has a certificate of the pool, but may not talk."""


class RevokedError(NotAdmittedError):
    """Its certificate was revoked."""


class CallerProof:
    """The side that opened the connection; `nonce` is its first message."""

    def __init__(self, secret: str, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES
        self.nonce = nonce
        self._secret = secret

    def answer(self, message: bytes, names: bytes) -> bytes:
        """The last message, once the called side has proved itself. Raises ProofError."""
        nonces = self.nonce + message[:NONCE_BYTES]
        _check(message[NONCE_BYTES:], _proof(self._secret, _CALLED, nonces, names))
        return _proof(self._secret, _CALLER, nonces, names)


class CalledProof:
    """The side that was called, given the caller's first message and what both call themselves."""

    def __init__(self, secret: str, nonce: bytes, caller_nonce: bytes, names: bytes) -> None:
        assert len(nonce) == len(caller_nonce) == NONCE_BYTES
        nonces = caller_nonce + nonce
        #: the second message
        self.message = nonce + _proof(secret, _CALLED, nonces, names)
        self._expected = _proof(secret, _CALLER, nonces, names)

    def check(self, message: bytes) -> None:
        """The caller's last message. Raises ProofError."""
        _check(message, self._expected)


def _proof(secret: str, side: bytes, nonces: bytes, names: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + nonces + names, "sha256")


def _check(proof: bytes, right: bytes) -> None:
    if not hmac.compare_digest(proof, right):
        raise ProofError("has a wrong token")
