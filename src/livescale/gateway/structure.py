"""How many lists, objects and values a JSON text has, counted while it arrives, and how long its
strings are.

Decoding makes something of each of them, so what comes of a body is bounded by these counts, not
by its bytes. Counting is a few passes in C over each part; nothing is decoded here.
"""

from __future__ import annotations

_KEPT = b'"[{:,'
_DROPPED = bytes(byte for byte in range(256) if byte not in _KEPT)
_CONTINUATIONS = bytes(range(0x80, 0xC0))
_HEX_DIGITS_AND_U = 5


class StructureCount:
    """Counts what lies outside of strings. `openings` are lists and objects, `keys` the members
    of objects, `commas` one less than the entries of each list and object. `string_chars`: the
    longest string that did not end in the part that it began in has at least so many characters.

    The counts of a text that is not JSON mean nothing, and are never too small for one that is.
    """

    def __init__(self) -> None:
        self.openings = 0
        self.keys = 0
        self.commas = 0
        self.string_chars = 0
        self._is_in_string = False
        #: of the string that the last part ended in
        self._begun_chars = 0
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
        plain = plain.replace(rb"\"", b"")
        if self._is_in_string:
            self._begun_chars += _least_chars(plain.partition(b'"')[0])
            self.string_chars = max(self.string_chars, self._begun_chars)
            if b'"' not in plain:
                return
            plain = b'"' + plain
        pieces = plain.translate(None, _DROPPED).split(b'"')
        # Strings and what is between them take turns.
        outside = b"".join(pieces[::2])
        self._is_in_string = len(pieces) % 2 == 0
        if self._is_in_string:
            self._begun_chars = _least_chars(plain.rpartition(b'"')[2])
        self.openings += outside.count(b"[") + outside.count(b"{")
        self.keys += outside.count(b":")
        self.commas += outside.count(b",")


def _least_chars(inside: bytes) -> int:
    """The characters of a piece of a string, or fewer."""
    chars = len(inside)
    if not inside.isascii():
        chars = len(inside.translate(None, _CONTINUATIONS))
    # An escape is one character, or (\uXXXX) half of one.
    return chars - inside.count(b"\\") - _HEX_DIGITS_AND_U * inside.count(rb"\u")
