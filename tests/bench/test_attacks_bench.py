"""`bench attacks`, short: its figures are there, and nothing breaks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from livescale.lab.bench.attacks.attacks import (
    GATEWAY_BYTES_MAX,
    RATIO_MAX,
    AttackFigures,
    AttacksReport,
)
from livescale.lab.bench.attacks.broken_models import BrokenWay
from livescale.lab.bench.attacks.poison import POISON, attribute
from livescale.lab.bench.attacks.poison_prompts import POISON_PROMPTS
from livescale.lab.bench.attacks.poison_report import BrokenFigures, PoisonFigures, PromptFigures
from livescale.main import main
from livescale.telemetry.history.reading import Loss

SHORT = ("--rounds", "1", "--seconds", "1")
NAMES = ("completion of 8 MiB", "500,000 members", "240,000 messages", "trailers", "do not end")


@pytest.mark.usefixtures("machine")
@pytest.mark.long
def test_attacks_are_measured_beside_a_light_client(tmp_path: Path) -> None:
    """Whether the bounds are kept in so short a time is the machine's matter."""
    file = tmp_path / "figures.json"
    chosen = [word for name in NAMES for word in ("--attack", name)]
    status = main(["bench", "attacks", *SHORT, *chosen, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures.keys() >= {"machine", "versions", "command", "attack_rate", "light_rate"}
    attacks = figures["attacks"]
    assert len(attacks) == len(NAMES) + 1  # heads and bodies that do not end
    for attack in attacks:
        assert attack["p99_ratio"] > 0, attack
        assert attack["gateway_bytes"] <= GATEWAY_BYTES_MAX, attack
        assert attack["http_5xx"] == attack["light_failed"] == 0, attack
        assert attack["offered_per_s"] > 0, attack
    assert status == int(any(attack["p99_ratio"] > RATIO_MAX for attack in attacks))


def test_an_unknown_attack_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attacks", "--attack", "politeness"]) != 0
    assert "politeness" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "is_within"),
    [
        ({}, True),
        ({"beside_ns": [100, 201]}, False),
        ({"gateway_bytes": GATEWAY_BYTES_MAX + 1}, False),
        ({"statuses": {"503": 1}}, False),
        ({"light_5xx": 1}, False),
        ({"failed": 1}, False),
    ],
)
def test_what_is_within_the_bounds(changed: dict[str, object], is_within: bool) -> None:
    figures = AttackFigures("x", 1, alone_ns=[50, 100], beside_ns=[100, 200])
    for name, value in changed.items():
        setattr(figures, name, value)
    assert figures.is_within is is_within


@pytest.mark.usefixtures("machine")
@pytest.mark.long
def test_poison_prompts_and_broken_models_beside_streams(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    few = ("--streams", "4", "--poison-prompts", str(len(POISON_PROMPTS)), "--broken-models", "1")
    status = main(["bench", "attacks", "--attack", POISON, *few, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["attacks"] == []
    poison = figures["poison"]
    assert status == 0, poison
    assert poison["stream_requests"] >= poison["streams"] == 4
    assert poison["prompts"] == len(POISON_PROMPTS)
    assert poison["tokens"] > 0 == poison["wrong_tokens"]
    assert all(sum(kind["answers"].values()) == 1 for kind in poison["by_prompt"])
    changed, configured = poison["by_model"]
    for model in (changed, configured):
        assert model["answers"].keys() == {"503 load_failed"}, model
        assert model["failed_loads"] > 0 == model["workers_lost"], model
    assert changed["published"] == "201"
    assert "checksum" in changed["words"]
    assert "Padding_idx" in configured["words"]


def poison_figures() -> PoisonFigures:
    """All is within its bounds."""
    broken = BrokenFigures("b", BrokenWay.PUBLISHED, "201", Counter({"503 load_failed": 4}))
    broken.losses = ["worker w2.0: died", "worker w2.1: died"]
    return PoisonFigures(
        streams=2,
        requests=4,
        prompts=[PromptFigures("p", Counter({"400 foreign_token": 3}))],
        models=[broken],
        workers=4,
        workers_wanted=4,
    )


def lost_to_a_prompt(figures: PoisonFigures) -> None:
    figures.losses.append("worker w0.0: died")


def ended_early(figures: PoisonFigures) -> None:
    figures.errors.append("StreamError: status 500")


def answered_wrongly(figures: PoisonFigures) -> None:
    figures.prompts[0].wrong = 1


def lost_to_a_model(figures: PoisonFigures) -> None:
    figures.models[0].losses.append("worker w3.0: died")


def never_answered(figures: PoisonFigures) -> None:
    figures.models[0].answers["closed"] += 1


def wrong_token(figures: PoisonFigures) -> None:
    figures.wrong_tokens = 1


def not_back(figures: PoisonFigures) -> None:
    figures.workers = 3


def no_stream(figures: PoisonFigures) -> None:
    figures.requests = 0


def test_two_workers_may_be_lost_to_a_broken_model() -> None:
    figures = poison_figures()
    assert figures.is_within
    assert AttacksReport({}, (), figures).is_good
    assert "out of bounds" not in figures.text()


@pytest.mark.parametrize(
    "spoil",
    [
        *(lost_to_a_prompt, ended_early, answered_wrongly, lost_to_a_model, never_answered),
        *(wrong_token, not_back, no_stream),
    ],
)
def test_what_is_out_of_bounds_with_poison(spoil: Callable[[PoisonFigures], None]) -> None:
    figures = poison_figures()
    spoil(figures)
    assert not figures.is_within
    assert not AttacksReport({}, (), figures).is_good
    assert "out of bounds" in figures.text()


def test_a_loss_belongs_to_what_came_last() -> None:
    figures = PoisonFigures(streams=1)
    figures.models = [BrokenFigures(name, BrokenWay.PUBLISHED) for name in ("first", "second")]
    losses = [
        Loss(at_ns, member, "died")
        for at_ns, member in ((50, "worker w0.0"), (100, "worker w1.0"), (199, "worker w2.0"))
    ]
    attribute(figures, [100, 200], [*losses, Loss(300, "controller", "a further life")])
    assert figures.losses == ["worker w0.0: died"]
    assert figures.models[0].losses == ["worker w1.0: died", "worker w2.0: died"]
    assert figures.models[1].losses == []
