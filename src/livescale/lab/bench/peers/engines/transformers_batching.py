"""`transformers`' continuous batching as a peer, at the best of a few settings.

Which setting is best depends on how many requests are in flight, so each number of them tries all
(its first round, which is not counted) and keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from time import perf_counter
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from livescale.lab.bench.peers.engines.stock_model import load_stock_model
from livescale.lab.bench.peers.line_server import Job, RoundResult, closed_loop, serve_lines

_ANSWER_S_MAX = 120.0

#: (tokens of a page, tokens of a batch)
_CANDIDATES = ((32, 256), (256, 2048))


class _Batching:
    """The model and the settings found best so far."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._best: dict[int, tuple[int, int]] = {}

    def play(self, job: Job) -> Job:
        in_flight = job["in_flight"]
        if in_flight in self._best:
            return asdict(self._round(job, self._best[in_flight]))
        tried = [(self._round(job, candidate), candidate) for candidate in _CANDIDATES]
        result, self._best[in_flight] = min(tried, key=lambda pair: pair[0].elapsed_ns)
        page_tokens, batch_tokens = self._best[in_flight]
        settings = f"page_size {page_tokens}, max_batch_tokens {batch_tokens}"
        return {**asdict(result), "settings": settings}

    def _round(self, job: Job, candidate: tuple[int, int]) -> RoundResult:
        page_tokens, batch_tokens = candidate
        request_tokens = len(job["prompts"][0]) + job["output_tokens"]
        # Without num_blocks the cache would be cut out of nearly all free memory. A margin keeps
        # the scheduler from holding prompts back.
        pages = -(-request_tokens // page_tokens) * job["in_flight"]
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                do_sample=False,
                max_new_tokens=job["output_tokens"],
                eos_token_id=-1,
                pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_tokens,
                num_blocks=2 * pages + 8,
                max_batch_tokens=batch_tokens,
                max_requests_per_batch=job["in_flight"],
                allow_block_sharing=False,
            ),
        )
        manager.start()
        try:
            return self._closed_loop(manager, job)
        finally:
            manager.stop(block=True, timeout=30)
            manager.destroy()

    def _closed_loop(self, manager: Any, job: Job) -> RoundResult:
        prompts = job["prompts"]
        started_s, ttft_ns = [0.0] * len(prompts), [0] * len(prompts)

        def start(index: int) -> None:
            started_s[index] = perf_counter()
            self._add(manager, str(index), prompts[index], job["output_tokens"])

        def step() -> Iterable[tuple[int, list[int], bool]]:
            output = self._wait(manager)
            index = int(output.request_id)
            ttft_ns[index] = int((output.timestamps[0] - started_s[index]) * 1_000_000_000)
            yield index, list(output.generated_tokens), True

        # Its thread builds the cache on the first request: that is no part of the round.
        self._add(manager, "first", prompts[0], 1)
        self._wait(manager)
        result = closed_loop(len(prompts), job["in_flight"], start, step)
        # Tokens come when all of a request are there; the engine reports when the first was.
        result.ttft_ns = ttft_ns
        return result

    def _add(self, manager: Any, request: str, prompt: list[int], tokens: int) -> None:
        manager.add_request(
            prompt,
            request_id=request,
            max_new_tokens=tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )

    def _wait(self, manager: Any) -> Any:
        output = manager.get_result(timeout=_ANSWER_S_MAX)
        if output is None or output.error is not None:
            reason = "no answer" if output is None else output.error
            raise RuntimeError(f"continuous batching of transformers failed: {reason}")
        return output


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """Load the model; it is switched to paged SDPA attention when a round begins."""
    model = load_stock_model(job)
    return "paged sdpa, the best of a few settings", _Batching(model).play


if __name__ == "__main__":
    serve_lines(load)
