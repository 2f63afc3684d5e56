"""What the gateway counts, in Prometheus' text format.

Each application has its own registry, so that several can live in one process. Labels take only
names of served models: clients must not be able to create time series.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from livescale.gateway.backend import Backend
from livescale.gateway.errors import ApiError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "livescale_"
UNKNOWN_MODEL = ""

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    *(0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06),
    *(0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)


class Metrics:
    """Counters and histograms of one application, and the backend's gauges."""

    def __init__(self, backend: Backend) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            PREFIX + "requests",
            "Generation requests by how they ended",
            ("model", "outcome"),
            registry=self._registry,
        )
        self._prompt = Counter(
            PREFIX + "prompt_tokens",
            "Prompt tokens of accepted requests",
            ("model",),
            registry=self._registry,
        )
        self._generated = Counter(
            PREFIX + "generation_tokens",
            "Tokens generated",
            ("model",),
            registry=self._registry,
        )
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "Time from the arrival of a request to its first token",
            ("model",),
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._inter_token = Histogram(
            PREFIX + "inter_token_latency_seconds",
            "Time between two consecutive tokens of a request",
            ("model",),
            buckets=INTER_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_BackendGauges(backend))

    def request_ended(self, model: str, outcome: str) -> None:
        """`outcome`: stop, length, cancelled, failed, rejected (4xx) or unavailable (503)."""
        self._requests.labels(model, outcome).inc()

    @contextmanager
    def counting_rejections(self, model: str) -> Iterator[None]:
        """An ApiError raised inside is counted as a rejected request."""
        try:
            yield
        except ApiError:
            self.request_ended(model, "rejected")
            raise

    def meter(self, model: str, prompt_tokens: int, arrived_s: float) -> TokenMeter:
        """A meter for one accepted request that arrived at `arrived_s`."""
        self._prompt.labels(model).inc(prompt_tokens)
        return TokenMeter(
            self._generated.labels(model),
            self._first_token.labels(model),
            self._inter_token.labels(model),
            arrived_s,
        )

    def text(self) -> bytes:
        """Everything, in the text format of CONTENT_TYPE."""
        return generate_latest(self._registry)


class TokenMeter:
    """Measures one request's tokens as they come."""

    def __init__(
        self, generated: Counter, first: Histogram, between: Histogram, arrived_s: float
    ) -> None:
        self._generated = generated
        self._first = first
        self._between = between
        self._last_s = arrived_s
        self.tokens = 0

    def token(self, now_s: float) -> None:
        """One more token has come."""
        histogram = self._between if self.tokens else self._first
        histogram.observe(now_s - self._last_s)
        self._generated.inc()
        self._last_s = now_s
        self.tokens += 1


class _BackendGauges(Collector):
    """Asks the backend at each scrape; its names may carry labels (`instances{model="m"}`)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> list[Metric]:
        return []  # the names are the backend's; asking for them here would ask it at start

    def collect(self) -> Iterator[Metric]:
        lines = [f"{PREFIX}{key} {value}" for key, value in sorted(self._backend.gauges().items())]
        gauges: dict[str, GaugeMetricFamily] = {}
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name not in gauges:
                    title = sample.name.removeprefix(PREFIX).replace("_", " ")
                    gauges[sample.name] = GaugeMetricFamily(sample.name, title)
                gauges[sample.name].add_sample(sample.name, sample.labels, sample.value)
        yield from gauges.values()
