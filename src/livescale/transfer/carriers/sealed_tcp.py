"""TCP channels whose frames, and ranges where that is wanted, are sealed (`sealing.py`).

A message is a record: its size in plain, and the sealed bytes. A range follows the record with its
header, in sealed pieces of one size, or in plain: then the content hash of its layer tells whether
it was changed. Pacing, stalls and permits are those of the TCP channel below.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

from livescale.transfer.carriers.tcp import TcpCarrier, TcpChannel
from livescale.transfer.formats.carrier import Address, ChannelClosedError, Landed, WritePermit
from livescale.transfer.formats.frames import HEADER_BYTES
from livescale.transfer.formats.sealing import TAG_BYTES, Keys, Protection, agree

_SIZE = struct.Struct(">I")
_PIECE_BYTES = 256 << 10
# A thread that is woken for each piece costs more than one that is for two.
_PIECES_AT_ONCE = 2
# What follows a range: the record of a header.
_HEADER_RECORD_BYTES = _SIZE.size + HEADER_BYTES + TAG_BYTES


class SealedChannel:
    """A Channel over a TcpChannel: nothing goes over it before `protect`."""

    def __init__(self, tcp: TcpChannel, protection: Protection, is_caller: bool) -> None:
        self.is_network = True
        self._tcp = tcp
        self._protection = protection
        self._is_caller = is_caller
        self._keys: Keys | None = None
        #: of records that were opened, and not asked for yet
        self._plain = bytearray()
        self._sealed = memoryview(bytearray(_PIECE_BYTES + TAG_BYTES))
        self._came = memoryview(bytearray(_PIECES_AT_ONCE * (_PIECE_BYTES + TAG_BYTES)))
        self._opened = memoryview(bytearray(_PIECE_BYTES))

    @property
    def taken_bytes(self) -> int:
        return self._tcp.taken_bytes

    def protect(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._keys = agree(
            self._protection,
            self._tcp.send,
            lambda size: self._tcp.receive(size, max(0.0, deadline_s - time.monotonic())),
            is_caller=self._is_caller,
            is_one_machine=self._tcp.is_one_machine,
        )

    def share_memory(self, timeout_s: float) -> None:
        """Ranges travel on the socket."""

    def send(self, message: bytes, is_urgent_payload: bool = False) -> None:
        view = memoryview(message)
        for start in range(0, len(view), _PIECE_BYTES):
            record = self._record(view[start : start + _PIECE_BYTES])
            self._tcp.send(record, is_urgent_payload)

    def send_range(self, header: bytes, offset_bytes: int, size_bytes: int) -> None:
        record = self._record(header)
        if not self._agreed.seals_ranges:
            self._tcp.send_range(record, offset_bytes, size_bytes)
            return
        content = self._tcp.view(offset_bytes, size_bytes)
        for start in range(0, size_bytes, _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            sealed = self._sealed[: len(piece) + TAG_BYTES]
            self._agreed.sending.seal(piece, sealed)
            self._tcp.send_paced(record, sealed)
            record = b""

    def settle(self) -> None:
        """The network has its own copy of what was sent."""

    def receive(
        self, size_bytes: int, timeout_s: float | None = None, is_urgent_payload: bool = False
    ) -> bytes:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._plain) < size_bytes:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            (length,) = _SIZE.unpack(self._tcp.receive(_SIZE.size, left_s))
            if not 0 < length <= _PIECE_BYTES:
                raise ChannelClosedError(f"a record of {length} bytes")
            sealed = self._tcp.receive(length + TAG_BYTES, left_s, is_urgent_payload)
            opened = self._opened[:length]
            self._agreed.receiving.open(memoryview(sealed), opened)
            self._plain += opened
        message = bytes(self._plain[:size_bytes])
        del self._plain[:size_bytes]
        return message

    def receive_range(
        self, offset_bytes: int, size_bytes: int, permit: WritePermit, landed: Landed
    ) -> None:
        self._check_empty()
        if not self._agreed.seals_ranges:
            self._tcp.receive_range(offset_bytes, size_bytes, permit, landed)
            return
        place = self._tcp.view(offset_bytes, size_bytes)
        written = 0
        for start, came in self._pieces(size_bytes):
            length = len(came) - TAG_BYTES
            with permit.lock:
                if permit.is_revoked:
                    self._agreed.receiving.open(came, self._opened[:length])
                else:
                    self._agreed.receiving.open(came, place[start : start + length])
                    written += length
        landed(written)

    def discard_range(self, size_bytes: int, landed: Landed) -> None:
        self._check_empty()
        if not self._agreed.seals_ranges:
            self._tcp.discard_range(size_bytes, landed)
            return
        for _, came in self._pieces(size_bytes):
            self._agreed.receiving.open(came, self._opened[: len(came) - TAG_BYTES])
        landed(0)

    def break_off(self) -> None:
        self._tcp.break_off()

    def close(self) -> None:
        self._tcp.close()

    # -- helpers --------------------------------------------------------------------------------

    @property
    def _agreed(self) -> Keys:
        if self._keys is None:
            raise ChannelClosedError("the channel is not protected yet")
        return self._keys

    def _record(self, plain: bytes | memoryview) -> bytes:
        record = bytearray(_SIZE.size + len(plain) + TAG_BYTES)
        _SIZE.pack_into(record, 0, len(plain))
        self._agreed.sending.seal(plain, memoryview(record)[_SIZE.size :])
        return bytes(record)

    def _pieces(self, size_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """The sealed pieces of a range that come next, each with where its bytes begin."""
        for start in range(0, size_bytes, _PIECES_AT_ONCE * _PIECE_BYTES):
            stop = min(start + _PIECES_AT_ONCE * _PIECE_BYTES, size_bytes)
            begins = range(start, stop, _PIECE_BYTES)
            came = self._came[: stop - start + len(begins) * TAG_BYTES]
            self._tcp.receive_paced(came, _HEADER_RECORD_BYTES if stop == size_bytes else 0)
            for begin in begins:
                sealed_bytes = min(_PIECE_BYTES, stop - begin) + TAG_BYTES
                yield begin, came[:sealed_bytes]
                came = came[sealed_bytes:]

    def _check_empty(self) -> None:
        if self._plain:
            raise ChannelClosedError("a range begins inside of a record")


class SealedCarrier:
    """A TcpCarrier whose channels are sealed."""

    def __init__(self, tcp: TcpCarrier, protection: Protection) -> None:
        self._tcp = tcp
        self._protection = protection

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._tcp.address

    def connect(self, address: Address, timeout_s: float) -> SealedChannel:
        """A channel to the member that listens there. Raises OSError."""
        return SealedChannel(self._tcp.connect(address, timeout_s), self._protection, True)

    def accept(self) -> SealedChannel:
        return SealedChannel(self._tcp.accept(), self._protection, False)

    def break_off(self) -> None:
        self._tcp.break_off()

    def close(self) -> None:
        self._tcp.close()

    def __repr__(self) -> str:
        return f"<SealedCarrier over {self._tcp!r}>"
