"""Channels whose other end has not proved yet who it is."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from livescale.transfer.carrier import Channel
from livescale.transfer.frames import FrameError
from livescale.transfer.greeting import Greeting
from livescale.transfer.orders import TransferError
from livescale.types import WorkerRef

_CALLERS_MAX = 64


class Strangers:
    """Greets them, and keeps those that say nothing few. Thread-safe."""

    def __init__(self, worker: WorkerRef, secret: str, handshake_s: float) -> None:
        self._greeting = Greeting(worker, secret, handshake_s)
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        # Those of them that were opened there, in the order in which they came.
        self._callers: list[Channel] = []
        self._is_closed = False

    def call(self, peer: WorkerRef, channel: Channel) -> Channel:
        """The channel, opened here, when the peer has answered on it. Raises TransferError; the
        channel is closed then."""
        try:
            with self._greeted(channel):
                self._greeting.call(channel, peer)
        except (OSError, FrameError) as error:
            channel.close()
            raise TransferError(str(error)) from error
        return channel

    def came(self, channel: Channel) -> None:
        """Opened there. The oldest that says nothing makes room: members are never kept out by
        strangers."""
        with self._lock:
            if len(self._callers) >= _CALLERS_MAX:
                self._callers.pop(0).break_off()
            self._callers.append(channel)

    def answer(self, channel: Channel, check: Callable[[WorkerRef], None]) -> WorkerRef | None:
        """Who opened the channel; None if that is not proved or `check` raises OSError: the
        channel is closed then."""
        try:
            with self._greeted(channel):
                return self._greeting.answer(channel, check)
        except (OSError, FrameError):
            channel.close()
            return None

    def close(self) -> None:
        """No greeting goes on for long. Idempotent."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.break_off()

    @contextlib.contextmanager
    def _greeted(self, channel: Channel) -> Iterator[None]:
        """After the greeting both ends may share memory. Meanwhile `close` breaks it off."""
        with self._lock:
            self._channels.append(channel)
            is_closed = self._is_closed
        if is_closed:
            channel.break_off()
        try:
            yield
            channel.share_memory(self._handshake_s)
        finally:
            with self._lock:
                self._channels.remove(channel)
                if channel in self._callers:
                    self._callers.remove(channel)
