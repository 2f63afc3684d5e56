"""What benchmarks and tests of pools read off a page of metrics, or cannot."""

from __future__ import annotations

import asyncio

import pytest

from livescale.gateway.contract.backend import Reading
from livescale.gateway.metrics.metrics import Metrics
from livescale.gateway.metrics.metrics_page import HELP, MetricsPage
from livescale.gateway.metrics.totals import Sums
from livescale.lab.bench.base.errors import BenchError
from livescale.lab.bench.base.made_models import gauge_sum

STATES = ("loading", "serving")


class Amounts:
    """What a page shows of two models, or of none."""

    def __init__(self, *models: str) -> None:
        self._models = models

    async def now(self) -> Sums:
        readings = [Reading("workers", 4)]
        for model in self._models:
            label = ("model", model)
            readings += [
                Reading("instances", 1 + (state == "serving"), (label, ("state", state)))
                for state in STATES
            ]
            readings.append(Reading("handovers_total", 5, (label,)))
        return Sums(Metrics(self._models, None).models, readings)


def page(*models: str) -> str:
    shown = MetricsPage(Amounts(*models), has_slo=False)  # type: ignore[arg-type]
    return asyncio.run(shown.text()).decode()


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        ("livescale_workers", 4),
        ("livescale_instances", 6),
        ('livescale_instances{model="a",state="serving"}', 2),
        ('livescale_instances{model="gone",state="serving"}', 0),
        ("livescale_handovers_total", 10),
        ("livescale_prompt_tokens_total", 0),
        ("livescale_record_open", 0),  # no record is written: the page has nothing of it
    ],
)
def test_samples_are_added_up(name: str, amount: float) -> None:
    assert gauge_sum(page("a", "b"), name) == amount


@pytest.mark.parametrize(
    "name",
    [
        "livescale_requests_running",
        "livescale_",
        "workers",
        "livescale_workers_total",
        "livescale_handovers",
        "livescale_time_to_first_token_seconds",
        'livescale_instances{model="a",stat="serving"}',
        'livescale_instances{model="a"}',
        "vllm:num_requests_runing",
    ],
)
def test_a_name_that_no_page_has_is_an_error_and_not_zero(name: str) -> None:
    with pytest.raises(BenchError, match=name.partition("{")[0]):
        gauge_sum(page("a", "b"), name)


def test_what_a_page_without_models_does_not_show_is_zero() -> None:
    """So it is before the controller's first word, and when the last model has left."""
    nothing = page()
    for stem in ("instances", "num_requests_running", "handovers_total"):
        assert stem.removesuffix("_total") in HELP
        assert gauge_sum(nothing, f"livescale_{stem}") == 0
    assert "# TYPE livescale_prompt_tokens_total counter\n" in nothing
    assert gauge_sum(nothing, "livescale_prompt_tokens_total") == 0
    with pytest.raises(BenchError):
        gauge_sum(nothing, "livescale_requests_running")
