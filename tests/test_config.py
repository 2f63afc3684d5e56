"""Configuration: precedence, strictness, and messages that name what and where."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from livescale.batching.contract.live_order import LIVE_ORDERS
from livescale.common.settings import ConfigError, parse_schedule
from livescale.config.automatic import AUTOMATIC
from livescale.config.model import (
    MODEL_SETTINGS,
    ModelConfig,
    RoleReplicas,
    RolesConfig,
    check_stages_given,
)
from livescale.config.pool import GROUPS, SETTINGS, PoolConfig
from livescale.config.reading import (
    add_flags,
    changed_model,
    checked_model,
    given_flags,
    load_config,
    load_given,
    settings_help,
)
from livescale.config.settings.tuning import Tuning
from livescale.runtime.layout.pool_layout import local_layout
from livescale.runtime.models.catalog import (
    controller_config,
    live_limits,
    live_over_ns,
    model_policy,
)
from livescale.runtime.models.scaling_settings import model_scaling, pool_scaling
from livescale.runtime.wire.protocol import CatalogEntry
from livescale.values.scaling_policies import (
    Bounds,
    Period,
    RoleLimits,
    SloAim,
    StagesByQueue,
    TargetOngoing,
)
from livescale.values.types import Manifest, ModelSpec, Role, StageOf
from made_config import made_config
from settings_table import settings_table_markdown

TOPOLOGY = """
hosts:
  - {name: "a{n}", count: 2, leaf: l0, devices: [{nic: 1Gbit}]}
