"""The process of a guest: it is the pool's member, and tells who started it of each layer.

A process of its own, because who takes the layers computes: others that read from here do not wait
for that one's interpreter, and a member that is silent counts as lost. Its memory is shared with
the one that takes the layers, so nothing is copied. It ends with that one.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from livescale.common.addresses import parse_address
from livescale.common.errors import UserError
from livescale.runtime.guest.guest import ArrivedLayer, Guest, GuestAs
from livescale.runtime.guest.guest_messages import (
    AllTaken,
    FromGuest,
    GuestTerms,
    LayerThere,
    Leave,
    NothingComes,
    TakeLayer,
    ToGuest,
    receive,
    send,
)
from livescale.runtime.join.head_talk import way_to
from livescale.runtime.wire.doors import open_credentials
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.token import check_fingerprint, read_token


def open_guest(terms: GuestTerms) -> Guest:
    """Raises UserError."""
    head = parse_address(terms.pool, "pool", is_own=False)
    token = read_token(Path(terms.token_file))
    tls = open_credentials(terms.tls_dir)
    check_fingerprint(Path(terms.token_file), token, None if tls is None else tls.fingerprint)
    rates = {
        "uplink_bytes_per_s": terms.uplink_bytes_per_s,
        "downlink_bytes_per_s": terms.downlink_bytes_per_s,
    }
    settings: dict[str, str | int | None] = {k: v for k, v in rates.items() if v is not None}
    guest_as = GuestAs(
        model=terms.model,
        name=terms.name,
        address=terms.address or way_to(head),
        settings=settings | {"tls_dir": terms.tls_dir},
        patience_s=terms.patience_s,
        reads_files=terms.same_files,
        rack=terms.rack,
    )
    return Guest(Address(*head), token.secret, guest_as, tls)


def main() -> None:
    """Run until who started this ends, or lets it leave."""
    logging.basicConfig(format="livescale guest: %(message)s", level=logging.WARNING)
    end = socket.socket(fileno=int(sys.argv[1]))
    asked: queue.SimpleQueue[ToGuest] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(end, asked), name="taker", daemon=True).start()
    terms = asked.get()
    assert isinstance(terms, GuestTerms), f"a guest is first told its terms, not {terms}"
    try:
        guest = open_guest(terms)
    except UserError as error:
        send(end, NothingComes(str(error)))
        return
    guest.begin()
    layers: Iterator[ArrivedLayer] = iter(())
    while isinstance(wish := asked.get(), TakeLayer):
        if wish.is_first:
            layers = guest.layers()
        answer, descriptor = _next(guest, layers, is_first=wish.is_first)
        send(end, answer, descriptor)
    assert isinstance(wish, Leave), wish
    guest.end(terms.leave_s)


def _next(
    guest: Guest, layers: Iterator[ArrivedLayer], *, is_first: bool
) -> tuple[FromGuest, int | None]:
    try:
        arrived = next(layers, None)
    except UserError as error:
        return NothingComes(str(error)), None
    if arrived is None:
        return AllTaken(), None
    there = LayerThere(arrived.number, arrived.offset_bytes)
    if not is_first:
        return there, None
    memory = guest.memory
    there = LayerThere(arrived.number, arrived.offset_bytes, arrived.manifest, memory.size_bytes)
    return there, memory.fd


def _read(end: socket.socket, asked: queue.SimpleQueue[ToGuest]) -> None:
    while True:
        try:
            found = receive(end, ToGuest)
        except OSError:
            found = None
        if found is None:
            # Who started this is gone, and nothing would stop it any more.
            os._exit(0)
        message, _ = found
        assert isinstance(message, ToGuest), message
        asked.put(message)
        if isinstance(message, Leave):
            return


if __name__ == "__main__":
    main()
