"""`timed_profile`: how long timed workers take, from a file or from the roofline."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from livescale.clusters.profiles import AttentionPoint, LinearPoint, OpProfile, write_profile
from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.config.reading import load_config
from livescale.latency.roofline import RooflineLatency
from livescale.latency.shapes import PRESETS
from livescale.latency.table import TableLatency
from livescale.latency.work import LinearLatency, RunWork
from livescale.runtime.models.timed_latency import latency
from livescale.runtime.wire.boot import WorkerBoot

PROFILE = OpProfile(
    linear=tuple(LinearPoint("cpu", "m", 1, n, {"all": 1000 + 10 * n}) for n in (1, 64)),
    attention=tuple(AttentionPoint("cpu", "decode", 1, n, 2, 1, 64, 5 * n) for n in (16, 256)),
    layers=4,
)


def pool(tmp_path: Path, **settings: str) -> PoolConfig:
    return load_config(None, [str(tmp_path)], {}, {"device": "timed", **settings})


def test_a_line_in_two_numbers(tmp_path: Path) -> None:
    config = pool(tmp_path, timed_profile="linear:300:2")
    assert latency(config) == LinearLatency(300_000, 2_000)


def test_a_file_of_measurements(tmp_path: Path) -> None:
    write_profile(tmp_path / "here.csv", PROFILE)
    (tmp_path / "pool.yaml").write_text("device: timed\ntimed_profile: here.csv\n")
    config = load_config(tmp_path / "pool.yaml", [str(tmp_path)], {}, {})
    model = latency(config)
    assert model == TableLatency.measured(PROFILE)
    # Four layers: one token through the linear layers, and attention to 256.
    assert model.run_ns(RunWork((), 1, 256, 1)) == 4 * (1010 + 5 * 256)


def test_the_roofline_of_a_known_model(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text("device: timed\ntimed_profile: roofline:h100:llama-2-7b\n")
    config = load_config(tmp_path / "pool.yaml", [str(tmp_path)], {}, {})
    assert latency(config) == RooflineLatency.of("h100", PRESETS["llama-2-7b"])


def test_every_kind_of_latency_reaches_a_worker(tmp_path: Path) -> None:
    write_profile(tmp_path / "here.csv", PROFILE)
    for text in ("roofline:a100:llama-3-8b", str(tmp_path / "here.csv")):
        model = latency(pool(tmp_path, timed_profile=text))
        line = msgspec.json.encode(model)
        field = next(f for f in msgspec.structs.fields(WorkerBoot) if f.name == "latency")
        assert msgspec.json.decode(line, type=field.type) == model


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("roofline:a100", "timed_profile: 'roofline:a100' is not roofline:ACCELERATOR:MODEL"),
        ("linear:300", "timed_profile: 'linear:300' is not linear:RUN_US:TOKEN_US"),
        ("linear:1.5:2", "is not linear:RUN_US:TOKEN_US"),
        ("roofline:a100:gpt", "with one of the models llama-7b, "),
        ("roofline:abacus:llama-3-8b", "timed_profile: unknown accelerator 'abacus'"),
        ("none.csv", r"timed_profile: none\.csv: cannot be read"),
    ],
)
def test_bad_profiles_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        latency(pool(tmp_path, timed_profile=text))


def test_a_profile_of_several_models_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    other = LinearPoint("cpu", "other", 1, 1, {"all": 1})
    write_profile(path, OpProfile((*PROFILE.linear, other), layers=4))
    with pytest.raises(ConfigError, match=rf"timed_profile: {path}: .* this one has 2"):
        latency(pool(tmp_path, timed_profile=str(path)))


def test_other_devices_take_the_time_that_they_take(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"timed_profile requires device timed\. The device is cpu"
    ):
        pool(tmp_path, device="cpu", timed_profile="roofline:a100:llama-3-8b")
