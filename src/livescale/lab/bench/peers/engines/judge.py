"""Are the outputs that were timed right? Stock `transformers` in fp32 is the judge.

Outputs in fp32 are held to the greedy oracle, token by token. Other dtypes round, so a token may
differ: there the shortfall counts, the distance of the chosen token's fp32 logit from the largest,
in standard deviations of the position's logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from livescale.engine.oracle import GreedyOracle
from livescale.lab.bench.peers.line_server import Job, serve_lines


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """Load the model in fp32, whatever it is stored in."""
    torch.set_num_threads(job["threads"])
    if job["dtype"] == "float32":
        return "greedy oracle, fp32", partial(_count_wrong, GreedyOracle(Path(job["directory"])))
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(job["directory"], dtype=torch.float32, local_files_only=True)
    return "shortfall against fp32", partial(_shortfall, model.eval())


def _count_wrong(oracle: GreedyOracle, job: Job) -> Job:
    checks = oracle.check_many(list(zip(job["prompts"], job["token_ids"], strict=True)))
    return {
        "tokens": sum(check.tokens for check in checks),
        "wrong": sum(len(check.wrong) for check in checks),
    }


@torch.inference_mode()
def _shortfall(model: Any, job: Job) -> Job:
    shortfalls = []
    for prompt, output in zip(job["prompts"], job["token_ids"], strict=True):
        ids = torch.tensor([[*prompt, *output]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        shortfalls.append((logits.max(dim=-1).values - chosen) / logits.std(dim=-1))
    all_tokens = torch.cat(shortfalls)
    return {
        "tokens": len(all_tokens),
        "shortfall_p99_stds": float(torch.quantile(all_tokens, 0.99)),
    }


if __name__ == "__main__":
    serve_lines(load)
