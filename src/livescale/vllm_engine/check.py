"""What speaks against running models in the vLLM of this interpreter.

`python -m livescale.vllm_engine.check` reads a question (JSON) on standard input and writes the
answer. vLLM is looked at, but not imported, which takes half a minute.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from livescale.engine.files.model_config import ModelShape, parse_config
from livescale.values.types import Value
from livescale.vllm_engine.versions import (
    NEWEST,
    VERSIONS,
    VllmVersion,
    is_for_cpus,
    release_of,
)

_REGISTRY = "model_executor/models/registry.py"
_TABLE = "_TEXT_GENERATION_MODELS"


class VllmQuestion(Value, frozen=True):
    """Can it run these models (config.json by name), with KV blocks of so many tokens?"""

    block_tokens: int
    configs: dict[str, str]
    any_version: bool = False


class VllmAnswer(Value, frozen=True):
    """What speaks against it, a sentence each."""

    refusals: tuple[str, ...]


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=VllmQuestion)
    refusals = tuple(refused(question, vllm_directory(), vllm_version()))
    sys.stdout.buffer.write(msgspec.json.encode(VllmAnswer(refusals)))


def vllm_directory() -> Path | None:
    """Where the package is installed; None if it is not."""
    spec = importlib.util.find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def vllm_version() -> str | None:
    """None: nothing is installed under this name."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def refused(question: VllmQuestion, directory: Path | None, version: str | None) -> Iterator[str]:
    """A sentence for each thing that speaks against it."""
    if directory is None or version is None:
        yield "it has no vLLM (make vllm; docs/vllm.md)"
        return
    facts = VERSIONS.get(release_of(version))
    if facts is None and not question.any_version:
        tested = ", ".join(VERSIONS)
        yield (
            f"vLLM {version} was not tested, only {tested} (vllm_any_version under `tuning:` of the"
            " configuration file tries it)"
        )
        return
    known = architectures(directory)
    shapes = {name: parse_config(text, name) for name, text in question.configs.items()}
    for name, shape in shapes.items():
        if known and shape.architecture not in known:
            yield f"{name}: vLLM {version} has no {shape.architecture}"
    if is_for_cpus(version):
        yield from _refused_by_kernels(question, facts or VERSIONS[NEWEST], version, shapes)


def architectures(directory: Path) -> frozenset[str]:
    """The architectures that generate text, as vLLM's table of models lists them. Empty where there
    is no such table."""
    path = directory / _REGISTRY
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    for node in tree.body:
        is_table = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == _TABLE for target in node.targets
        )
        if is_table and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            return frozenset(key for key in keys if isinstance(key, str))
    return frozenset()


def _refused_by_kernels(
    question: VllmQuestion, facts: VllmVersion, version: str, shapes: dict[str, ModelShape]
) -> Iterator[str]:
    if question.block_tokens % facts.block_tokens:
        yield (
            f"block_tokens is {question.block_tokens}: the attention of vLLM {version} needs a"
            f" multiple of {facts.block_tokens}"
        )
    for name, shape in shapes.items():
        if shape.head_dim not in facts.head_sizes:
            sizes = ", ".join(map(str, facts.head_sizes))
            yield (
                f"{name}: heads of size {shape.head_dim}, and the attention of vLLM {version}"
                f" has {sizes}"
            )


if __name__ == "__main__":
    main()