"""
BY_NAME = {setting.name: setting for setting in SETTINGS}


def loaded(
    text: str | None = None,
    tmp_path: Path | None = None,
    models: tuple[str, ...] = ("/models/tiny",),
    environ: dict[str, str] | None = None,
    **flags: object,
) -> PoolConfig:
    path = None
    if text is not None:
        assert tmp_path is not None
        path = tmp_path / "pool.yaml"
        path.write_text(text)
    if environ is None:
        return made_config(path, list(models), flags)
    return load_config(path, list(models), environ, flags)


def message(*arguments: object, **options: object) -> str:
    with pytest.raises(ConfigError) as raised:
        loaded(*arguments, **options)  # type: ignore[arg-type]
    return str(raised.value)


# -- the table ------------------------------------------------------------------------------------


def test_every_field_but_models_is_a_setting_with_help() -> None:
    others = {"models", *Tuning.__struct_fields__}
    assert [s.name for s in SETTINGS] == [
        f.name for f in msgspec.structs.fields(PoolConfig) if f.name not in others
    ]
    assert [s.name for s in MODEL_SETTINGS] == [f.name for f in msgspec.structs.fields(ModelConfig)]
    kinds = ("int", "str", "mapping")
    assert all(s.about.help and s.type in kinds for s in SETTINGS + MODEL_SETTINGS)


def test_defaults_pass_their_own_checks() -> None:
    config = loaded()
    for setting in SETTINGS:
        assert getattr(config, setting.name) == setting.default
        assert (setting.default is None) <= setting.is_optional
    assert loaded(**{s.name: s.default for s in SETTINGS}) == config


def test_documentation_names_every_setting() -> None:
    table = settings_table_markdown()
    for setting in SETTINGS:
        assert f"| `{setting.name}` | `{setting.variable}` |" in table
    for setting in MODEL_SETTINGS:
        assert f"| `{setting.name}` |" in table
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert widths == {7, 6}
    assert table.count("| auto |") == 6, "four settings are chosen; two have auto as their value"


def test_live_orders_are_those_of_the_batcher() -> None:
    assert set(BY_NAME["live_order"].about.choices) < set(LIVE_ORDERS)


def test_how_short_a_load_must_be_to_be_waited_for() -> None:
    assert live_over_ns(loaded()) == 100_000_000
    assert live_over_ns(loaded(slo="ttft=450ms,tbt=150ms")) == 112_500_000
    assert live_over_ns(loaded(slo="ttft=450ms", live_over_ms=0)) == 0


def test_a_pool_scales_by_bounds_a_target_or_an_aim() -> None:
    """The aim is the SLO's unless another is set; the other bounds hold with it. Without any it
    follows from the length of Runs."""
    bounds = pool_scaling(loaded(scaling_policy="bounds"))
    assert isinstance(bounds, Bounds)
    assert bounds.scale_down_timeout_ns == 333_000_000
    free = pool_scaling(loaded(run_tokens_max="256"))
    assert isinstance(free, SloAim)
    assert (free.ttft_ns, free.run_tokens_max, free.scale_down_timeout_ns) == (None, 256, 10**8)
    by_slo = {"slo": "ttft=450ms,tbt=150ms"}
    aim = pool_scaling(loaded(**by_slo, kv_upper_percent=80, scale_down_timeout_ms="5"))
    assert isinstance(aim, SloAim)
    assert (aim.ttft_ns, aim.scale_down_timeout_ns) == (450_000_000, 5_000_000)
    assert aim.room.kv_upper_permille == 800
    other = pool_scaling(loaded(**by_slo, ttft_aim_ms=200, floor_decay_ms=7))
    assert isinstance(other, SloAim)
    assert (other.ttft_ns, other.floor_decay_ns) == (200_000_000, 7_000_000)
    assert isinstance(pool_scaling(loaded(**by_slo, target_ongoing_requests=2)), TargetOngoing)


def test_stages_scale_by_their_queues_where_that_is_configured() -> None:
    """Models without stages scale as the pool's others do, and a target wins."""
    stage = ModelSpec("m/0", (1,) * 4, 1, 64, stage=StageOf("m", 0, 2, 0))
    model = ModelConfig(name="m", path="somewhere", stages=2, max_stage_replicas=7)
    by_stages = loaded(scaling_policy="stages", slo="ttft=450ms,tbt=150ms", stage_period_ms=500)
    found = model_scaling(by_stages, model, stage)
    assert isinstance(found, StagesByQueue)
    assert (found.slo_ns, found.period_ns, found.replicas_total) == (450 * 10**6, 5 * 10**8, 7)
    assert found.scale_down_timeout_ns == 3 * 10**9
    assert not found.is_uniform
    whole = model_scaling(loaded(scaling_policy="pipelines"), model, stage)
    assert isinstance(whole, StagesByQueue)
    assert whole.is_uniform
    assert whole.slo_ns is None
    assert model_scaling(by_stages, model, msgspec.structs.replace(stage, stage=None)) is None
    assert model_scaling(loaded(), model, stage) is None
    assert isinstance(pool_scaling(by_stages), SloAim)
    targeted = msgspec.structs.replace(model, target_ongoing_requests=2)
    assert isinstance(model_scaling(by_stages, targeted, stage), TargetOngoing)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"max_stage_replicas": 4}, "max_stage_replicas requires stages"),
        ({"stages": 4, "max_stage_replicas": 3}, "above max_stage_replicas 3"),
        ({"stage_profile": "times.csv"}, "stage_profile requires stages"),
        (
            {"stage_spans": "0-3 3-6", "stage_profile": "times.csv"},
            "stage_profile has no effect with stage_spans",
        ),
    ],
)
def test_totals_that_cannot_be_are_refused(given: dict[str, object], problem: str) -> None:
    model = msgspec.convert({"name": "m", "path": "somewhere", **given}, ModelConfig)
    with pytest.raises(ConfigError, match=problem):
        check_stages_given(model, 16, "model m: ")


def test_live_work_is_bounded_as_configured() -> None:
    limits = live_limits(loaded(live_batches_max=3, live_gap_ms=7, run_tokens_max="256"))
    assert (limits.batches_max, limits.batch_tokens_max, limits.gap_ns) == (3, 256, 7_000_000)
    assert limits.move_factor == 0
    assert live_limits(loaded(live_migration="move")).move_factor > 0


