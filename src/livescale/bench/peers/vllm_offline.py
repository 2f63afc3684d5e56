"""vLLM's CPU build as a peer: its offline engine, stepped in a closed loop.

An interpreter that has vLLM runs this file by its path, so nothing of this package can be imported
here; the words are those of `line_server.py`.
"""

import json
import os
import sys
from time import perf_counter_ns
from typing import Any


def load(job: dict[str, Any]) -> Any:
    """The engine, as it comes by default, sized for the rounds."""
    from vllm import LLM

    return LLM(
        model=job["directory"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        max_model_len=job["prompt_tokens"] + job["output_tokens"],
        max_num_seqs=job["in_flight_max"],
        seed=0,
    )


def play(llm: Any, job: dict[str, Any], round_number: int) -> dict[str, Any]:
    """Keep `in_flight` requests running until all prompts are answered."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompts = job["prompts"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["output_tokens"],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    token_ids: list[list[int]] = [[] for _ in prompts]
    started_ns = [0] * len(prompts)
    ttft_ns = [0] * len(prompts)
    begin_ns = perf_counter_ns()
    started = running = 0
    while started < len(prompts) or running:
        while started < len(prompts) and running < job["in_flight"]:
            started_ns[started] = perf_counter_ns()
            request = f"{round_number}-{started}"
            engine.add_request(request, {"prompt_token_ids": prompts[started]}, sampling)
            started += 1
            running += 1
        for output in engine.step():
            index = int(output.request_id.split("-")[1])
            tokens = list(output.outputs[0].token_ids)
            if tokens and not token_ids[index]:
                ttft_ns[index] = perf_counter_ns() - started_ns[index]
            token_ids[index] += tokens
            running -= output.finished
    elapsed_ns = perf_counter_ns() - begin_ns
    return {"elapsed_ns": elapsed_ns, "token_ids": token_ids, "ttft_ns": ttft_ns}


def main() -> None:
    """Answer lines until standard input ends."""
    # vLLM logs to standard output: only this descriptor may carry answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = load(json.loads(sys.stdin.readline()))
    from vllm import __version__

    settings = f"vllm {__version__}, as by default, compiled"
    print(json.dumps({"settings": settings}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(play(llm, json.loads(line), number)), file=answers, flush=True)


if __name__ == "__main__":
    main()
