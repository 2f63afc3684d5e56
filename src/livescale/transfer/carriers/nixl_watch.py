"""One thread per carrier that asks NIXL what has ended, for all channels.

NIXL has no call that waits. The thread sleeps while nothing is under way, and between two rounds
for ever longer while nothing ends. A round tells each peer one number per channel, however many
ranges have ended (Perplexity's TransferEngine, arXiv 2510.27656, section 3: counters instead of a
message per transfer; the counters are absolute, so that their order does not matter).
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from livescale.transfer.carriers.nixl_agent import NixlAgent, Read, ReadState

# A window of reads is longer than this on any network: the pause between two rounds hides in it.
_PAUSE_S_MIN, _PAUSE_S_MAX = 50e-6, 1e-3
# number of the receiver's channel at its sender, ranges it has read since the channel opened
_DONE = struct.Struct(">IQ")


class WatchedChannel(Protocol):
    """What the watch tells of."""

    #: of this channel, at this side
    number: int
    peer: str
    #: of this channel, at the other side
    peer_number: int
    #: ranges that the other side sent and that were read, or refused
    done: int

    def peer_read(self, count: int) -> None:
        """The other side has read so many ranges that were sent on this channel."""

    def break_off(self) -> None:
        """The channel is of no use any more."""


class _Followed:
    """A read under way, its channel, and who is told (True: all bytes are there) of its end."""

    def __init__(
        self, read: Read, channel: WatchedChannel, tell_ended: Callable[[bool], None]
    ) -> None:
        self.read = read
        self.channel = channel
        self.tell_ended = tell_ended


class NixlWatch:
    """Thread-safe. What it tells is told by its thread, and must not block."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        self._channels: dict[int, WatchedChannel] = {}
        self._numbers = 0
        self._under_way: list[_Followed] = []
        # Channels whose senders wait for their peers.
        self._waiting = 0
        # Channels whose peers do not know yet how many ranges were read.
        self._untold: dict[int, WatchedChannel] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="watches reads", daemon=True)
        self._thread.start()

    def add(self, channel: WatchedChannel) -> int:
        """The number of a new channel; its peer may tell how many ranges it has read."""
        with self._changed:
            self._numbers += 1
            self._channels[self._numbers] = channel
            return self._numbers

    def remove(self, number: int) -> None:
        """The channel is closed. Its reads are watched until they have ended."""
        with self._changed:
            self._channels.pop(number, None)
            self._untold.pop(number, None)

    def follow(
        self, read: Read, channel: WatchedChannel, tell_ended: Callable[[bool], None]
    ) -> None:
        """`tell_ended` is called when nothing is written any more for the read, with whether it
        was successful; the channel's `done` counts it then."""
        with self._changed:
            self._under_way.append(_Followed(read, channel, tell_ended))
            self._changed.notify()

    def refused(self, channel: WatchedChannel) -> None:
        """The peer is told of the channel's `done`, which has grown without a read."""
        with self._changed:
            self._untold[channel.number] = channel
            self._changed.notify()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile what peers have read is asked for."""
        with self._changed:
            self._waiting += 1
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def close(self) -> None:
        """The thread is gone."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _PAUSE_S_MIN
        while True:
            with self._changed:
                while not (self._is_closed or self._waiting or self._under_way or self._untold):
                    self._changed.wait()
                    pause_s = _PAUSE_S_MIN
                if self._is_closed:
                    return
                under_way, self._under_way = self._under_way, []
                untold, self._untold = self._untold, {}
                is_waited_for = self._waiting > 0
            has_news = bool(untold)
            left = []
            for followed in under_way:
                channel = followed.channel
                if not self._has_ended(followed):
                    left.append(followed)
                elif channel.number in self._channels:
                    untold[channel.number] = channel
            has_news = has_news or len(left) < len(under_way)
            with self._changed:
                self._under_way[:0] = left
            for channel in untold.values():
                self._tell(channel)
            if is_waited_for:
                has_news = self._listen() or has_news
            pause_s = _PAUSE_S_MIN if has_news else min(2 * pause_s, _PAUSE_S_MAX)
            time.sleep(pause_s)

    def _has_ended(self, followed: _Followed) -> bool:
        match self._agent.state(followed.read):
            case ReadState.UNDER_WAY:
                return False
            case ReadState.UNKNOWN:
                # Never told of: it may still write.
                followed.channel.break_off()
            case state:
                followed.tell_ended(state is ReadState.DONE)
        return True

    def _tell(self, channel: WatchedChannel) -> None:
        try:
            self._agent.tell(channel.peer, _DONE.pack(channel.peer_number, channel.done))
        except OSError:
            channel.break_off()

    def _listen(self) -> bool:
        """Peers' counters are passed on. Whether there were any."""
        messages: list[tuple[str, bytes]] = []
        # One that has gone ends its channel in other ways.
        with contextlib.suppress(OSError):
            messages = self._agent.told()
        for peer, message in messages:
            if len(message) == _DONE.size:
                number, count = _DONE.unpack(message)
                with self._changed:
                    channel = self._channels.get(number)
                # None speaks for another one.
                if channel is not None and channel.peer == peer:
                    channel.peer_read(count)
        return bool(messages)

    def __repr__(self) -> str:
        return f"<NixlWatch {len(self._under_way)} reads, {self._waiting} senders wait>"
