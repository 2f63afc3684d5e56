"""What the gateway counts, per model. How the page is written stands in `metrics_page.py`.

Everything is counted and read on the gateway's event loop, in plain integers: a token costs well
under a microsecond. Labels take only names of served models: clients must not be able to create
time series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from livescale.config.slo import SloAbsolute
from livescale.gateway.contract.errors import ApiError
from livescale.gateway.metrics.kept_counts import KeptBuckets, KeptModel

UNKNOWN_MODEL = ""

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4),
    *(0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06),
    *(0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
REQUEST_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)

FINISHED_REASONS = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "failed": "error",
    "timeout": "error",
}
"""Outcomes of accepted requests, and the words vLLM has for them."""
REFUSALS = ("rejected", "unavailable")
"""Outcomes of requests that were not accepted: the client's fault (4xx), or the pool's (503)."""
SLO_PARTS = ("ttft", "tbt", "all")


class Buckets:
    """How many values lie in each interval; a bound belongs to the interval below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def kept(self) -> KeptBuckets:
        return KeptBuckets(tuple(self.counts), self.sum)

    def add_kept(self, kept: KeptBuckets) -> None:
        """Those that were counted elsewhere come to these."""
        assert len(kept.counts) == len(self.counts), "both have the same bounds"
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, kept.counts, strict=True)]
        self.sum += kept.sum


class ModelCounts:
    """All that is counted of one model."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.outcomes = dict.fromkeys((*FINISHED_REASONS, *REFUSALS), 0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.first_token = Buckets(FIRST_TOKEN_BUCKETS_S)
        self.inter_token = Buckets(INTER_TOKEN_BUCKETS_S)
        self.request = Buckets(REQUEST_BUCKETS_S)
        self.queue = Buckets(REQUEST_BUCKETS_S)
        #: (part of the SLO, was it met) -> requests
        self.slo = {(part, is_met): 0 for part in SLO_PARTS for is_met in (True, False)}
        self.goodput_tokens = 0

    @property
    def ended(self) -> int:
        """Accepted requests that are over, however they ended."""
        return sum(self.outcomes[outcome] for outcome in FINISHED_REASONS)

    def judged(self, is_ttft_met: bool, is_tbt_met: bool) -> None:
        """A request's times are known."""
        self.slo["ttft", is_ttft_met] += 1
        self.slo["tbt", is_tbt_met] += 1
        self.slo["all", is_ttft_met and is_tbt_met] += 1

    def kept(self) -> KeptModel:
        """All of it, as it is now."""
        return KeptModel(
            model=self.model,
            outcomes=dict(self.outcomes),
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            goodput_tokens=self.goodput_tokens,
            first_token=self.first_token.kept(),
            inter_token=self.inter_token.kept(),
            request=self.request.kept(),
            queue=self.queue.kept(),
            slo={part: (self.slo[part, True], self.slo[part, False]) for part in SLO_PARTS},
        )

    def add(self, kept: KeptModel) -> None:
        """What was counted of the model elsewhere comes to this."""
        for outcome, number in kept.outcomes.items():
            self.outcomes[outcome] += number
        self.prompt_tokens += kept.prompt_tokens
        self.generation_tokens += kept.generation_tokens
        self.goodput_tokens += kept.goodput_tokens
        self.first_token.add_kept(kept.first_token)
        self.inter_token.add_kept(kept.inter_token)
        self.request.add_kept(kept.request)
        self.queue.add_kept(kept.queue)
        for part, (met, missed) in kept.slo.items():
            self.slo[part, True] += met
            self.slo[part, False] += missed


class CountedRefusal:
    """See `Metrics.counting_rejections`. `model` is whose the request is."""

    __slots__ = ("_metrics", "model")

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self.model = model

    def __enter__(self) -> CountedRefusal:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ApiError):
            outcome = "unavailable" if error.status == 503 else "rejected"
            self._metrics.request_refused(self.model, outcome)


