"""vLLM's CPU build as a peer: its offline engine, stepped in a closed loop.

An interpreter that has vLLM runs this file by its path, so nothing of this package can be imported
here but the file beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict

from line_server import Job, closed_loop, serve_lines  # type: ignore[import-not-found]


def load(job: Job) -> tuple[str, Callable[[Job], Job]]:
    """The engine, as it comes by default, sized for the rounds."""
    if job.get("instructions") == "avx2":
        _hide_wider_instructions()
    from vllm import LLM, SamplingParams, __version__
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        model=job["directory"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["prompt_tokens"] + job["output_tokens"],
        max_num_seqs=job["in_flight_max"],
        seed=0,
    ).llm_engine
    rounds = itertools.count()

    def play(job: Job) -> Job:
        number = next(rounds)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=job["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

        def start(index: int) -> None:
            prompt = {"prompt_token_ids": job["prompts"][index]}
            engine.add_request(f"{number}-{index}", prompt, sampling)

        def step() -> Iterable[tuple[int, list[int], bool]]:
            for output in engine.step():
                index = int(output.request_id.split("-")[1])
                yield index, list(output.outputs[0].token_ids), output.finished

        return asdict(closed_loop(len(job["prompts"]), job["in_flight"], start, step))

    return f"vllm {__version__}, as by default, compiled", play


def _hide_wider_instructions() -> None:
    """vLLM takes the one of its libraries that torch's answers point to; limits of libraries alone
    leave it with one that needs AVX-512 and ends the process."""
    import torch

    for name in ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16"):
        setattr(torch.cpu, f"_is_{name}_supported", lambda: False)


if __name__ == "__main__":
    serve_lines(load)
