"""Holds models' files against the modules that transformers builds of their configurations.

`python -m livescale.engine.files.module_fit` reads a question (JSON) on standard input and
writes the answer. Only headers are read, and no memory is taken for parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from livescale.engine.base.errors import ModelError
from livescale.engine.files.checkpoint import read_text
from livescale.engine.files.layout import LayerPlan, plan_checkpoint
from livescale.engine.files.model_config import parse_config
from livescale.values.types import Value

if TYPE_CHECKING:
    from livescale.engine.files.modules import Misfit


class FitQuestion(Value, frozen=True):
    """Do the files in these directories fit their modules?"""

    directories: tuple[str, ...]


class FitAnswer(Value, frozen=True):
    """By directory, what does not fit there."""

    refusals: dict[str, str]


def main() -> None:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=FitQuestion)
    refusals = {}
    for directory in question.directories:
        try:
            check_fit(Path(directory))
        except (ModelError, OSError) as error:
            refusals[directory] = str(error)
    sys.stdout.buffer.write(msgspec.json.encode(FitAnswer(refusals)))


def check_fit(directory: Path) -> None:
    """Raises ModelError for a directory whose config.json builds no modules, or whose tensors are
    not their parameters: that names the first such tensor, both shapes and the file."""
    # Imported here: the asking side takes the messages from this file, and needs no torch.
    from livescale.engine.files.modules import build_model, layer_modules, misfits

    path = directory / "config.json"
    text = read_text(path)
    shape = parse_config(text, str(path))
    checkpoint = plan_checkpoint(directory, shape)
    model = build_model(text, shape, str(path), checkpoint.dtype)
    modules = layer_modules(model, is_tied=shape.is_tied)
    for layer, (module, plan) in enumerate(zip(modules, checkpoint.layers, strict=True)):
        given = {entry.name: entry for entry in plan.entries}
        for misfit in misfits(module, given):
            raise ModelError(_sentence(directory, layer, plan, misfit))


# -- helpers --------------------------------------------------------------------------------------


def _sentence(directory: Path, layer: int, plan: LayerPlan, misfit: Misfit) -> str:
    wanted = None if misfit.wanted is None else "{} {}".format(*misfit.wanted)
    if misfit.given is None:
        # The ends are complete, so the layer is one of the decoder's.
        name = f"model.layers.{layer - 1}.{misfit.name}"
        return f"{directory} has no tensor {name}, its config.json wants one of {wanted}"
    names = [entry.name for entry in plan.entries]
    source = plan.sources[names.index(misfit.name)]
    given = "{} {}".format(*misfit.given)
    if wanted is None:
        return f"{source} ({given}) is no parameter of the model of its config.json"
    return f"{source} is {given}, its config.json wants {wanted}"


if __name__ == "__main__":
    main()