# -- precedence -----------------------------------------------------------------------------------


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    text = "port: 1\nworkers: 5\nlease_ms: 600"
    environ = {"LIVESCALE_PORT": "2", "LIVESCALE_WORKERS": "7", "PATH": "x", "LIVESCALE_DATA": "y"}
    config = loaded(text, tmp_path, environ=environ, port="3")
    assert (config.port, config.workers, config.lease_ms, config.gateways) == (3, 7, 600, 1)


def test_models_of_the_command_line_join_those_of_the_file(tmp_path: Path) -> None:
    text = (
        "models:\n  - path: a\n    name: first\n    max_replicas: 2\n  - sub/b/\n  - path: /abs/c\n"
    )
    config = loaded(text, tmp_path, models=("rel/d",), workers=4)
    assert [(m.name, m.path) for m in config.models] == [
        ("first", str(tmp_path / "a")),
        ("b", str(tmp_path / "sub/b")),
        ("c", "/abs/c"),
        ("d", "rel/d"),
    ]
    assert [m.max_replicas for m in config.models] == [2, None, None, None]


def test_none_can_be_said_everywhere(tmp_path: Path) -> None:
    text = "host_memory_bytes: 1MB\nkv_bytes: 1MB\nrecord: r.jsonl"
    config = loaded(text, tmp_path, environ={"LIVESCALE_HOST_MEMORY_BYTES": "none"}, record="None")
    assert config.host_memory_bytes is None
    assert config.kv_bytes == 1_000_000
    assert config.record is None
    assert loaded("host_memory_bytes: null", tmp_path).host_memory_bytes is None


def test_flags_are_made_from_the_table() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_path", nargs="*")
    add_flags(parser, {"workers": "auto"})
    arguments = parser.parse_args(["m", "--arena-bytes", "512MiB", "--port", "9", "--record", "r"])
    assert given_flags(arguments) == {"arena_bytes": "512MiB", "port": "9", "record": "r"}
    config = loaded(**given_flags(arguments))
    assert (config.arena_bytes, config.port, config.record) == (512 << 20, 9, "r")
    shown = parser.format_help()
    common = {setting.name for setting in SETTINGS if setting.about.is_common}
    assert [s.flag in shown for s in SETTINGS] == [s.name in common for s in SETTINGS]
    whole = settings_help({"workers": "auto"}, is_whole=True)
    assert all(setting.flag in whole for setting in SETTINGS)
    assert "Worker processes of this node, one per device (auto)" in shown
    assert "gets a worker. (default: auto)" in whole


def test_there_are_few_settings_and_each_is_in_a_group() -> None:
    grouped = [setting for group in GROUPS.values() for setting in group]
    assert sorted(setting.name for setting in grouped) == sorted(BY_NAME)
    assert len(BY_NAME) <= 45
    assert sum(setting.about.is_common for setting in SETTINGS) <= 20


@pytest.mark.parametrize("name", Tuning.__struct_fields__)
def test_what_is_no_setting_is_refused_with_what_replaces_it(tmp_path: Path, name: str) -> None:
    """In a file, a variable and a flag; code may give it."""
    variable = f"LIVESCALE_{name.upper()}"
    problems = [
        message(f"{name}: 1", tmp_path),
        message(environ={variable: "1"}),
        message(environ={}, **{name: "1"}),
    ]
    for problem in problems:
        assert f"{name} is no longer a setting. " in problem
    assert problems[0].startswith(str(tmp_path / "pool.yaml"))
    value = getattr(Tuning(), name)
    assert getattr(loaded(**{name: value}), name) == value
    tuned = loaded(f"tuning: {json.dumps({name: value})}", tmp_path)
    assert tuned == loaded()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tuning: 3", "tuning must be a mapping of keys to values, not 3"),
        ("tuning: {chunk_byte: 3}", "tuning: unknown key 'chunk_byte' (nearest known: 'chunk_byt"),
        ("tuning: {stall_ms: many}", "tuning: Expected `int`, got `str` - at `$.stall_ms`"),
        ("tuning: {port: 3}", "tuning: unknown key 'port'"),
        ("tuning: {chunk_bytes: 0}", "tuning: Expected `int` >= 4096 - at `$.chunk_bytes`"),
        ("tuning: {chunk_bytes: 3 parsecs}", "tuning.chunk_bytes is '3 parsecs'. Write bytes as"),
        ("tuning: {drain: of course}", "tuning: Invalid enum value 'of course' - at `$.drain`"),
    ],
)
def test_mistakes_in_what_a_measurement_varies_are_named(
    tmp_path: Path, text: str, words: str
) -> None:
    assert words in message(text, tmp_path)


