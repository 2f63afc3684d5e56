"""What speaks against vLLM as an engine is told in a sentence, before any process is started."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from livescale.common.settings import ConfigError
from livescale.config.reading import load_config
from livescale.runtime.layout.worker_python import WorkerPythonError
from livescale.runtime.supervisor.supervisor import Pool
from livescale.vllm_engine.check import VllmQuestion, refused
from livescale.vllm_engine.versions import NEWEST, VERSIONS

NONE_HERE = "vllm" not in {found.name for found in importlib.metadata.distributions()}


def config_json(architecture: str = "LlamaForCausalLM", **sizes: int) -> str:
    fields = {
        "architectures": [architecture],
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    }
    return json.dumps(fields | sizes)


def installed(root: Path, *architectures: str) -> Path:
    """A vLLM that knows these models, as far as its sources are looked at."""
    registry = root / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    rows = "".join(f"    {name!r}: ('module', {name!r}),\n" for name in architectures)
    registry.write_text(f"_TEXT_GENERATION_MODELS = {{\n{rows}}}\n")
    return root


def reasons(directory: Path | None, version: str | None, **asked: Any) -> list[str]:
    fields = {"block_tokens": 32, "configs": {"m": config_json()}, **asked}
    return list(refused(VllmQuestion(**fields), directory, version))


def test_what_can_run_is_not_refused(tmp_path: Path) -> None:
    directory = installed(tmp_path, "LlamaForCausalLM")
    assert reasons(directory, f"{NEWEST}+cpu") == []


def test_no_vllm_at_all() -> None:
    assert reasons(None, None) == ["it has no vLLM (make vllm; docs/vllm.md)"]


def test_a_version_that_was_not_tested_is_tried_only_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    directory = installed(tmp_path, "LlamaForCausalLM")
    (words,) = reasons(directory, "0.1.2+cpu")
    tested = ", ".join(VERSIONS)
    assert words == (
        f"vLLM 0.1.2+cpu was not tested, only {tested} (vllm_any_version under `tuning:` of the"
        " configuration file tries it)"
    )
    assert reasons(directory, "0.1.2+cpu", any_version=True) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"block_tokens": 16},
            "block_tokens is 16: the attention of vLLM 0.32.0+cpu needs a multiple of 32",
        ),
        (
            {"configs": {"m": config_json(head_dim=24)}},
            "m: heads of size 24, and the attention of vLLM 0.32.0+cpu has 32, 64, 80,",
        ),
        (
            {"configs": {"q": config_json("Qwen3ForCausalLM")}},
            "q: vLLM 0.32.0+cpu has no Qwen3ForCausalLM",
        ),
    ],
)
def test_what_its_kernels_and_models_lack(
    tmp_path: Path, asked: dict[str, Any], words: str
) -> None:
    (found,) = reasons(installed(tmp_path, "LlamaForCausalLM"), "0.32.0+cpu", **asked)
    assert found.startswith(words)


def test_kernels_of_gpus_have_no_such_limits(tmp_path: Path) -> None:
    directory = installed(tmp_path, "LlamaForCausalLM")
    configs = {"m": config_json(head_dim=24)}
    assert reasons(directory, "0.32.0", block_tokens=16, configs=configs) == []


# -- pools ----------------------------------------------------------------------------------------


def settings(tmp_path: Path, model: Path, entry: str = "", **given: object) -> dict[str, Any]:
    file = tmp_path / "pool.yaml"
    tuned = {"weights_layout": given.pop("weights_layout", "auto")}
    file.write_text(f"tuning: {json.dumps(tuned)}\nmodels:\n  - path: {model}\n{entry}")
    sizes = {"port": 0, "workers": 2, "arena_bytes": "8MiB", "kv_bytes": "8MiB"}
    values = {"device": "vllm", "worker_python": sys.executable, **sizes, **given}
    return {"path": file, "model_paths": [], "environ": {}, "flags": values}


@pytest.mark.parametrize(
    ("entry", "given", "words"),
    [
        ("", {"worker_python": None}, "device vllm requires worker_python"),
        ("", {"weights_layout": "compiled"}, "weights_layout compiled requires device cpu"),
        ("    stages: 2\n", {}, "device vllm does not support stages"),
        (
            "    roles: {prefill: {}, decode: {}}\n",
            {},
            "device vllm does not support roles",
        ),
    ],
)
def test_settings_that_do_not_go_with_it(
    tmp_path: Path, tiny_model: Path, entry: str, given: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(**settings(tmp_path, tiny_model, entry, **given))


@pytest.mark.usefixtures("machine")
def test_a_pool_whose_interpreter_is_not_there_does_not_begin(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = load_config(**settings(tmp_path, tiny_model, worker_python="/nowhere/python"))
    with pytest.raises(WorkerPythonError, match=r"^worker_python: /nowhere/python: No such file"):
        Pool(config)


@pytest.mark.usefixtures("machine")
@pytest.mark.skipif(not NONE_HERE, reason="this interpreter has vLLM")
def test_a_pool_whose_interpreter_has_no_vllm_does_not_begin(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = load_config(**settings(tmp_path, tiny_model))
    with pytest.raises(WorkerPythonError, match=r"^worker_python: .*: it has no vLLM"):
        Pool(config)
