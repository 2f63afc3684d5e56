"""A model's parameters as they lie in the arena, under the names that vLLM's loaders know.

Where the bytes of vLLM's own parameter are those of the arena, the parameter becomes a view of
them. Which ones these are is tried out with vLLM's loaders, not assumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from livescale.engine.files.families import DOWN, FAMILIES, GATE_UP, Family
from livescale.engine.files.layout import LM_HEAD
from livescale.engine.files.model_config import parse_config
from livescale.engine.files.modules import DTYPES
from livescale.values.types import LayerEntry, Manifest, TensorEntry

Named = tuple[str, torch.Tensor]


class ArenaParameters:
    """The tensors of one model in the arena, layer by layer."""

    def __init__(self, manifest: Manifest, arena: memoryview) -> None:
        """`arena` begins with the model."""
        self.manifest = manifest
        self._flat = torch.frombuffer(arena, dtype=torch.uint8)

    def stored(self, layer: int) -> Iterator[Named]:
        """The layer's tensors by the names that a checkpoint has for them, experts one by one."""
        entry = self.manifest.layers[layer]
        for tensor in entry.tensors:
            yield from as_stored(self.manifest, layer, tensor.name, self.view(entry, [tensor]))

    def view(self, entry: LayerEntry, tensors: Sequence[TensorEntry]) -> torch.Tensor:
        """Tensors that lie one behind the other, as one: rows below rows."""
        first, last = tensors[0], tensors[-1]
        start = entry.offset_bytes + first.offset_bytes
        stop = entry.offset_bytes + last.offset_bytes + last.size_bytes
        rows = sum(tensor.shape[0] for tensor in tensors)
        flat = self._flat[start:stop].view(DTYPES[first.dtype])
        return flat.view(rows, *first.shape[1:])