def test_config_survives_encoding() -> None:
    config = loaded()
    assert msgspec.json.decode(msgspec.json.encode(config), type=PoolConfig) == config


# -- amounts of bytes -----------------------------------------------------------------------------


@given(st.integers(1, 1023), st.sampled_from(["K", "M", "G"]))
def test_binary_and_decimal_units(number: int, prefix: str) -> None:
    power = "KMG".index(prefix) + 1
    environ = {"LIVESCALE_HOST_MEMORY_BYTES": f"{number}{prefix}iB"}
    assert loaded(environ=environ).host_memory_bytes == number * 1024**power
    assert loaded(host_memory_bytes=f"{number + 2} {prefix}B").host_memory_bytes == (
        (number + 2) * 1000**power
    )


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1.5GiB", 3 << 29), ("2000000", 2_000_000), ("2000000B", 2_000_000), ("1536k", 1_536_000)],
)
def test_amounts_in_a_file(tmp_path: Path, text: str, amount: int) -> None:
    assert loaded(f"arena_bytes: {text}", tmp_path).arena_bytes == amount


@pytest.mark.parametrize("text", ["1Gbit", "lots", "-1MiB", "1 000", "'1MiB '' '", "1e9"])
def test_other_amounts_are_refused(tmp_path: Path, text: str) -> None:
    assert "arena_bytes" in message(f"arena_bytes: {text}", tmp_path)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ["unknown setting 'prot'", "nearest known: 'port'"]),
        ("model: []", ["unknown setting 'model'", "'models'"]),
        ("1: 2", ["unknown setting '1'"]),
        ("port: http", ["port must be a whole number, not 'http'"]),
        ("port: '80'", ["port must be a whole number, not '80'"]),
        ("port: 1.5", ["port must be a whole number, not 1.5"]),
        ("port: yes", ["port must be a whole number, not yes or no"]),
        ("port: null", ["port must be a whole number, not nothing"]),
        ("port: [1]", ["port must be a whole number, not a list"]),
        ("port: 65536", ["port is 65536, above the largest value 65535"]),
        ("workers: -1", ["workers is -1, below the least value 0"]),
        ("host: 5", ["host must be text, not 5"]),
        ("host: ''", ["host is empty"]),
        ("log_level: loud", ["log_level is 'loud', not one of debug, info, warning, error"]),
        ("arena_bytes: 1.0000001KiB", ["not a whole number of bytes"]),
        ("port: 1\nport: 2", ["line 2, column 1: 'port' is repeated"]),
        ("port: [1", ["line 1"]),
        ("a: b: c", ["line 1, column 5"]),
        ("- port", ["the file must be a mapping of keys to values, not a list"]),
        ("port: 2024-13-45", ["month must be in 1..12"]),
        ("models: tiny", ["models must be a list, not 'tiny'"]),
        ("models: [5]", ["models[0] must be a mapping", "not 5"]),
        ("models: [{name: a}]", ["models[0]: path is missing"]),
        ("models: [{path: a, min_replica: 1}]", ["models[0].", "'min_replica'", "'min_replicas'"]),
        ("models: [{path: a, max_replicas: 0}]", ["models[0].max_replicas is 0, below"]),
        ("models: [{path: a, kv_blocks: x}]", ["models[0].kv_blocks must be a whole number"]),
    ],
)
def test_mistakes_in_a_file_are_named_with_the_file(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    problem = message(text, tmp_path)
    assert problem.startswith(str(tmp_path / "pool.yaml"))
    for word in words:
        assert word in problem


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"token_rate_lower_percent": 91},
            "token_rate_lower_percent is 91, above token_rate_upper_percent 90",
        ),
        ({"prefill_queue_upper_ms": 499}, "prefill_queue_lower_ms is 500, above"),
        ({"kv_upper_percent": 74}, "kv_lower_percent is 75, above kv_upper_percent 74"),
        ({"chunk_bytes": 2 << 20, "arena_bytes": "1MiB"}, "chunk_bytes is 2097152, above arena"),
        ({"sequences_max": 129}, "sequences_max is 129, above run_tokens_max 128"),
        ({"gateways": 0}, "gateways is 0, below the least value 1"),
        ({"gateways": 65}, "gateways is 65, above the largest value 64"),
        (
            {"gateways": 3, "queue_requests_max": 2},
            "gateways is 3, above queue_requests_max 2",
        ),
        ({"port": "many"}, "port must be a whole number, not 'many'"),
        ({"port": ""}, "port must be a whole number, not ''"),
        ({"record": ""}, "record is empty"),
        ({"workers": 0}, "workers is 0 and nodes cannot join"),
        ({"token_file": "t"}, "token_file requires `listen`"),
        ({"listen": "somewhere"}, "listen is 'somewhere'. Write ADDRESS:PORT"),
        ({"listen": "example.org:1"}, "example.org is an invalid IP address"),
        ({"listen": "[::]:7000"}, "Give one address of this machine"),
        ({"workerz": 1}, "unknown setting 'workerz' (nearest known: 'workers')"),
    ],
)
def test_contradictions_and_bad_flags_are_named(flags: dict[str, object], words: str) -> None:
    assert words in message(**flags)


