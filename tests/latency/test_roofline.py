"""The roofline: steps as Runs, monotone, the published times, predictions to the nanosecond."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from works import are_steps_of_single_runs, larger, works

from livescale.latency.accelerators import ACCELERATORS
from livescale.latency.models import AnyLatency
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.latency.work import RunWork

PREDICTIONS = Path(__file__).parent / "predictions.csv"

models = st.builds(
    lambda kind, name, tp_size: RooflineLatency.of(kind, PRESETS[name], tp_size),
    st.sampled_from(sorted(ACCELERATORS)),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([1, 2, 4, 8]),
)


# -- properties -----------------------------------------------------------------------------------


@given(
    model=models,
    decodes=st.integers(1, 512),
    context=st.integers(1, 32_768),
    steps=st.integers(0, 30),
)
def test_steps_take_as_long_as_their_runs(
    model: RooflineLatency, decodes: int, context: int, steps: int
) -> None:
    assert are_steps_of_single_runs(model, decodes, context, steps)


@given(
    model=models,
    work=works(),
    tokens=st.integers(1, 4096),
    context=st.integers(1, 4096),
    decodes=st.integers(1, 64),
)
def test_more_work_is_never_faster(
    model: RooflineLatency, work: RunWork, tokens: int, context: int, decodes: int
) -> None:
    run_ns = model.run_ns(work)
    assert run_ns > 0
    for more in larger(work, tokens, context, decodes):
        assert model.run_ns(more) >= run_ns, more


@given(model=models, work=works())
def test_a_model_that_was_written_down_says_the_same(model: RooflineLatency, work: RunWork) -> None:
    written = msgspec.json.encode(model)
    again = msgspec.json.decode(written, type=AnyLatency)
    assert again == model
    assert msgspec.json.encode(again) == written
    assert again.run_ns(work) == model.run_ns(work)


# -- the published figures ------------------------------------------------------------------------


def decode_ms(name: str, tp_size: int, batch: int, kind: str = "a100") -> float:
    model = RooflineLatency.of(kind, PRESETS[name], tp_size)
    return model.run_ns(RunWork((), batch, 1024 * batch, batch)) / 1e6


def prefill_ms(name: str, tp_size: int, tokens: int, kind: str = "a100") -> float:
    model = RooflineLatency.of(kind, PRESETS[name], tp_size)
    return model.run_ns(RunWork(((tokens, 0),), sampled=1)) / 1e6


@pytest.mark.parametrize(
    ("name", "tp_size", "alone_ms", "of_64_ms"),
    [
        ("llama-3-8b", 1, 12.8, 20.1),
        ("mistral-24b", 2, 18.5, 24.7),
        ("qwen2.5-72b", 4, 29.3, 38.2),
    ],
)
def test_published_times_between_tokens(
    name: str, tp_size: int, alone_ms: float, of_64_ms: float
) -> None:
    assert decode_ms(name, tp_size, 1) == pytest.approx(alone_ms, abs=0.06)
    assert decode_ms(name, tp_size, 64) == pytest.approx(of_64_ms, abs=0.06)


def test_published_prefills() -> None:
    assert prefill_ms("llama-3-8b", 1, 2000) == pytest.approx(144, rel=0.01)
    assert prefill_ms("qwen2.5-72b", 4, 2000) == pytest.approx(401, rel=0.01)
    # Tokens per second of a prefill of 2048: 14.8k, 13.9k, 8.8k and 5.0k.
    rates = {("llama-2-7b", 1): 14.8, ("llama-3-8b", 1): 13.9}
    rates |= {("mistral-24b", 2): 8.8, ("qwen2.5-72b", 4): 5.0}
    for (name, tp_size), thousand_tokens_per_s in rates.items():
        rate = 2048 / prefill_ms(name, tp_size, 2048)
        assert rate == pytest.approx(thousand_tokens_per_s, rel=0.01), name


def test_a_slower_bus_is_all_that_the_export_versions_have() -> None:
    for kind, alias in (("a100", "a800"), ("h100", "h800")):
        assert decode_ms("llama-3-8b", 1, 8, alias) == decode_ms("llama-3-8b", 1, 8, kind)
        assert prefill_ms("qwen2.5-72b", 4, 2000, alias) > prefill_ms("qwen2.5-72b", 4, 2000, kind)


# -- refusals -------------------------------------------------------------------------------------


def test_what_is_not_known_is_refused_by_name() -> None:
    shape = PRESETS["qwen2.5-72b"]
    with pytest.raises(ValueError, match="unknown accelerator 'a200'"):
        RooflineLatency.of("a200", shape)
    with pytest.raises(ValueError, match="cut into 3 ranks"):
        RooflineLatency.of("a100", shape, 3)
    with pytest.raises(ValueError, match="no all-reduce of 16 ranks"):
        RooflineLatency.of("a100", shape, 16)


# -- fifty predictions ----------------------------------------------------------------------------

_SERVED = (
    *(("a100", "llama-3-8b", 1), ("a800", "qwen2.5-72b", 4), ("h100", "mistral-24b", 2)),
    *(("h800", "llama-2-13b", 1), ("h200", "llama-2-70b", 8)),
)
_WORKS = (
    *("1x1x1", "64x1024x64", "256x300x256"),
    *("1+0;;1", "2048+0;;1", "512+3584;;0", "300+0,700+100;;2"),
    *("500+0;8x900;9", "2048+0;32x2000;33", "12000+0;;1"),
)


def test_the_predictions_are_those_written_down() -> None:
    with PREDICTIONS.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 50
    assert written == list(predictions())


def predictions() -> Iterator[dict[str, str]]:
    """Works are "chunk+before,…;decodes x context;sampled", or "decodes x context x sampled"."""
    for (kind, name, tp_size), text in product(_SERVED, _WORKS):
        model = RooflineLatency.of(kind, PRESETS[name], tp_size)
        yield {
            "accelerator": kind,
            "model": name,
            "tp": str(tp_size),
            "work": text,
            "run_ns": str(model.run_ns(_work(text))),
        }


def _work(text: str) -> RunWork:
    if ";" not in text:
        decodes, context, sampled = map(int, text.split("x"))
        return RunWork((), decodes, decodes * context, sampled)
    chunks, decoding, sampling = text.split(";")
    pairs = [chunk.split("+") for chunk in chunks.split(",")]
    decodes, context = map(int, decoding.split("x")) if decoding else (0, 0)
    prefills = tuple((int(new), int(before)) for new, before in pairs)
    return RunWork(prefills, decodes, decodes * context, int(sampling))
