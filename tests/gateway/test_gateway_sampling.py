"""What a request says about sampling reaches the backend, and what it leaves open is filled in."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import httpx
import pytest
from gateway_double import MODEL_TOKENS_MAX, ScriptedBackend, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import examples
from livescale.gateway.contract.backend import ModelCard
from livescale.gateway.contract.schema import (
    HARMLESS,
    LOGIT_BIAS_MAX,
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
)
from livescale.gateway.endpoints.app import AppOptions, create_app
from livescale.gateway.requests.sampling import (
    GENERATIONS_MAX,
    RANGES,
    SEEDS,
    TEMPERATURE_LEAST,
)
from livescale.values.types import SamplingDefaults, SamplingParams

PROMPT = {"model": "tiny", "prompt": "x", "max_tokens": 5}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
served = settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
numbers = st.fixed_dictionaries(
    {},
    optional={name: st.floats(allowed.low, allowed.high) for name, allowed in RANGES.items()}
    | {
        "top_k": st.integers(1, 319),
        "seed": st.integers(0, SEEDS - 1),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(st.integers(2, 319), max_size=4, unique=True),
        "logit_bias": st.dictionaries(
            st.integers(0, 319).map(str), st.floats(-100, 100), max_size=4
        ),
    },
)


def sampling_of(
    http: httpx.Client, backend: ScriptedBackend, body: dict[str, object]
) -> SamplingParams:
    """What the backend is given for a request with one generation."""
    backend.streams.clear()
    endpoint = "chat/completions" if "messages" in body else "completions"
    response = http.post(f"/v1/{endpoint}", json=body)
    assert response.status_code == 200, response.text
    [stream] = backend.streams
    return stream.request.sampling


@given(said=numbers, is_chat=st.booleans())
@served
def test_parameters_reach_the_backend(
    said: dict[str, object], is_chat: bool, http: httpx.Client, backend: ScriptedBackend
) -> None:
    sampling = sampling_of(http, backend, {**(CHAT if is_chat else PROMPT), **said})
    expected = {name: allowed.neutral for name, allowed in RANGES.items()} | {"top_k": 0} | said
    if 0 < expected["temperature"] < TEMPERATURE_LEAST:  # type: ignore[operator]
        expected["temperature"] = TEMPERATURE_LEAST
    for name in (*RANGES, "top_k"):
        assert getattr(sampling, name) == expected[name], name
    if "seed" in said:
        assert sampling.seed == said["seed"]
    assert 0 <= sampling.seed < SEEDS
    assert sampling.output_tokens_max == 5
    assert sampling.output_tokens_min == said.get("min_tokens", 0)
    assert sampling.stop_token_ids == (1, *said.get("stop_token_ids", ()))  # type: ignore[misc]
    biases = said.get("logit_bias", {})
    assert isinstance(biases, dict)
    assert dict(sampling.logit_bias) == {int(key): bias for key, bias in biases.items()}
    assert sampling.logit_bias == tuple(sorted(sampling.logit_bias))


@pytest.mark.parametrize(("said", "expected"), [(-1, 0), (0, 0), (319, 319), (320, 0), (2**70, 0)])
def test_top_k_that_cuts_nothing_is_off(
    said: int, expected: int, http: httpx.Client, backend: ScriptedBackend
) -> None:
    assert sampling_of(http, backend, {**PROMPT, "top_k": said}).top_k == expected


def test_seeds(http: httpx.Client, backend: ScriptedBackend) -> None:
    def seeds(**said: object) -> list[int]:
        backend.streams.clear()
        http.post("/v1/completions", json={**PROMPT, "prompt": ["x", "x"], "n": 2, **said})
        return [stream.request.sampling.seed for stream in backend.streams]

    assert seeds(seed=7) == [7, 8, 7, 8]
    assert seeds(seed=SEEDS - 1) == [SEEDS - 1, 0] * 2
    assert seeds(seed=-2) == [SEEDS - 2, SEEDS - 1] * 2
    for unsaid in ({}, {"seed": None}, {"seed": -1}):
        first, again = seeds(**unsaid), seeds(**unsaid)
        assert len({*first, *again}) == 8, "a request without a seed gets fresh ones"


@pytest.mark.usefixtures("machine")
def test_the_models_defaults_fill_what_a_request_leaves_open(
    model_directory: Path, text_ids: list[int]
) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    card = ModelCard("tiny", MODEL_TOKENS_MAX, 0, (1,), model_directory, defaults)
    backend = ScriptedBackend((card,), text_ids)
    with running(backend) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        for body in (PROMPT, CHAT, {**PROMPT, "temperature": None, "top_k": None}):
            sampling = sampling_of(http, backend, body)
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
            assert (sampling.min_p, sampling.repetition_penalty) == (0, 1.1)
        said = {"temperature": 0, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
        sampling = sampling_of(http, backend, {**PROMPT, **said})
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
        assert sampling.repetition_penalty == 1


def test_defaults_that_cannot_be_sampled_are_refused_at_the_start(model_directory: Path) -> None:
    card = ModelCard("tiny", MODEL_TOKENS_MAX, 0, (1,), model_directory)
    card = dataclasses.replace(card, sampling_defaults=SamplingDefaults(top_p=1.5))
    with pytest.raises(ValueError, match=r"generation_config.*'tiny'.*top_p.*1\.5"):
        create_app(ScriptedBackend((card,), []), AppOptions("gw"))


@pytest.mark.parametrize("base", [PROMPT, CHAT])
@pytest.mark.parametrize(
    ("param", "value", "says"),
    [
        *((name, allowed.high + 0.1, str(allowed)) for name, allowed in RANGES.items()),
        *((name, allowed.low - 0.1, str(allowed)) for name, allowed in RANGES.items()),
        *((name, "1", "`str`") for name in RANGES),
        *((name, True, "`bool`") for name in RANGES),
        *((name, 10**400, "range") for name in RANGES),
        ("top_k", -2, "at least 1"),
        ("top_k", 1.5, "int"),
        ("seed", SEEDS, str(SEEDS - 1)),
        ("seed", -SEEDS - 1, str(-SEEDS)),
        ("seed", 0.5, "int"),
        ("n", 0, f"from 1 to {GENERATIONS_MAX}"),
        ("n", GENERATIONS_MAX + 1, f"from 1 to {GENERATIONS_MAX}"),
        ("n", True, "bool"),
        ("best_of", 2, "n (1)"),
        ("min_tokens", -1, "from 0"),
        ("min_tokens", 6, "from 0 to 5"),
        ("min_tokens", 2**70, "from 0 to 5"),
        ("stop", "", ">= 1"),
        ("stop", ["a", ""], ">= 1"),
        ("stop", "x" * (STOP_CHARS_MAX + 1), str(STOP_CHARS_MAX)),
        ("stop", ["x"] * (STOP_STRINGS_MAX + 1), str(STOP_STRINGS_MAX)),
        ("stop_token_ids", [5, 320], "320"),
        ("stop_token_ids", [-1], "-1"),
        ("stop_token_ids", [5] * (STOP_TOKEN_IDS_MAX + 1), str(STOP_TOKEN_IDS_MAX)),
        ("logit_bias", {"5": 101}, "from -100 to 100"),
        ("logit_bias", {"320": 1}, "vocabulary"),
        ("logit_bias", {"-5": 1}, "token ids"),
        ("logit_bias", {"the": 1}, "token ids"),
        ("logit_bias", {"²": 1}, "token ids"),
        ("logit_bias", {"1" * 5000: 1}, "token ids"),
        ("logit_bias", {str(i): 1 for i in range(LOGIT_BIAS_MAX + 1)}, str(LOGIT_BIAS_MAX)),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    base: dict[str, object],
    param: str,
    value: object,
    says: str,
    http: httpx.Client,
    backend: ScriptedBackend,
) -> None:
    endpoint = "chat/completions" if "messages" in base else "completions"
    response = http.post(f"/v1/{endpoint}", json={**base, param: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split("[")[0] == param
    assert says in error["message"]
    assert not backend.streams
    assert not backend.admitted, "refused before any work is done"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**PROMPT, "logprobs": 21}, "logprobs"),
        ({**PROMPT, "logprobs": -1}, "logprobs"),
        ({**PROMPT, "logprobs": True}, "logprobs"),
        ({**PROMPT, "top_logprobs": 1}, "top_logprobs"),
        ({**PROMPT, "echo": True, "logprobs": 1}, "echo"),
        ({**PROMPT, "continue_final_message": True}, "continue_final_message"),
        ({**CHAT, "logprobs": 1}, "logprobs"),
        ({**CHAT, "top_logprobs": 1}, "top_logprobs"),
        ({**CHAT, "logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "echo": True}, "echo"),
        (
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_an_endpoint_lacks_is_refused_by_name(
    body: dict[str, object], param: str, http: httpx.Client
) -> None:
    endpoint = "chat/completions" if "messages" in body else "completions"
    response = http.post(f"/v1/{endpoint}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_the_bounds_themselves_are_allowed(http: httpx.Client, backend: ScriptedBackend) -> None:
    body = {
        **PROMPT,
        "min_tokens": 5,
        "stop": ["x" * STOP_CHARS_MAX, *(chr(0x4E00 + i) for i in range(STOP_STRINGS_MAX - 1))],
        "stop_token_ids": list(range(STOP_TOKEN_IDS_MAX)),
        "logit_bias": {str(i): 100 for i in range(320)},
        "best_of": 1,
        "logprobs": 20,
    }
    assert sampling_of(http, backend, body).logprobs == 20


def test_every_parameter_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    bodies = (ChatBody, CompletionBody, EmbeddingBody)
    fields = {name for body in bodies for name in body.__struct_fields__}
    for name in sorted(fields | set(HARMLESS)):
        assert f"`{name}`" in page, name
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for name, allowed in RANGES.items():
        [row] = [row for row in rows if f"`{name}`" in row]
        assert f"{allowed.low:g} to {allowed.high:g}" in row
    for bound in (GENERATIONS_MAX, STOP_STRINGS_MAX, STOP_CHARS_MAX, STOP_TOKEN_IDS_MAX):
        assert any(re.search(rf"\b{bound}\b", row) for row in rows), bound
    assert f"up to {LOGIT_BIAS_MAX} token ids" in page


def test_min_tokens_against_the_default_maximum(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "x", "min_tokens": 17}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert error["param"] == "min_tokens"
    assert "16" in error["message"]
