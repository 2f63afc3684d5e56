"""Gates in a model of vLLM's: its forward waits at each layer for the parameters of that layer.

So a step can begin with the first layer of a load: pipelined model transmission (PipeSwitch,
OSDI'20, §4.2). Hooks run in engines that compile nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from livescale.engine.base.errors import ModelError

Modules = tuple[torch.nn.Module, ...]


class RunGivenUp(BaseException):
    """A step waits for parameters that do not come any more. It is no Exception, which vLLM would
    take for an error of its own, and write down."""


def modules_by_layer(model: Any, layers: int, *, is_tied: bool) -> list[Modules]:
    """The modules that have the parameters of each of the manifest's layers; the first of them is
    the one that a forward calls first. Raises ModelError for a model that is not laid out so."""
    inner = getattr(model, "model", None)
    missing = [n for n in ("embed_tokens", "layers", "norm") if not hasattr(inner, n)]
    if missing:
        raise ModelError(f"vLLM's {type(model).__name__} has no model.{missing[0]}")
    assert inner is not None
    if len(inner.layers) != layers - 2:
        raise ModelError(
            f"vLLM's {type(model).__name__} has {len(inner.layers)} layers, and the manifest"
            f" {layers - 2}"
        )
    last: Modules = (inner.norm,) if is_tied else (inner.norm, model.lm_head)
    return [(inner.embed_tokens,), *((layer,) for layer in inner.layers), last]


class LayerGates:
    """Closed for the layers that are `missing`, a collection that shrinks."""

    def __init__(
        self,
        modules: list[Modules],
        missing: Collection[int],
        await_layer: Callable[[], bool],
    ) -> None:
        """A forward that comes to a missing layer calls `await_layer` until that is there. When it
        returns False the forward ends in RunGivenUp."""
        self._missing = missing
        self._await_layer = await_layer
        self._hooks = [
            of_layer[0].register_forward_pre_hook(partial(self._wait, layer))
            for layer, of_layer in enumerate(modules)
        ]

    def remove(self) -> None:
        """Nothing has to wait any more."""
        for hook in self._hooks:
            hook.remove()

    def _wait(self, layer: int, module: torch.nn.Module, given: object) -> None:
        while layer in self._missing:
            if not self._await_layer():
                raise RunGivenUp