def roles(keys: str, more: str = "idle_s: 60") -> str:
    return f"[{{path: a, {more}, roles: {{{keys}}}}}]"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("[{path: a, max_replicas: 4}]", "a: max_replicas is 4, above workers 3"),
        ("[{path: a, min_replicas: 4}]", "a: min_replicas is 4, above workers 3"),
        (
            "[{path: a, min_replicas: 3, max_replicas: 2}]",
            "a: min_replicas is 3, above max_replicas 2",
        ),
        ("[{path: a, schedule: at noon}]", "a: schedule: 'at noon' is not a valid period"),
        (
            "[{path: a, schedule: '08:00-25:00 min=1 max=2'}]",
            "schedule: '08:00-25:00 min=1 max=2' has",
        ),
        ("[{path: a, schedule: '08:00-09:00 min=3 max=2'}]", "min 3 <= max 2"),
        (roles("prefill: {}"), "models[0].roles: decode is missing"),
        (roles("decode: {}"), "models[0].roles: prefill is missing"),
        (roles("prefill: {}, decode: {}, encode: {}"), "roles: unknown setting 'encode' (nearest"),
        (roles("prefill: {}, decode: {min: 1}"), "roles: decode: unknown setting 'min' (nearest"),
        # Both roles have the same ranks: nothing says that they have others.
        (roles("prefill: {tp: 2}, decode: {}"), "roles: prefill: unknown setting 'tp' (nearest"),
        (roles("prefill: {}, decode: {max_replicas: 0}"), "decode: max_replicas is 0, below"),
        (roles("prefill: {}, decode: 2"), "roles: decode must be a mapping of keys to values"),
        ("[{path: a, roles: both}]", "models[0].roles must be a mapping of keys to values, not"),
        (
            roles("prefill: {}, decode: {}", "schedule: '08:00-20:00 min=2 max=3'"),
            "a: schedule and roles are both set",
        ),
        (
            roles("prefill: {}, decode: {}", "min_replicas: 1"),
            "models[0]: min_replicas and roles are both set",
        ),
        (
            roles("prefill: {}, decode: {}", "max_replicas: 3"),
            "models[0]: max_replicas and roles are both set",
        ),
        (
            roles("prefill: {min_replicas: 0}, decode: {}"),
            "a: roles: min_replicas is 0 for prefill and 1 for decode. Set both",
        ),
        (
            roles("prefill: {max_replicas: 4}, decode: {}"),
            "a: roles: prefill: max_replicas is 4, above workers 3",
        ),
        (
            roles("prefill: {}, decode: {min_replicas: 2, max_replicas: 1}"),
            "a: roles: decode: min_replicas is 2, above max_replicas 1",
        ),
        (
            roles("prefill: {min_replicas: 2}, decode: {min_replicas: 2}"),
            "a: roles: prefill and decode need at least 4 instances, above workers 3",
        ),
        (
            "[b, c, {path: a, roles: {prefill: {}, decode: {}}}]",
            "min_replicas add up to 4, above workers 3",
        ),
        ("[x/a, y/a]", "'a' names both"),
        ("[a, b, c, d]", "min_replicas add up to 4, above workers 3"),
        ("[]", "models: no model"),
        ("[/]", "models: '/' has no folder name"),
    ],
)
def test_contradictions_of_models_are_named(tmp_path: Path, models: str, words: str) -> None:
    assert words in message(f"models: {models}", tmp_path, models=())


