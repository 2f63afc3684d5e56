"""How a peer talks: one JSON object per line, in and out, and nothing else on standard output.

The first line describes the model; every further line is a round, answered with its outputs and
times. The closed loop of engines that are stepped lives here, too. Other interpreters run peers by
their path and find this file beside them: it imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

Job = dict[str, Any]


@dataclass(slots=True)
class RoundResult:
    """What one round gave: outputs in the order of the prompts, time to first token likewise
    (empty where the engine cannot tell)."""

    elapsed_ns: int
    token_ids: list[list[int]]
    ttft_ns: list[int] = field(default_factory=list)


def serve_lines(load: Callable[[Job], tuple[object, Callable[[Job], Job]]]) -> None:
    """Answer lines until standard input ends.

    `load` takes the first line and gives the settings in use, as JSON has them, and what answers
    the lines that follow.
    """
    # Libraries print: only this descriptor may carry answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings, answer = load(json.loads(sys.stdin.readline()))
    print(json.dumps({"settings": settings}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answering(worker: object) -> Callable[[Job], Job]:
    """Answers each line by the worker's method that it names in `do`."""
    return lambda job: getattr(worker, job["do"])(job)


def closed_loop(
    requests: int,
    in_flight: int,
    start: Callable[[int], None],
    step: Callable[[], Iterable[tuple[int, list[int], bool]]],
) -> RoundResult:
    """Keep `in_flight` requests running until all are done.

    `start(index)` gives a request to the engine; `step()` runs it once and yields (index, new
    tokens, ended).
    """
    token_ids: list[list[int]] = [[] for _ in range(requests)]
    started_ns = [0] * requests
    ttft_ns = [0] * requests
    begin_ns = perf_counter_ns()
    started = running = 0
    while started < requests or running:
        while started < requests and running < in_flight:
            started_ns[started] = perf_counter_ns()
            start(started)
            started += 1
            running += 1
        for index, tokens, is_ended in step():
            if tokens and not token_ids[index]:
                ttft_ns[index] = perf_counter_ns() - started_ns[index]
            token_ids[index] += tokens
            running -= is_ended
    return RoundResult(perf_counter_ns() - begin_ns, token_ids, ttft_ns)
