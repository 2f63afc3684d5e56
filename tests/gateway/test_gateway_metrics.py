"""What is counted, against a slow recount; and the page, as scrapers and dashboards read it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import httpx
import pytest
from gateway_double import EMBEDDING_SIZE, WAIT_S, LocalServer, ScriptedBackend, running
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from livescale.config.slo import RequestTiming, SloAbsolute
from livescale.gateway.contract.backend import GenerationFailed
from livescale.gateway.metrics.metrics import (
    FINISHED_REASONS,
    REFUSALS,
    SLO_PARTS,
    Buckets,
    Metrics,
    ModelCounts,
)
from livescale.gateway.metrics.metrics_page import HELP, PREFIX, VLLM_NAMES, VLLM_PREFIX

pytestmark = pytest.mark.usefixtures("machine")

SLO = SloAbsolute(ttft_ns=450_000_000, tbt_ns=150_000_000)
MS = 1_000_000
Key = tuple[str, frozenset[tuple[str, str]]]

#: one request: how it ended, and the times between its tokens, the first after its arrival
request_times = st.tuples(
    st.sampled_from(sorted(FINISHED_REASONS)), st.lists(st.integers(0, 1000), max_size=8)
)


@given(st.lists(request_times, max_size=8))
def test_counts_are_those_of_the_requests(requests: list[tuple[str, list[int]]]) -> None:
    """The judgement is the run record's own: the same rule over the same times."""
    metrics = Metrics(["m"], SLO)
    for outcome, gaps_ms in requests:
        meter = metrics.meter("m", prompt_tokens=3, arrived_s=0.0)
        for at_ms in accumulate(gaps_ms):
            meter.token(at_ms / 1e3)
        meter.end(outcome, queued_s=None)
    counts = metrics.models["m"]
    every = [gap_ms for _, gaps_ms in requests for gap_ms in gaps_ms[1:]]
    assert counts.prompt_tokens == 3 * len(requests)
    assert counts.generation_tokens == sum(len(gaps_ms) for _, gaps_ms in requests)
    assert_buckets(counts.first_token, [gaps_ms[0] for _, gaps_ms in requests if gaps_ms])
    assert_buckets(counts.inter_token, every)
    finished = [gaps_ms for outcome, gaps_ms in requests if outcome in ("stop", "length")]
    assert_buckets(counts.request, [sum(gaps_ms) for gaps_ms in finished])
    for outcome in FINISHED_REASONS:
        assert counts.outcomes[outcome] == sum(known == outcome for known, _ in requests)
    judged = [timing(*request) for request in requests if request[0] != "cancelled"]
    met = [timing for timing in judged if SLO.is_met(timing)]
    assert counts.slo["all", True] == len(met)
    assert counts.goodput_tokens == sum(len(timing.token_ns) for timing in met)
    for part in SLO_PARTS:
        assert counts.slo[part, True] + counts.slo[part, False] == len(judged)
        assert counts.slo[part, True] >= counts.slo["all", True]


def timing(outcome: str, gaps_ms: list[int]) -> RequestTiming:
    token_ns = tuple(at_ms * MS for at_ms in accumulate(gaps_ms))
    return RequestTiming("r", 0, 0, token_ns, 0, outcome in ("stop", "length"))