def test_roles_have_limits_of_their_own(tmp_path: Path) -> None:
    text = "models: " + roles("prefill: {max_replicas: 1}, decode: {min_replicas: 2}")
    [model] = loaded(text, tmp_path, models=()).models
    assert model.roles == RolesConfig(
        prefill=RoleReplicas(min_replicas=1, max_replicas=1),
        decode=RoleReplicas(min_replicas=2, max_replicas=None),
    )
    assert model.instances_min == 3
    config = loaded(text, tmp_path, models=())
    assert checked_model(model, config) == model
    changes = {"roles": {"prefill": {}, "decode": {"max_replicas": 2}}}
    changed = changed_model(model, changes, config)
    assert changed.roles == RolesConfig(prefill=RoleReplicas(), decode=RoleReplicas(max_replicas=2))
    assert msgspec.structs.replace(changed, roles=model.roles) == model


def test_a_running_model_neither_gets_nor_loses_its_roles(tmp_path: Path) -> None:
    config = loaded("models: " + roles("prefill: {}, decode: {}"), tmp_path, models=())
    [split] = config.models
    one = msgspec.structs.replace(split, roles=None)
    for model, changes, words in (
        (split, {"roles": None}, "roles are fixed when a model is published"),
        (
            one,
            {"roles": {"prefill": {}, "decode": {}}},
            "roles are fixed when a model is published",
        ),
        (split, {"min_replicas": 1}, "min_replicas and roles are both set"),
        (split, {"schedule": "08:00-20:00 min=2 max=3"}, "schedule and roles are both set"),
    ):
        with pytest.raises(ConfigError, match=words):
            changed_model(model, changes, config)


def test_roles_without_a_most_share_the_workers(tmp_path: Path) -> None:
    text = "models: " + roles("prefill: {}, decode: {min_replicas: 2, max_replicas: 3}")
    config = loaded(text, tmp_path, models=(), workers=6)
    entry = CatalogEntry(
        spec=ModelSpec("a", (1,) * 4, kv_bytes_per_token=1, model_tokens_max=1),
        manifest=Manifest("a", "{}", "float32", ()),
        directory="a",
        eos_token_ids=(),
        request_tokens_max=1,
    )
    policy = model_policy(config, config.models[0], entry)
    assert policy.roles == (RoleLimits(Role.PREFILL, 1, 4), RoleLimits(Role.DECODE, 2, 3))
    assert (policy.instances_min, policy.instances_max) == (3, 6)


def test_unknown_and_wrong_variables_are_named() -> None:
    unknown = message(environ={"LIVESCALE_PROT": "1"})
    assert "unknown variable 'LIVESCALE_PROT' (nearest known: 'LIVESCALE_PORT')" in unknown
    assert "environment: port must be" in message(environ={"LIVESCALE_PORT": "x"})


