"""One port that several processes listen on, each with a socket of its own that is kept here.

Linux deals connections out among all listening sockets of a port (SO_REUSEPORT), also to those
whose process is gone: there they would wait for its successor. So the kernel is told which sockets
are accepted from, by a classic BPF program that it asks for each new connection
(SO_ATTACH_REUSEPORT_CBPF, which needs no privilege). The program names sockets by their number in
the order in which they began to listen; none of them is closed while others are open, so numbers
stay. Where the system takes no such program connections go on being dealt out among all.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Sequence

from livescale.runtime.supervisor.listening import listen_together

_log = logging.getLogger(__name__)

# <asm-generic/socket.h>; Python has no name for it.
_SO_ATTACH_REUSEPORT_CBPF = 51
# <linux/filter.h>: instructions, and where a load gets a random number instead of packet bytes.
_LOAD_WORD, _MODULO, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x94, 0x15, 0x06
_RANDOM = 0xFFFFF000 + 56


class SharedPort:
    """Raises ConfigError where the address cannot be had."""

    def __init__(self, host: str, port: int, count: int) -> None:
        """One socket for each of `count` processes, on a free port if that is 0."""
        self._sockets = listen_together(host, port, count)
        #: the system has refused a program
        self._is_dealt_among_all = False

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def fileno(self, number: int) -> int:
        return self._sockets[number].fileno()

    def deal_to(self, numbers: Sequence[int]) -> None:
        """New connections come to these sockets alone; to all if there are none."""
        if len(self._sockets) == 1 or self._sockets[0].fileno() < 0 or self._is_dealt_among_all:
            return
        program = _choose_one_of(numbers or range(len(self._sockets)))
        instructions = ctypes.create_string_buffer(b"".join(program))
        # struct sock_fprog: a length and, where the machine aligns it, a pointer.
        described = struct.pack("@HP", len(program), ctypes.addressof(instructions))
        try:
            self._sockets[0].setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, described)
        except OSError as error:
            self._is_dealt_among_all = True
            _log.warning("Connections wait for the restart of gateways: %s", error)

    def close(self) -> None:
        for one in self._sockets:
            one.close()

    def __repr__(self) -> str:
        return f"<SharedPort {self.address} of {len(self._sockets)}>"


def _choose_one_of(numbers: Sequence[int]) -> list[bytes]:
    """A program that returns each of the numbers as often as the others."""
    *others, last = numbers
    program = [_instruction(_LOAD_WORD, _RANDOM), _instruction(_MODULO, len(numbers))]
    for turn, number in enumerate(others):
        program.append(_instruction(_JUMP_IF_EQUAL, turn, if_false=1))
        program.append(_instruction(_RETURN, number))
    return [*program, _instruction(_RETURN, last)]


def _instruction(code: int, operand: int, if_false: int = 0) -> bytes:
    """struct sock_filter: a code, how far to jump if true and if false, an operand."""
    return struct.pack("@HBBI", code, 0, if_false, operand)
