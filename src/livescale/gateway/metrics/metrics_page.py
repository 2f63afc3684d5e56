"""The page of /metrics: all counts and readings of the backend in Prometheus' text format.

One table lists what is exported, under which names. With vLLM's names each series that vLLM has,
too, is written a second time as vLLM writes it: `vllm:` for the prefix, the model in the label
`model_name`, and an `engine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from livescale.gateway.contract.backend import Reading
from livescale.gateway.metrics.metrics import FINISHED_REASONS, UNKNOWN_MODEL, Buckets, ModelCounts
from livescale.gateway.metrics.totals import Sums, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "livescale_"
VLLM_PREFIX = "vllm:"

HELP = {
    "requests": "Generation requests by outcome",
    "request_success": "Accepted requests by finished_reason: stop, length, abort or error",
    "prompt_tokens": "Prompt tokens of accepted requests",
    "generation_tokens": "Tokens generated",
    "time_to_first_token_seconds": "Time from the arrival of a request to its first token",
    "inter_token_latency_seconds": "Time between two consecutive tokens of a request",
    "e2e_request_latency_seconds": "Time from the arrival of a finished request to its last token",
    "request_queue_time_seconds": "Time that a request waited in the gateway for an instance",
    "slo_requests": "Requests by SLO (ttft, tbt, all) and by whether the request met it",
    "goodput_tokens": "Tokens of requests that met the whole SLO",
    "num_requests_waiting": "Requests that wait for an instance",
    "num_requests_running": "Requests that run on an instance",
    "waiting_prompt_tokens": "Prompt tokens of requests that wait for an instance",
    "kv_cache_usage_perc": "Share of the model's KV blocks in use, from 0 to 1",
    "kv_blocks": "KV blocks of the model's instances",
    "num_preemptions": "Preemptions: running requests that lost their KV blocks to other requests",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix index",
    "prefix_cache_hits": "Prompt tokens found in the prefix index, and not computed again",
    "handovers": "Batches handed over from another instance",
    "handover_bytes": "Bytes of hidden rows and KV of handed-over batches",
    "stage_arrivals": "Runs that arrived at a stage of the model",
    "stage_gap_seconds": "Time between two arrivals at an instance of the stage",
    "stage_gap_seconds_squared": "Sum of squared arrival gaps, for the variation of gaps (CV)",
    "stage_runs": "Completed Runs of a stage of the model",
    "stage_runs_merged": "Runs of a stage that were executed together with another Run",
    "stage_busy_seconds": "Time that Runs of a stage took on devices",
    "stage_wait_seconds": "Time that Runs waited at a stage before execution",
    "instances": "Instances by state and role",
    "model_problem": "1 while loads of the model fail, to devices or to host memory",
    "failed_loads": "Failed loads to devices and to host memory",
    "host_copies": "Complete copies of the model in host memory",
    "warm_spares": "Warm copies on devices that no instance uses",
    "warm_spare_bytes": "Bytes of warm copies on devices",
    "instance_starts": "Instance starts since the start of the controller",
    "warm_starts": "Warm starts: instance starts with parameters already on the device",
    "device_seconds": "Device time of the model's instances, loading included, summed over devices",
    "workers": "Registered workers",
    "workers_wanted": "Workers that the current load needs, registered or not",
    "agents": "Registered host agents",
    "record_open": "1 while the run record is written, 0 after a write error",
    "gateway_answers": "1 if the figures of this gateway are current, 0 if they are its last known",
}
"""Every family of the page: its name without prefix (and `_total`), and what it means."""
VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
)
"""The families that vLLM has under the same name and with the same meaning."""


class MetricsPage:
    """Writes the page anew each time it is asked for."""

    def __init__(self, totals: Totals, *, has_slo: bool, has_vllm_names: bool = False) -> None:
        """With figures of the SLO if it `has_slo`."""
        self._totals = totals
        self._has_slo = has_slo
        self._has_vllm_names = has_vllm_names

    async def text(self) -> bytes:
        """Everything, in the text format of CONTENT_TYPE.

        Many models make a long page: between two families tokens get their turn.
        """
        written = []
        for family in self._families(await self._totals.now()):
            written.append(generate_latest(_OneFamily(family)))
            await asyncio.sleep(0)
        return b"".join(written)

    def _families(self, sums: Sums) -> Iterator[Metric]:
        for family in chain(_counted(sums.models, self._has_slo), _read(sums.readings)):
            yield family
            if self._has_vllm_names and family.name.removeprefix(PREFIX) in VLLM_NAMES:
                yield _as_vllm(family)


class _OneFamily(CollectorRegistry):
    """What `generate_latest` writes."""

    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _counted(models: Mapping[str, ModelCounts], has_slo: bool) -> Iterator[Metric]:
    """The families of what gateways counted."""
    every = list(models.values())
    served = [counts for counts in every if counts.model != UNKNOWN_MODEL]
    requests = _counter("requests", "outcome")
    for counts in every:
        for outcome, number in counts.outcomes.items():
            requests.add_metric([counts.model, outcome], number)
    yield requests
    success = _counter("request_success", "finished_reason")
    for counts in served:
        for reason in dict.fromkeys(FINISHED_REASONS.values()):
            number = sum(counts.outcomes[o] for o, r in FINISHED_REASONS.items() if r == reason)
            success.add_metric([counts.model, reason], number)
    yield success
    yield _total("prompt_tokens", served, lambda counts: counts.prompt_tokens)
    yield _total("generation_tokens", served, lambda counts: counts.generation_tokens)
    yield _histogram("time_to_first_token_seconds", served, lambda counts: counts.first_token)
    yield _histogram("inter_token_latency_seconds", served, lambda counts: counts.inter_token)
    yield _histogram("e2e_request_latency_seconds", served, lambda counts: counts.request)
    yield _histogram("request_queue_time_seconds", served, lambda counts: counts.queue)
    if has_slo:
        slo = _counter("slo_requests", "slo", "met")
        for counts in served:
            for (part, is_met), number in counts.slo.items():
                slo.add_metric([counts.model, part, str(is_met).lower()], number)
        yield slo
        yield _total("goodput_tokens", served, lambda counts: counts.goodput_tokens)


def _counter(name: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, HELP[name], labels=("model", *labels))


def _total(
    name: str, models: list[ModelCounts], of: Callable[[ModelCounts], int]
) -> CounterMetricFamily:
    family = _counter(name)
    for counts in models:
        family.add_metric([counts.model], of(counts))
    return family


def _histogram(
    name: str, models: list[ModelCounts], of: Callable[[ModelCounts], Buckets]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(PREFIX + name, HELP[name], labels=("model",))
    for counts in models:
        buckets = of(counts)
        bounds = [*map(floatToGoString, buckets.bounds), "+Inf"]
        cumulative = list(zip(bounds, accumulate(buckets.counts), strict=True))
        family.add_metric([counts.model], cumulative, buckets.sum)
    return family


def _read(readings: Iterable[Reading]) -> Iterator[Metric]:
    """The families of the backend's readings, in the order of their names."""
    families: dict[str, Metric] = {}
    for reading in readings:
        name = reading.name.removesuffix("_total")
        family = families.get(name)
        if family is None:
            kind = GaugeMetricFamily if name == reading.name else CounterMetricFamily
            family = families[name] = kind(PREFIX + name, HELP[name])
        family.add_sample(PREFIX + reading.name, dict(reading.labels), reading.value)
    yield from (families[name] for name in sorted(families))


def _as_vllm(family: Metric) -> Metric:
    """The family as vLLM exports it."""
    prefix = len(PREFIX)
    twin = Metric(VLLM_PREFIX + family.name[prefix:], family.documentation, family.type)
    twin.samples = [_vllm_sample(sample, prefix) for sample in family.samples]
    return twin


def _vllm_sample(sample: Sample, prefix: int) -> Sample:
    labels = {"model_name" if key == "model" else key: text for key, text in sample.labels.items()}
    return Sample(VLLM_PREFIX + sample.name[prefix:], labels | {"engine": "0"}, sample.value)
