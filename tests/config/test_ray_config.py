"""The section `ray` of a configuration file, and files of Ray Serve's form."""

from __future__ import annotations

from pathlib import Path

import pytest

from livescale.common.settings import ConfigError
from livescale.config.pool import PoolConfig
from livescale.config.ray import RAY_SETTINGS, RayConfig, load_ray_config
from livescale.config.reading import load_config

CPU = PoolConfig(device="cpu")
DOCUMENT = Path(__file__).parents[2] / "docs" / "ray.md"
SERVE = """
applications:
  - name: llms
    import_path: ray.serve.llm:build_openai_app
    route_prefix: /
    args:
      llm_configs:
        - model_loading_config: {model_id: small, model_source: models/small}
          deployment_config:
            autoscaling_config: {min_replicas: 1, max_replicas: 4, target_ongoing_requests: 32}
          accelerator_type: A100
        - model_loading_config: {model_id: other, model_source: models/other}
          accelerator_type: A100
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    return path


def test_the_document_has_every_setting() -> None:
    text = DOCUMENT.read_text()
    for setting in RAY_SETTINGS:
        shown = "none" if setting.default is None else str(setting.default)
        row = next(line for line in text.splitlines() if line.startswith(f"| `{setting.name}` |"))
        assert row.split("|")[2].strip(" `") == shown


def test_a_pool_without_ray_ignores_the_section(tmp_path: Path) -> None:
    path = written(tmp_path, "models: [m]\nray: {hosts_max: 4, workers_per_host: 2}\n")
    assert load_config(path, [], {}, {}).models[0].name == "m"
    assert load_ray_config(path, CPU) == RayConfig(hosts_max=4, workers_per_host=2)
    assert load_ray_config(None, CPU) == RayConfig()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{hosts_mx: 3}", "ray.unknown setting 'hosts_mx' (nearest known: 'hosts_max')"),
        ("{hosts_min: 3, hosts_max: 2}", "ray.hosts_min is 3, above hosts_max 2"),
        ("{host_idle_s: 0}", "ray.host_idle_s is 0 s, below the least value 1"),
        ("{host_resource: none}", "requires device cuda. The device is cpu"),
        ("5", "ray must be a mapping of keys to values, not 5"),
        ("{tls_dir: node}", "ray.tls_dir is node. Write an absolute path"),
        ("{tls_dir: /node}", "ray.tls_dir requires tls_dir, the certificate of the head node"),
    ],
)
def test_a_wrong_section_is_named(tmp_path: Path, section: str, words: str) -> None:
    path = written(tmp_path, f"models: [m]\nray: {section.replace('none', 'null')}\n")
    with pytest.raises(ConfigError) as error:
        load_ray_config(path, CPU)
    assert words in str(error.value)


def test_nodes_have_certificates_of_their_own(tmp_path: Path) -> None:
    pool = PoolConfig(tls_dir="/head")
    path = written(tmp_path, "models: [m]\nray: {tls_dir: /node}\n")
    assert load_ray_config(path, pool).tls_dir == "/node"
    with pytest.raises(ConfigError, match=r"tls_dir is set, but ray\.tls_dir is not"):
        load_ray_config(None, pool)


def test_a_serve_file_is_a_pool(tmp_path: Path) -> None:
    path = written(tmp_path, SERVE)
    config = load_config(path, [], {}, {"workers": "4"})
    small, other = config.models
    assert (small.name, small.path) == ("small", str(tmp_path / "models/small"))
    assert (small.min_replicas, small.max_replicas, small.target_ongoing_requests) == (1, 4, 32)
    assert other.max_replicas is None
    assert load_ray_config(path, CPU).accelerator_type == "A100"
    # Where Serve itself listens and logs says nothing of a pool.
    beside = "proxy_location: EveryNode\nhttp_options: {host: 127.0.0.1, port: 8000}\n"
    assert load_config(written(tmp_path, beside + SERVE), [], {}, {"workers": "4"}) == config


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("route_prefix: /", "runtime_env: {}", "applications[0]: unknown key 'runtime_env'"),
        ("min_replicas: 1", "upscale_delay_s: 1", "autoscaling_config: unknown key"),
        ("model_source: models/other", "x: y", "llm_configs[1].model_loading_config: unknown key"),
        (", model_source: models/other", "", "model_source is missing"),
        ("other}\n          accelerator_type: A100", "other}", "A pool has one"),
        ("      llm_configs:", "      x: 1\n      llm_configs:", "args: unknown key 'x'"),
    ],
)
def test_what_means_nothing_here_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in SERVE
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, SERVE.replace(old, new)), [], {}, {})
    assert words in str(error.value)