def assert_buckets(buckets: Buckets, values_ms: list[int]) -> None:
    """As Prometheus defines them: a bucket's bound is inclusive."""
    assert buckets.sum == pytest.approx(sum(values_ms) / 1e3)
    for bound, number in zip(buckets.bounds, accumulate(buckets.counts), strict=False):
        # A millisecond has no exact float: differences of such may fall just beside a bound.
        below = sum(value / 1e3 < bound - 1e-9 for value in values_ms)
        assert below <= number <= sum(value / 1e3 <= bound + 1e-9 for value in values_ms)
    assert sum(buckets.counts) == len(values_ms)


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    buckets = Buckets((0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 1.0, 2.0):
        buckets.add(value)
    assert buckets.counts == [2, 2, 1]


def test_refusals_of_the_pool_miss_the_slo_and_those_of_clients_do_not() -> None:
    metrics = Metrics(["m"], SLO)
    for outcome in REFUSALS:
        metrics.request_refused("m", outcome)
    assert metrics.models["m"].slo == {
        (part, is_met): int(not is_met) for part in SLO_PARTS for is_met in (True, False)
    }


@pytest.mark.parametrize("name", ["first_token", "inter_token", "request", "queue"])
def test_buckets_are_fine_below_one_second(name: str) -> None:
    bounds = getattr(ModelCounts("m"), name).bounds
    assert list(bounds) == sorted(set(bounds))
    assert sum(bound < 1 for bound in bounds) >= 10


# -- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin_server(shared_backend: ScriptedBackend) -> Iterator[LocalServer]:
    with running(shared_backend, slo=SLO, has_vllm_metrics=True) as server:
        yield server


@pytest.fixture
def client(twin_server: LocalServer, backend: ScriptedBackend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=twin_server.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


def samples(client: httpx.Client) -> dict[Key, float]:
    """Every series of the page; the parser refuses a page that is not one."""
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    assert len({family.name for family in families}) == len(families)
    rows = [sample for family in families for sample in family.samples]
    series = {(row.name, frozenset(row.labels.items())): row.value for row in rows}
    assert len(series) == len(rows), "a series stands twice"
    return series


def key(name: str, **labels: str) -> Key:
    return (name, frozenset(labels.items()))


def test_a_finished_request_is_everywhere(client: httpx.Client) -> None:
    before = samples(client)
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 8, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200
    after = samples(client)

    def added(name: str, **labels: str) -> float:
        at = key(f"livescale_{name}", model="tiny", **labels)
        return after[at] - before[at]

    assert added("requests_total", outcome="length") == 1
    assert added("request_success_total", finished_reason="length") == 1
    assert added("prompt_tokens_total") == 2
    assert added("generation_tokens_total") == added("goodput_tokens_total") == 8
    assert added("time_to_first_token_seconds_count") == 1
    assert added("inter_token_latency_seconds_count") == 7
    assert added("e2e_request_latency_seconds_count") == 1
    assert added("request_queue_time_seconds_bucket", le="0.2") == 0
    assert added("request_queue_time_seconds_bucket", le="0.3") == 1  # 0.25 s, says the double
    for part in SLO_PARTS:
        assert added("slo_requests_total", slo=part, met="true") == 1


@pytest.mark.parametrize(
    ("then", "outcome", "reason"), [(GenerationFailed("lost"), "failed", "error")]
)
def test_a_failed_request_misses_the_slo(
    then: Exception, outcome: str, reason: str, client: httpx.Client, backend: ScriptedBackend
) -> None:
    before = samples(client)
    backend.script.token_ids, backend.script.then = [], then
    assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).is_error
    after = samples(client)
    for at in (
        key("livescale_requests_total", model="tiny", outcome=outcome),
        key("livescale_request_success_total", model="tiny", finished_reason=reason),
        key("livescale_slo_requests_total", model="tiny", slo="all", met="false"),
    ):
        assert after[at] == before[at] + 1


def test_an_embedding_that_is_not_finite_misses_the_slo(
    client: httpx.Client, backend: ScriptedBackend
) -> None:
    backend.script.embedding = struct.pack(f"<{EMBEDDING_SIZE}f", *[math.nan] * EMBEDDING_SIZE)
    before = samples(client)
    assert client.post("/v1/embeddings", json={"model": "tiny", "input": "x"}).is_error
    after = samples(client)
    missed = key("livescale_slo_requests_total", model="tiny", slo="all", met="false")
    goodput = key("livescale_goodput_tokens_total", model="tiny")
    assert after[missed] == before[missed] + 1
    assert after[goodput] == before[goodput]


def test_vllms_names_show_the_same_figures(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    page = samples(client)
    own, twins = {}, {}
    for (name, labels), value in page.items():
        if name.startswith(VLLM_PREFIX):
            assert ("engine", "0") in labels
            twins[name.removeprefix(VLLM_PREFIX), labels - {("engine", "0")}] = value
        else:
            renamed = {("model_name" if k == "model" else k, v) for k, v in labels}
            own[name.removeprefix(PREFIX), frozenset(renamed)] = value
    assert twins
    assert twins.items() <= own.items()
    stems = {name for name, _ in twins}
    for name in ("num_preemptions_total", "kv_cache_usage_perc", "request_success_total"):
        assert name in stems  # as vLLM spells them
    assert not any(name.startswith("slo_") for name in stems)


def test_without_compatibility_there_are_no_names_of_vllm(http: httpx.Client) -> None:
    page = samples(http)
    assert not any(name.startswith(VLLM_PREFIX) for name, _ in page)
    assert not any("slo" in name or "goodput" in name for name, _ in page)  # no SLO was given


def test_histograms_are_cumulative_and_end_with_all(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
    rows: dict[Key, list[tuple[float, float]]] = {}
    page = samples(client)
    for (name, labels), value in page.items():
        if name.endswith("_bucket"):
            [bound] = [text for label, text in labels if label == "le"]
            at = (name.removesuffix("_bucket"), labels - {("le", bound)})
            rows.setdefault(at, []).append((float(bound), value))
    assert rows
    for (name, labels), buckets in rows.items():
        counts = [count for _, count in sorted(buckets)]
        assert all(lower <= higher for lower, higher in pairwise(counts))
        assert sorted(buckets)[-1] == (float("inf"), page[f"{name}_count", labels])


def test_the_page_does_not_grow_with_requests(client: httpx.Client) -> None:
    before = set(samples(client))
    for number in range(5):
        body = {"model": f"made-up-{number}", "prompt": "x"}
        client.post("/v1/completions", json=body)
        client.post("/v1/completions", json={**body, "model": "tiny"})
    assert set(samples(client)) == before


def test_every_family_has_a_meaning(client: httpx.Client) -> None:
    families = text_string_to_metric_families(client.get("/metrics").text)
    stems = {family.name.removeprefix(PREFIX).removeprefix(VLLM_PREFIX) for family in families}
    assert stems <= set(HELP)
    assert set(VLLM_NAMES) <= set(HELP)


def test_the_document_has_every_family_with_its_type_and_labels(client: httpx.Client) -> None:
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = {row[0].removesuffix("_total"): row for row in map(cells, document.splitlines()) if row}
    assert set(rows) == set(HELP)
    for family in text_string_to_metric_families(client.get("/metrics").text):
        stem = family.name.removeprefix(PREFIX)
        if family.name.startswith(PREFIX) and stem in HELP:
            labels = {label for row in family.samples for label in row.labels} - {"le"}
            assert rows[stem][1] == family.type
            # Instances have a role and a state, too, but those of the double have none.
            assert labels == set(filter(None, rows[stem][2].split(", "))) - {"role", "state"}
    twins = {stem: row[4] for stem, row in rows.items() if row[4]}
    assert twins == {stem: VLLM_PREFIX + rows[stem][0] for stem in VLLM_NAMES}


def cells(line: str) -> list[str]:
    """Name, type, labels, meaning and vLLM's name, for a row of the table of families."""
    found = [cell.strip().strip("`") for cell in line.split("|")]
    return found[1:-1] if len(found) == 7 and line.startswith("| `") else []


def test_probes_with_head(client: httpx.Client) -> None:
    for path in ("/metrics", "/health", "/live", "/version", "/ping", "/v1/models"):
        answer = client.head(path)
        assert answer.status_code == 200
        assert not answer.content
