"""A vLLM server as a guest, run by an interpreter that has vLLM: greedy tokens of a model that the
plug-in loads.

The first line of the input has {"directory", "prompts", "tokens", "extras"}. When vLLM is imported
a line "ready" is printed, and the next line of the input is waited for. The last line of the output
has for each of the `extras` (what `--model-loader-extra-config` says) the tokens, or the words of
the refusal. The engine of the last one stays until the input ends. With "updates" there is one
engine without parameters, which gets those of each of these models in turn.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tokens import BLOCK_TOKENS, KV_BYTES
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    found, engines = [], []
    if "updates" in asked:
        print(json.dumps(updated(asked)), flush=True)
        return
    for extra in asked["extras"]:
        try:
            engine = engine_of(asked, load_format="livescale", model_loader_extra_config=extra)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        engines = [engine]
        found.append(tokens_of(engine, asked))
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    del engines


def updated(asked: dict[str, Any]) -> list[Any]:
    transfer = WeightTransferConfig(backend="livescale")
    engine = engine_of(asked, load_format="dummy", weight_transfer_config=transfer)
    call = engine.collective_rpc
    call("init_weight_transfer_engine", args=(asked["extras"][0],))
    found: list[Any] = []
    for model in asked["updates"]:
        engine.reset_prefix_cache()
        call("start_weight_update")
        try:
            call("update_weights", args=({"model": model},))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        call("finish_weight_update")
        found.append(tokens_of(engine, asked))
    return found


def engine_of(asked: dict[str, Any], **values: Any) -> LLM:
    return LLM(
        model=asked["directory"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=512,
        kv_cache_memory_bytes=KV_BYTES,
        **values,
    )


def tokens_of(engine: LLM, asked: dict[str, Any]) -> list[list[int]]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
