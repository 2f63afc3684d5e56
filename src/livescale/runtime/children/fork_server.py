"""A process that has imported what workers need, and becomes one whenever it is asked: it forks.

To import torch and the models' modules, and to load the kernels, takes seconds of a core, a fork
milliseconds. The workers of a host share the memory of all that, and a worker that died is back at
once. The server itself starts no thread: threads do not survive a fork. Its parent's side is
`forking.py`.

Standard input is a socket of packets: orders with the descriptors that become a worker's standard
input and output come in, pids and exit statuses go out. The end of the socket ends the server, and
with the server its children.
"""

from __future__ import annotations

import errno
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import NoReturn

import msgspec

from livescale.runtime.children.child_kinds import end_with_parent, run
from livescale.values.types import Value

PACKET_BYTES_MAX = 4096
# Standard input and output.
_ORDER_FDS = 2


class ForkOrder(Value, frozen=True):
    """Become a process of this kind. With two descriptors: standard input and output."""

    number: int
    kind: str
    log_level: str


class Forked(Value, frozen=True, tag=True):
    """The order was carried out. With a descriptor of the process (pidfd)."""

    number: int
    pid: int


class NotForked(Value, frozen=True, tag=True):
    """The order could not be carried out, for this reason."""

    number: int
    reason: str


class Ended(Value, frozen=True, tag=True):
    """The process ended with this status; one killed by a signal with its negative number."""

    number: int
    status: int


def main() -> None:
    _import_engine()
    # What is there will stay: the collector need not touch (and so copy) the pages of it.
    gc.collect()
    gc.freeze()
    _Server(socket.socket(fileno=os.dup(0))).run()


def _import_engine() -> None:
    # Imported here: the parent's side takes the messages from this file, and needs no torch.
    import livescale.runtime.member_process.worker_process  # noqa: F401
    from livescale.engine.warm_up import import_modelling, load_kernels

    import_modelling()
    load_kernels()


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        #: by descriptor of the process: number of the order, and pid
        self._children: dict[int, tuple[int, int]] = {}

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._channel:
                    self._reap(key.fd)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        """Carry out one order. False: the parent is gone."""
        packet, fds, _, _ = socket.recv_fds(self._channel, PACKET_BYTES_MAX, _ORDER_FDS)
        if not packet:
            return False
        order = msgspec.json.decode(packet, type=ForkOrder)
        answer: Forked | NotForked
        pidfds: list[int] = []
        try:
            pid, pidfd = self._fork(order, fds)
            answer, pidfds = Forked(order.number, pid), [pidfd]
        except OSError as error:
            # The other children live on: with this process they would all end.
            answer = NotForked(order.number, str(error))
        finally:
            for fd in fds:
                os.close(fd)
        socket.send_fds(self._channel, [msgspec.json.encode(answer)], pidfds)
        return True

    def _fork(self, order: ForkOrder, fds: list[int]) -> tuple[int, int]:
        """Its pid, and a descriptor of the process. Raises OSError."""
        if len(fds) < _ORDER_FDS:
            # The system leaves out those for which this process has no room.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(order, fds, parent)
        try:
            pidfd = os.pidfd_open(pid)
            self._children[pidfd] = (order.number, pid)
            self._selector.register(pidfd, selectors.EVENT_READ)
        except OSError:
            self._undo(pid)
            raise
        return pid, pidfd

    def _undo(self, pid: int) -> None:
        """The end of this child could not be seen."""
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for pidfd in [fd for fd, (_, known) in self._children.items() if known == pid]:
            del self._children[pidfd]
            os.close(pidfd)

    def _become(self, order: ForkOrder, fds: list[int], parent: int) -> NoReturn:
        """In the fork: be the ordered process until its end."""
        try:
            os.setsid()
            end_with_parent()
            if os.getppid() != parent:
                os._exit(1)  # the server ended before its end would have ended this process
            for standard, fd in enumerate(fds):
                os.dup2(fd, standard)
                os.close(fd)
            self._selector.close()
            self._channel.close()
            for pidfd in self._children:
                os.close(pidfd)
            run(order.kind, order.log_level)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        number, pid = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        ended = Ended(number, os.waitstatus_to_exitcode(status))
        self._channel.send(msgspec.json.encode(ended))
