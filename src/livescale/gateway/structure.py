"""How many lists, objects and values a JSON text has, counted while it arrives.

Decoding makes something of each of them, so what comes of a body is bounded by these counts, not
by its bytes. Counting is a few passes in C over each part; nothing is decoded here.
"""

from __future__ import annotations

import re

_KEPT = b'"[{:,'
_DROPPED = bytes(byte for byte in range(256) if byte not in _KEPT)
_STRING = re.compile(rb'"[^"]*(?:"|$)')


class StructureCount:
    """Counts what lies outside of strings. `openings` are lists and objects, `keys` the members
    of objects, `commas` one less than the entries of each list and object.

    The counts of a text that is not JSON mean nothing, and are never too small for one that is.
    """

    def __init__(self) -> None:
        self.openings = 0
        self.keys = 0
        self.commas = 0
        self._is_in_string = False
        #: a backslash that ends a part: what it escapes is in the next one
        self._carried = b""

    def feed(self, part: bytes) -> None:
        """Count the next part."""
        text = self._carried + part
        plain = text.replace(rb"\\", b"")
        self._carried = b""
        if plain.endswith(b"\\"):
            plain, self._carried = plain[:-1], b"\\"
        # With escaped quotes gone every quote begins or ends a string.
        kept = plain.replace(rb"\"", b"").translate(None, _DROPPED)
        if self._is_in_string:
            kept = b'"' + kept
        self._is_in_string = kept.count(b'"') % 2 == 1
        outside = _STRING.sub(b"", kept)
        self.openings += outside.count(b"[") + outside.count(b"{")
        self.keys += outside.count(b":")
        self.commas += outside.count(b",")
