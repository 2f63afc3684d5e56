"""`bench attacks`, short: its figures are there, and nothing breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from livescale.bench.attacks import GATEWAY_BYTES_MAX, RATIO_MAX, AttackFigures
from livescale.cli.main import main

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
