"""The replayer against a scripted server: open loop, exact records, every way to fail."""

from __future__ import annotations

import asyncio
import socket

import pytest
from scripted_server import Script, ScriptedServer

from livescale.lab.client.replayer import (
    PromptIdsFor,
    ReplayResult,
    lateness_ns,
    prompts_from_seed,
    replay,
)
from livescale.load.traces import TraceRow
from slowness import patient, patient_ms

MS = 1_000_000
S = 1_000_000_000


def rows_at(*arrivals_ns: int, output_tokens: int = 3) -> list[TraceRow]:
    return [TraceRow(arrival_ns, 4, output_tokens) for arrival_ns in arrivals_ns]


def prompts(*scripts: Script) -> PromptIdsFor:
    return lambda index, row: [scripts[index], index, *range(2, row.input_tokens)]


def replayed(
    url: str, rows: list[TraceRow], *scripts: Script, drain_ms_max: int | None = None
) -> list[ReplayResult]:
    drain_ns_max = (drain_ms_max or patient_ms(60_000)) * MS
    return asyncio.run(
        replay(url, "tiny", rows, prompt_ids_for=prompts(*scripts), drain_ns_max=drain_ns_max)
    )


@pytest.mark.usefixtures("machine")
def test_a_request_is_sent_as_agreed_and_recorded_exactly() -> None:
    with ScriptedServer() as server:
        (result,) = replayed(server.url, rows_at(20 * MS), Script.NORMAL)
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": [0, 0, 2, 3],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ]
    assert (result.ok, result.status, result.request_id) == (True, 200, "req-1")
    assert (result.prompt_ids, result.token_ids) == ([0, 0, 2, 3], [100, 101, 102])
    times = [result.scheduled_ns, result.sent_ns, *result.token_ns, result.finished_ns]
    assert times == sorted(times)
    assert len(result.token_ns) == 3
    assert repr(result) == "<ReplayResult 0 ok, 3/3 tokens>"


@pytest.mark.usefixtures("machine")
def test_tokens_of_one_event_have_one_time_each() -> None:
    with ScriptedServer() as server:
        (result,) = replayed(server.url, rows_at(0), Script.BUNDLED)
    assert result.ok
    assert result.token_ids == [100, 101, 102]
    assert len(set(result.token_ns)) == 1
    assert result.timing().tbt_ns == (0, 0)


@pytest.mark.usefixtures("machine")
def test_a_slow_server_delays_no_later_send() -> None:
    # No request ends before the last one has arrived: a closed loop would stop at its limit.
    count = 150
    with ScriptedServer(requests_expected=count) as server:
        rows = rows_at(*(k * MS for k in range(count)), output_tokens=2)
        results = replayed(server.url, rows, *[Script.HELD] * count)
    assert [result.error for result in results] == [None] * count
    assert len(server.bodies) == count
    last_sent_ns = max(result.sent_ns for result in results)
    assert all(result.finished_ns > last_sent_ns for result in results)
    start_ns = results[0].scheduled_ns
    assert [result.scheduled_ns - start_ns for result in results] == [
        row.arrival_ns for row in rows
    ]
    assert all(result.sent_ns >= result.scheduled_ns for result in results)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("script", "status", "tokens", "error"),
    [
        (Script.UNAVAILABLE, 503, 0, "HTTP 503: the queue is full"),
        (Script.PLAIN_502, 502, 0, "HTTP 502: <html>bad gateway"),
        (Script.ERROR_EVENT, 200, 1, "the worker was lost"),
        (Script.DROPPED, 200, 1, "RemoteProtocolError: "),
        (Script.SHORT, 200, 2, "2 tokens came, 3 were asked for"),
        (Script.NO_DONE, 200, 3, "the stream ended after 3 tokens without [DONE]"),
        (Script.WRONG_USAGE, 200, 3, "3 tokens came, the usage says 4"),
        (Script.NO_TOKEN_IDS, 200, 0, "an event has no token_ids"),
        (Script.GARBAGE, 200, 1, "the stream cannot be understood"),
    ],
)
def test_a_failure_becomes_a_result_and_spares_its_neighbours(
    script: Script, status: int, tokens: int, error: str
) -> None:
    with ScriptedServer() as server:
        before, failed, after = replayed(
            server.url, rows_at(0, 0, 5 * MS), Script.NORMAL, script, Script.NORMAL
        )
    assert before.ok
    assert after.ok
    assert (failed.ok, failed.status, len(failed.token_ids)) == (False, status, tokens)
    assert failed.error is not None
    assert failed.error.startswith(error)
    assert len(failed.token_ns) == tokens
    assert failed.finished_ns >= failed.sent_ns
    assert not failed.timing().ok


@pytest.mark.usefixtures("machine")
def test_nobody_listening_is_a_failed_result() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (result,) = replayed(url, rows_at(0), Script.NORMAL)
    assert result.error is not None
    assert result.error.startswith("ConnectError: ")
    assert (result.status, result.request_id, result.timing().request) == (None, None, "row-0")


@pytest.mark.usefixtures("machine")
def test_a_replay_ends_a_bounded_time_after_its_last_arrival() -> None:
    with ScriptedServer() as server:
        (result,) = replayed(server.url, rows_at(0), Script.HELD, drain_ms_max=300)
        assert server.stream_closed.wait(patient(10))
    assert result.error == "not finished when the replay's time was over"
    assert result.finished_ns - result.scheduled_ns < patient(10) * S


@pytest.mark.usefixtures("machine")
def test_cancelling_closes_every_connection() -> None:
    complete: list[ReplayResult] = []

    async def cancelled() -> None:
        task = asyncio.create_task(
            replay(
                server.url,
                "tiny",
                rows_at(0, 3600 * S),
                prompt_ids_for=prompts(Script.HELD, Script.NORMAL),
                on_progress=complete.append,
            )
        )
        assert await asyncio.to_thread(server.first_arrived.wait, patient(10))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ScriptedServer() as server:
        asyncio.run(cancelled())
        assert server.stream_closed.wait(patient(10))
    assert complete == []


@pytest.mark.usefixtures("machine")
def test_progress_reports_each_complete_result_once() -> None:
    complete: list[ReplayResult] = []

    async def run() -> list[ReplayResult]:
        return await replay(
            server.url,
            "tiny",
            rows_at(0, 0, 0),
            prompt_ids_for=prompts(Script.NORMAL, Script.UNAVAILABLE, Script.NORMAL),
            on_progress=lambda result: complete.append(result),
        )

    with ScriptedServer() as server:
        results = asyncio.run(run())
    assert sorted(result.index for result in complete) == [0, 1, 2]
    assert {id(result) for result in complete} == {id(result) for result in results}
    assert all(result.finished_ns for result in complete)


def test_an_empty_trace_is_replayed_at_once() -> None:
    assert replayed("http://127.0.0.1:1", []) == []
    assert lateness_ns([], 99) is None


def test_lateness_is_the_clients_own_delay() -> None:
    results = [ReplayResult(k, [1], 1, scheduled_ns=1000, sent_ns=1000 + k) for k in range(1, 101)]
    assert [lateness_ns(results, percent) for percent in (50, 99, 100)] == [50, 99, 100]


def test_prompts_depend_on_seed_and_row_only() -> None:
    row = TraceRow(0, 50, 1)
    first, again, other = (prompts_from_seed(300, seed) for seed in (1, 1, 2))
    assert first(7, row) == again(7, row) != other(7, row)
    assert first(7, row) != first(8, row)
    assert len(first(0, row)) == 50
    assert all(0 <= token < 300 for token in first(0, row))