def test_keys_are_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration is written into run records: it may name a file of keys, and no key."""
    config = loaded(environ={"LIVESCALE_API_KEY": "sk-secret"}, api_key_file="keys")
    assert config.api_key_file == "keys"
    assert b"sk-secret" not in msgspec.json.encode(config)
    parser = argparse.ArgumentParser()
    add_flags(parser, {})
    with pytest.raises(SystemExit):
        parser.parse_args(["--api-key", "sk-secret"])
    said = capsys.readouterr().err
    assert "--api-key-file" in said
    assert "sk-secret" not in said


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml", ["a"], {}, {})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, ["a"], {}, {})
    (tmp_path / "latin.yaml").write_bytes(b"host: \xff")
    with pytest.raises(ConfigError, match=r"latin\.yaml: is not UTF-8"):
        load_config(tmp_path / "latin.yaml", ["a"], {}, {})


def test_anchors_and_merges_are_understood(tmp_path: Path) -> None:
    text = "models:\n  - &one {path: a, max_replicas: 2}\n  - {<<: *one, path: b}\n"
    config = loaded(text, tmp_path, models=())
    assert [(m.name, m.max_replicas) for m in config.models] == [("a", 2), ("b", 2)]


@given(st.text(max_size=40))
def test_no_text_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="ignore")
    try:
        load_config(path, ["a"], {}, {})
    except ConfigError as error:
        assert "any.yaml" in str(error)  # noqa: PT017 (both ways out are allowed)


# -- schedules ------------------------------------------------------------------------------------

MINUTES = st.integers(0, 24 * 60 - 1)


@given(st.lists(st.tuples(MINUTES, MINUTES, st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_a_schedule_means_what_is_written(parts: list[tuple[int, int, int, int]]) -> None:
    parts = [(a, b, low, low + more) for a, b, low, more in parts if a != b]
    text = "; ".join(
        f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02} min={low} max={high}"
        for a, b, low, high in parts
    )
    minute_ns = 60_000_000_000
    assert parse_schedule(text) == tuple(
        Period(a * minute_ns, b * minute_ns, low, high) for a, b, low, high in parts
    )


def test_a_day_may_end_at_midnight() -> None:
    [period] = parse_schedule("20:00-24:00 max=2 min=0")
    assert (period.instances_min, period.instances_max) == (0, 2)
    assert period.holds_at(86_399_999_999_999)
    assert not period.holds_at(0)


def test_a_topology_is_sought_beside_the_file_that_names_it(tmp_path: Path) -> None:
    topology = tmp_path / "two.yaml"
    topology.write_text(TOPOLOGY)
    config = loaded("topology: two.yaml\nmodels: [a]", tmp_path, models=())
    assert config.topology == str(topology)
    assert config.workers == 2
    for problem in ("workers: 3\n", "workers: 1\n"):
        words = message(f"{problem}topology: two.yaml\nmodels: [a]", tmp_path, models=())
        assert "two.yaml has 2 devices" in words
    assert "nowhere.yaml" in message("topology: nowhere.yaml", tmp_path)


@pytest.mark.parametrize(("word", "avoids"), [("avoid", True), ("ignore", False)])
def test_plans_keep_away_from_what_serves_as_is_asked(word: str, avoids: bool) -> None:
    config = PoolConfig(serving_links=word)
    assert controller_config(config, local_layout(config), (), 1).avoids_serving is avoids


@pytest.mark.parametrize("name", AUTOMATIC)
@pytest.mark.parametrize("where", ["file", "variable", "flag"])
def test_auto_takes_back_what_was_said_before(tmp_path: Path, name: str, where: str) -> None:
    """In a file what is the default, in a variable the file, in a flag both."""
    value = 2 if name == "workers" else 64 << 20
    file = tmp_path / "pool.yaml"
    said = "auto" if where == "file" else value
    file.write_text(f"{name}: {said}\nmodels: [{tmp_path}]\n")
    environ, flags = {}, {}
    if where != "file":
        environ = {f"LIVESCALE_{name.upper()}": "auto" if where == "variable" else str(value)}
    if where == "flag":
        flags = {name: "auto"}
    config, given = load_given(file, [], environ, flags)
    assert name not in given
    assert getattr(config, name) == getattr(PoolConfig(), name)
    later, given = load_given(file, [], environ, {name: str(value)})
    assert name in given
    assert getattr(later, name) == value