class Metrics:
    """The counts of one application, which go on from `earlier` ones. `slo` None: nothing is
    judged."""

    def __init__(
        self,
        models: Iterable[str],
        slo: SloAbsolute | None = None,
        earlier: Iterable[KeptModel] = (),
    ) -> None:
        self.slo = slo
        self._earlier = {kept.model: kept for kept in earlier}
        self.models = {model: self._begun(model) for model in (UNKNOWN_MODEL, *models)}

    def keep(self, models: Iterable[str]) -> None:
        """Count these models from now on. What was counted of others is dropped."""
        names = dict.fromkeys((UNKNOWN_MODEL, *models))
        self.models = {name: self.models.get(name) or self._begun(name) for name in names}

    def request_refused(self, model: str, outcome: str) -> None:
        """A request was not accepted: `outcome` is one of REFUSALS."""
        counts = self._of(model)
        counts.outcomes[outcome] += 1
        if self.slo is not None and outcome == "unavailable" and model != UNKNOWN_MODEL:
            # Or a pool could reach its objective by refusing.
            counts.judged(False, False)

    def counting_rejections(self, model: str) -> CountedRefusal:
        """An ApiError raised inside is counted as a refused request, of the model that is named
        by then."""
        return CountedRefusal(self, model)

    def meter(self, model: str, prompt_tokens: int, arrived_s: float) -> TokenMeter:
        """A meter for one accepted request that arrived at `arrived_s`."""
        counts = self._of(model)
        counts.prompt_tokens += prompt_tokens
        return TokenMeter(counts, self.slo, arrived_s)

    def _begun(self, model: str) -> ModelCounts:
        counts, earlier = ModelCounts(model), self._earlier.pop(model, None)
        if earlier is not None:
            counts.add(earlier)
        return counts

    def _of(self, model: str) -> ModelCounts:
        # A model may have gone while a request to it was being read.
        return self.models.get(model, self.models[UNKNOWN_MODEL])


class TokenMeter:
    """Measures one request: its tokens as they come, and its end."""

    __slots__ = ("_arrived_s", "_counts", "_first_s", "_last_s", "_slo", "tokens")

    def __init__(self, counts: ModelCounts, slo: SloAbsolute | None, arrived_s: float) -> None:
        self._counts = counts
        self._slo = slo
        self._arrived_s = arrived_s
        self._first_s = self._last_s = arrived_s
        self.tokens = 0

    def token(self, now_s: float) -> None:
        """One more token has come."""
        counts = self._counts
        if self.tokens:
            counts.inter_token.add(now_s - self._last_s)
        else:
            counts.first_token.add(now_s - self._arrived_s)
            self._first_s = now_s
        counts.generation_tokens += 1
        self._last_s = now_s
        self.tokens += 1

    def end(self, outcome: str, queued_s: float | None) -> None:
        """The request is over; `outcome` is one of FINISHED_REASONS. Called once.

        `queued_s` is how long it waited for an instance, None if none took it. A finished request
        ended with its last token: how fast the client reads is not the pool's latency.
        """
        counts = self._counts
        counts.outcomes[outcome] += 1
        if queued_s is not None:
            counts.queue.add(queued_s)
        is_finished = outcome in ("stop", "length")
        if is_finished:
            counts.request.add(self._last_s - self._arrived_s)
        # Why a client left is not known: neither met nor missed.
        if self._slo is not None and outcome != "cancelled":
            self._judge(self._slo, is_finished)

    def _judge(self, slo: SloAbsolute, is_finished: bool) -> None:
        ttft_ns = _ns(self._first_s - self._arrived_s) if self.tokens else None
        gaps = self.tokens - 1
        tbt_mean_ns = _ns(self._last_s - self._first_s) // gaps if gaps > 0 else None
        is_ttft_met = slo.is_ttft_met(ttft_ns)
        is_tbt_met = is_finished and slo.is_tbt_met(tbt_mean_ns)
        self._counts.judged(is_ttft_met, is_tbt_met)
        if is_ttft_met and is_tbt_met:
            self._counts.goodput_tokens += self.tokens


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
