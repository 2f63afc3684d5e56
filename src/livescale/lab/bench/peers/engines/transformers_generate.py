"""`transformers` generate as a peer: padded batches, one after the other. No continuous batching:
the next batch starts when all of the last one are done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from livescale.lab.bench.peers.engines.stock_model import load_stock_model
from livescale.lab.bench.peers.line_server import Job, RoundResult, serve_lines


class _FirstToken(BaseStreamer):
    """Remembers when the first tokens came (generate hands over the prompts first)."""

    def __init__(self) -> None:
        self.first_ns = 0
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_ns = perf_counter_ns()

    def end(self) -> None:
        """Nothing is kept."""


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """Load the model with SDPA attention."""
    model = load_stock_model(job)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return "padded batches, sdpa, dynamic cache", partial(_play, model)


@torch.inference_mode()
def _play(model: Any, job: Job) -> Job:
    prompts, in_flight = job["prompts"], job["in_flight"]
    result = RoundResult(0, [])
    begin_ns = perf_counter_ns()
    for first in range(0, len(prompts), in_flight):
        # All prompts of a round have one length, so that padding costs nothing.
        batch = torch.tensor(prompts[first : first + in_flight])
        streamer = _FirstToken()
        started_ns = perf_counter_ns()
        output = model.generate(
            input_ids=batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=job["output_tokens"],
            streamer=streamer,
        )
        result.token_ids += output[:, batch.shape[1] :].tolist()
        result.ttft_ns += [streamer.first_ns - started_ns] * len(batch)
    result.elapsed_ns = perf_counter_ns() - begin_ns
    return asdict(result)


if __name__ == "__main__":
    serve_lines(load)