def as_stored(manifest: Manifest, layer: int, name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """A tensor of the manifest by the name that a checkpoint has for it. Experts are stored one by
    one: of `GATE_UP` (experts, 2 * inner, hidden) and `DOWN` (experts, hidden, inner)."""
    family = _family(manifest)
    experts = family.experts
    before = _prefix(manifest, layer, name)
    if experts is None or name not in (GATE_UP, DOWN):
        # A file of this family may have another name for the block of experts.
        own = name.removeprefix("mlp.")
        block = experts.block if experts is not None and own != name else None
        yield f"{before}{name if block is None else f'{block}.{own}'}", tensor
        return
    for number, one in enumerate(tensor):
        of_expert = f"{before}{experts.block}.experts.{number}"
        if name == DOWN:
            yield f"{of_expert}.{experts.down}.weight", one
        else:
            gate, up = one.chunk(2)
            yield f"{of_expert}.{experts.gate}.weight", gate
            yield f"{of_expert}.{experts.up}.weight", up


def _prefix(manifest: Manifest, layer: int, name: str) -> str:
    if name == LM_HEAD:
        return ""
    is_end = layer in (0, len(manifest.layers) - 1)
    return "model." if is_end else f"model.layers.{layer - 1}."


def _family(manifest: Manifest) -> Family:
    return FAMILIES[parse_config(manifest.config_json, manifest.model).architecture]


@dataclass(frozen=True, slots=True)
class Binding:
    """A parameter of vLLM's that can be a view of these tensors of a layer, all neighbours."""

    parameter: torch.nn.Parameter
    shape: torch.Size
    tensors: tuple[TensorEntry, ...]


class ParameterViews:
    """Binds a model of vLLM's to an arena, one layer at a time."""

    def __init__(self, model: Any, manifest: Manifest) -> None:
        """Finds out, with the loaders of vLLM's `model`, which parameters can be views. What they
        had is overwritten."""
        self._model = model
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        self._parameters = dict(model.named_parameters())
        proofs: dict[tuple[object, ...], frozenset[str]] = {}
        #: by layer, and what is left for vLLM's loaders
        self._bound: list[list[Binding]] = []
        self._loaded: list[frozenset[str]] = []
        for number, entry in enumerate(manifest.layers):
            found = dict(self._candidates(manifest, number, packed))
            # Layers of equal tensors are alike: the first of them stands for all.
            is_end = number in (0, len(manifest.layers) - 1)
            like = (is_end and number, tuple((t.name, t.shape) for t in entry.tensors))
            if like not in proofs:
                proofs[like] = self._proven(manifest, number, found)
            bound = [binding for key, binding in found.items() if key in proofs[like]]
            names = {tensor.name for binding in bound for tensor in binding.tensors}
            self._bound.append(bound)
            self._loaded.append(frozenset(t.name for t in entry.tensors) - names)

    @property
    def are_all(self) -> bool:
        """Nothing is copied."""
        return not any(self._loaded)

    def detach(self) -> None:
        """The parameters hold no memory until they are bound."""
        for binding in (binding for of_layer in self._bound for binding in of_layer):
            binding.parameter.data = torch.empty(0, dtype=binding.parameter.dtype)

    def bind(self, parameters: ArenaParameters, layer: int) -> None:
        """The layer's parameters are these from now on."""
        entry = parameters.manifest.layers[layer]
        for binding in self._bound[layer]:
            binding.parameter.data = parameters.view(entry, binding.tensors).view(binding.shape)
        left = self._loaded[layer]
        if left:
            self._model.load_weights(
                stored
                for tensor in entry.tensors
                if tensor.name in left
                for stored in as_stored(
                    parameters.manifest, layer, tensor.name, parameters.view(entry, [tensor])
                )
            )

    # -- helpers, in the order used -------------------------------------------------------------

    def _candidates(
        self, manifest: Manifest, layer: int, packed: Mapping[str, Sequence[str]]
    ) -> Iterator[tuple[str, Binding]]:
        """Parameters with as many items as neighbours in the arena have, by their key: the name of
        the first of these."""
        entry = manifest.layers[layer]
        names = {tensor.name: place for place, tensor in enumerate(entry.tensors)}
        for first, place in names.items():
            module, _, kind = first.rpartition(".")
            parent, _, own = module.rpartition(".")
            for fused, parts in {own: [own], **packed}.items():
                wanted = [f"{parent}.{part}.{kind}".lstrip(".") for part in parts]
                if wanted[0] != first or not all(name in names for name in wanted):
                    continue
                tensors = entry.tensors[place : place + len(parts)]
                whole = f"{_prefix(manifest, layer, first)}{f'{parent}.{fused}.{kind}'.lstrip('.')}"
                parameter = self._parameters.get(whole)
                is_row = [tensor.name for tensor in tensors] == wanted and _adjacent(tensors)
                if parameter is not None and is_row and _fits(parameter, tensors):
                    yield first, Binding(parameter, parameter.shape, tensors)

    def _proven(
        self, manifest: Manifest, layer: int, found: Mapping[str, Binding]
    ) -> frozenset[str]:
        """Those into which vLLM's own loaders put the bytes as they are."""
        entry = manifest.layers[layer]
        made = torch.randint(0, 256, (entry.size_bytes,), dtype=torch.uint8)
        own = msgspec.structs.replace(entry, offset_bytes=0)
        layers = (*manifest.layers[:layer], own, *manifest.layers[layer + 1 :])
        probed = msgspec.structs.replace(manifest, layers=layers)
        probe = ArenaParameters(probed, made.numpy().data)
        self._model.load_weights(probe.stored(layer))
        return frozenset(
            key
            for key, binding in found.items()
            if torch.equal(
                binding.parameter.data.flatten().view(torch.uint8),
                probe.view(own, binding.tensors).flatten().view(torch.uint8),
            )
        )


def _adjacent(tensors: Sequence[TensorEntry]) -> bool:
    pairs = itertools.pairwise(tensors)
    return all(a.offset_bytes + a.size_bytes == b.offset_bytes for a, b in pairs)


def _fits(parameter: torch.nn.Parameter, tensors: Sequence[TensorEntry]) -> bool:
    items = sum(tensor.size_bytes for tensor in tensors) // parameter.element_size()
    is_alike = DTYPES[tensors[0].dtype] == parameter.dtype and parameter.is_contiguous()
    return is_alike and parameter.device.type == "cpu" and parameter.numel() == items
