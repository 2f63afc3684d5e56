"""What a guest's process and the one that it loads for tell each other, and how: frames of msgpack
on a pair of unix sockets. Both are this user's.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from livescale.values.types import Manifest, Value

_LENGTH = struct.Struct("<I")


class GuestTerms(Value, frozen=True, tag=True):
    """Where the pool takes others (`pool`, ADDRESS:PORT) and its `token_file`. `model` is the one
    that is wanted, `name` that of the guest in the pool, `address` the one that others reach this
    machine at (empty: that of the way to the pool), `rack` its leaf switch.

    The guest stays a holder for others unless `keep` is false; then it leaves when all is taken,
    and others that read from it have `leave_s` for the rest. With `same_files` the models'
    directories are at the pool's paths here. No layer takes longer than `patience_s`.
    """

    pool: str
    token_file: str
    model: str = ""
    name: str = ""
    address: str = ""
    rack: str = ""
    tls_dir: str | None = None
    keep: bool = True
    leave_s: float = 60.0
    same_files: bool = False
    patience_s: float = 300.0
    uplink_bytes_per_s: int | None = None
    downlink_bytes_per_s: int | None = None


class TakeLayer(Value, frozen=True, tag=True):
    """Tell of the next layer when it is there: ends in LayerThere, AllTaken or NothingComes. The
    one before was read. `is_first`: begin with the first layer."""

    is_first: bool = False


class Leave(Value, frozen=True, tag=True):
    """Nothing more is taken: leave the pool in order, and end."""


class LayerThere(Value, frozen=True, tag=True):
    """The layer lies verified in the memory, where the model's bytes begin at `offset_bytes`. The
    `manifest` comes with the first layer, as does a file descriptor of the memory, which has
    `memory_bytes`."""

    number: int
    offset_bytes: int
    manifest: Manifest | None = None
    memory_bytes: int = 0


class AllTaken(Value, frozen=True, tag=True):
    """There is no layer behind the last one."""


class NothingComes(Value, frozen=True, tag=True):
    """Nothing more will come; the reason is for people."""

    reason: str


ToGuest = GuestTerms | TakeLayer | Leave
FromGuest = LayerThere | AllTaken | NothingComes


def send(end: socket.socket, message: ToGuest | FromGuest, descriptor: int | None = None) -> None:
    """Raises OSError where the other side is gone."""
    body = msgspec.msgpack.encode(message)
    head = _LENGTH.pack(len(body))
    if descriptor is not None:
        sent = socket.send_fds(end, [head], [descriptor])
        head = head[sent:]
    end.sendall(head + body)


def receive(end: socket.socket, kind: object) -> tuple[ToGuest | FromGuest, int | None] | None:
    """A message with the descriptor that came along; None when the other side is gone."""
    head, descriptors, _, _ = socket.recv_fds(end, _LENGTH.size, 1)
    head += _exactly(end, _LENGTH.size - len(head)) if head else b""
    if len(head) < _LENGTH.size:
        return None
    (size_bytes,) = _LENGTH.unpack(head)
    body = _exactly(end, size_bytes)
    if len(body) < size_bytes:
        return None
    decoder: msgspec.msgpack.Decoder[ToGuest | FromGuest] = msgspec.msgpack.Decoder(kind)
    return decoder.decode(body), descriptors[0] if descriptors else None


def _exactly(end: socket.socket, size_bytes: int) -> bytes:
    """So many bytes, or fewer where the other side is gone."""
    taken = bytearray()
    while len(taken) < size_bytes and (part := end.recv(size_bytes - len(taken))):
        taken += part
    return bytes(taken)
