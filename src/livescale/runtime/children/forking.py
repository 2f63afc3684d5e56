"""The parent's side of a fork server (`fork_server.py`): processes that are forks of it.

A `ForkedProcess` is for a `Child` what a process of asyncio is.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
from collections.abc import Mapping

import msgspec

from livescale.common.interpreter import module_words
from livescale.runtime.children.fork_server import (
    PACKET_BYTES_MAX,
    Ended,
    Forked,
    ForkOrder,
    NotForked,
)

# The server tells how a process ended at once; a server that is gone was killed with its children.
_STATUS_WAIT_S = 1.0
# The first answer comes when everything is imported and compiled, on a busy machine too.
_FIRST_ANSWER_S = 600.0
_ANSWER_S = 120.0


class ForkServerError(Exception):
    """The fork server ended, does not answer, cannot fork, or could not be started."""


class ForkedProcess:
    """A living fork, or one that ended."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        status: asyncio.Future[int],
        stdin: asyncio.WriteTransport,
        stdout: asyncio.StreamReader,
    ) -> None:
        """`status` is set when the fork server reports the end of the process."""
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        self._status = status
        self._loop.add_reader(pidfd, self._is_gone)
        status.add_done_callback(self._close)

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def send_signal(self, number: int) -> None:
        if not self._status.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _is_gone(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.call_later(_STATUS_WAIT_S, self._presume_killed)

    def _presume_killed(self) -> None:
        if not self._status.done():
            self._status.set_result(-signal.SIGKILL)

    def _close(self, _: asyncio.Future[int]) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)


class ForkServer:
    """The fork server of one place, started when it is first needed, and again when it is gone."""

    def __init__(
        self,
        prefix: tuple[str, ...],
        environment: Mapping[str, str],
        log_level: str,
        limit: int,
        first_answer_s: float = _FIRST_ANSWER_S,
        python: str | None = None,
    ) -> None:
        """`prefix` are the words in front of a command that is to run there; `limit` bounds the
        bytes of a line that a process writes, `first_answer_s` the wait for a server that starts.
        `python` is the interpreter (None: this one)."""
        self._prefix = prefix
        self._environment = environment
        self._log_level = log_level
        self._limit = limit
        self._first_answer_s = first_answer_s
        #: the server of now has answered once
        self._is_warm = False
        self._python = python
        self._server: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._orders = 0
        self._starting = asyncio.Lock()
        #: by the number of the order
        self._answers: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}

    async def start(self, kind: str) -> ForkedProcess:
        """A new process of this kind. Raises ForkServerError, OSError."""
        async with self._starting:
            if self._channel is None:
                await self._start_server()
        number, self._orders = self._orders, self._orders + 1
        status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Whatever fails on the way, no descriptor is left open: a process that cannot be started is
        # tried again and again.
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            their_in, our_in = _pipe()
            theirs.enter_context(their_in)
            ours.enter_context(our_in)
            our_out, their_out = _pipe()
            theirs.enter_context(their_out)
            ours.enter_context(our_out)
            ours.callback(self._statuses.pop, number, None)
            self._statuses[number] = status
            pid, pidfd = await self._fork(number, kind, [their_in.fileno(), their_out.fileno()])
            ours.callback(_discard, pidfd)
            stdin = await _write_end(our_in)
            ours.callback(stdin.abort)
            stdout = await _read_end(our_out, self._limit)
            process = ForkedProcess(pid, pidfd, status, stdin, stdout)
            ours.pop_all()
        return process

    def end(self) -> None:
        """End the server, and with it what is left of its processes; starts that have not come to
        their end are cancelled."""
        for answer in self._answers.values():
            answer.cancel()
        if self._channel is not None:
            self._lose_server()

    async def wait(self) -> None:
        """Until the server has ended, which loses its channel or is told to end."""
        if self._server is not None:
            await self._server.wait()

    # -- helpers ------------------------------------------------------------------------------

    async def _start_server(self) -> None:
        await self.wait()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server = await asyncio.create_subprocess_exec(
                *self._prefix,
                *module_words(
                    "livescale.runtime.children.child",
                    "fork-server",
                    self._log_level,
                    python=self._python,
                ),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment,
            )
        except OSError as error:
            ours.close()
            raise ForkServerError(str(error)) from error
        except asyncio.CancelledError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._channel, self._is_warm = ours, False
        asyncio.get_running_loop().add_reader(ours, self._receive, ours)

    async def _fork(self, number: int, kind: str, fds: list[int]) -> tuple[int, int]:
        assert self._channel is not None
        answer: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        order = msgspec.json.encode(ForkOrder(number, kind, self._log_level))
        try:
            socket.send_fds(self._channel, [order], fds)
        except OSError:
            self._lose_server()
        try:
            async with asyncio.timeout(_ANSWER_S if self._is_warm else self._first_answer_s):
                found = await answer
            self._is_warm = True
            return found
        except TimeoutError:
            # It may be stopped, with workers that serve: they would die with it.
            raise ForkServerError("the fork server does not answer") from None
        finally:
            del self._answers[number]

    def _receive(self, channel: socket.socket) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._lose_server()
            return
        message = msgspec.json.decode(packet, type=Forked | NotForked | Ended)
        if isinstance(message, Ended):
            status = self._statuses.pop(message.number, None)
            if status is not None and not status.done():
                status.set_result(message.status)
            return
        answer = self._answers.get(message.number)
        if answer is not None and answer.done():
            answer = None
        if isinstance(message, NotForked):
            if answer is not None:
                answer.set_exception(ForkServerError(f"it cannot fork: {message.reason}"))
        elif not fds:
            # The system leaves it out where this process has no room for one more. The fork sees
            # the end of its standard input, and ends.
            if answer is not None:
                answer.set_exception(ForkServerError("no room for a descriptor of the fork"))
        elif answer is not None:
            answer.set_result((message.pid, fds[0]))
        else:
            # Not wanted any more: the start was cancelled, or waited too long.
            _discard(fds[0])

    def _lose_server(self) -> None:
        assert self._channel is not None
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self._channel = None
        # The end of the channel would end it, too, but not if it is stopped.
        if self._server is not None and self._server.returncode is None:
            self._server.kill()
        self._statuses.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ForkServerError("the fork server ended"))


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    """What reads and what writes."""
    reading, writing = os.pipe()
    return io.FileIO(reading, "rb"), io.FileIO(writing, "wb")


def _discard(pidfd: int) -> None:
    """The process is not wanted any more."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


async def _write_end(pipe: io.FileIO) -> asyncio.WriteTransport:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
    return transport


async def _read_end(pipe: io.FileIO, limit: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=limit)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader
