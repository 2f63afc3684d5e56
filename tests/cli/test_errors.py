"""Bad input ends in one clear line that names what and where, before any process is started."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from commands import livescale, livescale_process

from livescale.engine.files.model_files import read_manifest


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "tiny"))


def test_unknown_key_names_the_nearest(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(f"arena_byte: 1GiB\nmodels: [{model}]\n")
    code, _, error = livescale("serve", "-c", file)
    assert code == 1
    assert str(file) in error
    assert "arena_byte" in error
    assert "'arena_bytes'" in error


def test_a_directory_without_weights(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    code, _, error = livescale("serve", model)
    assert code == 1
    assert str(model) in error
    assert "safetensors" in error


def test_a_truncated_file_with_both_sizes(model: Path) -> None:
    victim = sorted(model.glob("*.safetensors"))[-1]
    content = victim.read_bytes()
    victim.write_bytes(content[:-100])
    code, _, error = livescale("serve", model)
    assert code == 1
    assert victim.name in error
    assert str(len(content)) in error
    assert str(len(content) - 100) in error


def test_a_model_larger_than_the_hosts_memory_with_both_sizes(model: Path) -> None:
    flags = ("--arena-bytes", "64MiB", "--kv-bytes", "8MiB", "--host-memory-bytes", "1MiB")
    code, _, error = livescale("serve", model, *flags, "--port", 0)
    assert code == 1
    assert "above the 1048576 bytes for host copies" in error


def test_a_model_larger_than_the_arena_with_both_sizes(model: Path) -> None:
    code, _, error = livescale("serve", model, "--arena-bytes", "2MiB", "--port", 0)
    assert code == 1
    assert str(read_manifest(model, "tiny").size_bytes) in error
    assert str(2 << 20) in error
    assert "arena_bytes" in error


def test_more_memory_than_the_machine_has(model: Path) -> None:
    code, _, error = livescale("serve", model, "--arena-bytes", "1TiB", "--port", 0)
    assert code == 1
    assert str(1 << 40) in error
    assert "bytes of the machine" in error


def test_a_model_without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    code, _, error = livescale("serve", model, "--port", 0)
    assert code == 1
    assert "tokenizer.json" in error


def test_a_broken_tokenizer_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    code, _, error = livescale("serve", model, "--port", 0)
    assert code == 1
    assert "tokenizer.json" in error


@pytest.mark.usefixtures("machine")
def test_a_process_that_cannot_start_is_named_without_a_traceback(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{")
    code, _, error = livescale_process("serve", model, "--port", 0, "--device", "timed")
    assert code == 1
    assert "gateway" in error
    assert "chat template" in error


@pytest.mark.usefixtures("machine")
def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, error = livescale("serve", model, "--port", port)
    assert code == 1
    assert f"port {port}" in error
    assert "in use" in error


def test_a_missing_model_and_no_model() -> None:
    code, _, error = livescale("serve", "/nowhere/model")
    assert code == 1
    assert "/nowhere/model" in error
    assert livescale("serve")[0] == 1


def test_an_unsupported_architecture_by_name(model: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OddForCausalLM"))
    code, _, error = livescale("serve", model)
    assert code == 1
    assert "OddForCausalLM" in error
    assert "LlamaForCausalLM" in error


def test_a_wrong_environment_variable(model: Path) -> None:
    code, _, error = livescale("serve", model, environ={"LIVESCALE_WORKER": "2"})
    assert code == 1
    assert "LIVESCALE_WORKER" in error
    assert "LIVESCALE_WORKERS" in error


def test_a_testbed_around_the_pool_is_no_setting(model: Path, tmp_path: Path) -> None:
    known = {"LIVESCALE_TESTBED": "livescale-7"}
    code, _, error = livescale("serve", "/nowhere/model", environ=known)
    assert code == 1
    assert "/nowhere/model" in error
    assert "LIVESCALE_TESTBED" not in error


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("command", ["serve", "demo", "simulate"])
def test_ctrl_c_while_modules_are_imported(command: str, tmp_path: Path) -> None:
    # The first module that the command imports and that is not the program's own.
    (tmp_path / "msgspec.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    import asyncio\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('interrupted') from None\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, printed, error = livescale_process(command, "x", environ={"PYTHONPATH": path})
    assert (code, printed) == (130, "")
    assert error == f"livescale {command}: interrupted\n"


def test_an_slo_that_cannot_be_read(model: Path) -> None:
    code, _, error = livescale("serve", model, "--slo", "fast")
    assert code == 1
    assert "slo" in error
    assert "fast" in error


@pytest.mark.usefixtures("machine")
def test_a_record_that_cannot_be_written_or_read(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = livescale("serve", model, "--port", 0, "--record", tmp_path / "file" / "r")
    assert code == 1
    assert "record" in error
    code, _, error = livescale("replay", tmp_path / "none.jsonl")
    assert code == 1
    assert "none.jsonl" in error
    (tmp_path / "file").write_text("not a record\n")
    code, _, error = livescale("replay", tmp_path / "file")
    assert code == 1
    assert "file:1" in error


def test_the_demo_explains_an_unknown_trace(tmp_path: Path) -> None:
    code, _, error = livescale("demo", "--trace", "no_such_trace")
    assert code == 1
    assert "no_such_trace" in error
    assert "LIVESCALE_DATA" in error


def test_the_demo_has_no_live_part_with_roles() -> None:
    code, _, error = livescale("demo", "--disaggregated", "--only", "live")
    assert code == 1
    assert "--disaggregated" in error


def test_models_make_refuses_to_overwrite(model: Path) -> None:
    code, _, error = livescale("models", "make", model)
    assert code == 1
    assert str(model) in error


def test_models_make_refuses_a_seed_below_zero(tmp_path: Path) -> None:
    code, _, error = livescale("models", "make", tmp_path / "made", "--seed", -1)
    assert (code, "--seed -1 is invalid" in error) == (1, True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--every", value) for value in ("nan", "inf", "-inf", "1e300", "0", "-1")),
        *(("--windows", value) for value in (0, -1)),
    ],
)
def test_top_refuses_windows_that_never_end_or_begin(flag: str, value: object) -> None:
    code, _, error = livescale("top", f"{flag}={value}")
    assert code == 1
    assert error.startswith(f"livescale top: {flag} ")
    assert error.count("\n") == 1
