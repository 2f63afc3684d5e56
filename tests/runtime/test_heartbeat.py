"""Wires and the threads behind them: who is silent is cut off, who is busy is not."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable

import pytest
from pool_thread import wait_until

from livescale.messages.attempts import (
    Cancel,
    Disown,
)
from livescale.runtime.wire.doors import Door
from livescale.runtime.wire.heartbeat import Heartbeats, WorkPulse
from livescale.runtime.wire.protocol import Address
from livescale.runtime.wire.wire_channel import Wire, open_wire
from livescale.values.types import RequestId
from slowness import patient, patient_ms

pytestmark = pytest.mark.usefixtures("machine")

WAIT_S = 60.0
DOOR = "wires of a test"
LONG = 5
"""Periods after which a silent peer has been cut off."""
SOME = Cancel(RequestId("r"), 1)
Story = Callable[[Wire[Cancel], Wire[Cancel]], Awaitable[None]]


def lost_after_ms() -> int:
    """A function: how slow the machine is was not measured when this module was imported."""
    return patient_ms(300)


def play(story: Story) -> None:
    """Tell a story of both ends of a wire."""

    async def told() -> None:
        ends: asyncio.Queue[Wire[Cancel]] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.put_nowait(Wire(reader, writer, Cancel | Disown))

        server = await asyncio.start_server(Door("", DOOR, accept).accept, "127.0.0.1", 0)
        address = Address(*server.sockets[0].getsockname()[:2])
        one: Wire[Cancel] = await open_wire(address, Cancel | Disown, secret="", door=DOOR)
        other = await ends.get()
        try:
            await story(one, other)
        finally:
            one.close()
            other.close()
            server.close()

    asyncio.run(asyncio.wait_for(told(), patient(WAIT_S)))


def test_a_silent_peer_is_cut_off_and_the_reason_says_so() -> None:
    async def story(one: Wire[Cancel], other: Wire[Cancel]) -> None:
        heartbeats = Heartbeats(lost_after_ms())
        heartbeats.add(one)
        other.send(SOME)
        running = asyncio.create_task(heartbeats.run())
        assert await one.receive() == SOME
        assert await one.receive() is None
        assert one.error is not None
        assert one.error.startswith("silent for ")
        # The other end sees an end, too.
        assert await other.receive() is None
        running.cancel()

    play(story)


def test_heartbeats_keep_a_wire_on_which_nothing_else_is_said() -> None:
    async def story(one: Wire[Cancel], other: Wire[Cancel]) -> None:
        both = [Heartbeats(lost_after_ms()), Heartbeats(lost_after_ms())]
        both[0].add(one)
        both[1].add(other)
        running = [asyncio.create_task(heartbeats.run()) for heartbeats in both]
        waiting = asyncio.create_task(one.receive()), asyncio.create_task(other.receive())
        done, _ = await asyncio.wait(waiting, timeout=LONG * lost_after_ms() / 1000)
        assert not done
        # They are no messages.
        other.send(SOME)
        assert await waiting[0] == SOME
        for task in (*running, waiting[1]):
            task.cancel()

    play(story)


def test_while_a_message_is_dealt_with_its_sender_is_not_silent() -> None:
    async def story(one: Wire[Cancel], other: Wire[Cancel]) -> None:
        heartbeats, beating = Heartbeats(lost_after_ms()), Heartbeats(lost_after_ms())
        heartbeats.add(one)
        beating.add(other)
        running = [asyncio.create_task(h.run()) for h in (heartbeats, beating)]
        other.send(SOME)
        assert await one.receive() == SOME
        await asyncio.sleep(4 * lost_after_ms() / 1000)  # what the receiver does with it
        assert not one.is_closed
        other.send(SOME)
        assert await one.receive() == SOME
        for task in running:
            task.cancel()

    play(story)


class Thread:
    """Takes up pieces of work from an inbox, as a worker's main thread does."""

    def __init__(self, stuck_after_ms: int) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.pulse = WorkPulse(lost_after_ms(), stuck_after_ms, self._inbox.put)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            with self.pulse.piece():
                work()

    def __enter__(self) -> Thread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(None)
        self._thread.join(patient(WAIT_S))

    def do(self, work: Callable[[], object]) -> None:
        self._inbox.put(lambda: work() and None)


def test_a_long_piece_of_work_is_no_silence_and_one_that_is_stuck_is() -> None:
    over = threading.Event()

    def story_of(thread: Thread, periods: int) -> Story:
        async def story(one: Wire[Cancel], other: Wire[Cancel]) -> None:
            judge, member = (
                Heartbeats(lost_after_ms()),
                Heartbeats(lost_after_ms(), thread.pulse.is_working),
            )
            judge.add(one)
            member.add(other)
            running = [asyncio.create_task(h.run()) for h in (judge, member)]
            reading = asyncio.create_task(other.receive())
            ending = asyncio.create_task(one.receive())
            thread.do(over.wait)
            done, _ = await asyncio.wait([ending], timeout=periods * lost_after_ms() / 1000)
            assert bool(done) == (periods > LONG)
            for task in (*running, reading, ending):
                task.cancel()

        return story

    for stuck_after_ms, periods in ((60_000, LONG), (2 * lost_after_ms(), 100)):
        over.clear()
        with Thread(stuck_after_ms) as thread:
            play(story_of(thread, periods))
            over.set()


def test_the_log_has_where_a_thread_is_that_does_not_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()

    def waits_for_what_never_comes() -> None:
        over.wait()

    with Thread(2 * lost_after_ms()) as thread:
        assert thread.pulse.is_working()
        thread.do(waits_for_what_never_comes)
        wait_until(lambda: not thread.pulse.is_working(), "it is stuck")
        assert not thread.pulse.is_working()
        over.set()
        wait_until(thread.pulse.is_working, "it goes on")
    (line,) = (record.getMessage() for record in caplog.records)
    assert "does not go on" in line
    assert "in waits_for_what_never_comes" in line


def test_a_thread_with_nothing_to_do_sends_heartbeats() -> None:
    async def story(one: Wire[Cancel], other: Wire[Cancel]) -> None:
        with Thread(60_000) as thread:
            judge, member = (
                Heartbeats(lost_after_ms()),
                Heartbeats(lost_after_ms(), thread.pulse.is_working),
            )
            judge.add(one)
            member.add(other)
            running = [asyncio.create_task(h.run()) for h in (judge, member)]
            reading = [asyncio.create_task(wire.receive()) for wire in (one, other)]
            done, _ = await asyncio.wait(reading, timeout=LONG * lost_after_ms() / 1000)
            assert not done
            for task in (*running, *reading):
                task.cancel()

    play(story)
