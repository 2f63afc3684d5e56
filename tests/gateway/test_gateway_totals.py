"""Counts of several gateways behind one port, added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import httpx
import msgspec
import pytest
from gateway_double import WAIT_S, ScriptedBackend, running
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from livescale.config.slo import SloAbsolute
from livescale.gateway.contract.backend import Reading
from livescale.gateway.metrics.kept_counts import KeptCounts, SiblingCounts
from livescale.gateway.metrics.metrics import FINISHED_REASONS, Metrics, ModelCounts

pytestmark = pytest.mark.usefixtures("machine")

SLO = SloAbsolute(ttft_ns=450_000_000, tbt_ns=150_000_000)
TINY = (("model", "tiny"),)

#: one request: at which of three gateways, how it ended, and the times between its tokens
requests_anywhere = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(sorted(FINISHED_REASONS)),
        st.lists(st.integers(0, 1000), max_size=6),
    ),
    max_size=12,
)


def serve_one(metrics: Metrics, outcome: str, gaps_ms: Sequence[int]) -> None:
    meter = metrics.meter("m", prompt_tokens=3, arrived_s=0.0)
    for at_ms in accumulate(gaps_ms):
        # Sums of binary fractions are the same in any order.
        meter.token(at_ms / 1024)
    meter.end(outcome, queued_s=None)


def sent(metrics: Metrics) -> KeptCounts:
    """As another process reads them."""
    kept = KeptCounts(tuple(counts.kept() for counts in metrics.models.values()))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=KeptCounts)


@given(requests_anywhere)
def test_sums_are_those_of_one_gateway_that_had_all_requests(
    requests: list[tuple[int, str, list[int]]],
) -> None:
    single, parts = Metrics(["m"], SLO), [Metrics(["m"], SLO) for _ in range(3)]
    for number, outcome, gaps_ms in requests:
        serve_one(single, outcome, gaps_ms)
        serve_one(parts[number], outcome, gaps_ms)
    summed = ModelCounts("m")
    for part in parts:
        [kept] = [kept for kept in sent(part).models if kept.model == "m"]
        summed.add(kept)
    assert summed.kept() == single.models["m"].kept()


@given(requests_anywhere, st.booleans())
def test_a_successor_counts_on(
    requests: list[tuple[int, str, list[int]]], is_offered_later: bool
) -> None:
    """Also where it learns of a model only when it serves already."""
    single, life = Metrics(["m"], SLO), Metrics(["m"], SLO)
    for number, outcome, gaps_ms in requests:
        if number == 0:
            life = Metrics([] if is_offered_later else ["m"], SLO, sent(life).models)
            life.keep(["m"])
        serve_one(single, outcome, gaps_ms)
        serve_one(life, outcome, gaps_ms)
    assert life.models["m"].kept() == single.models["m"].kept()


class ScriptedSiblings:
    """Another gateway, whose counts a test writes down."""

    name = "0"

    def __init__(self, counts: KeptCounts, answers: bool = True) -> None:
        self.other = SiblingCounts("1", counts, answers)
        self.kept: list[KeptCounts] = []
        self.before = KeptCounts()

    def earlier(self) -> KeptCounts:
        return self.before

    def answer_with(self, own: Callable[[], KeptCounts]) -> None:
        self.own = own

    async def others(self, own: KeptCounts) -> list[SiblingCounts]:
        self.kept.append(own)
        return [self.other]


def of_other(tokens: int) -> KeptCounts:
    metrics = Metrics(["tiny", "unknown here"])
    for model in ("tiny", "unknown here"):
        meter = metrics.meter(model, prompt_tokens=2, arrived_s=0.0)
        for token in range(tokens):
            meter.token(token / 1024)
        meter.end("stop", queued_s=None)
    readings = [
        Reading("num_requests_running", 5, TINY, is_own=True),
        Reading("num_requests_running", 9, (("model", "unknown here"),), is_own=True),
    ]
    return KeptCounts(sent(metrics).models, tuple(readings))


class OwnReadings(ScriptedBackend):
    def readings(self) -> list[Reading]:
        return [*super().readings(), Reading("num_requests_running", 2, TINY, is_own=True)]


def page_of(client: httpx.Client) -> dict[str, float]:
    """Samples of the one model, or of none."""
    return {
        sample.name + sample.labels.get("gateway", ""): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.labels.get("model", "tiny") == "tiny" and "le" not in sample.labels
    }


def test_the_page_adds_what_is_each_gateways_own(shared_backend: ScriptedBackend) -> None:
    backend = OwnReadings(shared_backend.models(), [5, 6, 7])
    siblings = ScriptedSiblings(of_other(tokens=10))
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
    with (
        running(backend, siblings=siblings, is_local=True) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client,
    ):
        assert client.post("/v1/completions", json=body).status_code == 200
        page = page_of(client)
        usage = client.get("/admin/models/tiny").json()["usage"]
        siblings.other = SiblingCounts("1", of_other(tokens=10), answers=False)
        later = page_of(client)
        assert siblings.own() == siblings.kept[-1]
    assert page["livescale_generation_tokens_total"] == 4 + 10
    assert page["livescale_prompt_tokens_total"] == 2 + 2
    assert page["livescale_inter_token_latency_seconds_count"] == 3 + 9
    assert page["livescale_num_requests_running"] == 2 + 5
    assert page["livescale_instances"] == 2
    assert page["livescale_num_preemptions_total"] == 7
    assert (page["livescale_gateway_answers0"], page["livescale_gateway_answers1"]) == (1, 1)
    assert usage["generation_tokens"] == 4 + 10
    assert (later["livescale_gateway_answers0"], later["livescale_gateway_answers1"]) == (1, 0)
    assert later["livescale_generation_tokens_total"] == 4 + 10
    # What is shown was kept before.
    [kept] = [kept for kept in siblings.kept[0].models if kept.model == "tiny"]
    assert kept.generation_tokens == 4


def test_the_page_begins_where_the_process_before_left_it(shared_backend: ScriptedBackend) -> None:
    siblings = ScriptedSiblings(KeptCounts())
    siblings.before = of_other(tokens=10)
    with (
        running(shared_backend, siblings=siblings) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False) as client,
    ):
        page = page_of(client)
    assert page["livescale_generation_tokens_total"] == 10
    # Its requests have ended with it.
    assert "livescale_num_requests_running" not in page
