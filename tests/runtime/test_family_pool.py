"""Every family through the HTTP API, with the official client, in one warm pool of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from family_bursts import entries_of, make_families, name_of
from pool_thread import LocalPool

from livescale.engine.files.make import FAMILY_NAMES, Preset
from livescale.engine.oracle import GreedyOracle

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.long]
VOCABULARY = 512
TOKENS = 40  # longer than a made model's window
LONG = "Tell me, at some length, how layers travel from host to host. " * 3
QUESTIONS = ("What is a chain?", LONG)
OURS = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = Preset(4, 64, 96, 4, 2, VOCABULARY)
    return make_families(tmp_path_factory.mktemp("family-pool"), sizes, seed=3)


@pytest.fixture(scope="module")
def client(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    first, scratch = next(iter(models.values())), tmp_path_factory.mktemp("pool")
    flags = {"workers": str(len(models)), "kv_bytes": "2MiB", "arena_bytes": "4MiB"}
    with LocalPool(first, scratch, entries_of(models), **flags) as pool:
        yield openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_completions(client: openai.OpenAI, models: dict[str, Path], family: str) -> None:
    prompts = [[(7 * i + 3) % VOCABULARY for i in range(tokens)] for tokens in (1, 30, 50)]
    oracle = GreedyOracle(models[family])
    for prompt in prompts:
        asked = {"model": name_of(family), "prompt": prompt, "max_tokens": TOKENS}
        whole = client.completions.create(**asked, temperature=0, extra_body=OURS)
        events = client.completions.create(**asked, temperature=0, stream=True, extra_body=OURS)
        streamed = [choice for event in events for choice in event.choices]
        token_ids = whole.choices[0].model_extra["token_ids"]
        assert [i for choice in streamed for i in choice.model_extra["token_ids"]] == token_ids
        assert "".join(choice.text for choice in streamed) == whole.choices[0].text
        assert len(token_ids) == TOKENS
        assert oracle.check(prompt, token_ids).wrong == ()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_chat(client: openai.OpenAI, models: dict[str, Path], family: str) -> None:
    oracle = GreedyOracle(models[family])
    for question in QUESTIONS:
        asked = {
            "model": name_of(family),
            "messages": [{"role": "user", "content": question}],
            "max_completion_tokens": TOKENS,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**asked, extra_body=OURS)
        events = client.chat.completions.create(**asked, stream=True, extra_body=OURS)
        text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
        assert text == whole.choices[0].message.content
        prompt_ids = whole.model_extra["prompt_token_ids"]
        token_ids = whole.choices[0].model_extra["token_ids"]
        assert len(token_ids) == TOKENS
        assert oracle.check(prompt_ids, token_ids).wrong == ()
